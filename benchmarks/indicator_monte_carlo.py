"""Are the indicator's variances true? Predicted against measured with an independent quantizer in float64.

Operators: variance of output, weight gradient and input gradient of single operators, for formats, granularities,
roundings, shapes and data of several kinds. Networks: increase of the whole gradient's variance when one operator of a
small network is made noisy. Writes ``benchmarks/results/indicator.json``.

    python benchmarks/indicator_monte_carlo.py [--draws 24] [--output PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics as python_statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.precision import PrecisionFormats
from qsync_opt.rounding import Granularity, Rounding
from qsync_opt.runtimes.torch.statistics import collect_statistics
from qsync_opt.statistics import OperatorStatistics
from qsync_opt.variances import NoiseOptions, variances

HALF = PrecisionFormats(output="BF16", gradient_input="BF16", gradient_output="BF16")
HALF16 = PrecisionFormats(output="FP16", gradient_input="FP16", gradient_output="FP16")
FORMATS = {"INT8": HALF, "BF16": HALF, "FP16": HALF16}
RESULTS = Path(__file__).parent / "results" / "indicator.json"


# -- an independent quantizer ----------------------------------------------------------------------------------------


def quantize_int8(x: Tensor, dims: tuple[int, ...], rounding: Rounding, generator: torch.Generator) -> Tensor:
    """Symmetric INT8 with one scale per slice, straight from the definition."""
    scale = x.abs().amax(dims, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if rounding is Rounding.NEAREST:
        return torch.round(x / scale) * scale
    return torch.floor(x / scale + torch.rand(x.shape, generator=generator, dtype=x.dtype)) * scale


def to_half(x: Tensor, precision: str) -> Tensor:
    """Through the 16-bit type and back."""
    return x.to(torch.float32).to(torch.bfloat16 if precision == "BF16" else torch.float16).to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """A bilinear operator with what is needed to build a model of it and to quantize its operands."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    first: tuple[int, ...]
    second: tuple[int, ...]
    first_rows: tuple[int, ...]
    second_channels: tuple[int, ...]
    second_is_weight: bool = True

    def dims(self, operand: str, granularity: Granularity) -> tuple[int, ...]:
        """Dimensions that share a scale."""
        if granularity is Granularity.TENSOR:
            return tuple(range(len(self.first if operand == "first" else self.second)))
        return self.first_rows if operand == "first" else self.second_channels


LAYERS = (
    Layer("linear 64x512x256", F.linear, (64, 512), (256, 512), (1,), (1,)),
    Layer("linear 8x16x48x96", F.linear, (8, 16, 48), (96, 48), (2,), (1,)),
    Layer("matmul 2x3x32x24x40", torch.matmul, (2, 3, 32, 24), (2, 3, 24, 40), (3,), (2,), False),
    Layer(
        "conv2d 16->24 3x3 padding 1",
        lambda x, w: F.conv2d(x, w, padding=1),
        (4, 16, 12, 12),
        (24, 16, 3, 3),
        (1, 2, 3),
        (1, 2, 3),
    ),
    Layer(
        "conv2d 16->32 3x3 groups 4 stride 2 padding 2 dilation 2",
        lambda x, w: F.conv2d(x, w, stride=2, padding=2, dilation=2, groups=4),
        (4, 16, 13, 13),
        (32, 4, 3, 3),
        (1, 2, 3),
        (1, 2, 3),
    ),
    Layer("conv1d 12->20 kernel 5", lambda x, w: F.conv1d(x, w, padding=2), (8, 12, 50), (20, 12, 5), (1, 2), (1, 2)),
)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log-normal magnitudes with random signs."""
    sign = torch.sign(torch.randn(shape, generator=generator))
    return torch.exp(1.5 * torch.randn(shape, generator=generator)) * sign


def sparse(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """What a rectifier leaves."""
    return torch.randn(shape, generator=generator).relu()


DATA = {"normal": normal, "log-normal": outliers, "rectified": sparse}


def emulate(
    layer: Layer,
    x: Tensor,
    w: Tensor,
    g: Tensor,
    precision: str,
    options: NoiseOptions,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients (of w and x) of one draw, in float64 apart from the rounding under test."""
    half = "FP16" if precision == "FP16" else "BF16"
    if precision == "INT8":
        weight = options.weight_granularity
        if not layer.second_is_weight:
            per_row = options.activation_granularity is Granularity.ROW
            weight = Granularity.CHANNEL if per_row else Granularity.TENSOR
        first = quantize_int8(x, layer.dims("first", options.activation_granularity), options.rounding, generator)
        second = quantize_int8(w, layer.dims("second", weight), options.rounding, generator)
    else:
        first, second = to_half(x, half), to_half(w, half)
    z = to_half(layer.function(first, second), half)
    with torch.enable_grad():
        saved = [to_half(first, half).requires_grad_(), to_half(second, half).requires_grad_()]
        dx, dw = torch.autograd.grad(layer.function(*saved), saved, to_half(g, half))
    return z, to_half(dw, half), to_half(dx, half)


class OneLayer(nn.Module):
    """A model of one operator whose output gradient is given: the loss is the product with it."""

    def __init__(self, layer: Layer, weight: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.layer.function(x, self.weight) * g).sum()


def operator_statistics(layer: Layer, x: Tensor, w: Tensor, g: Tensor) -> OperatorStatistics:
    """What the collector says about one operator."""
    model = OneLayer(layer, w)
    return collect_statistics(model, [(x.clone().requires_grad_(), g)]).operators[0]


def operator_rows(draws: int) -> Iterator[dict[str, object]]:
    """One row per case: ratio predicted / measured of each variance."""
    int8 = [
        ("INT8", NoiseOptions(rounding=r, activation_granularity=a, weight_granularity=c))
        for r, (a, c) in itertools.product(
            Rounding,
            (
                (Granularity.TENSOR, Granularity.TENSOR),
                (Granularity.TENSOR, Granularity.CHANNEL),
                (Granularity.ROW, Granularity.CHANNEL),
            ),
        )
    ]
    cases = [*int8, ("BF16", NoiseOptions()), ("FP16", NoiseOptions())]
    for number, (layer, (data, make)) in enumerate(itertools.product(LAYERS, DATA.items())):
        generator = torch.Generator().manual_seed(number)
        x = make(layer.first, generator)
        w = torch.randn(layer.second, generator=generator) * 0.05
        shape = layer.function(x, w).shape
        # Gradients whose size differs from row to row, as tokens' do.
        g = torch.randn(shape, generator=generator) * torch.exp(
            torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator)
        )
        statistics = operator_statistics(layer, x, w, g)
        exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
        exact = layer.function(exact_x, exact_w)
        exact_dx, exact_dw = torch.autograd.grad(exact, (exact_x, exact_w), g.double())
        for precision, options in cases:
            repeats = draws if precision == "INT8" and options.rounding is Rounding.STOCHASTIC else 1
            totals = [0.0, 0.0, 0.0]
            for _ in range(repeats):
                results = emulate(layer, x.double(), w.double(), g.double(), precision, options, generator)
                for i, (result, truth) in enumerate(zip(results, (exact, exact_dw, exact_dx), strict=True)):
                    totals[i] += float((result - truth.detach()).square().sum()) / repeats
            found = variances(statistics, precision, FORMATS[precision], options)
            predicted = (found.output, found.second_gradient, found.first_gradient)
            ratios = [p.total / t for p, t in zip(predicted, totals, strict=True) if p is not None]
            granular = f"{options.activation_granularity}/{options.weight_granularity}" if precision == "INT8" else "-"
            yield {
                "operator": layer.name,
                "data": data,
                "precision": precision,
                "granularity": granular,
                "rounding": str(options.rounding) if precision == "INT8" else "nearest",
                "output": ratios[0],
                "weight_gradient": ratios[1],
                "input_gradient": ratios[2],
            }
