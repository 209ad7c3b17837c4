"""Which way a job takes: from times of the whole model, never slower than what a user could have chosen without it."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qsync_opt.errors import NotReadyError, ProblemError, QSyncError, UnsupportedError
from qsync_opt.runtimes.torch.checkpoints import RankState, carry_out, decide
from qsync_opt.runtimes.torch.execution import ApplyOptions, LossScaler, applied_plan, apply, undo
from qsync_opt.runtimes.torch.job import (
    PlanAdapter,
    PlanningOptions,
    Way,
    auto_plan,
    choose,
    everywhere,
    load_job,
    plan_job,
    step_ns,
    with_speed,
)
from qsync_opt.runtimes.torch.job import timing as job_timing
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.training import Plan, evaluate

HUGE = 1 << 60
NAMES = ("a/linear", "b/linear", "c/linear")


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def loss_of(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


def way(name, pass_ns, sensitivity, needed_bytes=0, precision=None, autocast=None):
    precision = precision or ("BF16" if name == "plan" else name.split()[0])
    return Way(
        name=name,
        precisions=dict.fromkeys(NAMES, precision),
        autocast=autocast,
        sensitivity=sensitivity,
        pass_ns=pass_ns,
        needed_bytes=needed_bytes,
    )


FAST = (way("FP32", 60, 0.0), way("BF16 autocast", 30, 1.0), way("INT8", 50, 9.0), way("plan", 45, 0.5))
SLOW = (way("FP32", 280, 0.0), way("BF16 autocast", 80, 1.0), way("INT8", 75, 9.0), way("plan", 74, 3.0))


def taken(ways, limits=None, **how):
    limits = limits or dict.fromkeys(ways, HUGE)
    return {name: found.name for name, found in choose(ways, limits, **how).items()}


def test_who_waits_anyway_computes_in_full_precision():
    assert taken({"fast": FAST, "slow": SLOW}) == {"fast": "FP32", "slow": "plan"}


def test_by_speed_nobody_waits():
    assert taken({"fast": FAST, "slow": SLOW}, balanced=True) == {"fast": "BF16 autocast", "slow": "plan"}


def test_slack_buys_precision():
    assert taken({"fast": FAST, "slow": SLOW}, slack=0.1) == {"fast": "FP32", "slow": "BF16 autocast"}


def test_memory_counts_and_what_ran_out_is_not_taken():
    tight = (way("FP32", 60, 0.0, None), way("BF16 autocast", 70, 1.0, 90), way("plan", 65, 2.0, 110))
    assert taken({"one": tight}, {"one": 120}) == {"one": "plan"}
    assert taken({"one": tight}, {"one": 100}) == {"one": "BF16 autocast"}
    assert choose({"one": tight}, {"one": 80}) is None
    assert everywhere({"one": tight}, {"one": 120}) == {"BF16 autocast": 70}


@st.composite
def clusters(draw):
    times = st.integers(1, 1000)
    names = ["FP32", "BF16 autocast", "INT8", "plan"]
    return {
        device: tuple(way(name, draw(times), draw(st.integers(0, 9)) * 1.0) for name in names)
        for device in ("one", "two", "three")[: draw(st.integers(1, 3))]
    }


@given(clusters(), st.booleans())
def test_never_slower_than_one_way_everywhere_nor_worse_than_one_as_fast(ways, balanced):
    limits = dict.fromkeys(ways, HUGE)
    chosen = choose(ways, limits, balanced=balanced)
    uniform = everywhere(ways, limits)
    assert step_ns(chosen) <= 1.02 * min(uniform.values())
    if not balanced:
        for name, time in uniform.items():
            if time <= min(uniform.values()) and time <= step_ns(chosen):
                there = sum(w.sensitivity for mine in ways.values() for w in mine if w.name == name)
                assert sum(w.sensitivity for w in chosen.values()) <= there


def test_a_way_is_plain_data():
    for found in (*FAST, way("FP32", 1, 0.0, None), way("BF16 autocast", 1, 0.0, autocast="BF16")):
        assert Way.from_json(json.loads(json.dumps(found.to_json())), "a way") == found
    whole = FAST[0].to_json()
    for change, error in (
        ({"autocast": "INT8"}, ProblemError),
        ({"precisions": {"a": "FP7"}}, UnsupportedError),
        ({"precisions": {"a": ["FP32"]}}, ProblemError),
        ({"autocast": ["BF16"]}, ProblemError),
        ({"pass_ns": -1}, ProblemError),
        ({"needed_bytes": 0.5}, ProblemError),
        ({"more": 1}, ProblemError),
    ):
        with pytest.raises(error):
            Way.from_json({**whole, **change}, "a way")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ways")
    options = PlanningOptions(
        cache_dir=folder, job_file=folder / "job.json", progress=False, memory="1 GiB", precisions=("BF16", "INT8")
    )
    model, x = Net(), torch.randn(1024, 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = auto_plan(model, x, loss=loss_of, options=options)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert applied_plan(model) is None
    return model, x, plan, options


def test_whole_passes_are_timed_and_decide(planned):
    _, _, plan, _ = planned
    ways = plan.model.ways[plan.device_type]
    assert [found.name for found in ways][:3] == ["FP32", "BF16 autocast", "INT8"]
    assert all(found.name == "plan" and not found.is_plain for found in ways[3:])
    assert all(found.pass_ns > 0 and found.needed_bytes > 0 for found in ways)
    assert ways[0].sensitivity == 0 < ways[1].sensitivity < ways[2].sensitivity
    picked = next(found for found in ways if found.name == plan.taken[plan.device_type])
    assert plan.worthwhile == (not picked.is_plain)
    steps = {step.taken[plan.device_type]: step for step in plan.model.steps}
    if steps:  # FP32 also where it is slower by less than the least gain
        fastest = min(steps.values(), key=lambda step: step.step_ns)
        mine = steps.get(picked.label)
        turns = () if mine is None else zip(mine.rounds_ns, fastest.rounds_ns, strict=False)
        ratios = [own / other for own, other in turns if own and other]
        slower = statistics.median(ratios) if ratios else plan.expected_ns / fastest.step_ns
        assert slower <= 1.02 / (0.98 if picked.is_plain else 1.0)
        assert mine is None or plan.expected_ns == mine.step_ns
    else:
        assert picked.is_plain  # so far ahead that nothing else was trained with
        assert picked.pass_ns == min(found.pass_ns for found in ways)
    assert "measured passes" in plan.reason
    assert plan.shares == {plan.device_type: 1.0}


def test_a_start_from_the_file_times_nothing_again(planned, monkeypatch):
    model, x, plan, options = planned
    monkeypatch.setattr(job_timing, "time_ways", None)
    again = auto_plan(model, x, loss=loss_of, options=options)
    assert (again.digest, dict(again.taken), again.expected_ns) == (plan.digest, dict(plan.taken), plan.expected_ns)
    made, _ = load_job(options.job_file)
    assert (made.ways, made.steps) == (plan.model.ways, plan.model.steps)


def had_it_measured(plan, times):
    """The same job with other times, in ms, and too little memory for the solver to plan FP32.

    What is not named takes a second.
    """
    made, name = plan.model, plan.device_type
    full = next(way for way in made.ways[name] if way.name == "FP32")
    whole = evaluate(plan.problem, Plan(problem=plan.problem.name, devices={name: full.precisions}))
    made = made.with_memory({name: whole.memory_bytes[name] - 1024})
    planned = plan_job(replace(made, ways={}), name, PlanningOptions()).plan.devices[name]
    ways = [way for way in made.ways[name] if way.name != "plan"]
    ways.append(Way(name="plan", precisions={n: planned[n] for n in full.precisions}))
    timed = [replace(way, pass_ns=times.get(way.name.split()[0], 1000) * 10**6, needed_bytes=1) for way in ways]
    return replace(made, ways={name: tuple(timed)}, steps=())


def test_a_file_with_ways_of_other_operators_is_refused(planned, tmp_path):
    data = json.loads(planned[3].job_file.read_text())
    name = next(iter(data["ways"]))
    for change in (
        {"other": data["ways"][name]},
        {name: []},
        {name: [{**data["ways"][name][0], "precisions": {"a/linear": "FP32"}}]},
    ):
        (tmp_path / "job.json").write_text(json.dumps({**data, "ways": change}))
        with pytest.raises(ProblemError, match="measure"):
            load_job(tmp_path / "job.json")


def test_the_fastest_of_what_was_timed_is_handed_out(planned):
    _, _, plan, options = planned
    name = plan.device_type
    whole = plan_job(had_it_measured(plan, {"BF16": 10, "FP32": 20}), name, options)
    assert whole.taken == {name: "BF16 autocast"}
    assert whole.autocast == {name: "BF16"}
    assert set(whole.devices[name].values()) == {"BF16"}
    assert whole.worthwhile
    assert "less time per sample than in FP32" in whole.reason
    assert "BF16 autocast" in whole.describe()
    alone = plan_job(had_it_measured(plan, {"BF16": 99, "FP32": 100}), name, options)
    assert not alone.worthwhile
    assert "left alone" in alone.reason
    best = plan_job(had_it_measured(plan, {"plan": 10}), name, options)
    assert best.taken == {name: "plan"}
    assert best.plan == best.solution.plan
    slower = with_speed(had_it_measured(plan, {"BF16": 10}), {name: 3.0})
    assert plan_job(slower, name, options).expected_ns > 3 * 10**7


def test_a_plan_that_was_not_timed_is_priced_by_the_one_that_was(planned):
    _, _, plan, options = planned
    name = plan.device_type
    made = had_it_measured(plan, {"plan": 10})
    timed = next(way for way in made.ways[name] if way.name == "plan")
    other = {**timed.precisions, "a/linear": "INT8" if timed.precisions["a/linear"] != "INT8" else "BF16"}
    made = replace(made, ways={name: (*made.ways[name][:-1], replace(timed, precisions=other))})
    found = plan_job(made, name, options)
    assert found.taken == {name: "plan"}
    then = evaluate(found.problem, Plan(problem=found.problem.name, devices={name: other})).devices[name]
    now = evaluate(found.problem, found.solution.plan).devices[name]
    rest = found.iteration_ns - now.backward_end_ns
    assert found.expected_ns - rest == pytest.approx(
        10**7 * now.backward_end_ns / then.backward_end_ns, rel=1e-6, abs=1
    )
    assert found.memory_bytes[name] == found.solution.evaluation.memory_bytes[name]


def test_autocast_is_what_torch_does():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_of(model(x)).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    apply(model, dict.fromkeys(NAMES, "BF16"), options=ApplyOptions(autocast="BF16", outputs="plan"))
    output = model(x)
    assert output.dtype is torch.bfloat16
    loss_of(output).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))
    assert applied_plan(model).half_formats == {"BF16"}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), output)
    undo(model)
    assert model(x).dtype is torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_within_checkpointed_modules_and_evaluation():
    class Recomputed(Net):
        def forward(self, x):
            x = torch.tanh(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False))
            return self.c(torch.tanh(self.b(x)))

    torch.manual_seed(0)
    model, x = Recomputed(), torch.randn(8, 64)
    apply(model, dict.fromkeys(NAMES, "BF16"), options=ApplyOptions(autocast="BF16", evaluate_in="FP32"))
    loss_of(model(x)).backward()
    assert model.a.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(NotReadyError, match="leave autocast"):
        model(x)
    assert model.eval()(x).dtype is torch.float32


def test_autocast_is_for_one_precision():
    with pytest.raises(UnsupportedError, match="mixes precisions"):
        apply(Net(), {**dict.fromkeys(NAMES, "BF16"), "b/linear": "FP32"}, options=ApplyOptions(autocast="BF16"))
    with pytest.raises(UnsupportedError, match="allowed are BF16, FP16"):
        ApplyOptions(autocast="INT8")
    with pytest.raises(ProblemError, match="local_batches"):
        PlanningOptions(local_batches="fastest")


def test_half_precision_under_autocast_wants_a_scaler():
    model = Net()
    applied = apply(model, dict.fromkeys(NAMES, "BF16"), options=ApplyOptions(autocast="BF16"))
    assert not LossScaler(applied).is_enabled()


def test_a_checkpoint_goes_on_in_the_same_way():
    model = Net()
    apply(model, dict.fromkeys(NAMES, "BF16"), options=ApplyOptions(autocast="BF16"))
    state = RankState.of(model, 0, None)
    assert state.to_json()["autocast"] == "BF16"
    undo(model)
    apply(model, dict.fromkeys(NAMES, "BF16"))
    present = RankState.of(model, 0, None)
    assert "autocast" not in present.to_json()
    resumed = decide(3, [state], [present], (), "checkpoint")
    assert not resumed.replanned
    carry_out(model, 0, [state], resumed)
    assert applied_plan(model).options.autocast == "BF16"


def test_an_adapter_moves_to_autocast_and_back(planned):
    model, _, plan, options = planned
    name = plan.device_type
    speeds = iter([1.0, 2.0, 4.0])
    first = plan_job(had_it_measured(plan, {"BF16": 10}), name, options)
    apply(model, first)
    try:
        adapter = PlanAdapter(model, first, options=options, every=1, speed=lambda: next(speeds))
        before = applied_plan(model)
        assert adapter.step() is None  # slower, and BF16 autocast all the same
        assert applied_plan(model) is before  # and what was captured or compiled stays
        assert applied_plan(model).options.autocast == "BF16"
        adapter.plan = replace(adapter.plan, model=had_it_measured(plan, {"plan": 10}))
        adapter.step()
        assert adapter.plan.taken == {name: "plan"}
        assert applied_plan(model).options.autocast is None
    finally:
        undo(model)


def test_a_way_without_memory_is_said_not_raised(monkeypatch):
    model, x = Net(), torch.randn(4, 64)
    real = TrainingExample.forward

    def short(self):
        if applied_plan(self.model) is not None:
            raise torch.cuda.OutOfMemoryError
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", short)
    example = TrainingExample(model=model, args=(x,), loss=loss_of)
    plain, half = job_timing.time_ways(
        model,
        example,
        [way("FP32", 0, 0.0), way("BF16 autocast", 0, 1.0, autocast="BF16")],
        None,
        ApplyOptions().kernels,
    )
    assert plain.pass_ns > 0
    assert plain.needed_bytes == 0
    assert half.needed_bytes is None
    assert applied_plan(model) is None


def test_an_error_in_a_way_leaves_the_model_alone():
    model = Net()
    example = TrainingExample(model=model, args=(torch.randn(4, 64),), loss=loss_of)
    with pytest.raises(QSyncError):
        job_timing.time_ways(model, example, [way("INT8", 0, 0.0, precision="FP8")], None, ApplyOptions().kernels)
    assert applied_plan(model) is None


@pytest.mark.gpu
def test_on_a_card_memory_is_measured_and_half_precision_scaled(tmp_path):
    device = torch.device("cuda")
    model, x = Net(width=256).to(device), torch.randn(512, 64, device=device)

    def loss(output):
        return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64, device=device))

    options = PlanningOptions(
        cache_dir=tmp_path, progress=False, profile_seconds=5, precisions=("INT8", "BF16", "FP16", "FP32")
    )
    plan = auto_plan(model, x, loss=loss, options=options)
    ways = {found.name: found for found in plan.model.ways[plan.device_type]}
    assert {"FP32", "BF16 autocast", "FP16 autocast", "INT8"} <= ways.keys()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(found.pass_ns > 0 and found.needed_bytes > parameters for found in ways.values())
    quick = tuple(replace(way, pass_ns=1 if way.name == "FP16 autocast" else 10**9) for way in ways.values())
    # Without the whole steps that were timed, which are another matter than these passes.
    told = replace(plan.model, ways={plan.device_type: quick}, steps=())
    found = plan_job(told, plan.device_type, options)
    assert found.taken == {plan.device_type: "FP16 autocast"}
    apply(model, found)
    scaler = LossScaler(model)
    assert scaler.is_enabled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        scaler.scale(loss(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    example = TrainingExample(model=undo(model), args=(x,), loss=loss)
    again = job_timing.time_ways(model, example, list(ways.values()), None, options.kernels, kept_bytes=1 << 20)
    assert all(found.needed_bytes > parameters + (1 << 20) for found in again)
