"""Compressed all-reduce between processes: equal bits on all ranks, close means, refusals instead of hangs."""

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def everything(run_workers):
    return run_workers("compression_worker.py", "everything")


def same(outcomes, *keys):
    values = []
    for outcome in outcomes:
        value = outcome
        for key in keys:
            value = value[key]
        values.append(value)
    assert all(value == values[0] for value in values), keys
    return values[0]


def check_schemes(outcomes, most):
    for name in outcomes[0]["schemes"]:
        same(outcomes, "schemes", name, "bits")
        for outcome in outcomes:
            one = outcome["schemes"][name]
            assert (one["repeats"], one["fresh"]) == (True, True), name
            assert one["error"] < most.get(name, 0.2), (name, one["error"])


def test_every_scheme_gives_equal_bits_and_a_close_mean(everything):
    check_schemes(
        everything, {"FP32": 1e-6, "BF16": 0.01, "two8": 0.02, "sum16": 1e-3, "exponential": 0.6, "sum4": 0.9}
    )


def test_a_large_bucket_is_reduced_in_pieces(everything):
    for name, most in (("sum8", 0.03), ("packed8", 0.03), ("two8", 0.02)):
        same(everything, "pieces", name, "bits")
        for outcome in everything:
            assert max(outcome["pieces"][name]["errors"]) < most, (name, outcome["pieces"][name])
    same(everything, "pieces", "linear", "bits")
    # Only the block of 256 that holds NaN is not finite, on every rank.
    first = 700_000 // 256 * 256
    assert same(everything, "pieces", "spoiled") == list(range(first, first + 256))


def test_three_workers_and_a_group_of_two_of_them(run_workers):
    outcomes = run_workers("compression_worker.py", "subgroup", world_size=3)
    check_schemes(outcomes, {"FP32": 1e-6, "BF16": 0.01, "exponential": 0.8, "sum4": 1.5, "sum6": 0.3})
    same(outcomes[:2], "subgroup")
    assert outcomes[2]["subgroup"] is None


@pytest.mark.slow
def test_every_scheme_is_unbiased_among_one_to_eight_processes(run_workers):
    outcome = run_workers("compression_worker.py", "unbiased", world_size=8)[0]["unbiased"]
    assert {int(name.split()[1]) for name in outcome} == set(range(1, 9))
    assert len(outcome) >= 8 * 10
    assert max(outcome.values()) < 5.5, outcome


def test_training_under_a_mixture_of_schemes(everything):
    same(everything, "trained", "bits")
    for outcome in everything:
        trained = outcome["trained"]
        assert trained["resumed"] == trained["bits"]
        assert trained["step"] == 11
        assert len(trained["sizes"]) >= 3
        assert all(loss < 4.0 for loss in trained["losses"])


def test_fp32_gives_the_bits_of_plain_ddp(everything):
    assert same(everything, "plain")


def test_accumulated_gradients_are_compressed_once(everything):
    same(everything, "accumulated", "bits")
    one = everything[0]["accumulated"]
    assert one["error"] < 0.03
    assert one["nonzero"]
    assert one["step"] == 2


def test_nothing_is_reduced_by_an_idle_hook(everything):
    same(everything, "idle", "bits")
    assert all(outcome["idle"]["own"] and outcome["idle"]["step"] == 3 for outcome in everything)


def test_computation_is_timed_on_the_slowest_rank_and_after_pauses(everything):
    alone_ns, *later_ns = same(everything, "idle", "times")
    assert alone_ns >= 20e6 * (len(everything) - 1)
    assert [pause_ns for pause_ns, _ in later_ns] == [5e6, 20e6, 80e6]
    assert all(later >= 0 for _, later in later_ns)


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks(everything):
    assert same(everything, "not_finite")


def test_bf16_gradients_stay_bf16(everything):
    assert same(everything, "half", "dtype") == "torch.bfloat16"
    same(everything, "half", "bits")


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("unlike", ("the compression of gradients differs between ranks: ranks 1 are not as rank 0",) * 2),
        (
            "unknown",
            ("rank 1 failed: UnsupportedError: unknown scheme 'sum9'", "UnsupportedError: unknown scheme 'sum9'"),
        ),
        ("workers", ("the plan was made for 3 workers, but 2 reduce here",) * 2),
        ("unwrapped", ("the model is a Sequential",) * 2),
        ("layout", ("elements, but the plan was made for 17",) * 2),
        ("state", ("the state of gradient compression differs between ranks",) * 2),
    ],
)
def test_bad_input_is_an_error_on_every_rank(everything, case, texts):
    for outcome, text in zip(everything, texts, strict=True):
        assert text in outcome["refused"][case]


def test_a_plan_from_sampled_gradients_and_measured_times(everything):
    same(everything, "planned", "bits")
    for outcome in everything:
        one = outcome["planned"]
        assert one["sizes"]
        assert one["noise"] > 0
        assert one["variance"] <= one["limit"] * (1 + 1e-9)


def test_reductions_are_recorded_step_by_step(everything):
    for outcome in everything:
        one = outcome["recorded"]
        assert "0 steps were recorded, but two are needed" in one["refused"]
        assert one["steps"] == [3, 3]  # the first says when the second begins
        assert one["schemes"] == [["FP32"], ["sum8"]]
        assert len(one["elements"]) == one["buckets"] >= 3
        assert one["predicted"] > 0 and one["shortest"] > 0
        assert len(one["slowdowns"]) == 2 and all(0 <= share <= 1 for share in one["slowdowns"])
        assert len(one["stretches"]) == 2 and all(factor >= 1 for factor in one["stretches"])


def test_compression_is_closed_and_begun_anew(everything):
    assert all(outcome["closed"] for outcome in everything)


def test_a_job_plans_its_compression(everything):
    same(everything, "by_the_job", "bits")
    for outcome in everything:
        one = outcome["by_the_job"]
        assert one["elements"] == one["predicted"]
        assert (one["workers"], one["described"]) == (2, True)
    assert [outcome["by_the_job"]["costs"] for outcome in everything] == [len(one["elements"]), None]


def test_a_mixture_is_kept_where_steps_in_turn_say_so(everything):
    same(everything, "mixtures")
    (kept, note), (dropped, other) = everything[0]["mixtures"]
    assert set(kept) == {"FP32", "BF16"}
    assert note.startswith(f"FP32 in {kept.count('FP32')}, BF16 in {kept.count('BF16')} of {len(kept)} buckets")
    assert len(set(dropped)) == 1 and len(dropped) == len(kept)
    assert f"{dropped[0]} in {len(dropped)} of {len(dropped)} buckets" in other
    assert "a mixture that was predicted to be faster was not" in other


def test_a_lost_rank_is_an_error_on_the_others_and_nothing_is_applied(everything):
    first, last = (outcome["lost"] for outcome in everything)
    assert last == "gone"
    assert "the other ranks do not answer" in first["error"]
    assert first["untouched"]


@pytest.mark.gpu
@pytest.mark.usefixtures("two_cards")
def test_steps_over_nccl_are_recorded_and_what_is_not_compressed_is_that_of_ddp(tmp_path, run_workers):
    for one in run_workers("nccl_gradients_worker.py", tmp_path, "nccl", flags=("-W", "ignore")):
        assert one["equal"]
        for name, largest in (("FP32", 1e-6), ("sum8", 0.2)):
            assert one[name]["schemes"] == [name] and one[name]["buckets"] > 1
            assert one[name]["alike"] and one[name]["error"] <= largest and one[name]["iteration_ns"] > 0
