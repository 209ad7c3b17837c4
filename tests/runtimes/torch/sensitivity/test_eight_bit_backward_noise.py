"""Variance of 8-bit operators whose backward pass is in 8 bits too: predicted against the kernels, over many draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.autograd import product
from qsync_opt.numerics import Granularity, formats_for
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import NoiseOptions, load_statistics, save_statistics, variances

FORMATS = formats_for(("INT8", "FP8"), "BF16")
FORMATS_16 = formats_for(("INT8", "BF16"), "BF16")
EIGHT = NoiseOptions(weight_granularity=Granularity.TENSOR, backward="eight")
DRAWS = 24


class Single(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, g):
        return (F.linear(x, self.weight) * g).sum()


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(96, 64, generator=generator), 0.1 * torch.randn(48, 64, generator=generator)
    # As gradients are: most elements far below a step of their common scale, sizes that differ from row to row.
    g = torch.randn(96, 48, generator=generator) * torch.exp(2 * torch.randn(96, 1, generator=generator))
    return x, w, g


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_predicted_variance_is_that_of_the_kernels(data, precision, tmp_path):
    x, w, g = data
    statistics = collect_statistics(Single(w.clone()), [(x.clone().requires_grad_(), g)])
    # Through a file: what an 8-bit backward pass needs is kept there.
    save_statistics(statistics, tmp_path / "statistics.json")
    operator = load_statistics(tmp_path / "statistics.json").operators[0]
    found = variances(operator, precision, FORMATS[precision], EIGHT)
    exact = (F.linear(x, w), g.T @ x, g @ w)
    measured = [0.0, 0.0, 0.0]
    for draw in range(DRAWS):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        options = KernelOptions(weight_granularity="tensor", backward="eight", offset=draw)
        z = product(a, b.t(), None, precision, options)
        da, db = torch.autograd.grad(z, (a, b), g.to(z.dtype))
        for i, (low, true) in enumerate(zip((z, db, da), exact, strict=True)):
            measured[i] += float((low.detach().float() - true).square().sum()) / DRAWS
    for noise, real in zip((found.output, found.second_gradient, found.first_gradient), measured, strict=True):
        assert noise is not None
        assert noise.total / real == pytest.approx(1, abs=0.1)


def test_an_8_bit_backward_pass_adds_noise_to_gradients_alone(data):
    x, w, g = data
    operator = collect_statistics(Single(w.clone()), [(x.clone().requires_grad_(), g)]).operators[0]
    half, eight = (
        variances(operator, "INT8", FORMATS["INT8"], NoiseOptions(weight_granularity=Granularity.TENSOR, backward=how))
        for how in ("half", "eight")
    )
    assert half.output == eight.output
    assert half.second_gradient is not None and eight.second_gradient is not None
    assert eight.second_gradient.total > 1.2 * half.second_gradient.total


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_a_precision_with_an_8_bit_backward_pass_implies_its_options(data, precision):
    x, w, g = data
    operator = collect_statistics(Single(w.clone()), [(x.clone().requires_grad_(), g)]).operators[0]
    implied = variances(operator, f"{precision}-BWD8", FORMATS[precision], NoiseOptions())
    assert implied == variances(operator, precision, FORMATS[precision], EIGHT)


def test_predicted_variance_is_that_of_a_planned_operator(data):
    """As the table of a plan says it, with default options, against what the operator does with default options."""
    x, w, g = data
    operator = collect_statistics(Single(w.clone()), [(x.clone().requires_grad_(), g)]).operators[0]
    found = variances(operator, "INT8-BWD8", FORMATS["INT8"])
    exact = (F.linear(x, w), g.T @ x, g @ w)
    measured = [0.0, 0.0, 0.0]
    for draw in range(DRAWS):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        z = ops.execute("linear", "INT8-BWD8", F.linear, tuple(leaves), options=KernelOptions(offset=draw))
        da, db = torch.autograd.grad(z, leaves, g.to(z.dtype))
        for i, (low, true) in enumerate(zip((z, db, da), exact, strict=True)):
            measured[i] += float((low.detach().float() - true).square().sum()) / DRAWS
    for noise, real in zip((found.output, found.second_gradient, found.first_gradient), measured, strict=True):
        assert noise is not None
        assert noise.total / real == pytest.approx(1, abs=0.1)


def test_gain_of_fixed_point_noise_follows_the_errors_of_single_elements(probe_gains):
    """Rows on the grid of their common scale do not err, so that the others alone say how far noise reaches."""
    model = Single(torch.zeros(1, 2))
    x, g = torch.tensor([[127.0, 64.0], [0.5, 0.5]]), torch.tensor([[3.0], [1.0]])
    # The weight's gradient is the sum over rows of g * x: noise on a row is handed on with the factor g of the row.
    gain = probe_gains(model, lambda: model(x.clone().requires_grad_(), g), probes=1).gains["linear"]["first"]
    assert gain.uniform == pytest.approx(4 * 1.0**2)  # spread evenly it would be 2 * 3**2 + 2 * 1**2


class Convolution(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.padding = nn.Parameter(weight), weight.shape[2] // 2

    def forward(self, x, g):
        return (F.conv2d(x, self.weight, padding=self.padding) * g).sum()


@pytest.mark.parametrize("taps", [1, 3])
def test_predicted_variance_of_convolutions_is_that_of_the_kernels(taps):
    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(8, 6, 9, 9, generator=generator), 0.1 * torch.randn(10, 6, taps, taps, generator=generator)
    sizes = torch.exp(torch.randn(8, 1, 9, 9, generator=generator))
    g = torch.randn(8, 10, 9, 9, generator=generator) * sizes
    operator = collect_statistics(Convolution(w.clone()), [(x.clone().requires_grad_(), g)]).operators[0]
    found = variances(operator, "INT8", FORMATS["INT8"], EIGHT)
    doubles = [t.double().requires_grad_() for t in (x, w)]
    exact = F.conv2d(*doubles, padding=taps // 2)
    true_x, true_w = torch.autograd.grad(exact, doubles, g.double())
    measured = [0.0, 0.0, 0.0]
    for draw in range(DRAWS):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        options = KernelOptions(weight_granularity="tensor", backward="eight", offset=draw)
        z = ops.execute("conv2d", "INT8", F.conv2d, tuple(leaves), {"padding": taps // 2}, options)
        dx, dw = torch.autograd.grad(z, leaves, g.to(z.dtype))
        for i, (low, true) in enumerate(zip((z, dw, dx), (exact.detach(), true_w, true_x), strict=True)):
            measured[i] += float((low.detach().double() - true).square().sum()) / DRAWS
    for noise, real in zip((found.output, found.second_gradient, found.first_gradient), measured, strict=True):
        assert noise is not None
        assert noise.total / real == pytest.approx(1, abs=0.15)


def test_other_backward_passes_are_refused():
    with pytest.raises(UnsupportedError, match="backward is 'four': allowed are half, eight"):
        NoiseOptions(backward="four")


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1, bias=False)

    def forward(self, x, g):
        return (self.conv(x) * g).sum()


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("precision", ["INT8", "BF16"])
def test_a_sample_need_not_hold_the_row_that_dominates_the_gradient(kind, precision):
    """Statistics that look at every second row only, where the gradient of an odd row is by far the largest."""
    torch.manual_seed(5)
    if kind == "linear":
        model, x, shape = Single(0.1 * torch.randn(24, 32)), torch.randn(64, 32), (64, 24)
    else:
        model, x, shape = Convolved(), torch.randn(8, 4, 9, 9), (8, 6, 9, 9)
    g = torch.randn(shape)
    g[3] *= 100
    full, part = (
        collect_statistics(model, [(x.clone().requires_grad_(), g)], sample_elements=limit).operators[0]
        for limit in (1 << 18, x.numel() // 2)
    )
    expected, found = (variances(s, precision, FORMATS_16[precision], NoiseOptions()) for s in (full, part))
    for name in ("output", "second_gradient", "first_gradient"):
        exact, sampled = getattr(expected, name), getattr(found, name)
        assert sampled.total / exact.total == pytest.approx(1, abs=0.2), name
