from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.runtimes.torch.support import TrainingExample, default_loss, measure_iteration, resident_bytes


@pytest.fixture
def example() -> TrainingExample:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return TrainingExample(model=model, args=(torch.randn(128, 64),), loss=lambda out: out.square().mean())


def test_a_batch_is_taken_as_everywhere(example: TrainingExample) -> None:
    x = torch.randn(128, 64)
    for batch in ((x,), [x], x, {"input": x}):
        assert TrainingExample(model=example.model, args=batch).forward().shape == ()


def test_repeats_are_checked(example: TrainingExample) -> None:
    with pytest.raises(ProblemError, match="repeats is 0, but it must be an integer of at least 1"):
        measure_iteration(example, repeats=0)


def test_times_and_memory_of_an_iteration(example: TrainingExample) -> None:
    optimizer = torch.optim.Adam(example.model.parameters())
    before = example.model[0].weight.detach().clone()
    result = measure_iteration(example, optimizer, repeats=3, warm_up=1)
    assert min(result.forward_ns, result.backward_ns, result.optimizer_ns) > 0
    assert result.iterations == 3
    assert not torch.equal(before, example.model[0].weight)
    parameters = resident_bytes(example.model)
    assert parameters == 4 * (64 * 256 + 256 + 256 * 64 + 64)
    # Weights and two moments stay; gradients come at the end of backward, hidden activations (ReLU's result, 128 KiB)
    # before.
    assert 3 * parameters < result.peak_memory_bytes < 5 * parameters + 2**20
    assert "torch.profiler" in result.memory_source


def test_without_an_optimizer_nothing_is_trained(example: TrainingExample) -> None:
    before = example.model[0].weight.detach().clone()
    result = measure_iteration(example, repeats=2, warm_up=1)
    assert torch.equal(before, example.model[0].weight)
    assert result.peak_memory_bytes < 3 * resident_bytes(example.model) + 2**20


def test_buffers_are_resident() -> None:
    assert resident_bytes(nn.BatchNorm1d(8)) == 4 * 32 + 8


def _leaf(value: Any) -> Tensor:
    return torch.tensor(value, requires_grad=True)


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (_leaf(3.0), 3.0),
        (_leaf([1.0, 2.0]), 3.0),
        ({"a": _leaf([1.0]), "b": (_leaf([4.0]), torch.tensor([7.0]))}, 5.0),
        (SimpleNamespace(loss=_leaf(9.0), logits=_leaf([1.0])), 9.0),
    ],
)
def test_the_default_loss(output: Any, loss: float) -> None:
    result = default_loss(output)
    assert result.dim() == 0
    assert float(result.detach()) == loss


@pytest.mark.parametrize("output", [torch.tensor([1]), torch.tensor(1.0), None, "text"])
def test_an_output_without_gradients_is_refused(output: Any) -> None:
    with pytest.raises(ModelError, match="give a loss function"):
        default_loss(output)
