"""Section quantize: bandwidth of the quantizers as a share of a copy's, beside torch.compile of the eager formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring import copy_bandwidth, median_s

from qsync_opt.kernels import library
from qsync_opt.kernels.formats import amax, format_of, scale_from
from qsync_opt.kernels.quantize_ops import UNIT, dequantize_matrix, quantize_matrix

SHAPE = (16384, 4096)
FORMATS = {"INT8": torch.int8, "FP8 E4M3": torch.float8_e4m3fn, "FP8 E5M2": torch.float8_e5m2}
SOURCES = {"FP32": torch.float32, "BF16": torch.bfloat16}
# Share of the copy bandwidth that is asked for.
WANTED = {"row": 0.80, "tensor": 0.75}


def _eager(x: torch.Tensor, format: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest rounding by the formula: what a user would write."""
    form = format_of(format)
    dims = {"tensor": None, "row": (1,), "channel": (0,)}[granularity]
    scale = scale_from(amax(x, dims), form)
    scaled = x.float() * scale.reciprocal()
    if format is torch.int8:
        return scaled.round().clamp(-form.largest, form.largest).to(torch.int8), scale
    return scaled.clamp(-form.largest, form.largest).to(format), scale


def _bytes(x: torch.Tensor, granularity: str, transposed: bool) -> int:
    passes = 1 if granularity in ("row", "block") and not transposed else 2
    return x.numel() * (passes * x.element_size() + 1 + int(transposed))


def records(quick: bool) -> list[dict[str, Any]]:
    """One record per source, format, granularity, rounding and implementation."""
    if not library.activate(UNIT):
        raise SystemExit(f"the compiled quantizers do not run here: {library.reason(UNIT)}")
    copy = copy_bandwidth()
    found: list[dict[str, Any]] = [{"implementation": "device copy", "bytes_per_s": copy}]

    def add(function: Callable[[], Any], moved: int, **facts: Any) -> None:
        seconds = median_s(function)
        share = moved / seconds / copy
        found.append({"shape": SHAPE, **facts, "seconds": seconds, "bytes": moved, "share_of_copy": share})

    for source, dtype in SOURCES.items():
        x = torch.randn(SHAPE, device="cuda").to(dtype)
        for name, format in FORMATS.items():
            for granularity in ("row", "tensor", "channel", "block"):
                for rounding in ("nearest", "stochastic"):
                    for transposed in (False, True):
                        if transposed and (granularity == "block" or quick):
                            continue
                        add(
                            lambda: quantize_matrix(
                                x, format, granularity=granularity, rounding=rounding, transposed=transposed, key=1
                            ),
                            _bytes(x, granularity, transposed),
                            implementation="qsync_opt",
                            source=source,
                            format=name,
                            granularity=granularity,
                            rounding=rounding,
                            transposed=transposed,
                            wanted_share=None if transposed else WANTED.get(granularity),
                        )
                if granularity in ("row", "tensor") and not quick:
                    compiled = torch.compile(_eager, dynamic=False)
                    add(
                        lambda: compiled(x, format, granularity),
                        _bytes(x, granularity, False),
                        implementation="torch.compile of the formula",
                        source=source,
                        format=name,
                        granularity=granularity,
                        rounding="nearest",
                        transposed=False,
                    )
            codes, scale, _ = quantize_matrix(x, format, granularity="row")
            add(
                lambda: dequantize_matrix(codes, scale, dtype),
                x.numel() * (1 + x.element_size()),
                implementation="qsync_opt dequantize",
                source=source,
                format=name,
                granularity="row",
            )
    return found
