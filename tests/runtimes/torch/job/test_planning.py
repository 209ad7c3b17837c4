import logging
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.costs import estimate_lines
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, SolverError, UnsupportedError
from qsync_opt.io import default_cache_folder
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.execution import applied_plan, apply, undo
from qsync_opt.runtimes.torch.job import (
    Alternative,
    PlanningOptions,
    auto_plan,
    cache_folder,
    plan_job,
    planning,
    verdict,
)
from qsync_opt.runtimes.torch.job import measuring as job_measuring
from qsync_opt.runtimes.torch.job import planning as job_planning
from qsync_opt.runtimes.torch.job import steps as job_steps
from qsync_opt.runtimes.torch.profiling import try_plan
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.steps import record_plan
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.training import evaluate, memory_breakdown, uniform_plan


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def cross_entropy(output):
    return nn.functional.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.int64))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("measurements")


@pytest.fixture
def options(cache):
    def make(**changes):
        settings = {"cache_dir": cache, "progress": False, "memory": "1 GiB", "precisions": ("BF16", "INT8")}
        settings["compare"] = False
        return PlanningOptions(**{**settings, **changes})

    return make


def test_a_single_worker_plans_for_itself_and_changes_nothing(options):
    model, x = Net(), torch.randn(32, 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = auto_plan(model, x, loss=cross_entropy, options=options(least_gain=0.0))
    assert set(plan.plan.devices) == {plan.device_type}
    assert set(plan.devices[plan.device_type]) >= {"a/linear", "b/linear", "c/linear"}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert applied_plan(model) is None
    assert all(parameter.grad is None for parameter in model.parameters())
    found = evaluate(plan.problem, plan.plan)
    assert (found.iteration_ns, found.objective) == (plan.iteration_ns, plan.sensitivity)
    assert {other.name for other in plan.alternatives} == {"FP32", "BF16", "INT8"}
    assert plan.iteration_ns <= min(other.iteration_ns for other in plan.alternatives if other.fits)
    assert "sensitivity" in plan.describe()


def test_recorded_steps_change_nothing_and_are_recorded_once(options, tmp_path, monkeypatch):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    wanted = options(costs="steps", cache_dir=tmp_path, precisions=("BF16",), trial=False)
    plan = auto_plan(model, torch.randn(32, 64), loss=cross_entropy, optimizer=optimizer, options=wanted)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state()[:8], random_state[:8])
    (text,) = plan.measured.values()
    assert text.startswith("training steps recorded under 4 plans")
    assert text in plan.describe()
    profile = next(iter(plan.model.profiles.values()))
    assert profile.optimizer.state_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert plan.iteration_ns == evaluate(plan.problem, plan.plan).iteration_ns
    monkeypatch.setattr(job_steps, "record_steps", None)  # whoever records again, fails
    again = auto_plan(model, torch.randn(32, 64), loss=cross_entropy, optimizer=optimizer, options=wanted)
    assert again.measured == plan.measured


def test_where_steps_cannot_be_recorded_operators_are_measured_and_the_plan_says_so(
    options, monkeypatch, caplog, tmp_path
):
    def fail(*_, **__):
        raise RuntimeError("a made-up fault")

    monkeypatch.setattr(job_steps, "record_steps", fail)
    model = Net()
    before = [parameter.clone() for parameter in model.parameters()]
    wanted = options(costs="steps", cache_dir=tmp_path, precisions=("FP32",), trial=False)
    plan = auto_plan(model, torch.randn(4, 64), loss=cross_entropy, options=wanted)
    reason = "because no training steps could be recorded: a made-up fault"
    assert reason in plan.describe()
    assert "a made-up fault" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_was_scaled_is_marked_in_profile_problem_and_plan(options, tmp_path, monkeypatch):
    def short_of_memory(stepper, graph, label, plan, *rest):
        if plan["b/linear"] == "FP32":
            raise torch.cuda.OutOfMemoryError("made up")
        return record_plan(stepper, graph, label, plan, *rest)

    monkeypatch.setattr("qsync_opt.runtimes.torch.steps.profile.record_plan", short_of_memory)
    wanted = options(costs="steps", cache_dir=tmp_path, precisions=("BF16",), trial=False)
    plan = auto_plan(Net(), torch.randn(32, 64), loss=cross_entropy, options=wanted)
    marked = "FP32 of b/linear was scaled from BF16, because it did not fit into memory"
    assert marked in plan.describe()
    assert estimate_lines(plan.problem.extras)[0].endswith(marked)
    assert estimate_lines(plan.plan.extras) == estimate_lines(plan.problem.extras)


def test_a_batch_may_be_a_mapping_or_positional_arguments(options):
    model, x = Net(), torch.randn(4, 64)
    wanted = options(precisions=("FP32",), trial=False)
    plans = [auto_plan(model, batch, loss=cross_entropy, options=wanted) for batch in ({"x": x}, (x,), [x], x)]
    assert len({plan.digest for plan in plans}) == 1


def test_fp32_is_left_alone_where_nothing_is_faster(options):
    model = Net()
    plan = auto_plan(model, torch.randn(4, 64), loss=cross_entropy, options=options(precisions=("FP32",)))
    assert not plan.worthwhile
    assert "left alone" in plan.reason
    assert apply(model, plan) is model
    assert applied_plan(model) is None


def test_apply_takes_the_plan_as_it_is(options):
    model, x = Net(), torch.randn(32, 64)
    plan = auto_plan(model, x, loss=cross_entropy, options=options(least_gain=0.0))
    object.__setattr__(plan, "worthwhile", True)
    apply(model, plan)
    cross_entropy(model(x)).backward()
    assert applied_plan(model).precisions == {
        name: precision
        for name, precision in plan.devices[plan.device_type].items()
        if name in "a/linear b/linear c/linear"
    }
    assert applied_plan(model).audit._predicted_bytes == plan.memory_bytes[plan.device_type]
    sized = replace(plan, shares={plan.device_type: 0.9, "another": 0.1})
    assert applied_plan(apply(Net(), sized)).audit._predicted_bytes is None  # of another batch
    with pytest.raises(NotReadyError, match="applied to this model already"):
        auto_plan(model, x, loss=cross_entropy, options=options())
    undo(model)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("tampered", ["plan", "captured", "autocast"])
def test_a_plan_that_arrives_as_another_is_refused(options, monkeypatch, tampered):
    plan = auto_plan(Net(), torch.randn(32, 64), loss=cross_entropy, options=options(least_gain=0.0))
    name = plan.device_type
    real = planning.broadcast_json

    def on_the_way(value, source=0):
        told = real(value, source)
        if tampered == "plan":
            entry = told["plan"]["devices"][name]
            entry["b/linear"] = "BF16" if entry["b/linear"] == "FP32" else "FP32"
            told["plan"].pop("x-digest", None)  # one that was meant to be like that
        else:
            told[tampered] = {name: "BF16"} if tampered == "autocast" else [name]
        return told

    assert planning.shared_plan(plan.model, name, options(least_gain=0.0)).digest == plan.digest
    monkeypatch.setattr(planning, "broadcast_json", on_the_way)
    with pytest.raises(SolverError, match="the plan that arrived is not the one that was sent"):
        planning.shared_plan(plan.model, name, options(least_gain=0.0))


def test_too_little_memory_is_an_error_that_says_so(options):
    with pytest.raises(ProblemError, match="no plan for this job"):
        auto_plan(Net(), torch.randn(4, 64), loss=cross_entropy, options=options(memory=1 << 20))


def test_where_only_the_bound_is_above_the_limit_a_measured_peak_replaces_it(options):
    """The sum over operators is an upper bound of the peak: a plan that it forbids may fit."""
    model, x = Net(), torch.randn(256, 64)
    roomy = auto_plan(model, x, loss=cross_entropy, options=options(least_gain=0.0))
    uniform = [evaluate(roomy.problem, uniform_plan(roomy.problem, each)) for each in roomy.problem.formats]
    least = min(each.memory_bytes[roomy.device_type] for each in uniform)
    measured = {
        precision: try_plan(
            TrainingExample(model=model, args=(x,), loss=cross_entropy),
            dict.fromkeys(roomy.devices[roomy.device_type], precision),
            roomy.model.graph,
            KernelOptions(),
        )
        for precision in ("BF16", "INT8")
    }
    state = roomy.model.profiles[roomy.device_type].optimizer.state_bytes
    limit = (min(measured.values()) + state + least) // 2
    assert min(measured.values()) + state < limit < least
    plan = auto_plan(model, x, loss=cross_entropy, options=options(least_gain=0.0, memory=limit))
    assert plan.model.memory_excess_bytes[plan.device_type] > 0
    assert plan.memory_bytes[plan.device_type] <= limit
    assert (
        memory_breakdown(plan.problem, evaluate(plan.problem, plan.plan).devices[plan.device_type]).total_bytes <= limit
    )
    assert plan.peak_bytes == plan.memory_bytes  # no passes were timed


def test_tighter_limits_leave_a_plan_that_fits_by_measurement(options, monkeypatch, caplog):
    """The first trial of a plan fails, and the limit that is tightened for it would fall below what is needed."""
    peak_bytes, trials = 1_000_000, []

    def peak(job, plan, measured):
        if isinstance(plan, dict):  # the most frugal plan
            return peak_bytes
        trials.append(plan)
        return peak_bytes if len(trials) > 1 else 1 << 40

    monkeypatch.setattr(job_planning, "_peak_bytes", peak)
    model, x = Net(), torch.randn(256, 64)
    needed = peak_bytes + 2 * sum(p.numel() * p.element_size() for p in model.parameters())  # AdamW keeps two
    with caplog.at_level(logging.WARNING):
        plan = auto_plan(model, x, loss=cross_entropy, options=options(least_gain=0.0, memory=int(1.07 * needed)))
    assert len(trials) == 2
    assert "the plan needs more memory than predicted" in caplog.text
    assert plan.memory_bytes[plan.device_type] <= 1.01 * needed


def test_statistics_of_a_batch_that_does_not_fit_are_those_of_a_part(options, monkeypatch):
    seen = []

    def with_little_memory(model, batches, **rest):
        samples = len(batches[0][0])
        seen.append(samples)
        if samples > 16:
            raise torch.cuda.OutOfMemoryError("too large")
        return collect_statistics(model, batches, **rest)

    monkeypatch.setattr(job_measuring, "collect_statistics", with_little_memory)
    plan = auto_plan(Net(), torch.randn(64, 64), loss=cross_entropy, options=options(least_gain=0.0))
    assert seen == [64, 64, 32, 32, 16]
    assert plan.sensitivity >= 0
    monkeypatch.setattr(job_measuring, "_PARTS", (1, 2))
    with pytest.raises(ModelError, match="not enough memory for the statistics"):
        auto_plan(Net(), torch.randn(64, 64), loss=cross_entropy, options=options(least_gain=0.0))


def test_measured_once_planned_again_at_once(options):
    model, x = Net(), torch.randn(1024, 64)  # activations outweigh what casts of weights cost
    patient = options(trial=False, slack=9.0)
    first = auto_plan(model, x, loss=cross_entropy, options=patient)
    assert set(first.devices[first.device_type].values()) == {"FP32"}
    limits = {first.device_type: first.memory_bytes[first.device_type] - 1024}
    tighter = plan_job(first.model.with_memory(limits), first.device_type, patient)
    assert tighter.memory_bytes[first.device_type] <= limits[first.device_type]
    assert tighter.plan.devices != first.plan.devices
    with pytest.raises(ProblemError, match="nowhere"):
        first.model.with_memory({"nowhere": 1})


def test_a_trial_that_runs_out_of_memory_tightens_the_plan(options, monkeypatch, caplog):
    tried = []

    def short_of_memory(example, plan, graph, kernels):
        tried.append(plan)
        return None if len(tried) < 3 else 0

    monkeypatch.setattr(planning, "try_plan", short_of_memory)
    with caplog.at_level(logging.WARNING):
        plan = auto_plan(
            Net(), torch.randn(32, 64), loss=cross_entropy, options=options(least_gain=0.0, memory="64 MiB")
        )
    assert len(tried) == 3
    device = plan.model.cluster.device(plan.device_type)
    assert device.memory_limit_bytes == pytest.approx(0.81 * (64 << 20), rel=1e-3)
    assert "needs more memory than predicted" in caplog.text


def test_a_plan_that_the_model_refuses_is_left_out_where_others_are_compared(options, monkeypatch, caplog):
    def refused(*_):
        raise UnsupportedError("the model does not run under its plan (one operand is half)")

    monkeypatch.setattr(planning, "try_plan", refused)
    with pytest.raises(UnsupportedError, match="one operand is half"):
        auto_plan(Net(), torch.randn(32, 64), loss=cross_entropy, options=options(least_gain=0.0))
    with caplog.at_level(logging.WARNING):
        plan = auto_plan(
            Net(), torch.randn(32, 64), loss=cross_entropy, options=options(least_gain=0.0, compare="passes")
        )
    assert "one operand is half" in caplog.text
    assert plan.model.modes


def test_a_trial_that_never_fits_ends(options, monkeypatch):
    monkeypatch.setattr(planning, "try_plan", lambda *_: 1 << 60)
    with pytest.raises(ProblemError, match="smaller batch"):
        auto_plan(Net(), torch.randn(32, 64), loss=cross_entropy, options=options(least_gain=0.0))


def test_a_model_without_second_derivatives_is_planned_all_the_same(options, caplog):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    def loss(output):
        return cross_entropy(Once.apply(output))

    with caplog.at_level(logging.WARNING):
        auto_plan(Net(), torch.randn(4, 64), loss=loss, options=options(trial=False))
    assert "what is propagated by formula" in caplog.text


def test_what_probes_computed_is_gone_when_the_formula_takes_over(options, monkeypatch):
    real, kept, alive = job_measuring.collect_statistics, [], []

    def without_room(*args, adaptive_probes=0, **settings):
        if adaptive_probes:
            computed = torch.zeros(1000)
            kept.append(weakref.ref(computed))
            raise torch.cuda.OutOfMemoryError(f"no room beside {computed.numel()} elements")
        alive.append(kept[0]() is not None)
        return real(*args, **settings)

    monkeypatch.setattr(job_measuring, "collect_statistics", without_room)
    auto_plan(Net(), torch.randn(4, 64), loss=cross_entropy, options=options(trial=False))
    assert alive == [False]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"memory": "12"}, ProblemError, "memory"),
        ({"memory": "1000 TiB"}, UnsupportedError, "at most"),
        ({"precisions": ("FP7",)}, UnsupportedError, "FP7"),
    ],
)
def test_unusable_options(options, changes, error, said):
    with pytest.raises(error, match=said):
        auto_plan(Net(), torch.randn(4, 64), loss=cross_entropy, options=options(**changes))


def test_least_gain_is_a_share():
    with pytest.raises(ProblemError, match="least_gain"):
        PlanningOptions(least_gain=1.0)


@pytest.mark.parametrize(
    ("plan_ns", "full", "worthwhile"),
    [(50, (100, True), True), (99, (100, True), False), (100, (100, True), False), (120, (100, False), True)],
)
def test_verdict(plan_ns, full, worthwhile):
    others = (Alternative(name="FP32", iteration_ns=full[0], sensitivity=0.0, fits=full[1]),)
    assert verdict(plan_ns, 1.0, others, 0.02)[0] is worthwhile
    assert verdict(plan_ns, 1.0, (), 0.02)[0]


def test_two_types_profile_themselves_and_train_under_one_plan(tmp_path, run_workers):
    first, second = run_workers("planning_worker.py", "train", tmp_path)
    assert first["digest"] == second["digest"]
    assert first["types"] == second["types"] == ["big", "small"]
    assert (first["mine"], second["mine"]) == ("big", "small")
    assert first["has_model"]
    assert not second["has_model"]
    assert first["weights"] == second["weights"]
    assert second["kept"][0] == second["kept"][1] > 0  # everything was measured before


def test_two_types_record_their_own_steps_with_ddp_around(tmp_path, run_workers):
    first, second = run_workers("planning_worker.py", "steps", tmp_path)
    assert first["digest"] == second["digest"]
    assert first["weights"] == pytest.approx(second["weights"], abs=1e-9)
    assert first["measured"] == second["measured"]
    assert set(first["measured"]) == {"big", "small"}
    assert all(text.startswith("training steps recorded") for text in first["measured"].values())


@pytest.mark.slow
def test_workers_train_for_a_few_steps_with_the_best_candidates_before_one_is_taken(tmp_path, run_workers):
    first, second = run_workers("planning_worker.py", "steps timed", tmp_path)
    assert first["digest"] == second["digest"]
    assert first["weights"] == second["weights"]
    taken = [tuple(step["taken"].values()) for step in first["steps"]]
    assert ("FP32", "FP32") in taken
    assert any("BF16" in "".join(labels) for labels in taken)
    assert all(step["step_ns"] > 0 for step in first["steps"])
    turns = [sum(time > 0 for time in step["rounds_ns"]) for step in first["steps"]]
    assert sum(count >= 4 for count in turns) >= 2  # so many rounds at least


@pytest.mark.slow
def test_local_batches_are_sized_by_whole_steps_that_were_tried(tmp_path, run_workers):
    first, second = run_workers("planning_worker.py", "sized", tmp_path)
    assert first["digest"] == second["digest"]
    assert first["shares"] == second["shares"]
    equal, tried, again, odd = first["shares"]
    assert equal[0] == {"big": 0.5, "small": 0.5}
    assert tried[1] == ["passes", "plan", "steps"]  # all else was known; passes of own plans were not
    assert again[1] == ["plan"]
    assert tried[0] == again[0]
    assert sum(tried[0].values()) == pytest.approx(1.0)
    assert 0 < first["kept"][0] < first["kept"][1] == first["kept"][2]
    sized = [step for step in first["steps"] if "batches" in step]
    assert sized
    assert all(sum(step["batches"].values()) in (31, 32, 33) for step in sized)
    assert odd[1] == []  # a batch that cannot be sized: passes decide
    assert sum(odd[0].values()) == pytest.approx(1.0)


def test_ranks_with_different_models_are_told_which_operators_differ(tmp_path, run_workers):
    for result in run_workers("planning_worker.py", "models", tmp_path):
        assert result["error"] == "ModelError"
        assert "hold different models" in result["said"]
        assert "rank 0" in result["said"]
        assert "rank 1" in result["said"]


def test_ranks_with_different_versions_are_told_which(tmp_path, run_workers):
    for result in run_workers("planning_worker.py", "versions", tmp_path):
        assert result["error"] == "ModelError"
        assert "the version of qsync_opt or torch differs between ranks: ranks 1 are not as rank 0" in result["said"]
        assert "'9.9.9'" in result["said"]
        assert "install the same versions everywhere" in result["said"]


def test_a_failure_on_one_rank_stops_all(tmp_path, run_workers):
    first, second = run_workers("planning_worker.py", "failure", tmp_path)
    assert second["error"] == "ProblemError"
    assert first["error"] == "NotReadyError"
    assert first["said"].startswith("rank 1 failed: ProblemError: memory is '3 parsecs'")


def test_measurements_lie_beside_the_other_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("QSYNC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == default_cache_folder() / "measurements"
    assert cache_folder().is_relative_to(tmp_path)
    monkeypatch.setenv("QSYNC_CACHE", str(tmp_path / "told"))
    assert cache_folder() == tmp_path / "told"
    assert cache_folder(tmp_path / "given") == tmp_path / "given"
