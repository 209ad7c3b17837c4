"""Terms of a program's time on a device: what launches, operations, rows, tiles and bytes would each take alone.

Every term is a time at a rate of the device, so that a device described in other units gives terms in these units.
Every term grows with every size of a program, and is a sum over leaves, whose order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.devices import DeviceVector
from qsync_opt.costs.learned.programs import LeafKind, Phase, Program

FEATURE_VERSION = 5
"""Changes with the meaning of any term; models of another version are refused."""
Matrix = NDArray[np.float64]
_WORK = (
    "operations", "operations in waves of tiles", "operations in small tiles",
    "elements of results", "elements of left operands", "elements of right operands",
    "bytes of products", "bytes of casts", "bytes of quantizations", "bytes of streams",
    "elements", "rows", "padded rows",
)  # fmt: skip
TERMS = (
    "launch", "launch per leaf", "launch per product", "launch per 256 steps of depth", *_WORK,
    *(f"bytes beyond 1/{part} of the cache" for part in (512, 32, 8, 2)), "bytes beyond twice the cache",
    *(f"{what}, not at full rate" for what in _WORK),
)  # fmt: skip
"""Names of the columns of `terms_of`."""
_CACHES = (1 / 512, 1 / 32, 1 / 8, 1 / 2, 2.0)
_SMALL = (8, 16, 32)
_TILE = 128
_STEPS = 256
_WORD = 4.0
_ROW = 16
_BYTES = {
    LeafKind.PRODUCT: 10, LeafKind.ATTENTION: 10, LeafKind.CAST: 11, LeafKind.QUANTIZE: 12, LeafKind.LOOKUP: 13,
    LeafKind.POINTWISE: 13, LeafKind.STREAM: 13, LeafKind.VIEW: 13,
}  # fmt: skip


def terms_of(programs: Sequence[Program], device: DeviceVector) -> Matrix:
    """Terms of N programs on a device in nanoseconds, shape (N, `TERMS`); a sum of them with weights is a time.

    Raises:
        ProblemError: The device has no peak for a precision of the programs.
    """
    return np.array([_row(program, device) for program in programs]).reshape(len(programs), len(TERMS))


def _row(program: Program, device: DeviceVector) -> list[float]:
    launch, byte_ns = device.launch_ns, 1e9 / device.bandwidth_bytes_per_s
    element_ns = 1e9 / device.peak("FP32")
    rows: list[list[float]] = []
    for leaf in program.leaves:
        row = [0.0] * (4 + len(_WORK))
        row[1] = launch
        column = _BYTES[leaf.kind] if program.phase is not Phase.CAST else _BYTES[LeafKind.STREAM]
        row[column] = leaf.num_bytes * byte_ns
        if leaf.kind.is_product:
            peak_ns = 1e9 / device.peak(leaf.number_format)
            sizes = leaf.rows, leaf.columns, leaf.depth
            tiles = leaf.batch * -(-leaf.rows // _TILE) * -(-leaf.columns // _TILE)
            # A wave, one tile per multiprocessor, takes as long when it is not full; within a tile, depth is serial.
            in_waves = -(-tiles // device.multiprocessors) * device.multiprocessors
            row[2:4] = leaf.batch * launch, leaf.depth * launch / _STEPS
            row[4:7] = (
                leaf.flops * peak_ns,
                2.0 * in_waves * _TILE * _TILE * leaf.depth * peak_ns,
                2.0 * leaf.batch * _padded(sizes, _SMALL) * peak_ns,
            )
            for k, (a, b) in enumerate(((0, 1), (0, 2), (2, 1))):
                row[7 + k] = leaf.batch * sizes[a] * sizes[b] * _WORD * byte_ns
        else:
            row[4] = leaf.flops * element_ns
            row[14] = leaf.rows * leaf.columns * element_ns
            if leaf.kind is not LeafKind.POINTWISE:  # whose elements may as well be in one row
                row[15] = leaf.rows * element_ns
                row[16] = leaf.rows * -(-leaf.columns // _ROW) * _ROW * element_ns
        rows.append(row)
    total = [math.fsum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * (4 + len(_WORK))
    total[0] = launch
    moved = program.num_bytes
    beyond = [max(0.0, moved - share * device.cache_bytes) * byte_ns for share in _CACHES]
    # Small work does not reach the full rate: time grows more slowly than it, from a launch on.
    return [*total, *beyond, *(math.sqrt(launch * ns) for ns in total[4:])]


def _padded(sizes: tuple[int, int, int], tile: tuple[int, int, int]) -> int:
    return math.prod(-(-size // part) * part for size, part in zip(sizes, tile, strict=True))
