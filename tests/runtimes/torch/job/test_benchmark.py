"""Whole steps of candidates are timed in turns on the real model, and decide on the plan of the job."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.runtimes.torch.execution import applied_plan
from qsync_opt.runtimes.torch.job import (
    ExecutionMode,
    Job,
    PlanningOptions,
    StepTime,
    auto_plan,
    example_of,
    load_job,
    plan_job,
    profile_job_steps,
    save_job,
    with_speed,
    with_workers,
)
from qsync_opt.runtimes.torch.job import benchmark as job_benchmark
from qsync_opt.runtimes.torch.job import candidates as job_candidates
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.systems import solve

NAMES = ("a/linear", "b/linear")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 4)
        self.spare = nn.Linear(2, 2)  # never used

    def forward(self, x):
        return self.b(torch.relu(self.a(x))).float().square().mean()


def mode(name, sensitivity=0.0):
    precision = "BF16" if name == "plan" else name.split()[0]
    return ExecutionMode(
        name=name,
        precisions=dict.fromkeys(NAMES, precision),
        autocast=precision if "autocast" in name else None,
        sensitivity=sensitivity,
    )


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


def benchmark(job, *modes):
    found = job_benchmark.StepBenchmark(job, [{"here": mode} for mode in modes], "here", None)
    found.run()
    return found


def test_steps_of_every_candidate_are_timed_and_nothing_moves(job):
    before = [p.detach().clone() for p in job.model.parameters()]
    found = benchmark(job, mode("FP32"), mode("BF16 autocast"), mode("plan"))
    assert [step.taken["here"] for step in found.step_times()] == ["FP32", "BF16 autocast", "plan"]
    assert found.short == [[], [], []]
    assert all(torch.equal(old, new) for old, new in zip(before, job.model.parameters(), strict=True))
    assert not job.optimizer.state
    assert job.optimizer.param_groups[0]["lr"] == 0.1
    assert applied_plan(job.model) is None


@pytest.fixture
def paced(job, monkeypatch):
    """Benchmarks FP32, which is less sensitive, and BF16 autocast with given times of their blocks, in this order."""

    def run(fine, coarse, **options):
        blocks = {"FP32": iter(fine), "BF16 autocast": iter(coarse)}

        def block(self, steps):
            if steps == 1:  # to count how many fit
                return 1e9
            self._step()
            return 1e6 * next(blocks["FP32" if applied_plan(self._job.model) is None else "BF16 autocast"])

        monkeypatch.setattr(job_benchmark.StepBenchmark, "_block_ns", block)
        wanted = replace(job, options=replace(job.options, **options))
        return benchmark(wanted, mode("FP32", 0.0), mode("BF16 autocast", 1.0))

    return run


def test_rounds_are_added_only_while_they_disagree_and_as_long_as_there_is_time(paced):
    assert len(paced([100.0] * 4, [100.0] * 4).rounds) == 4
    restless = [100.0, 104.0, 100.0, 104.0, *[100.0] * 20]
    assert 4 < len(paced(restless, [100.0] * 20).rounds) < 17
    assert len(paced([100.0, 104.0] * 10, [100.0] * 20).rounds) == 17
    assert len(paced([100.0, 104.0] * 10, [100.0] * 20, race_seconds=0.0).rounds) == 1


def test_what_is_far_slower_takes_one_turn(paced):
    found = paced([107.0], [100.0, 200.0, 200.0, 200.0])
    assert [sorted(times) for times in found.rounds] == [[0, 1], [1], [1], [1]]
    fine, coarse = found.step_times()
    assert (coarse.step_ns, coarse.rounds_ns[1:]) == (200_000_000, (200_000_000,) * 3)
    assert (fine.step_ns, fine.rounds_ns) == (214_000_000, (107_000_000, 0, 0, 0))


@pytest.mark.parametrize("fitting", [0, 1])
def test_who_lacks_memory_is_told_and_the_others_go_on(job, monkeypatch, fitting):
    """In the first step, or beside the optimizer's state that it made."""
    real, passes = TrainingExample.forward, []

    def forward(self):
        if applied_plan(self.model) is not None:
            passes.append(self)
            if len(passes) > fitting:
                raise torch.cuda.OutOfMemoryError("no room")
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", forward)
    found = benchmark(job, mode("BF16 autocast"), mode("FP32"))
    assert [step.taken["here"] for step in found.step_times()] == ["FP32"]
    assert found.short == [[0], []]
    assert applied_plan(job.model) is None


def test_where_no_step_can_be_taken_passes_decide(job, monkeypatch, caplog):
    monkeypatch.setattr(job_benchmark, "own_optimizer", lambda *_: 1 / 0)
    assert benchmark(job, mode("FP32")).step_times() == []
    assert "whole steps are not timed: rank 0: ZeroDivisionError" in caplog.text


def test_a_failure_is_told_by_its_first_line_with_words(job, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("\n  a kernel said no\nand much more")

    monkeypatch.setattr(job_benchmark, "own_optimizer", fail)
    assert benchmark(job, mode("FP32")).step_times() == []
    assert "rank 0: RuntimeError: a kernel said no" in caplog.text
    assert "much more" not in caplog.text


def with_steps(plan, ms):
    """The job as if passes had taken 10 ms and steps so many milliseconds, by name; sensitivities rise in order.

    The solver's plan, which depends on what this machine measured, is far slower.
    """
    job, name = plan.model, plan.device_type
    operators = job.modes[name][0].precisions
    modes = [
        replace(mode(n, float(i)), precisions=dict.fromkeys(operators, n.split()[0]), pass_ns=10**7, needed_bytes=1)
        for i, n in enumerate(ms)
    ]
    solved = plan_job(replace(job, modes={}, steps=()), name, PlanningOptions()).plan.devices[name]
    slow = ExecutionMode(name="plan", precisions={o: solved[o] for o in operators}, pass_ns=10**9, needed_bytes=1)
    steps = tuple(StepTime(taken={name: n}, step_ns=round(time * 1e6)) for n, time in ms.items())
    return replace(job, modes={name: (*modes, slow)}, steps=steps)


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
    modes = {name: made.modes[name], other: tuple(mode.slowed(3.0) for mode in made.modes[name])}
    profiles, tables = (
        {**made.profiles, other: made.profiles[name]},
        {**made.sensitivities, other: made.sensitivities[name]},
    )
    devices = (*made.cluster.devices, replace(made.cluster.devices[0], name=other))
    both = replace(
        made,
        modes=modes,
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
        modes={name: one.modes[name], other: tuple(mode.slowed(3.0) for mode in one.modes[name])},
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


def test_a_measured_job_is_planned_jointly(planned):
    """Twice the speed on one of two workers: batches of 2 to 1, and its plan among the modes of sized batches."""
    name, other = planned.device_type, "a slower one"
    one = planned.model
    made = with_speed(
        replace(
            one,
            modes={},
            steps=(),
            profiles={**one.profiles, other: one.profiles[name]},
            sensitivities={**one.sensitivities, other: one.sensitivities[name]},
            cluster=replace(one.cluster, devices=(*one.cluster.devices, replace(one.cluster.devices[0], name=other))),
        ),
        {other: 2.0},
    )
    shares = made.shares_problem(12, slack=0.1)
    assert shares.global_batch == 24
    solution = solve(shares)
    assert solution.evaluation.feasible
    assert solution.plan.batches[name] > solution.plan.batches[other]
    assert solution.evaluation.iteration_ns < made.problem().latency_limit_ns  # equal batches, as fast as they can be
    (mode,) = job_candidates.joint_modes(made.problem(), solution.plan)[other]
    assert mode.is_solved
    assert mode.label == "joint plan"
    timed = {
        n: [replace(m, pass_ns=10) for m in (*own, *job_candidates.possible_modes(made.problem(), {
            d: solution.plan.precisions.devices[d] for d in (name, other)})[n])]
        for n, own in job_candidates.joint_modes(made.problem(), solution.plan).items()
    }  # fmt: skip
    proposed = job_candidates.shortlist(timed, made.limits_bytes, workers=made.workers)
    assert job_candidates.labels(proposed[0]) == dict.fromkeys((name, other), "joint plan")


def test_the_local_batches_of_ranks_add_up(planned):
    assert planned.local_batches(17) == (17,)


def test_batches_are_cut_and_repeated():
    x, mask = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])
    example = TrainingExample(model=Net(), args=(x, [mask, "text"]), kwargs={"scale": torch.tensor(2.0)})
    assert job_benchmark.batch_size(example) == 3
    for count in (1, 3, 5):
        found = job_benchmark.sized(example, count)
        assert torch.equal(found.args[0], x[torch.arange(count) % 3])
        assert len(found.args[1][0]) == count
        assert found.args[1][1] == "text"
        assert found.kwargs["scale"] == 2.0
    assert job_benchmark.batch_size(TrainingExample(model=Net(), args=(x, torch.zeros(2)))) is None
    assert job_benchmark.Sizing({"a": 1, "b": 2}, 5).split({"a": 3.0, "b": 1.0}) == {"a": 9, "b": 3}
    assert job_benchmark.Sizing({"a": 1, "b": 1}, 2).split({"a": 1000.0, "b": 1.0}) == {
        "a": 4,
        "b": 1,
    }  # nobody has none


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


def test_a_precision_that_the_device_refuses_is_left_out(job, monkeypatch, caplog, tmp_path):
    real = TrainingExample.forward

    def forward(self):
        applied = applied_plan(self.model)
        if applied is not None and "INT8" in applied.precisions.values():
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", forward)
    from qsync_opt.runtimes.torch.capture import capture_model

    graph = capture_model(job.model, job.example.args, {}).graph
    options = PlanningOptions(precisions=("BF16", "INT8"), cache_dir=tmp_path)
    found = profile_job_steps(job.example, graph, None, options)
    assert set(found.formats) == {"BF16", "FP32"}
    assert "INT8 does not run on this device and is left out: CUBLAS" in caplog.text
    assert applied_plan(job.model) is None

    def broken(self):
        raise RuntimeError("no kernel at all")

    monkeypatch.setattr(TrainingExample, "forward", broken)
    with pytest.raises((RuntimeError, UnsupportedError), match="no kernel at all"):
        profile_job_steps(job.example, graph, None, replace(options, precisions=("BF16",), cache_dir=tmp_path / "none"))
