"""Section layer: Linear-GELU-Linear forward and backward, compiled, all quantization included, beside BF16."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measuring import median_s
from torch import Tensor

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.autograd import feed_forward
from qsync_opt.kernels.compilation import library

# Tokens, model width, hidden width, and the speed-up over BF16 that is asked for.
SHAPES = ((16384, 4096, 16384, 1.6), (8192, 1024, 4096, 1.1))
MASTERS = {"BF16": torch.bfloat16, "FP32": torch.float32}
EIGHT = {"backward": "eight", "weight_granularity": "tensor"}
# As three operations: two linear layers through the door that plans use, and torch's GELU between them.
APART: dict[str, tuple[str, dict[str, str]]] = {
    "INT8, three operations": ("INT8", EIGHT),
    "FP8, three operations": ("FP8", EIGHT),
    "INT8 forward, BF16 backward, three operations": ("INT8", {}),
}
# As one operation: kernels/autograd/feed_forward_block.py.
WHOLE = {"INT8, one operation": "INT8", "FP8, one operation": "FP8"}

Linear = Callable[[Tensor, Tensor], Tensor]
Network = Callable[[Tensor, Tensor, Tensor], Tensor]


def _half(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def _eight(precision: str, options: KernelOptions, x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = ops.execute("linear", precision, F.linear, (x, weight), {}, options)
    return result


def _apart(linear: Linear) -> Network:
    return lambda x, first, second: linear(F.gelu(linear(x, first)), second)


def _whole(precision: str, options: KernelOptions) -> Network:
    return lambda x, first, second: feed_forward(x, first, None, second, None, precision, options)


def _step(network: Network) -> Callable[..., tuple[Tensor, ...]]:
    compiled = torch.compile(network, dynamic=False, fullgraph=True)

    def run(x: Tensor, first: Tensor, second: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(x, first, second), (x, first, second), grad)

    return run


def _time(network: Network, shape: tuple[int, int, int], master: torch.dtype) -> float:
    tokens, width, hidden = shape
    torch.compiler.reset()
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    first = (torch.randn(hidden, width, device="cuda", dtype=master) * width**-0.5).requires_grad_()
    second = (torch.randn(width, hidden, device="cuda", dtype=master) * hidden**-0.5).requires_grad_()
    grad = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    return median_s(functools.partial(_step(network), x, first, second, grad), calls=2)


def _options(**fields: str) -> KernelOptions:
    return KernelOptions(step=torch.zeros(1, dtype=torch.int64, device="cuda"), **fields)  # type: ignore[arg-type]


def records(quick: bool) -> Iterator[dict[str, Any]]:
    """One record per shape, type of the weights and implementation, as they are measured."""
    for unit in ("quantize", "matmul"):
        if not library.activate(unit):
            raise SystemExit(f"the compiled kernels do not run here: {library.reason(unit)}")
    networks: dict[str, Network] = {}
    for name, (precision, fields) in APART.items():
        networks[name] = _apart(functools.partial(_eight, precision, _options(**fields)))
    for name, precision in WHOLE.items():
        networks[name] = _whole(precision, _options())
    for (tokens, width, hidden, wanted), master in itertools.product(SHAPES, ("BF16", "FP32")):
        if quick and master == "FP32":
            continue
        sizes, dtype = (tokens, width, hidden), MASTERS[master]
        half = _time(_apart(_half), sizes, dtype)
        facts = {"shape": sizes, "weights": master}
        yield {**facts, "implementation": "torch BF16", "seconds": half}
        for name, network in networks.items():
            seconds = _time(network, sizes, dtype)
            record = {**facts, "implementation": name, "seconds": seconds, "speed_up": half / seconds}
            yield {**record, "wanted_speed_up": wanted}
