"""`torch.compile` of single layers, with shapes that change, and after plan upon plan."""

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.execution import applied_plan, apply, undo

pytestmark = [
    # torch's own, about a cache of constants.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    # torch's own, where a layer's input is another layer's result.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
LAYERS = 10  # more than torch compiles of one code


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_layers_that_are_compiled_one_by_one():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))
    apply(model, {f"{i}/linear": "INT8" if i % 2 else "BF16" for i in range(LAYERS)})
    for layer in model:
        layer.compile(backend="aot_eager")
    x = torch.randn(4, 8)
    results = [model(x) for _ in range(3)]
    assert graphs() == LAYERS
    assert not torch.equal(results[1], results[2])
    results[2].float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert applied_plan(model).options.kernels.offset == 3
    exact = undo(model)(x)
    assert ((results[2].double() - exact).norm() / exact.norm()).item() < 0.1


@pytest.mark.slow
def test_every_new_plan_is_compiled_again():
    model = nn.Linear(8, 8)
    compiled = torch.compile(apply(model, {"linear": "INT8"}), backend="aot_eager")
    for i in range(LAYERS):
        undo(model)
        apply(model, {"linear": ("BF16", "INT8")[i % 2]})
        compiled(torch.randn(4, 8))
    assert graphs() == LAYERS


def test_any_batch_size_is_one_graph():
    model = apply(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), {"0/linear": "INT8", "2/linear": "BF16"})
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for size in (4, 6, 3):
        compiled(torch.randn(size, 8)).float().sum().backward()
    assert graphs() == 1


@pytest.mark.slow
def test_any_batch_size_with_several_layers_in_8_bits():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    apply(model, {"0/linear": "INT8", "2/linear": "INT8"})
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for size in (4, 6, 3):
        compiled(torch.randn(size, 8)).sum().backward()
    model.eval()
    x = torch.randn(5, 8)
    assert torch.equal(compiled(x), model(x))
