"""Are the indicator's variances true? Predicted against measured.

Operators: variance of output, weight gradient and input gradient of single operators, for formats, granularities,
roundings, shapes and data of several kinds; measured with an independent quantizer in float64, and with the package's
kernels. Networks: increase of the whole gradient's variance when one operator of a small network runs in low precision
with the real kernels, at initialization and after some training; and of random plans, where the sum of sensitivities is
the prediction. Writes ``benchmarks/results/indicator.json``.

    python benchmarks/indicator_monte_carlo.py [--draws 24] [--output PATH]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from indicator_networks import network_rows, squared_distance
from torch import Tensor, nn

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.numerics import Granularity, PrecisionFormats, Rounding
from qsync_opt.runtimes.torch.interception import OperatorCall, intercept
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import NoiseOptions, OperatorStatistics, variances

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
    op_type: str
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
    Layer("linear 64x512x256", "linear", F.linear, (64, 512), (256, 512), (1,), (1,)),
    Layer("linear 8x16x48x96", "linear", F.linear, (8, 16, 48), (96, 48), (2,), (1,)),
    Layer("matmul 2x3x32x24x40", "matmul", torch.matmul, (2, 3, 32, 24), (2, 3, 24, 40), (3,), (2,), False),
    Layer(
        "conv2d 16->24 3x3 padding 1",
        "conv2d",
        lambda x, w: F.conv2d(x, w, padding=1),
        (4, 16, 12, 12),
        (24, 16, 3, 3),
        (1, 2, 3),
        (1, 2, 3),
    ),
    Layer(
        "conv2d 16->32 3x3 groups 4 stride 2 padding 2 dilation 2",
        "conv2d",
        lambda x, w: F.conv2d(x, w, stride=2, padding=2, dilation=2, groups=4),
        (4, 16, 13, 13),
        (32, 4, 3, 3),
        (1, 2, 3),
        (1, 2, 3),
    ),
    Layer(
        "conv1d 12->20 kernel 5",
        "conv1d",
        lambda x, w: F.conv1d(x, w, padding=2),
        (8, 12, 50),
        (20, 12, 5),
        (1, 2),
        (1, 2),
    ),
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

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        return (self.function(x, self.weight) * g).sum()


def run_kernel(
    model: OneLayer, x: Tensor, g: Tensor, precision: str, options: KernelOptions
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output and gradients (of w and x) as the package's kernels compute them."""
    outputs: list[Tensor] = []

    def handler(call: OperatorCall) -> Any:
        if call.op_type not in ops.ADJUSTABLE:
            return call.run()
        result = ops.execute(call.op_type, precision, call.function, call.args, call.kwargs, options)
        outputs.append(result.detach())
        return result

    inputs = [model.weight, *([x.requires_grad_()] if x.is_floating_point() else [])]
    with intercept(model, handler):
        gradients = torch.autograd.grad(model(x, g), inputs)
    return outputs[0], gradients[0], gradients[1] if len(gradients) > 1 else None


def cases() -> list[tuple[str, NoiseOptions]]:
    """Precisions with their options."""
    granular = (
        (Granularity.TENSOR, Granularity.TENSOR),
        (Granularity.TENSOR, Granularity.CHANNEL),
        (Granularity.ROW, Granularity.CHANNEL),
    )
    int8 = [
        ("INT8", NoiseOptions(rounding=rounding, activation_granularity=first, weight_granularity=second))
        for rounding, (first, second) in itertools.product(Rounding, granular)
    ]
    return [*int8, ("BF16", NoiseOptions()), ("FP16", NoiseOptions())]


def problem(layer: Layer, make: Callable[..., Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and output gradient, whose size differs from row to row, as tokens' do."""
    generator = torch.Generator().manual_seed(seed)
    x = make(layer.first, generator)
    w = torch.randn(layer.second, generator=generator) * 0.05
    shape = layer.function(x, w).shape
    size = torch.exp(torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator))
    return x, w, torch.randn(shape, generator=generator) * size


def row(name: str, data: str, precision: str, options: NoiseOptions, by: str, ratios: list[float]) -> dict[str, Any]:
    int8 = precision == "INT8"
    return {
        "operator": name,
        "data": data,
        "precision": precision,
        "granularity": f"{options.activation_granularity}/{options.weight_granularity}" if int8 else "-",
        "rounding": str(options.rounding) if int8 else "nearest",
        "measured_by": by,
        **dict(zip(("output", "weight_gradient", "input_gradient"), ratios, strict=False)),
    }


def ratios(statistics: OperatorStatistics, precision: str, options: NoiseOptions, measured: list[float]) -> list[float]:
    """Predicted over measured variance of output, weight gradient and input gradient."""
    found = variances(statistics, precision, FORMATS[precision], options)
    predicted = (found.output, found.second_gradient, found.first_gradient)
    return [p.total / m for p, m in zip(predicted, measured, strict=False) if p is not None]


def operator_rows(draws: int) -> Iterator[dict[str, Any]]:
    """One row per operator, data, precision and way of measuring."""
    for number, (layer, (data, make)) in enumerate(itertools.product(LAYERS, DATA.items())):
        x, w, g = problem(layer, make, number)
        model = OneLayer(layer.function, w)
        statistics = collect_statistics(model, [(x.clone().requires_grad_(), g)]).operators[0]
        exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
        z = layer.function(exact_x, exact_w)
        dx, dw = torch.autograd.grad(z, (exact_x, exact_w), g.double())
        truth = (z.detach(), dw, dx)
        generator = torch.Generator().manual_seed(1000 + number)
        for precision, options in cases():
            repeats = draws if precision == "INT8" and options.rounding is Rounding.STOCHASTIC else 1
            for by in ("mathematics", "kernels"):
                if by == "kernels" and not ops.supports(layer.op_type, precision, "cpu"):
                    continue
                totals = [0.0, 0.0, 0.0]
                for draw in range(repeats):
                    if by == "mathematics":
                        found = emulate(layer, x.double(), w.double(), g.double(), precision, options, generator)
                    else:
                        kernel = KernelOptions(
                            rounding=str(options.rounding),
                            activation_granularity=str(options.activation_granularity),
                            weight_granularity=str(options.weight_granularity),
                            offset=draw,
                        )
                        found = run_kernel(model, x.clone(), g, precision, kernel)
                    for i, (result, exact) in enumerate(zip(found, truth, strict=True)):
                        totals[i] += squared_distance(result, exact) / repeats
                yield row(layer.name, data, precision, options, by, ratios(statistics, precision, options, totals))


def embedding_rows() -> Iterator[dict[str, Any]]:
    """A lookup with frequent and rare rows, some of them padding."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn((500, 64), generator=generator)
    indices = (torch.rand((16, 32), generator=generator).pow(3) * 500).long()
    g = torch.randn((16, 32, 64), generator=generator)
    model = OneLayer(lambda i, w: F.embedding(i, w, padding_idx=0), table)
    statistics = collect_statistics(model, [(indices, g)]).operators[0]
    truth_dw = torch.autograd.grad(model(indices, g), model.weight)[0]
    z = table[indices]
    for precision in ("BF16", "FP16"):
        kept = to_half(g, precision) * (indices != 0).unsqueeze(-1)
        dw = torch.zeros_like(table).index_add_(0, indices.reshape(-1), kept.reshape(-1, 64))
        totals = [squared_distance(to_half(z, precision), z), squared_distance(dw, truth_dw)]
        found = ratios(statistics, precision, NoiseOptions(), totals)
        yield row("embedding 500x64", "normal", precision, NoiseOptions(), "mathematics", found)
        if ops.supports("embedding", precision, "cpu"):
            result = run_kernel(model, indices, g, precision, KernelOptions())
            totals = [squared_distance(result[0], z), squared_distance(result[1], truth_dw)]
            found = ratios(statistics, precision, NoiseOptions(), totals)
            yield row("embedding 500x64", "normal", precision, NoiseOptions(), "kernels", found)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines for people: range of the ratios per kind of case."""
    lines = []
    keys = ("precision", "granularity", "rounding", "data", "measured_by")
    for group in dict.fromkeys(tuple(r[k] for k in keys) for r in rows):
        members = [r for r in rows if tuple(r[k] for k in keys) == group]
        parts = []
        for result in ("output", "weight_gradient", "input_gradient"):
            values = [r[result] for r in members if result in r]
            if values:
                parts.append(f"{result} {min(values):.3f}-{max(values):.3f}")
        lines.append(f"{' '.join(group):55} {'  '.join(parts)}")
    return lines


def rounded(value: Any) -> Any:
    """Floats to four significant digits, so that the file can be read and compared."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=24, help="draws per stochastic case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    operators = [*operator_rows(arguments.draws), *embedding_rows()]
    for line in summary(operators):
        print(line)
    networks = []
    for found in network_rows(max(2, arguments.draws // 3)):
        networks.append(found)
        every, plans = found["all"], found["plans"]
        print(
            f"{found['network']:22}{found['training_steps']:3} steps {found['indicator']:10} n={every['cases']:3} "
            f"spearman {every['spearman']:.3f} ratio {every['ratio_median']:.2f} "
            f"({every['ratio_lowest']:.2g}-{every['ratio_highest']:.2g})  plans {plans['ratio_median']:.2f} "
            f"({plans['ratio_lowest']:.2g}-{plans['ratio_highest']:.2g})"
        )
    result = {
        "format": "qsync-indicator-check/1",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": platform.machine(),
        "draws": arguments.draws,
        "seconds": time.perf_counter() - started,
        "operators": operators,
        "networks": networks,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(result), indent=1, allow_nan=False)
    arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
