"""Section convolution: the 53 convolutions of ResNet-50, batch 128, channels-last: INT8 forward beside cuDNN in BF16.

The INT8 kernel reads codes and writes BF16, scales fused; for the first layer its time includes folding the image. The
23 distinct shapes are timed; ``times`` says how often each occurs in the network. Also on a partition of 16
multiprocessors.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from measuring import median_eager_s, median_s
from torch import Tensor

from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.convolution import scaled_conv2d

BATCH = 128
WANTED = 1.3
PARTITION = 16
# What rotates between calls is at least this large, so that the cache of 60 MB holds none of it from the last turn.
ROTATED_BYTES = 200_000_000
# Input channels, output channels, kernel, stride, input size, times in the network.
SHAPES = (
    (3, 64, 7, 2, 224, 1),
    (64, 64, 1, 1, 56, 1),
    (64, 64, 3, 1, 56, 3),
    (64, 256, 1, 1, 56, 4),
    (256, 64, 1, 1, 56, 2),
    (256, 128, 1, 1, 56, 1),
    (128, 128, 3, 2, 56, 1),
    (128, 512, 1, 1, 28, 4),
    (256, 512, 1, 2, 56, 1),
    (512, 128, 1, 1, 28, 3),
    (128, 128, 3, 1, 28, 3),
    (512, 256, 1, 1, 28, 1),
    (256, 256, 3, 2, 28, 1),
    (256, 1024, 1, 1, 14, 6),
    (512, 1024, 1, 2, 28, 1),
    (1024, 256, 1, 1, 14, 5),
    (256, 256, 3, 1, 14, 5),
    (1024, 512, 1, 1, 14, 1),
    (512, 512, 3, 2, 14, 1),
    (512, 2048, 1, 1, 7, 3),
    (1024, 2048, 1, 2, 14, 1),
    (2048, 512, 1, 1, 7, 2),
    (512, 512, 3, 1, 7, 2),
)


def _rotating(function: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> Callable[[], None]:
    """A call per input in turn, results kept as long as the others rotate, so that each has memory of its own."""
    turns, kept = itertools.cycle(inputs), collections.deque[Tensor](maxlen=len(inputs))

    def call() -> None:
        kept.append(function(next(turns)))

    return call


class _Case:
    """One shape: inputs that rotate, and the implementations as functions of an input."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        c, k, r, stride, size, self.times = shape
        self.geometry: dict[str, Any] = {"stride": (stride, stride), "padding": (r // 2, r // 2)}
        p = (size + 2 * (r // 2) - r) // stride + 1
        moved = BATCH * (size * size * c + p * p * k * 2)
        sets = min(12, max(2, -(-ROTATED_BYTES // moved)))
        generator = torch.Generator("cuda").manual_seed(1)
        draw = functools.partial(torch.randint, -127, 128, device="cuda", dtype=torch.int8, generator=generator)
        self.codes = [draw((BATCH, size, size, c)).permute(0, 3, 1, 2) for _ in range(sets)]
        self.weight = draw((k, r, r, c)).permute(0, 3, 1, 2)
        self.x_scale, self.weight_scale = torch.rand(1, device="cuda") / 100, torch.rand(k, device="cuda") / 100
        self.bias = torch.randn(k, device="cuda")
        self.halves = [x.to(torch.bfloat16, memory_format=torch.channels_last) for x in self.codes]
        self.half_weight = self.weight.to(torch.bfloat16, memory_format=torch.channels_last)
        self.multiplications = BATCH * p * p * k * c * r * r
        self.int8_bytes = BATCH * (size * size * c // (stride * stride if r == 1 else 1) + p * p * k * 2)
        self.facts = {"c": c, "k": k, "kernel": r, "stride": stride, "size": size, "batch": BATCH, "times": self.times}

    def int8(self, x: Tensor, activation: str = "none") -> Tensor:
        bias = self.bias if activation == "relu" else None
        return scaled_conv2d(
            x, self.weight, self.x_scale, self.weight_scale, bias, activation=activation, **self.geometry
        )

    def cudnn(self, x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, self.half_weight, **self.geometry)

    def check(self) -> None:
        """Three images bit for bit against FP64 sums: a wrong kernel is not timed."""
        chosen = torch.tensor([0, BATCH // 2 + 13, BATCH - 1], device="cuda")
        sums = torch.nn.functional.conv2d(self.codes[0][chosen].double(), self.weight.double(), **self.geometry)
        scale = (self.x_scale * self.weight_scale).view(1, -1, 1, 1)
        expected = (sums.float() * scale + self.bias.view(1, -1, 1, 1)).relu().to(torch.bfloat16)
        if not torch.equal(self.int8(self.codes[0], "relu")[chosen], expected):
            raise SystemExit(f"scaled_conv2d is wrong on {self.facts}")


def _case_records(shape: tuple[int, ...], time: Callable[..., float], device: str) -> list[dict[str, Any]]:
    case = _Case(shape)
    case.check()
    calls = len(case.codes) * max(1, 12 // len(case.codes))
    seconds = {
        "cuDNN BF16": time(_rotating(case.cudnn, case.halves), calls),
        "qsync_opt INT8": time(_rotating(case.int8, case.codes), calls),
        "qsync_opt INT8, bias, ReLU": time(
            _rotating(functools.partial(case.int8, activation="relu"), case.codes), calls
        ),
    }
    return [
        {
            **case.facts,
            "device": device,
            "implementation": name,
            "seconds": value,
            "ops_per_s": 2 * case.multiplications / value,
            "ratio": seconds["cuDNN BF16"] / value,
            **({"bytes_per_s": case.int8_bytes / value} if "INT8" in name else {}),
        }
        for name, value in seconds.items()
    ]


def _summary(records: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    found = []
    for name in ("qsync_opt INT8", "qsync_opt INT8, bias, ReLU"):
        ours = [r for r in records if r["implementation"] == name]
        logs, times = [math.log(r["ratio"]) for r in ours], [r["times"] for r in ours]
        found.append(
            {
                "device": device,
                "implementation": name,
                "against": "cuDNN BF16 channels-last",
                "geometric_mean_of_23_shapes": math.exp(sum(logs) / len(logs)),
                "geometric_mean_of_53_layers": math.exp(
                    sum(log * n for log, n in zip(logs, times, strict=True)) / sum(times)
                ),
                "least": min(r["ratio"] for r in ours),
                "wanted": WANTED,
            }
        )
    return found


def _on_partition(shapes: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    device = f"{PARTITION} of the card's multiprocessors"
    context = torch.cuda.GreenContext.create(num_sms=PARTITION, device_id=0)
    torch.cuda.synchronize()
    with torch.cuda.stream(context.Stream()):
        records = [record for shape in shapes for record in _case_records(shape, median_eager_s, device)]
    torch.cuda.synchronize()
    return records + _summary(records, device)


def records(quick: bool) -> list[dict[str, Any]]:
    """One record per shape and implementation, and the geometric means."""
    if not library.activate("convolution"):
        raise SystemExit(f"the compiled convolution does not run here: {library.reason('convolution')}")
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        found = [record for shape in SHAPES for record in _case_records(shape, median_s, "whole card")]
        found += _summary(found, "whole card")
        if not quick:
            found += _on_partition(SHAPES)
    finally:
        torch.backends.cudnn.benchmark = before
    return found
