"""Measurement of the fastest tile for a product, kept on disk for this machine's card."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qsync_opt.errors import NotReadyError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul.scaled import SCALE_BLOCK, scaled_mm
from qsync_opt.kernels.matmul.tiles import (
    Choice,
    ProductKind,
    activate,
    cache_file,
    kind_of,
    read_choices,
    remember,
    variants,
    write_choices,
)

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_GROUPS = (4, 8, 16, 32)
_SECOND_LEVEL_CACHES = 2  # inputs are spread over so many times the card's second-level cache
_MAX_SETS = 8
_SHORTLIST = 4


def tune(
    rows: int,
    columns: int,
    depth: int,
    *,
    codes: torch.dtype = torch.int8,
    b_codes: torch.dtype | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accurate: bool = False,
    batch: int = 1,
    keep: bool = True,
) -> list[tuple[float, Choice]]:
    """Measure every tile for a product on the current card and stream, and use the fastest from now on.

    Args:
        rows: Of the result.
        columns: Of the result.
        depth: Length of the contraction.
        codes: int8, float8_e4m3fn or float8_e5m2, of the first operand.
        b_codes: Of the second; None: the same.
        out_dtype: Of the result; 16-bit types share their choices.
        accurate: Whether FP8 blocks of 128 products are summed in FP32; block scales share these choices.
        batch: Matrices.
        keep: Whether to write the choice to the file that later processes read.

    Returns:
        Seconds per launch and choice, the fastest first. Inputs outgrow the second-level cache; launches are replayed
        from a CUDA graph.

    Raises:
        NotReadyError: The compiled products do not run here; the text says why.

    Source: ours.
    """
    if not activate():
        raise NotReadyError(f"cannot tune products: {library.reason('matmul')}")
    sets = operand_sets((batch, rows, columns, depth), codes, codes if b_codes is None else b_codes)
    kind = kind_of(sets[0][0], sets[0][1], out_dtype, promoting=accurate and codes is not torch.int8)
    launches = [functools.partial(scaled_mm, *operands, out_dtype=out_dtype, accurate=accurate) for operands in sets]
    first = rank(kind, launches, _candidates(kind), replays=3)
    groups = [replace(choice, group=group) for _, choice in first[:_SHORTLIST] for group in _GROUPS]
    final = rank(kind, launches, groups, replays=7)
    remember(kind, final[0][1])
    if keep:
        path = cache_file()
        known = read_choices(path) if path.is_file() else {}
        write_choices(path, {**known, kind: final[0][1]})
    return final + first


def operand_sets(
    shape: tuple[int, int, int, int], a_dtype: torch.dtype, b_dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Codes and scales for a product (batch, rows, columns, depth), as many as outgrow the second-level cache."""
    batch, rows, columns, depth = shape
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    one = batch * (rows + columns) * depth + 2 * batch * rows * columns
    count = max(1, min(_MAX_SETS, math.ceil(_SECOND_LEVEL_CACHES * cache / one)))
    lead = (batch,) if batch > 1 else ()
    return [
        (
            random_codes((*lead, rows, depth), a_dtype),
            random_codes((*lead, columns, depth), b_dtype),
            torch.rand((*lead, rows), device="cuda") * 1e-3,
            torch.rand((*lead, columns), device="cuda") * 1e-3,
        )
        for _ in range(count)
    ]


def random_codes(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Codes as quantizers write them: normal values, the largest near the end of the range."""
    x = torch.randn(shape, device="cuda")
    if dtype is torch.int8:
        return (x * 32).round_().clamp_(-127, 127).to(torch.int8)
    return (x * 96).clamp_(-448, 448).to(dtype)


def _candidates(kind: ProductKind) -> list[Choice]:
    blocks = math.ceil(kind.depth / SCALE_BLOCK)
    few = kind.batch * math.ceil(kind.rows / 128) * math.ceil(kind.columns / 128) < 4 * kind.multiprocessors
    splits = [s for s in _SPLITS if s == 1 or (few and s * 4 <= blocks)]
    return [Choice(variant=index, splits=s) for index in variants(kind.b, promoting=kind.promoting) for s in splits]


def rank(
    kind: ProductKind, launches: Sequence[Callable[[], object]], candidates: Sequence[Choice], replays: int
) -> list[tuple[float, Choice]]:
    """Median seconds of a launch with each choice, the fastest first; leaves the last one in use."""
    times = []
    for choice in candidates:
        remember(kind, choice)
        times.append((median_s(launches, replays), choice))
    return sorted(times, key=lambda entry: entry[0])


def median_s(launches: Sequence[Callable[[], object]], replays: int) -> float:
    """Median device time of one launch, seconds: over replays of a CUDA graph, which leave out the host."""
    for launch in launches:
        launch()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():  # which cannot be captured
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 1):  # the first brings the clocks up and is left out
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3)
    return statistics.median(times[1:]) / len(launches)
