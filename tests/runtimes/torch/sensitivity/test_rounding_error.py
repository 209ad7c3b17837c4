"""Expected errors of rounding, against the grids written out; statistics of samples, against those of the whole."""

import math

import pytest
import torch
from torch import nn

from qsync_opt.numerics import Granularity, formats_for, noise_kinds
from qsync_opt.runtimes.torch.sensitivity import (
    attention_call,
    attention_errors,
    collect_statistics,
    errors,
    reductions,
)
from qsync_opt.runtimes.torch.sensitivity.errors import ErrorRequest, rounding_errors, run_batched
from qsync_opt.sensitivity import NoiseOptions, variances

KINDS = (*noise_kinds(scaled=True), "E5M2/tensor")
# Mantissa bits, smallest exponent of a normal number, largest number.
GRIDS = {
    "BF16": (7, -126, 1.0),
    "FP16": (10, -14, 1.0),
    "TF32": (10, -126, 1.0),
    "FP8": (3, -6, 448.0),
    "E5M2": (2, -14, 57344.0),
}


def _expected(x, kind, amax):
    name = kind.partition("/")[0]
    scale = 1.0
    if name == "INT8":
        scale = amax / 127
        step = scale
    else:
        bits, least, largest = GRIDS[name]
        scale = amax / largest if "/" in kind else 1.0
        exponent = max(least, math.floor(math.log2(abs(x) / scale))) if x else least
        step = 2.0 ** (exponent - bits) * scale
    fraction = x / step - math.floor(x / step)
    return fraction * (1 - fraction) * step**2, min(fraction, 1 - fraction) ** 2 * step**2


def test_errors_are_those_of_the_grids():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7) * torch.logspace(-7, 2, 7)
    x[0, 0, 0] = 0.0
    dims = {Granularity.TENSOR: (0, 1, 2), Granularity.ROW: (2,), Granularity.CHANNEL: (1,)}
    amaxes = {granularity: x.abs().amax(along, keepdim=True) for granularity, along in dims.items()}
    found = rounding_errors(x, KINDS, amaxes)
    for i, kind in enumerate(KINDS):
        amax = amaxes[Granularity(kind.partition("/")[2] or "tensor")].expand_as(x).double()
        expected = [_expected(v, kind, a) for v, a in zip(x.double().flatten().tolist(), amax.flatten(), strict=True)]
        for ours, theirs in zip(found, zip(*expected, strict=True), strict=True):
            step_square = max(theirs) * 4
            torch.testing.assert_close(
                ours[i].flatten().double(), torch.tensor(theirs).double(), rtol=1e-3, atol=1e-5 * step_square
            )


def _uneven():
    """Images, channels and rows of very different sizes, and a gradient that few of them dominate."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(500, 64)
            self.one, self.two = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, stride=2)
            self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 10)
            with torch.no_grad():
                self.inner.weight *= torch.logspace(-1, 1, 64)
                self.two.weight *= torch.logspace(-1, 1, 64).view(1, 64, 1, 1)

        def forward(self, x, tokens):
            h = self.two(self.one(x).relu()).relu().mean((2, 3)) + self.table(tokens).mean(1)
            return nn.functional.cross_entropy(self.outer(nn.functional.gelu(self.inner(h))), tokens[:, 0] % 10)

    torch.manual_seed(0)
    images = torch.randn(64, 3, 12, 12) * torch.rand(64, 1, 1, 1) ** 3 * 3
    return Model(), (images, torch.randint(0, 500, (64, 5)))


def _table(model, batch, sample):
    formats = formats_for(("FP32", "INT8"), "BF16")["INT8"]
    found = {}
    for operator in collect_statistics(model, [batch], sample_elements=sample).operators:
        for first, second in (("tensor", "tensor"), ("tensor", "channel"), ("row", "channel")):
            options = NoiseOptions(activation_granularity=first, weight_granularity=second, backward="eight")
            results = variances(operator, "INT8", formats, options)
            for name in ("output", "first_gradient", "second_gradient"):
                if getattr(results, name) is not None:
                    found[operator.name, first, second, name] = getattr(results, name).total
    return found


def test_samples_stand_for_the_whole(monkeypatch):
    model, batch = _uneven()
    whole = _table(model, batch, 1 << 24)
    sampled = _table(model, batch, 30000)
    for key, value in whole.items():
        assert sampled[key] == pytest.approx(value, rel=0.1), key
    # Looking at a few rows at a time changes nothing but the order of sums.
    monkeypatch.setattr(reductions, "_CHUNK", 1000)
    for key, value in _table(model, batch, 1 << 24).items():
        assert value == pytest.approx(whole[key], rel=1e-5), key


@pytest.mark.parametrize("common", [1.0, 3.0])
def test_attention_errors_count_that_row_sums_are_taken_from_rounded_results(common):
    """Where all values are alike, gradients of scores cancel, and what the result lost by rounding shows."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, 4, 128, 64) * 0.1 for _ in range(2))
    value = torch.randn(2, 4, 1, 64) * common + torch.randn(2, 4, 128, 64) * 0.3
    gradient = torch.randn(2, 4, 128, 64) * 1e-3

    def query_gradient(dtype):
        operands = [x.detach().clone().to(dtype).requires_grad_() for x in (query, key, value)]
        output = nn.functional.scaled_dot_product_attention(*operands)
        return torch.autograd.grad(output, operands, gradient.to(dtype))[0].double()

    measured = (query_gradient(torch.bfloat16) - query_gradient(torch.float32)).square().sum()
    predicted = attention_errors(attention_call((query, key, value), {}), gradient)["BF16"][1]
    assert 0.85 < float(predicted / measured) < 1.15


def test_errors_of_tensors_of_several_shapes_are_found_together(monkeypatch):
    torch.manual_seed(0)
    kinds, together = noise_kinds(scaled=True), []

    def counted(x, *rest):
        together.append(x.numel())
        return rounding_errors(x, *rest)

    monkeypatch.setattr(errors, "rounding_errors", counted)
    given = {}
    for name, shape in (("a", (2, 5, 7)), ("b", (3, 11, 4)), ("c", (1, 2, 3)), ("d", (40, 5, 5))):
        x = torch.randn(shape) * 10
        dims = {Granularity.TENSOR: (1, 2), Granularity.ROW: (2,), Granularity.CHANNEL: (1,)}
        given[name] = x, {g: x.abs().amax(along, keepdim=True) for g, along in dims.items()}

    def steps(x, amaxes):
        return (yield ErrorRequest(x, kinds, amaxes))

    found = dict(run_batched(((name, steps(*pair)) for name, pair in given.items()), 300 * len(kinds)))
    assert together == [70 + 132 + 6, 1000]
    for name, (x, amaxes) in given.items():
        torch.testing.assert_close(found[name], rounding_errors(x, kinds, amaxes), rtol=0, atol=0)
