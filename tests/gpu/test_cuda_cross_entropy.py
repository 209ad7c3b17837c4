"""Cross-entropy of rows on a card: against the plain implementation in FP64."""

import pytest
import torch

from qsync_opt.kernels.cross_entropy import cross_entropy_rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# The result's rounding, and beside it that of sums and exponentials in FP32.
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 3e-6, torch.float64: 1e-12}


def _both(logits, target, smoothing, gradient=True):
    """Losses and gradient by the kernel, and in FP64 by the plain implementation."""
    how = {"ignore_index": -100, "label_smoothing": smoothing, "gradient": gradient}
    own, exact = logits.clone(), logits.double()
    losses = cross_entropy_rows(own, target, backend="compiled", **how)
    return losses, own, cross_entropy_rows(exact, target, backend="reference", **how), exact


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("classes", [1, 7, 1000, 1024, 32000, 50257])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernel_against_fp64(dtype, classes, smoothing):
    torch.manual_seed(classes)
    logits = (4 * torch.randn(67, classes, device=CUDA)).to(dtype)
    target = torch.randint(classes, (67,), device=CUDA)
    target[::5] = -100
    losses, gradient, expected, exact = _both(logits, target, smoothing)
    assert losses.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    sums = 1e-12 if dtype is torch.float64 else 3e-6
    torch.testing.assert_close(losses.double(), expected, rtol=sums, atol=10 * sums)
    smallest = 2.0**-24 if dtype is torch.float16 else 1e-30
    torch.testing.assert_close(gradient.double(), exact, rtol=BOUNDS[dtype] + 2e-5, atol=max(smallest, sums * 1e-2))
    assert not gradient[::5].any()


def test_logits_stay_without_a_gradient():
    logits = torch.randn(5, 100, device=CUDA)
    before, target = logits.clone(), torch.randint(100, (5,), device=CUDA)
    losses, own, expected, _ = _both(logits, target, 0.1, gradient=False)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(own, before)


def test_infinite_and_nan_logits_are_as_in_torch():
    inf, nan = float("inf"), float("nan")
    rows = torch.zeros(5, 64, device=CUDA)
    rows[0, :40] = -inf  # masked classes
    rows[1] = -inf
    rows[2, 3] = inf
    rows[3, 9] = nan
    target = torch.tensor([50, 0, 3, 9, 1], device=CUDA)
    losses, gradient, expected, exact = _both(rows, target, 0.0)
    torch.testing.assert_close(losses.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-7)


def test_rows_may_begin_anywhere():
    storage = torch.randn(1 + 6 * 24, device=CUDA)
    logits, target = storage[1:].view(6, 24), torch.randint(24, (6,), device=CUDA)
    _, _, expected, exact = _both(logits, target, 0.0)
    own = cross_entropy_rows(logits, target, ignore_index=-100, label_smoothing=0.0, gradient=True, backend="compiled")
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-6)
