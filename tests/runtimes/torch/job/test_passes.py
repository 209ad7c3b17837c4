"""Passes of every execution mode are timed on the real model, and decide where whole steps were not timed."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.errors import NotReadyError, ProblemError, QSyncError, UnsupportedError
from qsync_opt.io import decode, encode
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.checkpoints import RankState, decide, resume_plan
from qsync_opt.runtimes.torch.execution import ApplyOptions, LossScaler, applied_plan, apply, undo
from qsync_opt.runtimes.torch.job import (
    FORMS,
    ExecutionMode,
    JobPlan,
    PlanAdapter,
    PlanningOptions,
    auto_plan,
    load_job,
    plan_job,
    time_modes,
    with_speed,
)
from qsync_opt.runtimes.torch.job import passes as job_passes
from qsync_opt.runtimes.torch.profiling import try_plan
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.training import Plan, evaluate

NAMES = ("a/linear", "b/linear", "c/linear")


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def loss_of(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


def mode(precision, **more):
    return ExecutionMode(name=precision, precisions=dict.fromkeys(NAMES, precision), **more)


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


def test_whole_passes_are_timed_and_one_of_the_modes_is_taken(planned):
    _, _, plan, _ = planned
    modes = plan.model.modes[plan.device_type]
    assert [mode.name for mode in modes][:3] == ["FP32", "BF16 autocast", "INT8"]
    assert all(mode.name == "plan" and not mode.is_plain for mode in modes[3:])
    assert all(mode.pass_ns > 0 and mode.needed_bytes > 0 for mode in modes)
    assert modes[0].sensitivity == 0 < modes[1].sensitivity < modes[2].sensitivity
    taken = next(mode for mode in modes if mode.name == plan.taken[plan.device_type])
    assert plan.worthwhile == (not taken.is_plain)
    timed = {step.taken[plan.device_type]: step.step_ns for step in plan.model.steps}
    assert plan.expected_ns == timed.get(taken.label, plan.expected_ns)
    assert "measured passes" in plan.reason
    assert plan.shares == {plan.device_type: 1.0}


def test_a_start_from_the_file_times_nothing_again(planned, monkeypatch):
    model, x, plan, options = planned
    monkeypatch.setattr(job_passes, "time_modes", None)
    again = auto_plan(model, x, loss=loss_of, options=options)
    assert (again.digest, dict(again.taken), again.expected_ns) == (plan.digest, dict(plan.taken), plan.expected_ns)
    made, _ = load_job(options.job_file)
    assert (made.modes, made.steps) == (plan.model.modes, plan.model.steps)


def had_it_measured(plan, times):
    """The same job with other times, in ms, and too little memory for the solver to plan FP32.

    What is not named takes a second.
    """
    made, name = plan.model, plan.device_type
    full = next(mode for mode in made.modes[name] if mode.name == "FP32")
    whole = evaluate(plan.problem, Plan(problem=plan.problem.name, devices={name: full.precisions}))
    made = made.with_memory({name: whole.memory_bytes[name] - 1024})
    planned = plan_job(replace(made, modes={}), name, PlanningOptions()).plan.devices[name]
    modes = [mode for mode in made.modes[name] if mode.name != "plan"]
    modes.append(ExecutionMode(name="plan", precisions={n: planned[n] for n in full.precisions}))
    timed = [replace(mode, pass_ns=times.get(mode.name.split()[0], 1000) * 10**6, needed_bytes=1) for mode in modes]
    return replace(made, modes={name: tuple(timed)}, steps=())


def test_build_and_layout_of_what_is_taken_are_applied(planned):
    model, _, plan, options = planned
    name, how = plan.device_type, {"compiled": True, "regional": True, "channels_last": True}
    made = had_it_measured(plan, {"BF16": 10, "FP32": 20})
    modes = [replace(mode, **how) if mode.name == "BF16 autocast" else mode for mode in made.modes[name]]
    fastest = plan_job(replace(made, modes={name: tuple(modes)}), name, options)
    assert dict(fastest.taken) == {name: "BF16 autocast, compiled, by blocks, channels last"}
    assert fastest.taken[name] in fastest.describe()
    assert fastest.digest != plan_job(made, name, options).digest
    sent = decode(JobPlan, encode(fastest), "the plan", device_type=name)
    try:
        applied = applied_plan(apply(model, sent)).options
    finally:
        undo(model)
    assert all(getattr(applied, option) for option in how)


def test_a_file_with_modes_of_other_operators_is_refused(planned, tmp_path):
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
    timed = next(mode for mode in made.modes[name] if mode.name == "plan")
    other = {**timed.precisions, "a/linear": "INT8" if timed.precisions["a/linear"] != "INT8" else "BF16"}
    made = replace(made, modes={name: (*made.modes[name][:-1], replace(timed, precisions=other))})
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


def test_a_checkpoint_goes_on_in_the_same_mode():
    model = Net()
    apply(model, dict.fromkeys(NAMES, "BF16"), options=ApplyOptions(autocast="BF16"))
    state = RankState.of(model, 0, None)
    assert encode(state)["autocast"] == "BF16"
    undo(model)
    apply(model, dict.fromkeys(NAMES, "BF16"))
    present = RankState.of(model, 0, None)
    assert "autocast" not in encode(present)
    resumed = decide(3, [state], [present], (), "checkpoint")
    assert not resumed.replanned
    resume_plan(model, 0, [state], resumed)
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


def test_a_mode_without_memory_is_left_out_not_raised(monkeypatch):
    model, x = Net(), torch.randn(4, 64)
    real = TrainingExample.forward

    def short(self):
        if applied_plan(self.model) is not None:
            raise torch.cuda.OutOfMemoryError
        return real(self)

    monkeypatch.setattr(TrainingExample, "forward", short)
    example = TrainingExample(model=model, args=(x,), loss=loss_of)
    modes = [mode("FP32"), mode("BF16", autocast="BF16")]
    plain, half = time_modes(example, modes, None, ApplyOptions().kernels)
    assert plain.pass_ns > 0
    assert plain.needed_bytes == 0
    assert half.needed_bytes is None
    assert applied_plan(model) is None


def test_an_error_in_a_mode_leaves_the_model_alone():
    model = Net()
    example = TrainingExample(model=model, args=(torch.randn(4, 64),), loss=loss_of)
    with pytest.raises(QSyncError):
        time_modes(example, [mode("FP8")], None, ApplyOptions().kernels)
    assert applied_plan(model) is None


def test_every_mode_is_timed_in_every_form():
    modes = job_passes.in_forms([mode("FP32"), mode("BF16")], FORMS)
    assert [each.label for each in modes[::2]] == [
        "FP32",
        "FP32, captured",
        "FP32, compiled",
        "FP32, compiled, captured",
    ]
    assert [each.form for each in modes[1::2]] == [*FORMS]
    assert all(job_passes.has_form({"a": modes}, form) for form in FORMS)
    assert not job_passes.has_form({"a": modes[:2]}, "captured")


def test_on_a_cpu_nothing_is_captured():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(UnsupportedError, match="CUDA graphs need a model on a card"):
        apply(model, {"0/linear": "BF16"}, options=ApplyOptions(captured=True))
    assert applied_plan(model) is None
    example = TrainingExample(model=model, args=(torch.randn(4, 8),), loss=torch.Tensor.sum)
    modes = [ExecutionMode(name="BF16", precisions={"0/linear": "BF16"}, captured=kind) for kind in (False, True)]
    eager, captured = time_modes(example, modes, None, ApplyOptions().kernels)
    assert eager.pass_ns > 0
    assert captured.needed_bytes is None


def test_layers_that_wait_for_other_workers_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    with pytest.raises(UnsupportedError, match="'1' is a SyncBatchNorm"):
        apply(model, {"0/linear": "BF16"}, options=ApplyOptions(captured=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_captured_training_on_two_cards(tmp_path, run_workers):
    seen = run_workers("captured_worker.py", tmp_path, "nccl", flags=("-W", "ignore"))
    for case, first in seen[0].items():
        for how, mine in first.items() if case != "planned" else ():
            other = seen[1][case][how]
            assert mine["weights"] == other["weights"], (case, how)
            for rank, found in enumerate((mine, other)):
                eager = seen[rank][case]["eager"]
                assert found["replayed"] is (how != "eager" and (case != "one_rank_alone" or rank == 1)), (case, how)
                torch.testing.assert_close(
                    torch.tensor(found["losses"]), torch.tensor(eager["losses"]), rtol=0.02, atol=0.02
                )
    for results in seen:
        scales = results["scaled"]["first pass"]["scales"]
        assert scales == results["scaled"]["eager"]["scales"]
        assert scales[0] < 2.0**30
        assert scales[-1] == scales[-2]
    planned = [results["planned"] for results in seen]
    assert planned[0]["digest"] == planned[1]["digest"]
    assert planned[0]["weights"] == planned[1]["weights"]
    assert any(label.endswith(", captured") for label in planned[0]["timed"])
    assert all(found["replayed"] is found["captured"] for found in planned)


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
    modes = {mode.name: mode for mode in plan.model.modes[plan.device_type] if mode.form == "launched"}
    assert {"FP32", "BF16 autocast", "FP16 autocast", "INT8"} <= modes.keys()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(found.pass_ns > 0 and found.needed_bytes > parameters for found in modes.values())
    quick = tuple(replace(mode, pass_ns=1 if mode.name == "FP16 autocast" else 10**9) for mode in modes.values())
    # Without the whole steps that were timed, which are another matter than these passes.
    job = replace(plan.model, modes={plan.device_type: quick}, steps=())
    found = plan_job(job, plan.device_type, options)
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
    again = time_modes(example, list(modes.values()), None, options.kernels, kept_bytes=1 << 20)
    assert all(found.needed_bytes > parameters + (1 << 20) for found in again)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        wide = self.up(self.norm(x))  # of what follows, compiled code keeps little for the backward pass
        return x + self.down(nn.functional.gelu(wide) * torch.sigmoid(wide))


@pytest.mark.gpu
def test_where_only_compiled_passes_keep_the_memory_limit_the_plan_is_compiled(tmp_path):
    model, x = nn.Sequential(*(Block() for _ in range(6))).cuda(), torch.randn(16384, 256, device="cuda")

    def loss(output):
        return output.float().square().mean()

    captured = capture_model(model, (x,))
    example = TrainingExample(model=model, args=(x,), loss=loss)
    names = [operator.name for operator in captured.graph.operators if operator.role is Role.ADJUSTABLE]
    launched = try_plan(example, dict.fromkeys(names, "BF16"), captured.graph, KernelOptions())
    how = {"autocast": "BF16", "compiled": True, "regional": True}
    compiled = try_plan(example, dict.fromkeys(names, "BF16"), captured.graph, KernelOptions(), **how)
    assert compiled < launched
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    limit = 2 * parameters + (compiled + launched) // 2  # with the state of AdamW
    options = PlanningOptions(
        cache_dir=tmp_path,
        progress=False,
        profile_seconds=5,
        memory=limit,
        capture=False,
        compare="passes",
        precisions=("BF16", "FP32"),
    )
    plan = auto_plan(model, x, loss=loss, options=options)
    assert plan.compiled == (plan.device_type,)
    assert plan.worthwhile
    apply(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - 3 * parameters
    torch.cuda.reset_peak_memory_stats()
    loss(model(x)).backward()
    assert torch.cuda.max_memory_allocated() - before <= limit
    with pytest.raises(ProblemError, match="there is no plan for this job"):
        auto_plan(undo(model), x, loss=loss, options=replace(options, compile=False))


def test_loss_scaling_is_timed_where_a_mode_needs_it(monkeypatch):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    example = TrainingExample(model=model, args=(x,))
    scaled = []
    real = job_passes.unscale_gradients
    monkeypatch.setattr(job_passes, "unscale_gradients", lambda network: scaled.append(real(network)))
    monkeypatch.setattr(ExecutionMode, "needs_scaling", property(lambda mode: mode.name == "scaled"))
    modes = [ExecutionMode(name=name, precisions={"0/linear": "FP32"}) for name in ("plain", "scaled")]
    time_modes(example, modes[:1], None, ApplyOptions().kernels)
    assert scaled == []
    time_modes(example, modes, None, ApplyOptions().kernels)
    assert scaled
    assert not any(scaled)


def test_an_overflow_is_seen():
    model = nn.Linear(2, 2)
    assert not job_passes.unscale_gradients(model)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad.clone()
    assert not job_passes.unscale_gradients(model)
    assert torch.equal(model.weight.grad, before)
    model.bias.grad[0] = float("inf")
    assert job_passes.unscale_gradients(model)
