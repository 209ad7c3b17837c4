"""Recorded steps of a small model on the CPU: memory is deterministic there and compared tightly, times are not."""

import json
import math
import random
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch

from qsync_opt.cli import main
from qsync_opt.errors import NotReadyError, ProblemError, UnsupportedError
from qsync_opt.model import Role, save_graph
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.runtimes.torch.execution import applied_plan, apply, undo
from qsync_opt.runtimes.torch.steps import (
    RecordingOptions,
    Stepper,
    profile_steps,
    read_events,
    record_plan,
    record_steps,
    step_labels,
)
from qsync_opt.runtimes.torch.steps import profile as step_profile
from qsync_opt.runtimes.torch.support import TrainingExample, measure_iteration
from qsync_opt.steps import FORWARD, PHASES, StepCosts, StepPredictor, charge_step, scaled_operators
from qsync_opt.training import Plan

FEW = RecordingOptions(warm_up=1, repeats=1, traced=1)


class Setting:
    def __init__(self):
        torch.manual_seed(0)
        config = GptConfig(vocabulary=64, context=16, width=32, heads=2, layers=2)
        tokens = torch.randint(0, 64, (2, 16))
        model = Gpt(config).train()
        self.graph = capture(model, (tokens, tokens))
        self.example = TrainingExample(model=model, args=(tokens, tokens))
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.stepper = Stepper(self.example, self.optimizer)
        self.costs = profile_steps(
            self.example, self.graph, self.optimizer, precisions=["BF16"], mixed=1, options=FEW, progress=False
        )
        self.names = [operator.name for operator in self.graph.by_role(Role.ADJUSTABLE)]


@pytest.fixture(scope="module")
def setting():
    return Setting()


def test_the_model_is_left_without_a_plan_and_every_plan_has_its_residual(setting):
    assert applied_plan(setting.example.model) is None
    assert [check.plan for check in setting.costs.checks] == ["uniform BF16", "uniform FP32", "mixed 0"]
    assert all(check.predicted_ns > 0 and check.measured_ns > 0 for check in setting.costs.checks)


def test_fp32_is_recorded_as_in_a_plan_and_alone_as_it_stands_aside(setting):
    example, graph, optimizer = setting.example, setting.graph, setting.optimizer
    sample = record_plan(setting.stepper, graph, "fine", dict.fromkeys(setting.names, "FP32"), FEW)
    assert sample.resting_ns > 0
    mixed = dict.fromkeys(setting.names, "FP32") | {setting.names[0]: "BF16"}
    assert record_plan(setting.stepper, graph, "mixed", mixed, FEW).resting_ns == 0
    costs = profile_steps(example, graph, optimizer, precisions=["BF16"], mixed=0, options=FEW, progress=False)
    costs = replace(costs, resting_share=0.5)
    predictor, whole = StepPredictor(graph, costs), StepPredictor(graph, replace(costs, resting_share=1.0))
    fine = dict.fromkeys(setting.names, "FP32")
    alone, carried_out = (p.steady_ns(p.plan(fine)) for p in (predictor, whole))
    assert alone == round(0.5 * carried_out)
    assert predictor.steady_ns(predictor.plan(mixed)) == whole.steady_ns(whole.plan(mixed))
    # After a change of one operator, too.
    step = predictor.plan(mixed)
    predictor.change(step, setting.names[0], "FP32")
    assert predictor.steady_ns(step) == alone
    assert StepCosts.from_json(json.loads(json.dumps(costs.to_json())), "again").resting_share == 0.5


def test_where_the_host_waits_for_its_device_fp32_is_not_recorded_alone(setting, monkeypatch):
    monkeypatch.setattr(step_profile, "_FAR_ABOVE", 0.0)
    plan = dict.fromkeys(setting.names, "FP32")
    sample = record_plan(setting.stepper, setting.graph, "fine", plan, FEW)
    assert sample.resting_ns == 0
    assert sample.iteration_ns > 0


def test_the_host_is_timed_in_as_many_rounds_as_asked_for(setting, monkeypatch):
    times = iter((dict.fromkeys(PHASES, 1e12 * k), 5e12 * k) for k in range(1, 100))
    monkeypatch.setattr(step_profile, "_time_host", lambda *rest: next(times))
    monkeypatch.setattr(step_profile, "_FAR_ABOVE", math.inf)  # whatever the steps take on this machine
    thrice = replace(FEW, rounds=3)
    arguments = (setting.example, setting.graph, setting.optimizer)
    records = record_steps(*arguments, precisions=["BF16"], mixed=0, options=thrice, progress=False)
    for sample, told in zip(records.samples, ((1, 3), (2, 4)), strict=True):
        first, *later = sample.host_rounds_ns
        assert later == [len(PHASES) * 1e12 * time for time in told]
        assert first < sum(sample.host_ns.values()) == later[0]  # the median
        assert sample.resting_ns or sample.iteration_ns == 5e12 * told[0]


@pytest.mark.parametrize(
    ("whole_ns", "host_ns", "expected_ns"),
    [(0.3e9, 0.01e9, 0.3e9), (0.3e9, 0.2e9, 0.25e9), (0.1e9, 0.01e9, 0.25e9)],
    ids=["long and far behind the host", "the host is slow", "short"],
)
def test_only_long_steps_are_not_timed_among_others(setting, monkeypatch, whole_ns, host_ns, expected_ns):
    monkeypatch.setattr(setting.stepper, "host_ns", lambda steps: ({"forward": host_ns}, [whole_ns]))
    monkeypatch.setattr(setting.stepper, "paced_ns", lambda steps: [0.25e9])
    assert setting.stepper.measure(1)["iteration_ns"] == expected_ns


def short_of_memory(most, *, never=()):
    """Recording that runs out of memory where a plan has more than some operators in FP32, or a certain one."""
    record = step_profile.record_plan

    def try_to_record(stepper, graph, label, plan, *rest):
        fine = [name for name, precision in plan.items() if precision == "FP32"]
        if len(fine) > most or set(fine) & set(never):
            raise torch.cuda.OutOfMemoryError("made up")
        return record(stepper, graph, label, plan, *rest)

    return try_to_record


def test_a_plan_that_does_not_fit_is_recorded_in_parts(setting, monkeypatch):
    arguments = (setting.example, setting.graph, setting.optimizer)
    monkeypatch.setattr(step_profile, "record_plan", short_of_memory(6))
    with pytest.warns(UserWarning, match="not enough memory on cpu to record uniform FP32; 3 parts"):
        costs = profile_steps(*arguments, precisions=["BF16"], mixed=0, options=FEW, progress=False)
    first, *parts = [check.plan for check in costs.checks]
    assert first == "uniform BF16"
    assert len(parts) == 3
    assert all(part.startswith("uniform FP32, part ") for part in parts)
    assert not scaled_operators(setting.graph, costs)
    # Every operator was met in FP32, so that the plan which did not fit is priced from what was seen.
    step = StepPredictor(setting.graph, costs).plan(dict.fromkeys(setting.names, "FP32"))
    assert all(cost.samples for cost, o in zip(step.costs, setting.graph, strict=True) if o.name in setting.names)


def test_when_the_time_is_over_parts_are_recorded_until_one_in_fp32_fits(setting, monkeypatch):
    arguments = (setting.example, setting.graph, setting.optimizer)
    monkeypatch.setattr(step_profile, "record_plan", short_of_memory(6))
    with pytest.warns(UserWarning, match=r"FP32; 1 parts of them were recorded instead; \d+ costs are scaled"):
        costs = profile_steps(*arguments, precisions=["BF16"], mixed=0, options=FEW, progress=False, budget_s=0.0)
    assert [check.plan for check in costs.checks] == ["uniform BF16", ANY]
    # A plan of FP32 alone, which did not fit, has a cost all the same.
    assert StepPredictor(setting.graph, costs).plan(dict.fromkeys(setting.names, "FP32")).costs


def test_what_is_far_smaller_than_the_largest_operator_comes_first(setting, monkeypatch):
    arguments = (setting.example, setting.graph, setting.optimizer)
    graph = setting.graph
    size = {name: sum(graph[t].output_elements for t in (name, *graph[name].inputs)) for name in setting.names}
    small = {name for name in size if 2 * size[name] < max(size.values())}
    assert 0 < len(small) < len(size) / 2
    monkeypatch.setattr(step_profile, "_FAR_SMALLER", 2)
    monkeypatch.setattr(step_profile, "record_plan", short_of_memory(len(size), never=set(size) - small))
    with pytest.warns(UserWarning, match="not enough memory"):
        records = record_steps(*arguments, precisions=["BF16"], mixed=0, options=FEW, progress=False, budget_s=0.0)
    _, part = records.samples
    assert {name for name, precision in part.precisions.items() if precision == "FP32"} == small


def test_what_never_fits_is_scaled_and_marked(setting, monkeypatch):
    arguments = (setting.example, setting.graph, setting.optimizer)
    monkeypatch.setattr(step_profile, "record_plan", short_of_memory(6, never=["head/linear"]))
    with pytest.warns(UserWarning, match=r"1 costs are scaled from other precisions \(head/linear in FP32\)"):
        costs = profile_steps(*arguments, precisions=["BF16"], mixed=0, options=FEW, progress=False)
    assert scaled_operators(setting.graph, costs) == {("FP32", "BF16"): ("head/linear",)}
    predictor = StepPredictor(setting.graph, costs)
    step = predictor.plan(dict.fromkeys(setting.names, "FP32"))
    (marked,) = [cost for cost in step.costs if cost.scaled_from]
    assert marked.forward.device > 0
    assert marked.output == "FP32"
    again = StepCosts.from_json(json.loads(json.dumps(costs.to_json())), "again")
    assert scaled_operators(setting.graph, again) == scaled_operators(setting.graph, costs)


@pytest.mark.parametrize("compiled", [lambda m: torch.compile(m), lambda m: m.compile() or m])
def test_a_compiled_model_is_refused(compiled):
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.zeros(2, 4)
    graph = capture(model, (x,))
    example = TrainingExample(model=torch.nn.Sequential(compiled(model)), args=(x,))
    with pytest.raises(UnsupportedError, match=r"is compiled.*before torch\.compile"):
        profile_steps(example, graph, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_compiled_plan_that_cannot_be_charged_is_left_out(setting, monkeypatch):
    def record(stepper, graph, label, plan, options, kernels):
        if label == "mixed 0":
            raise ProblemError("6 kernels were to run")
        return record_plan(stepper, graph, label, plan, options, kernels)

    monkeypatch.setattr(step_profile, "record_compiled_plan", record)
    wanted = {"precisions": ["BF16"], "mixed": 1, "options": FEW, "progress": False, "compiled": True}
    with pytest.warns(UserWarning, match="plan 'mixed 0' is left out: 6 kernels were to run"):
        records = record_steps(setting.example, setting.graph, setting.optimizer, **wanted)
    assert [sample.name for sample in records.samples] == ["uniform BF16", "uniform FP32"]


def test_nothing_fits(setting, monkeypatch):
    arguments = (setting.example, setting.graph, setting.optimizer)
    monkeypatch.setattr(step_profile, "record_plan", short_of_memory(0))
    with pytest.raises(NotReadyError, match="smaller batch"):
        profile_steps(*arguments, precisions=["FP32"], mixed=0, options=FEW, progress=False)


def test_with_the_time_used_up_only_uniform_plans_are_recorded(setting):
    arguments = (setting.example, setting.graph, setting.optimizer)
    costs = profile_steps(*arguments, precisions=["FP32"], mixed=2, options=FEW, progress=False, budget_s=0.0)
    assert [check.plan for check in costs.checks] == ["uniform FP32"]


def test_peak_memory_of_recorded_and_of_new_plans(setting):
    predictor = StepPredictor(setting.graph, setting.costs)
    source = random.Random(3)
    plans = [dict.fromkeys(setting.names, "FP32"), dict.fromkeys(setting.names, "BF16")]
    plans += [{name: source.choice(["BF16", "FP32"]) for name in setting.names} for _ in range(2)]
    for number, plan in enumerate(plans):
        sample = record_plan(setting.stepper, setting.graph, "again", plan, FEW)
        predicted = predictor.memory(predictor.plan(plan)).peak_bytes - setting.costs.resident_bytes
        # A few bytes (the gradient of the loss) exist outside of every operator.
        tolerance = 1e-4 if number < 2 else 0.02
        assert predicted == pytest.approx(sample.memory.peak_bytes, rel=tolerance), number


def test_the_peak_on_a_cpu_counts_what_stays_between_steps(setting):
    parameters = sum(4 * p.numel() for p in setting.example.model.parameters())
    predictor = StepPredictor(setting.graph, setting.costs)
    predicted = predictor.memory(predictor.plan(dict.fromkeys(setting.names, "FP32"))).peak_bytes
    measured = measure_iteration(setting.example, setting.optimizer, repeats=1, warm_up=0)
    assert setting.costs.resident_bytes >= 3 * parameters  # with both states of AdamW
    assert predicted == pytest.approx(measured.peak_memory_bytes, rel=0.05)
    assert all(check.measured_bytes > 0 for check in setting.costs.checks)


def test_formats_follow_what_really_ran(setting):
    predictor = StepPredictor(setting.graph, setting.costs)
    plan = dict.fromkeys(setting.names, "BF16") | {"blocks.1.down/linear": "FP32"}
    sample = record_plan(setting.stepper, setting.graph, "one in FP32", plan, FEW)
    step = predictor.plan(plan)
    formats = {o.name: f for o, f in zip(setting.graph, step.formats, strict=True)}
    assert {name: formats[name] for name in sample.outputs} == dict(sample.outputs)
    assert formats["blocks.1/add_1"] == "FP32"
    assert formats["blocks.0/add_1"] == "BF16"


def test_observing_does_not_change_what_runs(setting):
    model, tokens = setting.example.model, setting.example.args
    apply(model, dict.fromkeys(setting.names, "BF16"), graph=setting.graph)
    try:
        plain = model(*tokens)
        with step_labels(model, setting.graph):
            labelled = model(*tokens)
        assert torch.equal(plain, labelled)
    finally:
        undo(model)
    with step_labels(model, setting.graph):
        pass
    assert applied_plan(model) is None


def test_a_trace_file_says_what_the_profiler_said_and_is_audited(setting, tmp_path, capsys):
    model = setting.example.model
    plan = dict.fromkeys(setting.names, "BF16")
    apply(model, plan, graph=setting.graph)
    try:
        with step_labels(model, setting.graph), torch.profiler.profile(acc_events=True) as profiler:
            setting.stepper.step()
    finally:
        undo(model)
    files = {name: tmp_path / f"{name}.json" for name in ("trace", "graph", "plan", "costs", "overlay")}
    profiler.export_chrome_trace(str(files["trace"]))
    save_graph(setting.graph, files["graph"])
    Plan(problem="any", devices={"cpu": plan}).save(files["plan"])
    setting.costs.save(files["costs"])
    common = [str(files["trace"]), "--graph", str(files["graph"]), "--plan", str(files["plan"])]
    common += ["--costs", str(files["costs"])]
    capsys.readouterr()
    assert main(["audit", *common, "--json", "--overlay", str(files["overlay"])]) == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    spans = charge_step(read_events(profiler))[-1]
    measured = {row["operator"]: row["measured_ns"] for row in worker["operators"] if row["phase"] == FORWARD}
    assert set(measured) <= {operator.name for operator in setting.graph}
    for name in setting.names:
        # The file's clock has fewer digits.
        assert measured[name] == pytest.approx(spans.spans[FORWARD, name].host_ns, abs=3000)
    differences = [abs(row["difference_ns"]) for row in worker["operators"]]
    assert differences == sorted(differences, reverse=True)
    lanes = json.loads(files["overlay"].read_text())["traceEvents"]
    assert {row["args"]["name"] for row in lanes if row.get("name") == "process_name"} == {
        "0: cpu (predicted)",
        "0: cpu (measured)",
    }
    assert main(["audit", *common, "--top", "3"]) == 0
    assert "forward" in capsys.readouterr().out
    assert main(["audit", *common[:-1], str(files["costs"]), str(files["costs"])]) == 2
    assert "one of each per worker" in capsys.readouterr().err
    assert main(["audit", str(files["plan"]), *common[1:]]) == 2
    assert "no list 'traceEvents'" in capsys.readouterr().err
