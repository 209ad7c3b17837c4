"""Whole steps decide between ways whose passes look alike: never a slower one, and of equally fast ones the finest."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.runtimes.torch.execution import applied_plan
from qsync_opt.runtimes.torch.job import (
    Job,
    PlanningOptions,
    StepTime,
    Way,
    auto_plan,
    batch_size,
    best_step,
    choose,
    everywhere,
    example_of,
    finalists,
    load_job,
    paired_medians,
    plan_job,
    predicted_step_ns,
    profile_job_steps,
    rounds_of,
    save_job,
    sized,
    split,
    step_ns,
    timed_together,
    with_speed,
    with_workers,
)
from qsync_opt.runtimes.torch.job import racing as job_racing
from qsync_opt.runtimes.torch.support import TrainingExample

HUGE = 1 << 60
NAMES = ("a/linear", "b/linear")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 4)
        self.spare = nn.Linear(2, 2)  # never used

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).float().square().mean()


def way(name, ms, sensitivity, captured=False, needed_bytes=1):
    precision = "BF16" if name == "plan" else name.split()[0]
    return Way(
        name=name,
        precisions=dict.fromkeys(NAMES, precision),
        autocast=precision if "autocast" in name else None,
        sensitivity=sensitivity,
        pass_ns=round(ms * 1e6),
        needed_bytes=needed_bytes,
        captured=captured,
    )


# Passes in milliseconds as they were measured on two H200s, one a part of 16 multiprocessors.
VIT = {
    "whole": (way("FP32", 89.6, 0.0), way("BF16 autocast", 43.6, 0.13), way("plan", 65.6, 0.0001)),
    "part": (way("FP32", 765, 0.0), way("BF16 autocast", 82.96, 0.13), way("plan", 79.91, 2.36)),
}
LIMITS = {"whole": HUGE, "part": HUGE}


def labels(found):
    return tuple(way.label for way in found.values())


def test_a_plan_that_is_no_faster_in_whole_steps_gives_way_to_a_finer_one():
    chosen = choose(VIT, LIMITS)
    assert labels(chosen) == ("plan", "plan")  # by passes
    tried = {labels(found): found for found in finalists(VIT, LIMITS)}
    assert ("plan", "BF16 autocast") in tried
    assert ("BF16 autocast", "BF16 autocast") in tried
    steps = {("plan", "plan"): 90.24, ("plan", "BF16 autocast"): 90.4, ("BF16 autocast", "BF16 autocast"): 90.66}
    timed = [(tried[name], ms * 1e6) for name, ms in steps.items()]
    best, took = best_step(chosen, timed, rest_ns=0, slack=0.0)
    assert (labels(best), took) == (("plan", "BF16 autocast"), 90.4e6)
    faster = [(tried[name], ms * (0.9 if name == ("plan", "plan") else 1.0) * 1e6) for name, ms in steps.items()]
    assert labels(best_step(chosen, faster, rest_ns=0, slack=0.0)[0]) == ("plan", "plan")
    assert labels(best_step(chosen, faster, rest_ns=0, slack=0.15)[0]) == ("plan", "BF16 autocast")


def test_the_slowest_goes_a_plain_way_and_the_others_spend_its_time():
    ways = {
        "whole": (way("FP32", 89.6, 0.0), way("BF16 autocast", 43.6, 0.13), way("FP16 autocast", 41.3, 0.004)),
        "part": (way("FP32", 765, 0.0), way("BF16 autocast", 82.96, 0.13), way("FP16 autocast", 82.37, 0.004)),
    }
    ways = {name: (*mine, way("plan", 65.6 if name == "whole" else 200, 0.0001)) for name, mine in ways.items()}
    tried = {labels(found): found for found in finalists(ways, LIMITS)}
    assert ("plan", "BF16 autocast") in tried  # by passes alone FP16 autocast, as fast and finer, would be it
    steps = {found: 95.0 for found in tried} | {
        ("plan", "BF16 autocast"): 92.6,
        ("BF16 autocast", "BF16 autocast"): 92.5,
    }
    timed = [(tried[name], ms * 1e6) for name, ms in steps.items() if name in tried]
    assert labels(best_step(choose(ways, LIMITS), timed, rest_ns=0, slack=0.0)[0]) == ("plan", "BF16 autocast")


def test_finer_ways_beside_one_without_loss_scaling_need_none_either():
    mixed = replace(way("plan", 60.0, 0.0005), precisions=dict(zip(NAMES, ("FP16", "FP32"), strict=True)))
    ways = {
        "whole": (
            way("FP32", 89.9, 0.0),
            way("TF32", 55.0, 0.002),
            way("FP16 autocast", 41.4, 0.006),
            way("BF16 autocast", 40.3, 0.146),
            mixed,
        ),
        "part": (
            way("FP32", 765, 0.0),
            way("TF32", 190, 0.002),
            way("FP16 autocast", 82.2, 0.006),
            way("BF16 autocast", 83.0, 0.146),
        ),
    }
    assert mixed.needs_scaling
    tried = {labels(found) for found in finalists(ways, LIMITS)}
    assert ("TF32", "BF16 autocast") in tried
    assert ("plan", "FP16 autocast") in tried  # there it is needed anyway


def test_captured_passes_that_hinder_others_are_not_taken():
    ways = {
        "whole": (way("BF16 autocast", 57.5, 1.0), way("BF16 autocast", 14.8, 1.0, captured=True)),
        "part": (way("BF16 autocast", 86.3, 1.0), way("BF16 autocast", 77.6, 1.0, captured=True)),
    }
    chosen = choose(ways, LIMITS)
    assert all(found.captured for found in chosen.values())
    launched = next(found for found in finalists(ways, LIMITS) if not found["part"].captured)
    best, _ = best_step(chosen, [(chosen, 90.1e6), (launched, 86.1e6)], rest_ns=0, slack=0.0)
    assert best == launched


# ViT-B by the indicator of progress: INT8, whose passes are slow, needs the least memory and had the fastest steps.
RESTLESS = {
    "whole": (
        *(way("FP32", 89.7, 0.0, needed_bytes=9), way("TF32", 43.9, 3e-7, needed_bytes=9)),
        *(way("BF16 autocast", 32.7, 4.3e-5, needed_bytes=5), way("INT8", 57.7, 9.4e-4, needed_bytes=3)),
    ),
    "part": (
        *(way("FP32", 765, 0.0, needed_bytes=9), way("TF32", 218.6, 3e-7, needed_bytes=9)),
        *(way("BF16 autocast", 82.9, 4.3e-5, needed_bytes=5), way("INT8", 90.1, 9.4e-4, needed_bytes=3)),
    ),
}


def test_who_waits_for_another_is_offered_precision_beside_what_needs_the_least_memory_too():
    tried = [labels(found) for found in finalists(RESTLESS, LIMITS)]
    assert tried[-2:] == [("INT8", "INT8"), ("FP32", "INT8")]
    assert ("TF32", "BF16 autocast") in tried
    far = {name: (*mine[:3], replace(mine[3], pass_ns=2 * mine[3].pass_ns)) for name, mine in RESTLESS.items()}
    assert [labels(found) for found in finalists(far, LIMITS)][-1] == ("INT8", "INT8")  # only for its memory


def test_rounds_decide_where_medians_differ_by_chance():
    steps = {
        ("INT8", "INT8"): (87.45, (86.3, 86.4, 88.3, 93.8, 90.5)),
        ("BF16 autocast", "BF16 autocast"): (89.42, (88.3, 88.3, 88.2, 88.3, 88.3)),
        ("TF32", "BF16 autocast"): (89.45, (88.3, 88.3, 88.3, 88.3, 88.4)),
    }
    made = [
        StepTime(
            taken=dict(zip(RESTLESS, names, strict=True)),
            step_ns=round(ms * 1e6),
            rounds_ns=tuple(round(turn * 1e6) for turn in turns),
        )
        for names, (ms, turns) in steps.items()
    ]
    timed = timed_together(RESTLESS, LIMITS, made)
    chosen = choose(RESTLESS, LIMITS)
    assert labels(best_step(chosen, timed, rest_ns=0, slack=0.0)[0]) == ("INT8", "INT8")  # by medians alone
    best, took = best_step(chosen, timed, rest_ns=0, slack=0.0, rounds=rounds_of(timed, made))
    assert (labels(best), took) == (("TF32", "BF16 autocast"), 89.45e6)
    faster = [
        replace(step, rounds_ns=tuple(round(0.95 * turn) for turn in step.rounds_ns))
        if step.taken["part"] == "INT8"
        else step
        for step in made
    ]
    kept = best_step(chosen, timed, rest_ns=0, slack=0.0, rounds=rounds_of(timed, faster))
    assert labels(kept[0]) == ("INT8", "INT8")
    assert rounds_of(timed, [replace(step, rounds_ns=()) for step in made]) == []
    unequal = rounds_of(timed, [replace(made[0], rounds_ns=(5,)), replace(made[1], rounds_ns=(0, 7)), made[2]])
    assert [set(entry) for entry in unequal] == [{0, 2}, {1, 2}, {2}, {2}, {2}]


def test_captured_passes_that_gain_little_are_not_worth_more_sensitivity():
    eager = {"a": way("BF16 autocast", 50, 1.0)}
    captured = {"a": way("INT8", 49, 9.0, captured=True)}
    for ms, expected in ((97.0, eager), (95.0, captured)):
        timed = [(eager, 100e6), (captured, ms * 1e6)]
        assert best_step(eager, timed, rest_ns=0, slack=0.0)[0] == expected
    finer = {"a": way("FP32", 49, 0.0, captured=True)}
    assert best_step(eager, [(eager, 100e6), (finer, 99.6e6)], rest_ns=0, slack=0.0)[0] == eager
    timed = [(eager, 100e6), (finer, 96e6), (captured, 95e6)]
    assert best_step(eager, timed, rest_ns=0, slack=0.0)[0] == finer


def test_a_step_that_was_not_timed_takes_as_much_beside_its_passes_as_others_of_its_kind():
    eager, captured = {"a": way("FP32", 50, 0.0)}, {"a": way("INT8", 20, 1.0, captured=True)}
    timed = [(eager, 60e6), ({"a": way("BF16 autocast", 25, 1.0, captured=True)}, 28e6)]
    assert predicted_step_ns(captured, timed, 7) == 23e6
    assert predicted_step_ns(eager, timed, 7) == 60e6
    assert predicted_step_ns(captured, [], 7) == 20e6 + 7


def test_what_slows_a_whole_round_decides_nothing():
    rounds = [{0: 100.0, 1: 101.0, 2: 130.0}, {0: 150.0, 1: 151.5}, {0: 90.0, 1: 90.9}]
    found = paired_medians(rounds)
    assert found[1] / found[0] == pytest.approx(1.01)
    assert found[0] == pytest.approx(100.0)
    assert found[2] == 130.0  # in one round alone
    assert paired_medians([{4: 7.0}, {4: 9.0}, {4: 8.0}]) == {4: 8.0}
    assert paired_medians([]) == {}


# ResNet-50 as it was measured: launched by the host, a whole card waits for it with few samples.
RESNET = {
    "whole": (
        way("FP32", 76.7, 0.0),
        way("FP16 autocast", 25.7, 7.0),
        way("INT8", 69.5, 156.0),
        way("FP16 autocast", 22.4, 7.0, captured=True),
        way("INT8", 25.4, 156.0, captured=True),
    ),
    "part": (
        way("FP32", 533.0, 0.0),
        way("FP16 autocast", 117.3, 7.0),
        way("INT8", 121.0, 156.0),
        way("FP16 autocast", 116.8, 7.0, captured=True),
        way("INT8", 119.1, 156.0, captured=True),
    ),
}


def test_with_sized_batches_plain_ways_are_tried_launched_and_captured():
    tried = {labels(found): found for found in finalists(RESNET, LIMITS, balanced=True)}
    launched, captured = ("FP16 autocast",) * 2, ("FP16 autocast, captured",) * 2
    assert {launched, captured} <= set(tried)
    assert ("INT8", "INT8") not in tried  # far slower on the whole card
    assert ("INT8, captured",) * 2 in tried  # losses are not scaled, which passes do not tell
    chosen = choose(RESNET, LIMITS, balanced=True)
    assert labels(chosen) == captured  # by passes with equal batches
    timed = [(tried[launched], 46.0e6), (tried[captured], 46.5e6)]
    assert best_step(chosen, timed, rest_ns=0, slack=0.0, balanced=True) == timed[0]
    timed = [(tried[launched], 46.5e6), (tried[captured], 46.0e6)]
    assert best_step(chosen, timed, rest_ns=0, slack=0.0, balanced=True) == timed[1]


def test_with_sized_batches_every_device_type_may_take_its_own_plan():
    own = {
        "whole": (way("own plan", 20.9, 90.0, captured=True), way("own plan without FP16", 24.0, 120.0, captured=True)),
        "part": (way("own plan", 111.8, 76.0, captured=True), way("own plan without FP16", 114.0, 99.0, captured=True)),
    }
    own = {
        n: tuple(replace(w, precisions=RESNET[n][int("FP16" in w.name) + 1].precisions) for w in own[n]) for n in own
    }
    ways = {name: (*mine, *own[name]) for name, mine in RESNET.items()}
    tried = [labels(found) for found in finalists(ways, LIMITS, balanced=True)]
    assert ("own plan, captured",) * 2 in tried
    assert ("own plan without FP16, captured",) * 2 in tried
    assert ("INT8, captured",) * 2 in tried
    assert not any("own" in "".join(found) for found in map(labels, finalists(RESNET, LIMITS, balanced=True)))


@st.composite
def clusters(draw):
    times, names = st.integers(1, 100), ["FP32", "BF16 autocast", "INT8", "plan"]
    room = st.sampled_from([1, 1, 1, None])
    return {
        device: tuple(
            way(name, draw(times), draw(st.integers(0, 9)) * 1.0, captured, draw(room))
            for captured in ((False, True) if draw(st.booleans()) else (False,))
            for name in names
        )
        for device in ("one", "two", "three")[: draw(st.integers(1, 3))]
    }


@given(clusters(), st.data())
def test_what_whole_steps_say_is_kept(ways, data):
    limits = dict.fromkeys(ways, HUGE)
    tried = finalists(ways, limits)
    assert len({labels(found) for found in tried}) == len(tried) <= 8
    assert all(way.fits(HUGE) for found in tried for way in found.values())
    assert all(len({way.captured for way in found.values()}) == 1 for found in tried)
    chosen = choose(ways, limits)
    if chosen is None:
        assert not tried
        return
    assert chosen in tried
    plain = {name: time for name, time in everywhere(ways, limits).items() if "captured" not in name}
    quickest = min(step_ns(found) for found in tried)
    for name in sorted(plain, key=plain.__getitem__)[:2]:  # as far as passes tell, a user could do no better
        assert plain[name] > 1.079 * quickest or any(set(labels(found)) == {name} for found in tried)
    timed = [(found, data.draw(st.integers(50, 150)) * 1e6) for found in tried]
    best, took = best_step(chosen, timed, rest_ns=0, slack=0.0)
    assert took <= 1.015 * 1.021 * min(time for _, time in timed)
    launched = [time for found, time in timed if not any(way.captured for way in found.values())]
    if launched and not any(way.captured for way in best.values()):
        assert took <= 1.0151 * min(launched)  # never 2 % slower than a plain way that was trained with
    for found, time in timed:
        if time <= took and labels(found)[0].endswith("captured") == labels(best)[0].endswith("captured"):
            assert sum(w.sensitivity for w in best.values()) <= sum(w.sensitivity for w in found.values())


def test_a_time_of_steps_is_plain_data():
    step = StepTime(taken={"a": "BF16 autocast", "b": "plan, captured"}, step_ns=5)
    for one in (step, replace(step, batches={"a": 3, "b": 1}), replace(step, rounds_ns=(4, 0, 6))):
        assert StepTime.from_json(json.loads(json.dumps(one.to_json())), "a step") == one
    wrong = ({"a": 1}, {"a": 1, "b": 0}, {"a": 1, "c": 2}, {"a": 1, "b": "2"}, [1, 2])
    for change in (
        *({"step_ns": 0}, {"taken": {"a": 1}}, {"taken": []}, {"more": 1}),
        *({"rounds_ns": turns} for turns in ([1.5], [-1], ["1"], [True], 3)),
        *({"batches": batches} for batches in wrong),
    ):
        with pytest.raises(ProblemError):
            StepTime.from_json({**step.to_json(), **change}, "a step")
    limits = {"a": HUGE, "b": HUGE}
    assert not timed_together({"a": VIT["whole"]}, limits, [step])
    assert not timed_together({"a": VIT["whole"], "b": VIT["part"]}, limits, [step])  # nothing is captured there


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    options = PlanningOptions(
        cache_dir=folder, job_file=folder / "job.json", progress=False, memory="1 GiB", precisions=("BF16", "INT8")
    )
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Job(model, example_of(model, torch.randn(256, 64), None), options, optimizer)


@pytest.fixture(scope="module")
def planned(job):
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    plan = auto_plan(job.model, job.example.args, optimizer=job.optimizer, options=replace(job.options, least_gain=0.0))
    assert all(torch.equal(before[name], tensor) for name, tensor in job.model.state_dict().items())
    assert not job.optimizer.state
    assert set(plan.stages_s) == {
        "capture",
        "profile",
        "network",
        "sensitivities",
        "plan",
        "trial",
        "passes",
        "steps",
        "host",
    }
    assert "planned in" in plan.describe()
    return plan


def race(job, ways):
    times, short, _ = job_racing._Race(job, [{"here": way} for way in ways], "here", None).run()
    return times, short


def test_steps_of_every_candidate_are_timed_and_nothing_moves(job):
    before = [p.detach().clone() for p in job.model.parameters()]
    times, short = race(job, [way("FP32", 0, 0.0), way("BF16 autocast", 0, 0.0), way("plan", 0, 0.0)])
    assert all(time > 0 for time in times)
    assert short == [[], [], []]
    assert all(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))
    assert not job.optimizer.state
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert applied_plan(job.model) is None


def test_more_rounds_are_timed_where_they_leave_it_open_and_no_more_than_there_is_time_for(job, monkeypatch):
    turns = []
    pace = {"FP32": 100.0, "BF16 autocast": 100.0}

    def block(self, steps):
        self._step()
        label = "FP32" if applied_plan(self._job.model) is None else "BF16 autocast"
        turns.append(label)
        return pace[label] * (1 + wander * (len(turns) % 3) * (label == "FP32")) * 1e6

    monkeypatch.setattr(job_racing._Race, "_block", block)
    ways = [way("FP32", 0, 1.0), way("BF16 autocast", 0, 0.0)]
    rounds = {}
    for wander, seconds in ((0.0, 60.0), (0.03, 60.0), (0.03, 0.0)):
        race = job_racing._Race(
            replace(job, options=replace(job.options, race_seconds=seconds)), [{"here": w} for w in ways], "here", None
        )
        times, _, _ = race.run()
        assert all(times)
        rounds[wander, seconds] = race.turns(0)
        assert len(race.turns(0)) == len(race.turns(1))
    assert len(rounds[0.0, 60.0]) == 4  # four of four: shown
    assert len(rounds[0.03, 60.0]) >= 4
    assert len(rounds[0.03, 0.0]) == 1
    pace["BF16 autocast"] = 101.8
    monkeypatch.setattr(job_racing, "undecided", lambda rounds, *_: sorted(rounds[0]))  # it never is
    race = job_racing._Race(job, [{"here": w} for w in ways], "here", None)
    race.run()
    assert len(race.turns(0)) == 17


def test_who_lacks_memory_is_told_and_the_others_go_on(job, monkeypatch):
    real = TrainingExample.forward

    def forward(self):
        if applied_plan(self.model) is not None:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", forward)
    times, short = race(job, [way("BF16 autocast", 0, 0.0), way("FP32", 0, 0.0)])
    assert times[0] is None
    assert times[1] > 0
    assert short == [[0], []]
    assert applied_plan(job.model) is None


def test_where_no_step_can_be_taken_passes_decide(job, monkeypatch, caplog):
    monkeypatch.setattr(job_racing, "own_optimizer", lambda *_: 1 / 0)
    assert race(job, [way("FP32", 0, 0.0)]) == ([None], [[]])
    assert "whole steps are not timed: rank 0: ZeroDivisionError" in caplog.text


def test_a_failure_is_told_by_its_first_line_with_words(job, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("\n  a kernel said no\nand much more")

    monkeypatch.setattr(job_racing, "own_optimizer", fail)
    assert race(job, [way("FP32", 0, 0.0)]) == ([None], [[]])
    assert "rank 0: RuntimeError: a kernel said no" in caplog.text
    assert "much more" not in caplog.text


def with_steps(plan, ms):
    """The job as if passes and steps had taken so many milliseconds, by the way's name."""
    made, name = plan.model, plan.device_type
    ways = [
        Way(name=n, precisions=dict.fromkeys(made.ways[name][0].precisions, n.split()[0]), needed_bytes=1) for n in ms
    ]
    timed = [
        replace(w, pass_ns=10**7, sensitivity=i * 1.0, autocast=w.name.split()[0] if "auto" in w.name else None)
        for i, w in enumerate(ways)
    ]
    steps = tuple(StepTime(taken={name: n}, step_ns=round(time * 1e6)) for n, time in ms.items())
    return replace(made, ways={name: tuple(timed)}, steps=steps)


def test_the_plan_is_what_whole_steps_say(planned, job):
    name = planned.device_type
    fast = plan_job(with_steps(planned, {"FP32": 30, "BF16 autocast": 20}), name, job.options)
    assert (fast.taken, fast.expected_ns) == ({name: "BF16 autocast"}, 20 * 10**6)
    assert "whole steps: BF16 autocast 20.00 ms, FP32 30.00 ms" in fast.reason
    equal = plan_job(with_steps(planned, {"FP32": 20.2, "BF16 autocast": 20}), name, job.options)
    assert not equal.worthwhile
    assert equal.expected_ns == 20_200_000


def test_with_local_batches_by_speed_a_step_is_that_of_sized_batches(planned):
    name = planned.device_type
    made = with_steps(planned, {"FP32": 30, "BF16 autocast": 20})
    other = "a slower one"
    ways = {name: made.ways[name], other: tuple(way.slowed(3.0) for way in made.ways[name])}
    profiles, tables = (
        {**made.profiles, other: made.profiles[name]},
        {**made.sensitivities, other: made.sensitivities[name]},
    )
    devices = (*made.cluster.devices, replace(made.cluster.devices[0], name=other))
    both = replace(
        made,
        ways=ways,
        steps=(),
        profiles=profiles,
        sensitivities=tables,
        cluster=replace(made.cluster, devices=devices),
    )
    sized = plan_job(both, name, PlanningOptions(local_batches="by speed", least_gain=0.0))
    equal = plan_job(both, name, PlanningOptions(least_gain=0.0))
    # Passes of 10 and 30 ms: 4 samples in the time of which equal batches do 2.
    assert sized.expected_ns - 15 * 10**6 == equal.expected_ns - 30 * 10**6


def test_steps_with_sized_batches_decide_and_say_how_large_they_are(planned, job, tmp_path):
    name, other = planned.device_type, "a slower one"
    one = with_steps(planned, {"FP32": 30, "BF16 autocast": 20})
    made = replace(
        one,
        ways={name: one.ways[name], other: tuple(way.slowed(3.0) for way in one.ways[name])},
        profiles={**one.profiles, other: one.profiles[name]},
        sensitivities={**one.sensitivities, other: one.sensitivities[name]},
        cluster=replace(one.cluster, devices=(*one.cluster.devices, replace(one.cluster.devices[0], name=other))),
        steps=tuple(
            StepTime(taken=dict.fromkeys((name, other), label), step_ns=time, batches={name: mine, other: theirs})
            for label, time, mine, theirs in (("FP32", 14_000_000, 6, 2), ("BF16 autocast", 12_000_000, 7, 1))
        ),
    )
    options = PlanningOptions(local_batches="by speed", least_gain=0.0)
    found = plan_job(made, name, options)
    assert found.taken == {name: "BF16 autocast", other: "BF16 autocast"}
    assert found.expected_ns == 12_000_000
    assert found.shares == {name: 7 / 8, other: 1 / 8}
    equal = plan_job(made, name, PlanningOptions(least_gain=0.0))
    assert equal.shares == {name: 0.5, other: 0.5}
    assert equal.expected_ns != 12_000_000
    save_job(made, tmp_path / "job.json", {"memory_bytes": {name: 1 << 30, other: 1 << 30}})
    assert load_job(tmp_path / "job.json")[0].steps == made.steps
    assert not with_speed(made, {name: 2.0}).steps  # sized for other speeds
    assert with_speed(made, {name: 1.0}).steps == made.steps


def test_batches_are_cut_and_repeated():
    x, mask = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])
    example = TrainingExample(model=Net(), args=(x, [mask, "text"]), kwargs={"scale": torch.tensor(2.0)})
    assert batch_size(example) == 3
    for count in (1, 3, 5):
        found = sized(example, count)
        assert torch.equal(found.args[0], x[torch.arange(count) % 3])
        assert len(found.args[1][0]) == count
        assert found.args[1][1] == "text"
        assert found.kwargs["scale"] == 2.0
    assert batch_size(TrainingExample(model=Net(), args=(x, torch.zeros(2)))) is None
    assert split({"a": 3.0, "b": 1.0}, {"a": 1, "b": 2}, 15) == {"a": 9, "b": 3}
    assert split({"a": 1000.0, "b": 1.0}, {"a": 1, "b": 1}, 4) == {"a": 4, "b": 1}  # nobody has none


def test_a_running_job_stays_where_nothing_is_clearly_better(planned, job):
    name, options = planned.device_type, replace(job.options, least_gain=0.0)
    made = with_steps(planned, {"FP32": 40, "BF16 autocast": 20, "INT8": 20})
    present = plan_job(made.with_memory({name: made.cluster.device(name).memory_limit_bytes}), name, options)
    assert present.taken == {name: "BF16 autocast"}
    little = replace(
        made, steps=tuple(replace(s, step_ns=19_800_000) if "INT8" in s.taken.values() else s for s in made.steps)
    )
    assert plan_job(little, name, options).taken == {name: "BF16 autocast"}
    much = replace(
        made, steps=tuple(replace(s, step_ns=15_000_000) if "INT8" in s.taken.values() else s for s in made.steps)
    )
    assert plan_job(much, name, options).taken == {name: "INT8"}
    was = plan_job(much, name, options)
    assert plan_job(little, name, options, was).taken == {name: "BF16 autocast"}  # half as sensitive
    near = replace(
        made, steps=tuple(replace(s, step_ns=19_590_000) if "INT8" in s.taken.values() else s for s in made.steps)
    )
    assert plan_job(near, name, options).taken == {name: "INT8"}
    assert plan_job(near, name, options, present).taken == {name: "BF16 autocast"}  # so little is not worth it
    assert plan_job(much, name, options, present).taken == {name: "INT8"}


def test_times_of_steps_are_kept_with_the_job(planned, job, tmp_path):
    name = planned.device_type
    made = with_steps(planned, {"FP32": 30, "BF16 autocast": 20})
    save_job(made, tmp_path / "job.json", {"memory_bytes": {name: 1 << 30}})
    assert load_job(tmp_path / "job.json")[0].steps == made.steps
    turned = replace(made, steps=tuple(replace(step, rounds_ns=(step.step_ns, 0)) for step in made.steps))
    assert [step.rounds_ns for step in with_speed(turned, {name: 2.0}).steps] == [(40 * 10**6, 0), (30 * 10**6, 0)]
    slow = with_speed(made, {name: 2.0})
    assert [step.step_ns for step in slow.steps] == [40 * 10**6, 30 * 10**6]  # passes of 10 ms each
    assert with_workers(made, {name: 1}).steps == made.steps
    assert not with_workers(made, {name: 2}).steps  # other all-reduces
    data = json.loads((tmp_path / "job.json").read_text())
    data["steps"][0]["taken"] = {name: "FP8"}
    (tmp_path / "job.json").write_text(json.dumps(data))
    with pytest.raises(ProblemError, match="a step was timed in a way that was not"):
        load_job(tmp_path / "job.json")


def test_a_precision_that_the_device_refuses_is_left_out(job, monkeypatch, caplog):
    real = TrainingExample.forward

    def forward(self):
        applied = applied_plan(self.model)
        if applied is not None and "INT8" in applied.precisions.values():
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", forward)
    from qsync_opt.runtimes.torch.capture import capture_model

    graph = capture_model(job.model, job.example.args, {}).graph
    found = profile_job_steps(job.example, graph, None, precisions=("BF16", "INT8"))
    assert set(found.formats) == {"BF16", "FP32"}
    assert "INT8 does not run on this device and is left out: CUBLAS" in caplog.text
    assert applied_plan(job.model) is None

    def broken(self):
        raise RuntimeError("no kernel at all")

    monkeypatch.setattr(TrainingExample, "forward", broken)
    with pytest.raises((RuntimeError, UnsupportedError), match="no kernel at all"):
        profile_job_steps(job.example, graph, None, precisions=("BF16",))
