import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.kernels.cross_entropy import cross_entropy_rows


@given(
    rows=st.integers(0, 9),
    classes=st.integers(1, 17),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_losses_and_gradients_are_those_of_torch(rows, classes, smoothing, ignored, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator)
    target[:ignored] = -7
    how = {"ignore_index": -7, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, target, reduction="none", **how)
    expected.sum().backward()
    own = logits.detach().clone()
    torch.testing.assert_close(cross_entropy_rows(own, target, gradient=False, **how), expected)
    assert torch.equal(own, logits)  # only a wanted gradient takes their place
    torch.testing.assert_close(cross_entropy_rows(own, target, gradient=True, **how), expected)
    torch.testing.assert_close(own, logits.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_gradient_is_rounded(dtype):
    torch.manual_seed(0)
    logits, target = torch.randn(8, 50).to(dtype), torch.randint(50, (8,))
    exact = logits.float().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_rows(logits, target, ignore_index=-100, label_smoothing=0.0, gradient=True)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits, exact.grad.to(dtype))


def test_what_is_not_finite_in_an_ignored_row_does_not_spread():
    logits = torch.tensor([[1.0, float("nan")], [0.0, 0.0]])
    losses = cross_entropy_rows(logits, torch.tensor([-100, 1]), ignore_index=-100, label_smoothing=0.0, gradient=True)
    assert losses[0] == 0
    assert torch.equal(logits, torch.tensor([[0.0, 0.0], [0.5, -0.5]]))
