"""Compression problems, plans, their evaluation and schemes as data."""

import json

import pytest

import qsync_opt
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.gradients import (
    Bucket,
    BucketStatistics,
    Choice,
    Moments,
    Plan,
    Problem,
    evaluate,
    scheme,
    schemes,
)

TINY = {
    "format": "qsync-gradients/1", "name": "tiny", "compute_end_ns": 900, "tail_ns": 50, "latency_limit_ns": 1200,
    "variance_limit": None, "objective": "variance",
    "buckets": [
        {"name": "b0", "ready_ns": 300, "choices": {
            "FP32": {"time_ns": 400, "variance": 0.0}, "INT8": {"time_ns": 120, "variance": 2.5}}},
        {"name": "b1", "ready_ns": 800, "choices": {
            "FP32": {"time_ns": 500, "variance": 0.0}, "INT8": {"time_ns": 150, "variance": 1.5}}},
    ],
    "optimum": None,
}  # fmt: skip


def tiny(**changes):
    return Problem.from_json(json.loads(json.dumps(TINY | changes)))


def test_buckets_follow_one_another_on_one_stream():
    result = evaluate(tiny(), Plan(schemes={"b0": "FP32", "b1": "INT8"}))
    assert (result.start_ns, result.end_ns) == ((300, 800), (700, 950))
    assert (result.iteration_ns, result.exposed_ns, result.variance) == (1000, 50, 1.5)
    assert (result.objective, result.feasible) == (1.5, True)
    late = evaluate(tiny(), Plan(schemes={"b0": "FP32", "b1": "FP32"}))
    assert late.violations == ("an iteration takes 1350 ns, above the limit of 1200 ns",)


def test_the_limit_of_the_objective_itself_does_not_count():
    result = evaluate(
        tiny(objective="latency", latency_limit_ns=1, variance_limit=2.0), Plan(schemes={"b0": "INT8", "b1": "INT8"})
    )
    assert (result.objective, result.violations) == (1000.0, ("the variance is 4, above the limit of 2",))


def test_files_round_trip_with_extension_keys(tmp_path):
    problem = tiny(**{"x-workers": 4, "x-elements": [10, 20], "x-note": "kept"})
    problem.save(tmp_path / "p.json")
    again = qsync_opt.load_problem(tmp_path / "p.json")
    assert again == problem
    plan = qsync_opt.solve(again).plan
    assert (plan.workers, plan.elements) == (4, (10, 20))
    plan.save(tmp_path / "plan.json")
    assert qsync_opt.load_plan(tmp_path / "plan.json") == plan
    assert qsync_opt.load_plan(tmp_path / "plan.json").to_json()["x-workers"] == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"buckets": []}, "no buckets"),
        ({"objective": "speed"}, "objective is 'speed', but allowed are variance, latency"),
        ({"tail_ns": -1}, "tail_ns is -1"),
        ({"wrong": 1}, "unknown key 'wrong'"),
        ({"buckets": [TINY["buckets"][0]] * 2}, "bucket 'b0' is named twice"),
        ({"buckets": [{"name": "b", "ready_ns": 0, "choices": {}}]}, "bucket 'b': choices is empty"),
        ({"compute_end_ns": 2**62}, "below 2"),
        ({"buckets": [{"name": "b", "ready_ns": 0, "choices": {"FP32": {"time_ns": 1.5, "variance": 0}}}]}, "1.5"),
    ],
)
def test_bad_problems_are_refused(changes, text):
    with pytest.raises(ProblemError, match=text):
        tiny(**changes)


def test_a_plan_that_does_not_fit_names_the_buckets():
    with pytest.raises(ProblemError, match="names 'b9', which the problem lacks; it lacks 'b1'"):
        evaluate(tiny(), Plan(schemes={"b0": "FP32", "b9": "FP32"}))
    with pytest.raises(ProblemError, match="bucket 'b1': the plan picks 'INT9'; did you mean 'INT8'"):
        evaluate(tiny(), Plan(schemes={"b0": "FP32", "b1": "INT9"}))


def test_no_sum_of_codes_overflows():
    for name, each in schemes().items():
        for workers in range(1, 128):
            if each.transport != "sum" or not each.supports(workers):
                continue
            most = each.levels(workers) * workers
            assert most <= 127 if each.lanes == 1 else 2 * most < 2**each.width, name
    assert not scheme("sum4").supports(8)
    with pytest.raises(UnsupportedError, match="'sum8' cannot sum the codes of 128 workers in 8 bits"):
        scheme("sum8").levels(128)


def test_bytes_on_the_wire():
    elements = 256 * 3 * 5 * 8
    sizes = {name: each.wire_bytes(elements, 2) for name, each in schemes().items()}
    assert (sizes["FP32"], sizes["BF16"]) == (4 * elements, 2 * elements)
    assert sizes["sum8"] == elements + 2 * elements // 256
    assert sizes["two8"] == elements + 4 * elements // 256
    assert sizes["sum4"] == elements // 2 + 2 * elements // 256
    assert sizes["sum10"] == 4 * elements // 3 + 2 * elements // 256
    assert scheme("FP32").wire_bytes(1000, 4) == 6000
    assert scheme("sum8").wire_bytes(1000, 1) == 0


def test_bits_of_an_element_are_those_of_its_lane():
    assert {name: scheme(name).bits for name in ("FP32", "BF16", "sum8", "two8", "sum4")} == {
        "FP32": 32,
        "BF16": 16,
        "sum8": 8,
        "two8": 8,
        "sum4": 4,
    }
    assert scheme("sum10").bits == 11  # three lanes of 32 bits


def test_a_single_worker_reduces_nothing_and_errs_by_nothing():
    moments = Moments(square=1e3, block_square=1e4, block_absolute=2e3, bucket_square=1e6, bucket_absolute=2e4)
    statistics = BucketStatistics(elements=1000, local=moments, mean=moments)
    values = {name: each.mean_variance(statistics, 1) for name, each in schemes().items()}
    assert set(values.values()) == {0.0}


def test_powers_of_two_are_rounded_once_more_at_every_level_of_the_tree():
    moments = Moments(square=8.0, block_square=90.0, block_absolute=0.0, bucket_square=900.0, bucket_absolute=0.0)
    statistics = BucketStatistics(elements=1000, local=moments, mean=moments)
    rounded = 8.0 / 8  # of one worker's gradient
    two = 9 / 8 * (2 * rounded) + 2 * 2 * 8.0 / 8
    assert scheme("exponential").mean_variance(statistics, 2) == pytest.approx(two / 2**2)
    three = 9 / 8 * (9 / 8 * (3 * rounded) + 2 * 3 * 8.0 / 8) + 3 * 3 * 8.0 / 8
    assert scheme("exponential").mean_variance(statistics, 3) == pytest.approx(three / 3**2)


def test_the_bound_of_bf16_is_met_where_the_mean_of_exact_codes_lies_between_two_numbers():
    workers, elements, step = 64, 100, 2.0**-7
    none = dict.fromkeys(("block_square", "block_absolute", "bucket_square", "bucket_absolute"), 0.0)
    # Half of the workers hold 1, the others the next number of BF16: only the second rounding errs, by half a step.
    local = Moments(square=elements * (1 + (1 + step) ** 2) / 2, **none)
    mean = Moments(square=elements * (1 + step / 2) ** 2, **none)
    bound = scheme("BF16").mean_variance(BucketStatistics(elements=elements, local=local, mean=mean), workers)
    variance = elements * (step / 2) ** 2
    assert variance <= bound <= 1.05 * variance


def test_variances_fall_with_levels_and_are_none_for_fp32():
    moments = Moments(square=1e3, block_square=1e4, block_absolute=2e3, bucket_square=1e6, bucket_absolute=2e4)
    statistics = BucketStatistics(elements=1000, local=moments, mean=moments.scaled(0.25))
    values = {name: each.mean_variance(statistics, 4) for name, each in schemes().items()}
    assert values["FP32"] == 0.0
    order = ["BF16", "two8", "sum8", "sum6", "sum4"]
    assert [values[name] for name in order] == sorted(values[name] for name in order)
    assert values["linear"] > 10 * values["sum8"]
    assert values["sum8"] == values["packed8"]


def test_schemes_are_quantizers_that_another_package_can_add(monkeypatch):
    class Own:
        name, bits, block, unbiased, transport = "own", 3, 64, True, "sum"

    own = Own()
    assert scheme(own) is own
    with pytest.raises(UnsupportedError, match="unknown scheme 'sum9'; did you mean 'sum"):
        scheme("sum9")
    for each in schemes().values():
        assert each.unbiased
        assert each.variance(1.0, {"tensor": 9.0}) >= 0.0


def test_a_bucket_keeps_its_choices():
    bucket = Bucket(name="b", ready_ns=1, choices={"FP32": Choice(time_ns=1, variance=0)})
    with pytest.raises(TypeError):
        bucket.choices["x"] = Choice(time_ns=1, variance=0)
