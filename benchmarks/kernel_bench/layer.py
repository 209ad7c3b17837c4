"""Section layer: Linear-GELU-Linear forward and backward, compiled, all quantization included, beside BF16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import median_s
from torch import Tensor

from qsync_opt.kernels import library, ops
from qsync_opt.kernels.options import KernelOptions

# Tokens, model width, hidden width, and the speed-up over BF16 that is asked for.
SHAPES = ((16384, 4096, 16384, 1.6), (8192, 1024, 4096, 1.1))
EIGHT = {"backward": "eight", "weight_granularity": "tensor"}
OURS: dict[str, tuple[str, dict[str, str]]] = {
    "INT8": ("INT8", EIGHT),
    "FP8": ("FP8", EIGHT),
    "INT8, nearest": ("INT8", {**EIGHT, "rounding": "nearest"}),
    "INT8 forward, BF16 backward": ("INT8", {}),
}

Linear = Callable[[Tensor, Tensor], Tensor]


def _half(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _eight(precision: str, options: KernelOptions, x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = ops.execute("linear", precision, F.linear, (x, weight), {}, options)
    return result


def _step(linear: Linear) -> Callable[..., tuple[Tensor, ...]]:
    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return linear(F.gelu(linear(x, first)), second)

    compiled = torch.compile(forward, dynamic=False, fullgraph=True)

    def run(x: Tensor, first: Tensor, second: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(x, first, second), (x, first, second), grad)

    return run


def _time(linear: Linear, shape: tuple[int, int, int], master: torch.dtype) -> float:
    tokens, width, hidden = shape
    torch.compiler.reset()
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    first = (torch.randn(hidden, width, device="cuda", dtype=master) * width**-0.5).requires_grad_()
    second = (torch.randn(width, hidden, device="cuda", dtype=master) * hidden**-0.5).requires_grad_()
    grad = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    return median_s(functools.partial(_step(linear), x, first, second, grad), calls=2)


def records(quick: bool) -> list[dict[str, Any]]:
    """One record per shape, type of the weights and implementation."""
    for unit in ("quantize", "matmul"):
        if not library.activate(unit):
            raise SystemExit(f"the compiled kernels do not run here: {library.reason(unit)}")
    found = []
    for *shape, wanted in SHAPES:
        for name, master in (("BF16", torch.bfloat16), ("FP32", torch.float32)):
            if quick and name == "FP32":
                continue
            sizes = (shape[0], shape[1], shape[2])
            half = _time(_half, sizes, master)
            facts = {"shape": sizes, "weights": name}
            found.append({**facts, "implementation": "torch BF16", "seconds": half})
            for implementation, (precision, fields) in OURS.items():
                options = KernelOptions(step=torch.zeros(1, dtype=torch.int64, device="cuda"), **fields)  # type: ignore[arg-type]
                seconds = _time(functools.partial(_eight, precision, options), sizes, master)
                record = {**facts, "implementation": implementation, "seconds": seconds, "speed_up": half / seconds}
                found.append({**record, "wanted_speed_up": wanted})
    return found
