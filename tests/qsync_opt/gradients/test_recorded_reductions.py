"""Recorded reductions: their files, the model that is fitted to them, what it predicts, and the plans made by it."""

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qsync_opt.errors import ProblemError
from qsync_opt.gradients import (
    BucketStatistics,
    Computation,
    Moments,
    Plan,
    RecordedReductions,
    Reduction,
    ReductionModel,
    SchemeTimes,
    evaluate,
    fastest_scheme,
    fit_reductions,
    is_as_fast,
    load_recorded_reductions,
    plan_reductions,
    predicted_reductions,
    reductions_timeline,
    scheme,
)
from qsync_opt.training import trace_json

MENU = ("FP32", "sum16", "two8", "sum8")


def model_of(segments, times, slowdowns, stretches=()):
    names = MENU[: len(slowdowns)]
    return ReductionModel(
        workers=2,
        elements=(1000,) * len(segments),
        segments_ns=tuple(segments),
        times_ns=dict(zip(names, map(tuple, times), strict=True)),
        slowdowns=dict(zip(names, slowdowns, strict=True)),
        stretches=dict(zip(names, stretches, strict=False)),
    )


def recorded(model, plan, steps=1):
    return RecordedReductions(workers=model.workers, elements=model.elements, steps=(model.predict(plan),) * steps)


def plan_of(names):
    return Plan(schemes={f"b{k}": name for k, name in enumerate(names)}, workers=2)


def statistics(count, noise=1.0):
    moments = Moments(square=1.0, block_square=20.0, block_absolute=3.0, bucket_square=90.0, bucket_absolute=8.0)
    return [BucketStatistics(elements=1000, local=moments, mean=moments.scaled(0.3), noise=noise)] * count


@st.composite
def models(draw, most_slowdown=0.8, most_stretch=1.0):
    count, kinds = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    times = st.lists(st.integers(0, 900_000), min_size=count, max_size=count)
    return model_of(
        draw(st.lists(st.integers(1000, 500_000), min_size=count, max_size=count)),
        [draw(times) for _ in range(kinds)],
        [draw(st.floats(0, most_slowdown)) for _ in range(kinds)],
        [draw(st.floats(1, most_stretch)) for _ in range(kinds)] if most_stretch > 1 else (),
    )


def test_computation_beside_a_reduction_is_slower():
    model = model_of([100, 100, 60], [[50, 10, 10], [150, 10, 20]], [0.5, 0.2])
    plain, other = (
        [(each.ready_ns, each.start_ns, each.end_ns) for each in model.predict(model.single(name))]
        for name in ("FP32", "sum16")
    )
    # Beside 50 ns of reduction 25 ns of work are done, and the rest alone.
    assert plain == [(100, 100, 150), (225, 225, 235), (290, 290, 300)]
    # Done at 225 at four fifths of the speed; the next reduction waits for the first one.
    assert other == [(100, 100, 250), (225, 250, 260), (292, 292, 312)]
    mixed = model.predict(plan_of(["FP32", "sum16", "sum16"]))
    assert [each.end_ns for each in mixed] == [150, 235, 307]


def test_a_reduction_beside_computation_is_slower():
    model = model_of([100, 100], [[50, 30], [150, 20]], [0.5, 0.0], [2.0, 1.5])
    plain, other = (
        [(each.ready_ns, each.start_ns, each.end_ns) for each in model.predict(model.single(name))]
        for name in ("FP32", "sum16")
    )
    # The first takes twice its 50 ns, in which half of the computation is done; the second is beside nothing.
    assert plain == [(100, 100, 200), (250, 250, 280)]
    # Of 150 ns two thirds are done in 100 beside the computation, the rest alone.
    assert other == [(100, 100, 283), (200, 283, 303)]
    problem = model.problem(statistics(2), model.single("sum16"))
    assert [bucket.choices["sum16"].time_ns for bucket in problem.buckets] == [183, 20]
    # Four ninths of the first reduction's work are beside computation.
    assert [bucket.choices["FP32"].time_ns for bucket in problem.buckets] == [72, 30]


@given(models(most_stretch=3.0))
@settings(max_examples=60, deadline=None)
def test_no_work_is_lost_or_done_twice(model):
    for name in model.times_ns:
        step = model.predict(model.single(name))
        share, stretch, end = model.slowdowns[name], model.stretches[name], step[-1].ready_ns
        beside = sum(max(0, min(each.end_ns, end) - each.start_ns) for each in step)
        done = sum(each.time_ns for each in step) - (1 - 1 / stretch) * beside
        assert done == pytest.approx(sum(model.times_ns[name]), abs=4 * len(step))
        assert end - share * beside == pytest.approx(sum(model.segments_ns), abs=4 * len(step))
        assert all(a.end_ns <= b.start_ns and b.ready_ns <= b.start_ns for a, b in itertools.pairwise(step))


@given(models())
@settings(max_examples=60, deadline=None)
def test_without_slowdowns_the_prediction_is_the_evaluation(model):
    model = replace(model, slowdowns=dict.fromkeys(model.slowdowns, 0.0))
    names = list(itertools.islice(itertools.cycle(model.times_ns), len(model.elements)))
    plan = plan_of(names)
    problem = model.problem(statistics(len(names)), model.single("FP32"), noise_share=1.0)
    assert predicted_reductions(problem, plan) == model.predict(plan)
    assert evaluate(problem, plan).iteration_ns == model.predict(plan)[-1].end_ns


@given(models(most_stretch=3.0))
@settings(max_examples=60, deadline=None)
def test_the_problem_under_a_plan_evaluates_that_plan_as_predicted(model):
    plan = plan_of(list(itertools.islice(itertools.cycle(model.times_ns), len(model.elements))))
    problem = model.problem(statistics(len(model.elements)), plan)
    assert evaluate(problem, plan).iteration_ns == model.predict(plan)[-1].end_ns


@given(models(), st.randoms(use_true_random=False))
@example(model_of([1000, 1000], [[0, 0], [1, 1]], [0.0, 0.5]), random.Random(0))
@settings(max_examples=60, deadline=None)
def test_a_fitted_model_predicts_what_was_recorded_and_mixtures_too(model, draw):
    fitted = fit_reductions([recorded(model, model.single(name)) for name in model.times_ns])
    assert fitted.times_ns == model.times_ns
    mixed = plan_of([draw.choice(list(model.times_ns)) for _ in model.elements])
    for plan in (*map(model.single, model.times_ns), mixed):
        ours, theirs = fitted.predict(plan)[-1].end_ns, model.predict(plan)[-1].end_ns
        # Where a gap is filled by reductions under every scheme, segment and slowdown cannot be told apart.
        assert ours == pytest.approx(theirs, rel=0.35)


def test_a_step_without_reductions_tells_computation_from_slowdown():
    """All gaps are filled by reductions under the one scheme that there is."""
    model = model_of([50_000, 200_000, 200_000], [[900_000] * 3], [0.5])
    records = [recorded(model, model.single("FP32"), steps=2)]
    assert sum(fit_reductions(records).segments_ns) > 1.5 * 450_000
    fitted = fit_reductions(records, Computation(alone_ns=450_000))
    assert sum(fitted.segments_ns) == pytest.approx(450_000, abs=3)
    assert fitted.slowdowns["FP32"] == pytest.approx(0.5, abs=0.02)
    assert fitted.predict(fitted.single("FP32"))[-1].end_ns == pytest.approx(records[0].iteration_ns, rel=0.01)


def test_computation_begins_later_after_a_pause():
    computation = Computation(alone_ns=300_000, later_ns={100_000: 20_000, 400_000: 50_000})
    pauses_ns, later_ns = (0, 50_000, 100_000, 250_000, 10**9), [0, 10e3, 20e3, 35e3, 50e3]
    assert [*map(computation.after_ns, pauses_ns)] == later_ns
    short, long = [20_000] * 3, [20_000, 20_000, 250_000]
    without = model_of([100_000] * 3, [short, long], [0.0, 0.0])
    model = replace(without, computation=computation)
    for name, later_ns in (("FP32", 4_000), ("sum16", 35_000)):  # after pauses of 20 and 250 microseconds
        for before, after in zip(*(each.predict(model.single(name)) for each in (without, model)), strict=True):
            assert after.ready_ns - before.ready_ns == after.end_ns - before.end_ns == later_ns
    fitted = fit_reductions([recorded(model, model.single(name), steps=2) for name in model.times_ns], computation)
    assert fitted.segments_ns == pytest.approx(without.segments_ns, abs=3)
    assert max(fitted.slowdowns.values()) < 1e-3
    mixed = plan_of(["sum16", "FP32", "sum16"])
    assert fitted.predict(mixed)[-1].end_ns == pytest.approx(model.predict(mixed)[-1].end_ns, abs=10)


def test_slowdowns_are_found_where_buckets_differ():
    times = [[300_000, 150_000, 50_000, 9], [150_000, 20_000, 80_000, 9], [80_000, 200_000, 120_000, 9]]
    model = model_of([400_000] * 4, times, [0.6, 0.3, 0.1])
    fitted = fit_reductions([recorded(model, model.single(name), steps=3) for name in model.times_ns])
    assert list(fitted.slowdowns.values()) == pytest.approx([0.6, 0.3, 0.1], abs=0.05)
    plan = plan_of(["FP32", "two8", "sum16", "FP32"])
    assert fitted.predict(plan)[-1].end_ns == pytest.approx(model.predict(plan)[-1].end_ns, rel=0.01)


@given(models(), st.sampled_from([None, 1e-4, 0.05]))
@settings(max_examples=40, deadline=None)
def test_planned_mixtures_are_as_fast_as_any_scheme_with_less_variance(model, noise_share):
    own = statistics(len(model.elements), noise=3.0)
    plan = plan_reductions(model, own, noise_share=noise_share)

    def cost(each):
        names = each.schemes.values()
        return model.predict(each)[-1].end_ns, sum(
            scheme(name).mean_variance(bucket, 2) for name, bucket in zip(names, own, strict=True)
        )

    time_ns, variance = cost(plan)
    allowed = float("inf") if noise_share is None else noise_share * 3.0 * len(own)
    assert variance <= allowed * (1 + 1e-9)
    single = [row for row in map(cost, map(model.single, model.times_ns)) if row[1] <= allowed * (1 + 1e-9)]
    if single:
        assert time_ns <= min(row[0] for row in single)
        assert all(row[1] >= variance * (1 - 1e-9) for row in single if row[0] <= time_ns)


def lengthened(record, factor):
    """The record of a busy moment, in which everything takes longer."""
    steps = tuple(
        tuple(
            replace(each, **{name: round(factor * getattr(each, name)) for name in ("ready_ns", "start_ns", "end_ns")})
            for each in step
        )
        for step in record.steps
    )
    return replace(record, steps=steps)


def test_the_error_of_a_model_is_that_of_records_it_was_not_fitted_to():
    model = model_of([400_000] * 3, [[300_000, 150_000, 50_000], [90_000, 60_000, 80_000]], [0.0, 0.0])
    once = [recorded(model, model.single(name)) for name in model.times_ns]
    assert fit_reductions(once).error == pytest.approx(0, abs=1e-3)
    assert fit_reductions([*once, *once]).error == pytest.approx(0, abs=1e-3)
    # Each of the two moments is predicted from the other, and from both of the other scheme.
    busy = [lengthened(each, 1.2) for each in once]
    assert 0.1 < fit_reductions([*once, *busy]).error < 0.25
    # Without a second record nothing is left out, and the fit hides part of the difference.
    assert fit_reductions([once[0], busy[1]]).error < 0.1


@pytest.mark.parametrize(
    ("last_ns", "error", "chosen"),
    [
        (360, 0.0, "two8"),  # 4 % faster than sum8 everywhere, and less variance
        (360, 0.03, "two8"),
        (360, 0.06, "sum8"),  # within the error of predictions that is no gain
        (400, 0.01, "two8"),  # as fast, with less variance
        (400, 0.03, "sum8"),
        (300, 0.06, "two8"),
    ],
)
def test_a_mixture_must_gain_more_than_predictions_err(last_ns, error, chosen):
    model = model_of([100, 500], [[800, last_ns], [500, 400]], [0.0, 0.0])
    times = dict(zip(("two8", "sum8"), model.times_ns.values(), strict=True))
    model = replace(model, times_ns=times, slowdowns=dict.fromkeys(times, 0.0), error=error)
    assert list(plan_reductions(model, statistics(2)).schemes.values()) == ["sum8", chosen]


def test_more_variance_must_gain_more_than_predictions_err():
    # The first scheme is quieter and faster alone; with sum8 in the last bucket the step takes 8 % less.
    times = {"two8": (500, 400), "sum8": (900, 320)}
    model = replace(
        model_of([100, 500], [[0, 0]], [0.0]), times_ns=times, slowdowns=dict.fromkeys(times, 0.0), error=0.06
    )
    assert list(plan_reductions(model, statistics(2)).schemes.values()) == ["two8", "sum8"]
    assert list(plan_reductions(replace(model, error=0.09), statistics(2)).schemes.values()) == ["two8", "two8"]


def test_too_little_variance_for_every_plan_is_said():
    model = model_of([10, 10], [[5, 5], [5, 5]], [0.0, 0.0])
    model = replace(model, times_ns={"two8": (5, 5), "sum8": (5, 5)}, slowdowns={"two8": 0.0, "sum8": 0.0})
    with pytest.raises(ProblemError, match="every plan of two8, sum8 has more variance than noise_share=1e-12 allows"):
        plan_reductions(model, statistics(2), noise_share=1e-12)


def test_files_round_trip_and_medians_count(tmp_path):
    steps = tuple(
        (
            Reduction(scheme="sum8", ready_ns=5, start_ns=5, end_ns=end),
            Reduction(scheme="FP32", ready_ns=6, start_ns=end, end_ns=2 * end),
        )
        for end in (10, 12, 90)
    )
    record = RecordedReductions(workers=3, elements=(10, 20), steps=steps)
    record.save(tmp_path / "r.json")
    assert load_recorded_reductions(tmp_path / "r.json") == record
    assert record.iteration_ns == 24
    assert record.usual() == steps[1]
    assert record.usual()[1].time_ns == 12
    shifted = record.under(["sum8", "FP32"], tail_ns=5)
    assert [(each.ready_ns, each.end_ns) for each in shifted] == [(0, 7), (1, 19)]
    with pytest.raises(ProblemError, match="bucket b1 was recorded under FP32, but the plan says sum8"):
        record.under(["sum8", "sum8"])
    with pytest.raises(ProblemError, match="2 buckets were recorded, but the plan has 1"):
        record.under(["sum8"])
    rows = trace_json(reductions_timeline("both", {"predicted": steps[0], "measured": steps[1]}))["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {"predicted", "measured"}
    assert [row["dur"] for row in rows if row["name"] == "all-reduce 1 (FP32)"] == [0.01, 0.012]


GOOD = {
    "format": "qsync-gradients-recorded/1", "workers": 2, "elements": [4, 4],
    "steps": [[{"scheme": "FP32", "ready_ns": 1, "start_ns": 2, "end_ns": 5},
               {"scheme": "FP32", "ready_ns": 3, "start_ns": 5, "end_ns": 9}]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": []}, "there is no step"),
        ({"elements": [4]}, "step 0 has 2 buckets, but sizes are given of 1"),
        ({"steps": [[GOOD["steps"][0][0], GOOD["steps"][0][0]]]}, "in step 0 bucket b1 begins at 2 ns, before"),
        ({"steps": [[{**GOOD["steps"][0][0], "end_ns": 1}] * 2]}, "these must follow one another"),
        ({"workers": 0}, "workers is 0"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_bad_records_are_refused(changes, text):
    with pytest.raises(ProblemError, match=text):
        RecordedReductions.from_json(json.loads(json.dumps(GOOD | changes)))


def test_records_that_do_not_belong_together_are_refused():
    good = RecordedReductions.from_json(GOOD)
    with pytest.raises(ProblemError, match="records are of 2 jobs"):
        fit_reductions([good, replace(good, workers=3)])
    half = replace(good, steps=((good.steps[0][0], replace(good.steps[0][1], scheme="sum8")),))
    with pytest.raises(ProblemError, match="scheme 'FP32' was not recorded for bucket b1"):
        fit_reductions([half])
    both = replace(good, steps=(*good.steps, *half.steps))
    with pytest.raises(ProblemError, match="bucket b1 was reduced under FP32, sum8"):
        both.usual()
    model = fit_reductions([good])
    with pytest.raises(ProblemError, match="scheme 'sum8' was not recorded; recorded are FP32"):
        model.predict(plan_of(["FP32", "sum8"]))
    with pytest.raises(ProblemError, match="the plan has 1 buckets of 2 workers"):
        model.predict(plan_of(["FP32"]))
    with pytest.raises(ProblemError, match=r"statistics are of buckets of \[1000, 1000\] elements"):
        model.problem(statistics(2), model.single("FP32"))


def test_a_plan_as_the_network_of_the_step_predictor():
    times = SchemeTimes(
        workers=2, elements=(10, 1000), times_ns={"FP32": (10, 1000), "sum8": (10, 300)}, slowdowns={"sum8": 0.25}
    )
    assert SchemeTimes.from_json(times.to_json()) == times
    assert times.network(plan_of(["sum8", "FP32"]), (1000, 10)) == ((300, 10), (0.25, 0.0))
    stretched = replace(times, stretches={"sum8": 1.5})
    assert SchemeTimes.from_json(stretched.to_json()) == stretched
    assert stretched.network(plan_of(["sum8", "FP32"]), (1000, 10)) == ((450, 10), (0.25, 0.0))
    with pytest.raises(ProblemError, match=r"the stretch of 'sum8' is 0\.5, but a factor of at least 1"):
        replace(times, stretches={"sum8": 0.5})
    with pytest.raises(ProblemError, match="scheme 'two8' was not timed; timed are FP32, sum8"):
        times.network(plan_of(["two8"]), (10,))
    with pytest.raises(ProblemError, match="the plan has 1 buckets, but sizes are given of 2"):
        times.network(plan_of(["sum8"]), (10, 20))
    with pytest.raises(ProblemError, match=r"the slowdown of 'sum8' is 1\.5, but a share from 0 to 1"):
        replace(times, slowdowns={"sum8": 1.5})


def test_the_fastest_scheme_is_one_whose_variance_is_allowed():
    model = model_of([100, 500], [[0, 0]], [0.0])
    times = {"FP32": (900, 900), "two8": (500, 450), "sum8": (500, 400)}
    model = replace(model, times_ns=times, slowdowns=dict.fromkeys(times, 0.0))
    own = statistics(2)
    assert fastest_scheme(model, own) == model.single("sum8")
    assert fastest_scheme(model, own, schemes=["FP32", "two8"]) == model.single("two8")
    assert fastest_scheme(model, own, noise_share=1e-12) == model.single("FP32")
    assert fastest_scheme(model, own, noise_share=1e-12, schemes=["two8", "sum8"]) is None
    # Of two that take as long, the quieter one.
    times = {"two8": (500, 400), "sum8": (500, 400)}
    model = replace(model, times_ns=times, slowdowns=dict.fromkeys(times, 0.0))
    assert fastest_scheme(model, own) == model.single("two8")


def test_records_in_turn_say_whether_a_mixture_is_as_fast():
    model = model_of([400_000] * 3, [[300_000, 150_000, 50_000]], [0.0])
    once = recorded(model, model.single(next(iter(model.times_ns))))
    assert is_as_fast([(once, once)])
    assert is_as_fast([(lengthened(once, 0.9), once)] * 2 + [(lengthened(once, 3.0), once)])
    # A busy moment slows both down.
    assert not is_as_fast([(lengthened(once, factor * 1.05), lengthened(once, factor)) for factor in (1.0, 2.0, 0.5)])
