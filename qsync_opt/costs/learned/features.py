"""Features of programs on devices: one row of numbers without units per program.

Times enter as multiples of the device's launch time, bytes as multiples of its cache, rates as ratios, so that a
device described in other units gives the same row. Sums over leaves are exact, and of the sizes those of the leaf with
the most work count, so that the order of leaves does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.devices import DeviceVector, reference_ns
from qsync_opt.costs.learned.programs import LeafKind, Phase, Program
from qsync_opt.numerics import FORMATS

FEATURE_VERSION = 1
"""Changes with the meaning of any feature; models of another version are refused."""
Matrix = NDArray[np.float64]
_PRECISIONS = tuple(sorted(FORMATS))
_SMALL = 1e-3
_NAMES = (
    *(f"phase {phase}" for phase in Phase),
    *(f"precision {name}" for name in _PRECISIONS),
    *(f"time of {kind}" for kind in LeafKind),
    "roofline", "operations", "bytes", "reference", "bytes in cache", "leaves", "elements",
    "batch", "rows", "columns", "depth", "odd rows", "odd columns", "odd depth", "tiles per multiprocessor",
    "peak over FP32", "operations per byte", "time to fill the cache", "cache over memory", "multiprocessors",
    "is cuda",
)  # fmt: skip
_TILE = 64


def feature_names(families: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns of `feature_matrix`."""
    return (*_NAMES, *(f"family {family}" for family in families))


def feature_matrix(programs: Sequence[Program], devices: Sequence[DeviceVector], families: Sequence[str]) -> Matrix:
    """Features of programs, each on its device.

    Args:
        programs: N programs.
        devices: N devices.
        families: Kinds of operators with a column of their own; of others these columns are all zero.

    Returns:
        Shape (N, number of `feature_names`), without unit.
    """
    known = {family: len(_NAMES) + i for i, family in enumerate(families)}
    matrix = np.zeros((len(programs), len(_NAMES) + len(families)))
    of_device = {id(device): _device_row(device) for device in {id(device): device for device in devices}.values()}
    for i, (program, device) in enumerate(zip(programs, devices, strict=True)):
        matrix[i, : len(_NAMES)] = (*_program_row(program, device), *of_device[id(device)][program.precision])
        if (column := known.get(program.family)) is not None:
            matrix[i, column] = 1.0
    return matrix


_PHASE_ROWS = {phase: [float(phase is other) for other in Phase] for phase in Phase}
_PRECISION_ROWS = {name: [float(name == other) for other in _PRECISIONS] for name in _PRECISIONS}
_KIND_COLUMN = {kind: i for i, kind in enumerate(LeafKind)}


def _program_row(program: Program, device: DeviceVector) -> list[float]:
    log, launch = math.log, device.launch_ns
    leaves = program.leaves
    by_kind: list[list[float]] = [[] for _ in _KIND_COLUMN]
    for leaf in leaves:
        computed = 1e9 * leaf.flops / device.peak(leaf.number_format) if leaf.flops else 0.0
        by_kind[_KIND_COLUMN[leaf.kind]].append(max(computed, device.moved_ns(leaf.num_bytes)))
    moved = math.fsum(leaf.num_bytes for leaf in leaves)
    computed = math.fsum(1e9 * leaf.flops / device.peak(leaf.number_format) for leaf in leaves if leaf.flops)
    moved_ns = device.moved_ns(moved)
    main = max(leaves, key=lambda x: (x.flops, x.num_bytes, x.batch, x.rows, x.columns, x.depth), default=None)
    sizes = (1, 1, 1, 1) if main is None else (main.batch, main.rows, main.columns, main.depth)
    tiles = sizes[0] * -(-sizes[1] // _TILE) * -(-sizes[2] // _TILE)
    return [
        *_PHASE_ROWS[program.phase],
        *_PRECISION_ROWS[program.precision],
        *(math.log1p(math.fsum(times) / launch) for times in by_kind),
        log(max(computed, moved_ns) / launch + _SMALL),
        log(computed / launch + _SMALL),
        log(moved_ns / launch + _SMALL),
        log(reference_ns(program, device) / launch),
        log(moved / device.cache_bytes + _SMALL),
        float(len(leaves)),
        log(max(1, program.elements)),
        *(log(size) for size in sizes),
        *(_oddness(size) for size in sizes[1:]),
        log(tiles / device.multiprocessors),
    ]


def _oddness(size: int) -> float:
    """How far a size is from a multiple of 64, in halvings: 0 for multiples, 6 for odd numbers."""
    return 6.0 - math.log2(math.gcd(size, _TILE))


def _device_row(device: DeviceVector) -> dict[str, list[float]]:
    log = math.log
    rest = [
        log(1e9 * device.cache_bytes / device.bandwidth_bytes_per_s / device.launch_ns),
        log(device.cache_bytes_per_s / device.bandwidth_bytes_per_s),
        log(device.multiprocessors),
        float(device.kind == "cuda"),
    ]
    rows = {}
    for name in _PRECISIONS:
        # Data movement and casts occur in formats that a device has no products in.
        peak = device.peak_flops.get(name, device.peak_flops["FP32"])
        ratios = [log(peak / device.peak_flops["FP32"]), log(peak / device.bandwidth_bytes_per_s)]
        rows[name] = [*ratios, *rest]
    return rows
