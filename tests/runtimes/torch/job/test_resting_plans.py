"""A plan under which torch does what it would do anyway gets out of the way after the first pass."""

import copy

import pytest
import torch
from torch import nn

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.execution import applied_plan, apply, undo
from qsync_opt.runtimes.torch.interception import interception_of

FP32 = {"0/linear": "FP32", "2/linear": "FP32"}


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))


def _rests(model, *args):
    """Whether the outermost pass ran without the plan being asked about any operator."""
    interception, resting = interception_of(model), []
    hook = model[0].register_forward_hook(lambda *_: resting.append(interception.resting))
    try:
        model(*args)
    finally:
        hook.remove()
    return all(resting)


def test_only_after_the_first_pass_and_with_the_same_bits():
    model, x = _mlp(), torch.randn(5, 12)
    twin = copy.deepcopy(model)
    apply(model, FP32)
    assert not _rests(model, x)
    assert _rests(model, x)
    model(x).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(model(x), twin(x))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    undo(model)
    assert "forward" not in model.__dict__


def test_not_where_an_operator_runs_lower():
    model, x = _mlp(), torch.randn(5, 12)
    apply(model, FP32 | {"2/linear": "BF16"})
    assert not _rests(model, x)
    assert not _rests(model, x)


def test_not_where_inputs_are_lifted():
    model, x = _mlp(), torch.randn(5, 12, dtype=torch.bfloat16)
    apply(model, FP32)
    for _ in range(2):
        assert not _rests(model, x)
        assert model(x).dtype is torch.float32


def test_autocast_is_still_refused():
    model, x = _mlp(), torch.randn(5, 12)
    apply(model, FP32)
    model(x)
    assert _rests(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotReadyError, match="autocast"):
        model(x)
    assert _rests(model, x)


def test_an_observer_is_told_of_every_operator():
    model, x = _mlp(), torch.randn(5, 12)
    apply(model, FP32)
    model(x)
    names = []
    with applied_plan(model).interception.observed(lambda call, planned: (names.append(call.name), call.run())[1], ()):
        model(x)
    assert names == list(FP32)
    assert _rests(model, x)


def test_a_pass_that_raises_ends_the_rest():
    model, x = _mlp(), torch.randn(5, 12)
    apply(model, FP32)
    model(x)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 11))
    assert not interception_of(model).resting
    undo(model)
