"""Errors that runs share: as the kernel makes them, added where they belong, and reversed exactly."""

import pytest
import torch

from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions

pytestmark = pytest.mark.usefixtures("quality_modules")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.register_buffer("signs", torch.randn(32, 4))

    def forward(self, x):
        return (self.b(torch.tanh(self.a(x))) * self.signs).mean()


@pytest.fixture
def made():
    """Model, batch, graph and options under which the backward pass rounds to 8 bits too."""
    from qsync_opt.kernels import KernelOptions

    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(32, 8),)
    options = ApplyOptions(kernels=KernelOptions(weight_granularity="tensor", backward="eight", offset=5))
    return model, batch, capture(model, batch), options


def _gradients(model, batch, put):
    import copy

    copied = copy.deepcopy(model)
    plan = put(copied)
    loss = copied(*batch)
    return plan, loss.item(), torch.autograd.grad(loss, list(copied.parameters()))


def test_a_run_with_noted_errors_is_one_with_the_kernel(made):
    """At the same weights, where the gradient that arrives does not depend on the error."""
    from noisy import MagnifiedPlan
    from shared_errors import ErringPlan, NotingPlan

    model, batch, graph, options = made
    noting, clean_loss, clean = _gradients(
        model, batch, lambda m: NotingPlan(m, {"a/linear": {}, "b/linear": {}}, "INT8", graph, options)
    )
    exact = torch.autograd.grad(model(*batch), list(model.parameters()))
    torch.testing.assert_close(list(clean), list(exact))
    assert clean_loss == pytest.approx(model(*batch).item())
    _, kernel_loss, kernel = _gradients(
        model, batch, lambda m: MagnifiedPlan(m, {"b/linear": "INT8"}, graph, options, factor=1.0)
    )
    _, loss, found = _gradients(
        model, batch, lambda m: ErringPlan(m, "b/linear", noting.errors["b/linear"], graph, options, 1.0)
    )
    assert loss == pytest.approx(kernel_loss)
    assert loss != pytest.approx(clean_loss, rel=1e-6)
    torch.testing.assert_close(list(found), list(kernel))
    assert not torch.allclose(found[2], clean[2], rtol=1e-4)


def test_errors_are_added_in_every_pass(made):
    """Also after the first, from which on a plan of FP32 alone is otherwise left to torch."""
    from shared_errors import ErringPlan, NotingPlan

    model, batch, graph, options = made
    noting = NotingPlan(model, {"a/linear": {}}, "INT8", graph, options)
    clean = model(*batch)
    clean.backward()
    noting.interception.remove()
    ErringPlan(model, "a/linear", noting.errors["a/linear"], graph, options, 8.0)
    losses = [model(*batch).item() for _ in range(3)]
    assert losses[0] != pytest.approx(clean.item(), rel=1e-6)
    assert losses == [losses[0]] * 3


def test_errors_of_a_last_linear_layer_reverse_exactly(made):
    from shared_errors import ErringPlan, NotingPlan

    model, batch, graph, options = made
    noting, _, clean = _gradients(model, batch, lambda m: NotingPlan(m, {"a/linear": {}}, "INT8", graph, options))
    # Without the part that goes through the forward pass, gradients are linear in the errors.
    errors = {number: error for number, error in noting.errors["a/linear"].items() if number >= 0}
    errors[-1] = torch.zeros_like(noting.errors["a/linear"][-1])
    ahead, behind = (
        _gradients(model, batch, lambda m, s=s: ErringPlan(m, "a/linear", errors, graph, options, s))[2]
        for s in (8, -8)
    )
    for a, b, c in zip(ahead, behind, clean, strict=True):
        torch.testing.assert_close((a + b) / 2, c)
    assert not torch.allclose(ahead[0], clean[0])


def test_trials_share_the_errors_of_the_run_in_full_precision(made):
    """The even part is then the smaller: what is odd in the errors cancels however far the runs are apart."""
    from trials import Trials

    model, _, graph, options = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(torch.randn(32, 8),) for _ in range(10)]
    model(*batches[0]).backward()
    optimizer.step()
    names = ["a/linear", "b/linear"]
    harms = {}
    for shared in (False, True):
        trials = Trials(
            model, optimizer, graph, names, "INT8", options, 4.0, (batches[0], batches[0]), False, shared=shared
        )
        once, again = (trials.harms(batches, 5) for _ in range(2))
        assert set(once) == set(names)
        assert all(len(values) == 2 for values in once.values())
        assert once != again  # other random numbers
        harms[shared] = once
    assert harms[True] != harms[False]
