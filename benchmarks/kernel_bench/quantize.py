"""Section quantize: bandwidth of the quantizers as a share of a copy's, beside torch.compile of the eager formula.

Also on a partition of 16 multiprocessors, launched by the host, as a share of what a kernel there copies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from measuring import copy_bandwidth, kernel_copy_bandwidth, median_eager_s, median_s

from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.quantize import UNIT, amax, dequantize_matrix, format_of, quantize_matrix, scale_from

SHAPE = (16384, 4096)
FORMATS = {"INT8": torch.int8, "FP8 E4M3": torch.float8_e4m3fn, "FP8 E5M2": torch.float8_e5m2}
SOURCES = {"FP32": torch.float32, "BF16": torch.bfloat16}
# Share of the copy bandwidth that is asked for.
WANTED = {"row": 0.80, "tensor": 0.75}
PARTITION = 16


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


class _Section:
    """The records of this section while they are taken."""

    def __init__(self, multiprocessors: int | None = None) -> None:
        self.copy = copy_bandwidth() if multiprocessors is None else kernel_copy_bandwidth()
        # A graph belongs to the context in which it was captured: a partition's stream runs what the host launches.
        self.time = median_s if multiprocessors is None else median_eager_s
        self.place: dict[str, Any] = {} if multiprocessors is None else {"multiprocessors": multiprocessors}
        yardstick = "device copy" if multiprocessors is None else "copy by a kernel"
        self.records: list[dict[str, Any]] = [
            {**self.place, "implementation": yardstick, "bytes_per_s": self.copy},
        ]

    def add(self, function: Callable[[], Any], moved: int, **facts: Any) -> None:
        seconds = self.time(function)
        share = moved / seconds / self.copy
        self.records.append(
            {"shape": SHAPE, **self.place, **facts, "seconds": seconds, "bytes": moved, "share_of_copy": share}
        )


def _ours(section: _Section, x: torch.Tensor, name: str, granularity: str, quick: bool, facts: dict[str, Any]) -> None:
    for rounding, transposed in itertools.product(("nearest", "stochastic"), (False, True)):
        if transposed and (granularity == "block" or quick):
            continue
        choices = {"granularity": granularity, "rounding": rounding, "transposed": transposed}
        section.add(
            functools.partial(quantize_matrix, x, FORMATS[name], key=1, **choices),
            _bytes(x, granularity, transposed),
            implementation="qsync_opt",
            **facts,
            **choices,
            wanted_share=None if transposed else WANTED.get(granularity),
        )


def _formula(section: _Section, x: torch.Tensor, name: str, granularity: str, facts: dict[str, Any]) -> None:
    compiled = torch.compile(_eager, dynamic=False)
    section.add(
        functools.partial(compiled, x, FORMATS[name], granularity),
        _bytes(x, granularity, False),
        implementation="torch.compile of the formula",
        **facts,
        granularity=granularity,
        rounding="nearest",
        transposed=False,
    )


def _on_partition() -> list[dict[str, Any]]:
    context = torch.cuda.GreenContext.create(num_sms=PARTITION, device_id=0)
    with torch.cuda.stream(context.Stream()):
        section = _Section(PARTITION)
        for (source, dtype), name in itertools.product(SOURCES.items(), ("INT8", "FP8 E4M3")):
            x = torch.randn(SHAPE, device="cuda").to(dtype)
            for granularity in ("row", "tensor"):
                _ours(section, x, name, granularity, True, {"source": source, "format": name})
    return section.records


def records(quick: bool) -> list[dict[str, Any]]:
    """One record per source, format, granularity, rounding and implementation."""
    if not library.activate(UNIT):
        raise SystemExit(f"the compiled quantizers do not run here: {library.reason(UNIT)}")
    section = _Section()
    for (source, dtype), name in itertools.product(SOURCES.items(), FORMATS):
        x = torch.randn(SHAPE, device="cuda").to(dtype)
        facts = {"source": source, "format": name}
        for granularity in ("row", "tensor", "channel", "block"):
            _ours(section, x, name, granularity, quick, facts)
        for granularity in () if quick else ("row", "tensor"):
            _formula(section, x, name, granularity, facts)
        codes, scale, _ = quantize_matrix(x, FORMATS[name], granularity="row")
        section.add(
            functools.partial(dequantize_matrix, codes, scale, dtype),
            x.numel() * (1 + x.element_size()),
            implementation="qsync_opt dequantize",
            **facts,
            granularity="row",
        )
    return section.records if quick else [*section.records, *_on_partition()]
