"""Compiled steps on a card: products in a mode of their own, and kernels charged to operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qsync_opt
from qsync_opt.kernels.autograd import float_modes
from qsync_opt.runtimes.torch.execution import apply, undo
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper
from qsync_opt.runtimes.torch.steps.compiled import compiled_inside, compiled_plan_peak, record_compiled_plan
from qsync_opt.steps import BACKWARD

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning:torch")]
CUDA = torch.device("cuda")


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x_BC):
        return (x_BC + self.b(F.gelu(self.a(self.norm(x_BC))))).square().mean()


class _NormLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

    def forward(self, x_BC):
        return self.norm(self.b(F.gelu(self.a(x_BC)))).square().mean()


@pytest.fixture
def many_rows():
    """A model whose norm has so many rows that Inductor sums over them and along them in one kernel."""
    torch.manual_seed(0)
    model, x = _NormLast().to(CUDA), torch.randn(32768, 256, device=CUDA)
    yield qsync_opt.TrainingExample(model=model, args=(x,)), qsync_opt.capture(_NormLast(), (x.cpu(),))
    torch.compiler.reset()


@pytest.mark.parametrize("outside", ["ieee", "tf32"])
@pytest.mark.parametrize("precision", ["FP32", "TF32"])
def test_a_compiled_product_runs_in_the_mode_of_its_plan(precision, outside):
    torch.manual_seed(0)
    model, x = nn.Linear(512, 512, bias=False).to(CUDA), torch.randn(512, 512, device=CUDA)
    exact = x.double() @ model.weight.double().T
    with float_modes.fp32_mode("matmul", outside):
        apply(model, {"linear": precision})
        torch.compiler.reset()
        error = ((torch.compile(model, fullgraph=True)(x).double() - exact).norm() / exact.norm()).item()
    assert (error < 1e-6) == (precision == "FP32")
    assert error < 1e-3


def test_compiled_steps_are_charged_and_predicted():
    torch.manual_seed(0)
    model, x = _Block().to(CUDA), torch.randn(4096, 256, device=CUDA)
    graph = qsync_opt.capture(_Block(), (x.cpu(),))
    costs = qsync_opt.profile_steps(
        qsync_opt.TrainingExample(model=model, args=(x,)),
        graph,
        torch.optim.AdamW(model.parameters()),
        precisions=["TF32", "BF16"],
        mixed=1,
        options=RecordingOptions(warm_up=2, repeats=3, traced=1),
        compiled=True,
    )
    assert costs.graphs == 1
    assert costs.checks
    predictor = qsync_opt.StepPredictor(graph, costs)
    for precision in ("FP32", "TF32", "BF16"):
        step = predictor.plan({"a/linear": precision, "b/linear": precision})
        by_name = {operator.name: cost for operator, cost in zip(graph, step.costs, strict=True)}
        for name in ("a/linear", "b/linear", "norm/layer_norm"):
            assert by_name[name].forward.device > 0
            assert by_name[name].backward.device > 0
    for check in costs.checks:  # so few operators are worse than a model: see docs/background/replay.md
        assert abs(check.memory_error) < 0.1
    assert model._compiled_call_impl is None
    with pytest.raises(qsync_opt.QSyncError):
        undo(model)


def test_steps_with_many_rows_are_recorded(many_rows):
    example, graph = many_rows
    stepper = Stepper(example, torch.optim.SGD(example.model.parameters(), lr=1e-3))
    plan = {"a/linear": "BF16", "b/linear": "FP32"}
    options = RecordingOptions(warm_up=2, repeats=2, traced=1)
    sample = record_compiled_plan(stepper, graph, "many rows", plan, options)
    assert sample.spans.spans[BACKWARD, "norm/layer_norm"].device_ns > 0
    assert sample.memory.peak_bytes > 0


@pytest.mark.parametrize("precisions", ["BF16 FP32", "INT8 BF16", "FP32 FP32"])
def test_the_compilers_code_has_the_peak(many_rows, precisions):
    example, graph = many_rows
    plan = dict(zip(("a/linear", "b/linear"), precisions.split(), strict=True))
    example.forward().backward()
    example.model.zero_grad()
    peak = compiled_plan_peak(example, graph, plan)
    apply(example.model, plan, graph=graph)
    try:
        with compiled_inside(example.model):
            for _ in range(2):
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                example.forward().backward()
                measured = torch.cuda.max_memory_allocated() - before
                example.model.zero_grad()
    finally:
        undo(example.model)
    # The allocator gives large blocks that are up to a megabyte larger.
    assert 0.97 * measured <= peak.peak_bytes <= 1.03 * measured


def test_a_job_that_trains_compiled_is_planned_compiled():
    torch.manual_seed(0)
    model, x = _Block().to(CUDA), torch.randn(8192, 256, device=CUDA)
    options = qsync_opt.PlanningOptions(precisions=("BF16", "FP32"), compiled=True, profile_seconds=1.0)
    plan = qsync_opt.auto_plan(model, (x,), options=options)
    assert "measured compiled passes" in plan.reason
    compiled = torch.compile(qsync_opt.apply(model, plan), fullgraph=True, dynamic=False)
    compiled(x).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
