import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.support import TrainingExample, model_unchanged

X = torch.ones(2, 4)


class Counting(nn.Module):
    """Writes to one buffer, assigns another one anew, and fills one that was empty; draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("assigned", torch.zeros(4))
        self.register_buffer("empty", None)

    def forward(self, x):
        self.written += 1
        self.assigned = self.assigned + 1
        self.empty = torch.ones(4)
        return torch.dropout(self.linear(x), 0.5, True).sum()


def _with_block(model):
    with model_unchanged(model):
        TrainingExample(model=model, args=(X,)).forward().backward()
        assert model.assigned[0] == 1


def _with_failure(model):
    with pytest.raises(KeyboardInterrupt), model_unchanged(model):
        model(X)
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "run",
    [
        _with_block,
        _with_failure,
        lambda model: capture(model, (X,)),
        lambda model: collect_statistics(model, [X], step=lambda m, x: m(x)),
    ],
)
def test_buffers_gradients_and_random_state_are_put_back(run):
    model = Counting()
    model.linear.weight.grad = gradient = torch.ones(4, 4)
    state, written, assigned = torch.get_rng_state(), model.written, model.assigned
    run(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert model.linear.bias.grad is None
    assert model.written is written
    assert model.assigned is assigned
    assert model.empty is None
    assert not written.any()
    assert not assigned.any()
