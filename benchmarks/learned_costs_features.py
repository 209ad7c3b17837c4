"""Features of programs on devices for the peers of learned costs: one row of numbers without units per program.

Times enter as multiples of the device's launch time, bytes as multiples of its cache, rates as ratios, so that a
device described in other units gives the same row. Sums over leaves are exact, and of the sizes those of the leaf with
the most work count, so that the order of leaves does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned import CostRecord, DeviceVector, LeafKind, Phase, Program
from qsync_opt.numerics import FORMATS

Matrix = NDArray[np.float64]
_PRECISIONS = tuple(sorted(name for name, form in FORMATS.items() if not form.eight_bit_backward))
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
    """Names of the columns of `features_of`."""
    return (*_NAMES, *(f"family {family}" for family in families))


class Features(NamedTuple):
    """Features of N programs, shape (N, F), with the reference and the roofline of each in nanoseconds, shape (N,)."""

    matrix_NF: Matrix
    reference_N: Matrix
    floor_N: Matrix


def features_of(programs: Sequence[Program], devices: Sequence[DeviceVector], families: Sequence[str]) -> Features:
    """Features of programs, each on its device.

    Args:
        programs: N programs.
        devices: N devices.
        families: Kinds of operators with a column of their own; of others these columns are all zero.
    """
    known = {family: len(_NAMES) + i for i, family in enumerate(families)}
    matrix = np.zeros((len(programs), len(_NAMES) + len(families)))
    of_device = {id(device): _device_row(device) for device in {id(device): device for device in devices}.values()}
    rows, references, floors = [], [], []
    for i, (program, device) in enumerate(zip(programs, devices, strict=True)):
        row, reference, floor = _program_row(program, device)
        rows.append([*row, *of_device[id(device)][program.precision]])
        references.append(reference)
        floors.append(floor)
        if (column := known.get(program.family)) is not None:
            matrix[i, column] = 1.0
    if rows:
        matrix[:, : len(_NAMES)] = rows
    return Features(matrix, np.array(references), np.array(floors))


_PHASE_ROWS = {phase: [float(phase is other) for other in Phase] for phase in Phase}
_PRECISION_ROWS = {name: [float(name == other) for other in _PRECISIONS] for name in _PRECISIONS}
_KINDS = tuple(str(kind) for kind in LeafKind)


def _program_row(program: Program, device: DeviceVector) -> tuple[list[float], float, float]:
    """Features of one program beside its device's, its reference and its roofline."""
    log, launch = math.log, device.launch_ns
    leaves = program.leaves
    by_kind: dict[str, list[float]] = {}
    computed_ns: list[float] = []
    for leaf in leaves:
        computed = 1e9 * leaf.flops / device.peak(leaf.number_format) if leaf.flops else 0.0
        computed_ns.append(computed)
        by_kind.setdefault(leaf.kind, []).append(max(computed, device.moved_ns(leaf.num_bytes)))
    moved = math.fsum(leaf.num_bytes for leaf in leaves)
    computed = math.fsum(computed_ns)
    moved_ns = device.moved_ns(moved)
    floor = max(computed, moved_ns)
    reference = floor + launch * max(1, len(leaves))
    sizes = (1, 1, 1, 1)
    if leaves:
        *_, batch, rows, columns, depth = max(
            (leaf.flops, leaf.num_bytes, leaf.batch, leaf.rows, leaf.columns, leaf.depth) for leaf in leaves
        )
        sizes = int(batch), int(rows), int(columns), int(depth)
    tiles = sizes[0] * -(-sizes[1] // _TILE) * -(-sizes[2] // _TILE)
    row = [
        *_PHASE_ROWS[program.phase],
        *_PRECISION_ROWS[program.precision],
        *(math.log1p(math.fsum(by_kind[kind]) / launch) if kind in by_kind else 0.0 for kind in _KINDS),
        log(floor / launch + _SMALL),
        log(computed / launch + _SMALL),
        log(moved_ns / launch + _SMALL),
        log(reference / launch),
        log(moved / device.cache_bytes + _SMALL),
        float(len(leaves)),
        log(max(1, program.elements)),
        *map(log, sizes),
        *map(_oddness, sizes[1:]),
        log(tiles / device.multiprocessors),
    ]
    return row, reference, floor


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


class FeatureRows:
    """A record as features (N, F), references (N,) in nanoseconds, and targets log(time / reference)."""

    def __init__(self, record: CostRecord, families: Sequence[str]) -> None:
        triples = list(record.programs())
        features = features_of([program for program, _, _ in triples], [device for _, device, _ in triples], families)
        self.matrix = features.matrix_NF
        self.reference = features.reference_N
        ns = np.maximum(features.floor_N, [float(sample.ns) for _, _, sample in triples])
        self.target: Matrix = np.log(ns / self.reference)


def trees_ns(train: CostRecord, test: CostRecord) -> Matrix:
    """Times (N,) by boosted trees that are fitted to the logarithm with absolute errors."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    families = sorted({program.family for program, _, _ in train.programs()})
    rows, held = FeatureRows(train, families), FeatureRows(test, families)
    regressor = HistGradientBoostingRegressor(
        loss="absolute_error", max_iter=400, learning_rate=0.06, max_leaf_nodes=32, min_samples_leaf=5,
        l2_regularization=1e-3, early_stopping=False, random_state=0,
    )  # fmt: skip
    regressor.fit(rows.matrix, rows.target)
    return held.reference * np.exp(regressor.predict(held.matrix))
