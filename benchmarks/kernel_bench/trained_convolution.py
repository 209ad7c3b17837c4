"""Section trained_convolution: training steps of single convolutions of ResNet-50, quantization included, beside BF16.

Forward and backward of one layer at batch 128, channels-last, from BF16 activations and FP32 weights. The backward pass
of INT8 runs in cuDNN in BF16, or with INT8 gradients: input gradients and weight gradients of 1 x 1 by our kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from measuring import median_s
from torch import Tensor

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.compilation import library

BATCH = 128
# Input channels, output channels, kernel, stride, input size.
LAYERS = (
    (64, 64, 3, 1, 56),
    (64, 256, 1, 1, 56),
    (128, 512, 1, 1, 28),
    (256, 256, 3, 2, 28),
    (256, 1024, 1, 1, 14),
    (256, 256, 3, 1, 14),
    (512, 512, 3, 1, 7),
)
# Implementation, precision and options of a layer.
TRAINED: dict[str, tuple[str, dict[str, str]]] = {
    "BF16": ("BF16", {}),
    "INT8": ("INT8", {}),
    "INT8, gradients in INT8": ("INT8", {"backward": "eight", "weight_granularity": "tensor"}),
}


def _layer_records(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Forward and backward of one layer from BF16 activations and FP32 weights, quantization included."""
    c, k, r, stride, size = shape
    make = functools.partial(torch.randn, device="cuda")
    x = make(BATCH, c, size, size).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    weight = make(k, c, r, r).to(memory_format=torch.channels_last).requires_grad_()
    geometry = {"stride": stride, "padding": r // 2}

    def step(name: str, grad: Tensor) -> None:
        precision, fields = TRAINED[name]
        options = KernelOptions(**fields)  # type: ignore[arg-type]
        ops.execute("conv2d", precision, torch.nn.functional.conv2d, (x, weight), geometry, options).backward(grad)
        x.grad = weight.grad = None

    p = (size + 2 * (r // 2) - r) // stride + 1
    grad = make(BATCH, k, p, p).to(torch.bfloat16, memory_format=torch.channels_last)
    seconds = {name: median_s(functools.partial(step, name, grad), calls=4) for name in TRAINED}
    facts = {"c": c, "k": k, "kernel": r, "stride": stride, "size": size, "batch": BATCH}
    return [
        {
            **facts,
            "implementation": f"layer, forward and backward, {name}",
            "seconds": value,
            "ratio": seconds["BF16"] / value,
        }
        for name, value in seconds.items()
    ]


def records(quick: bool) -> Iterator[dict[str, Any]]:
    """Records of every layer and implementation, as they are measured."""
    for unit in ("quantize", "matmul", "convolution"):
        if not library.activate(unit):
            raise SystemExit(f"the compiled kernels do not run here: {library.reason(unit)}")
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        for shape in LAYERS[: 2 if quick else None]:
            yield from _layer_records(shape)
    finally:
        torch.backends.cudnn.benchmark = before
