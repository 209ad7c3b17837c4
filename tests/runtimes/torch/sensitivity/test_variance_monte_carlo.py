"""Predicted against measured variance of single operators, with a quantizer of the test's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.numerics import Granularity, PrecisionFormats, Rounding
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import NoiseOptions, variances

FULL = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")
OPERATORS = {
    "linear": (F.linear, (32, 128), (64, 128), (1,), (1,)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), (4, 8, 9, 9), (12, 4, 3, 3), (1, 2, 3), (1, 2, 3)),
}
DATA = {
    "normal": torch.randn,
    "outliers": lambda *shape: torch.exp(1.5 * torch.randn(*shape)) * torch.sign(torch.randn(*shape)),
    "rectified": lambda *shape: torch.randn(*shape).relu(),
}
GRANULARITIES = {"tensor": (Granularity.TENSOR, Granularity.TENSOR), "slice": (Granularity.ROW, Granularity.CHANNEL)}


class Single(nn.Module):
    def __init__(self, function, weight):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, x, g):
        return (self.function(x, self.weight) * g).sum()


def quantize(x, dims, rounding):
    scale = x.abs().amax(dims, keepdim=True) / 127
    if rounding is Rounding.NEAREST:
        return torch.round(x / scale) * scale
    return torch.floor(x / scale + torch.rand_like(x)) * scale


@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("data", list(DATA))
@pytest.mark.parametrize("granularity", list(GRANULARITIES))
@pytest.mark.parametrize("rounding", list(Rounding))
def test_int8_variance_of_output_and_gradients(operator, data, granularity, rounding):
    function, first, second, row_dims, channel_dims = OPERATORS[operator]
    x, w = DATA[data](*first), 0.1 * torch.randn(*second)
    g = torch.randn(function(x, w).shape) * torch.exp(torch.randn(first[0]).view(-1, *[1] * (len(first) - 1)))
    by_row, by_channel = GRANULARITIES[granularity]
    options = NoiseOptions(rounding=rounding, activation_granularity=by_row, weight_granularity=by_channel)
    statistics = collect_statistics(Single(function, w), [(x.clone().requires_grad_(), g)]).operators[0]
    found = variances(statistics, "INT8", FULL, options)

    def results(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        z = function(x, w)
        return z.detach(), *torch.autograd.grad(z, (w, x), g.double())

    exact = results(x.double(), w.double())
    dims = [tuple(range(len(first)))] * 2 if granularity == "tensor" else [row_dims, channel_dims]
    draws = 12 if rounding is Rounding.STOCHASTIC else 1
    measured = [0.0, 0.0, 0.0]
    for _ in range(draws):
        noisy = results(quantize(x.double(), dims[0], rounding), quantize(w.double(), dims[1], rounding))
        for i, (a, b) in enumerate(zip(noisy, exact, strict=True)):
            measured[i] += float((a - b).square().sum()) / draws
    tolerance = 0.1 if rounding is Rounding.STOCHASTIC else 0.25  # one draw, and errors that are not independent
    for noise, real in zip((found.output, found.second_gradient, found.first_gradient), measured, strict=True):
        assert noise is not None
        assert noise.total / real == pytest.approx(1, abs=tolerance)
