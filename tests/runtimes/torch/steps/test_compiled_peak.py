"""What a compiled step will need, beside what it was seen to need."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import applied_plan
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper
from qsync_opt.runtimes.torch.steps.compiled import compiled_plan_peak, peak, record_compiled_plan
from qsync_opt.runtimes.torch.support import TrainingExample

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(256, 512), nn.Linear(512, 256), nn.LayerNorm(256)

    def forward(self, x):
        return self.norm(x + self.b(F.gelu(self.a(x)))).square().mean()


@pytest.fixture(scope="module")
def example():
    torch.manual_seed(0)
    return TrainingExample(model=Block(), args=(torch.randn(512, 256),))


@pytest.fixture(scope="module")
def graph(example):
    return capture(example.model, example.args)


@pytest.mark.slow
@pytest.mark.parametrize("precisions", ["BF16 FP32", "FP32 FP32"])
def test_the_peak_is_that_of_a_recorded_step(example, graph, precisions):
    """With the compiler for CPUs; torch's profiler sees what is allocated there."""
    plan = dict(zip(("a/linear", "b/linear"), precisions.split(), strict=True))
    peak = compiled_plan_peak(example, graph, plan)
    assert example.model._compiled_call_impl is None
    assert applied_plan(example.model) is None
    stepper = Stepper(example, torch.optim.SGD(example.model.parameters(), lr=1e-3))
    sample = record_compiled_plan(stepper, graph, "one", plan, RecordingOptions(warm_up=1, repeats=1, traced=1))
    assert peak.peak_bytes == pytest.approx(sample.memory.peak_bytes, rel=0.01)


@pytest.mark.slow
def test_a_model_that_is_not_trained_is_refused(graph):
    model = Block().eval().requires_grad_(False)
    with pytest.raises(UnsupportedError, match="the model in training mode"):
        compiled_plan_peak(
            TrainingExample(model=model, args=(torch.randn(512, 256),)), graph, {"a/linear": "FP32", "b/linear": "FP32"}
        )


def test_the_compiler_is_left_as_it_was():
    from torch._inductor.graph import GraphLowering

    before = GraphLowering.compile_to_module
    with pytest.raises(KeyError), peak.generated_passes():
        assert GraphLowering.compile_to_module is not before
        raise KeyError
    assert GraphLowering.compile_to_module is before
