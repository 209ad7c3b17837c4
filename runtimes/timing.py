"""Measuring in every runtime: pairs and sizes of casts, and medians of repeated rounds.

Disturbances on a shared machine only lengthen times, and come in bursts that can cover a whole round. So the rounds
with the lowest medians count, once two of them agree.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qsync_opt.model import OpGraph, TensorSpec
from qsync_opt.numerics import PrecisionFormats

_LOGGER = logging.getLogger(__name__)
MAX_SIZES = 6
"""Sizes that a cast is measured at: the smallest, the largest, and some between."""
MAX_ROUNDS = 6
AGREEMENT = 0.04
"""Relative distance within which two rounds agree."""
RESOLUTION_NS = 1000.0
"""Distance below which they agree in any case."""
BUSY = 0.15
"""Distance of the two lowest of all rounds, and share of measurements with such a distance, that is worth a warning."""


def cast_pairs(formats: Mapping[str, PrecisionFormats]) -> tuple[tuple[str, str], ...]:
    """Pairs of unlike formats that can meet on an edge, forward or backward."""
    forward = [(borders.output, precision) for borders in formats.values() for precision in formats]
    backward = [(v.gradient_output, u.gradient_input) for v in formats.values() for u in formats.values()]
    return tuple(dict.fromkeys((a, b) for a, b in (*forward, *backward) if a != b))


def edge_sizes(graph: OpGraph) -> tuple[TensorSpec, ...]:
    """Results of the graph to measure casts on: real shapes, their sizes spread over the range that edges have."""
    read = {source for operator in graph for source in operator.inputs}
    by_size: dict[int, TensorSpec] = {}
    for operator in graph:
        if operator.name in read:
            for spec in operator.output_specs:
                if spec.is_floating and spec.elements:
                    by_size.setdefault(spec.elements, spec)
    sizes = sorted(by_size)
    if len(sizes) > MAX_SIZES:
        sizes = [sizes[round(i * (len(sizes) - 1) / (MAX_SIZES - 1))] for i in range(MAX_SIZES)]
    return tuple(by_size[size] for size in sizes)


@dataclass(slots=True)
class Rounds:
    """The rounds of one measurement: until when they may start, and how they went.

    Attributes:
        deadline: Value of ``time.monotonic()`` after which no round starts but the first.
        run_s: Seconds of one run, as `runs` was told.
        was_cut: Whether the deadline ended the measurement early.
        disagreement: Relative distance of the two lowest medians where no two rounds agreed, else 0.
    """

    deadline: float = math.inf
    run_s: float = 0.0
    was_cut: bool = False
    disagreement: float = 0.0

    def runs(self, wanted: int, run_s: float) -> int:
        """Runs per round, at most ``wanted`` and at least 1, so that a first round and two that count fit."""
        self.run_s = run_s
        fitting = (self.deadline - time.monotonic()) / max(3 * run_s, 1e-9)
        if fitting >= wanted:
            return wanted
        self.was_cut = True
        return max(1, int(fitting))

    def medians(self, run_round: Callable[[], Sequence[Sequence[float]]]) -> tuple[float, ...]:
        """As `steady_medians`; at the deadline the rounds so far count."""
        columns: list[list[float]] = []
        for rounds in range(1, MAX_ROUNDS + 1):
            medians = [statistics.median(column) for column in zip(*run_round(), strict=True)]
            columns = columns or [[] for _ in medians]
            for column, value in zip(columns, medians, strict=True):
                column.append(value)
                column.sort()
            if rounds >= 2 and all(_agree(column[0], column[1]) for column in columns):
                break
            if time.monotonic() > self.deadline:
                self.was_cut = True
                break
        lowest = [(column[0], column[min(1, len(column) - 1)]) for column in columns]
        if rounds == MAX_ROUNDS:
            self.disagreement = max(0.0, *((high - low) / high for low, high in lowest if not _agree(low, high)), 0.0)
        return tuple((low + high) / 2 for low, high in lowest)


def steady_medians(run_round: Callable[[], Sequence[Sequence[float]]]) -> tuple[float, ...]:
    """Run rounds until, in every column, the two lowest medians agree, at most `MAX_ROUNDS` of them.

    Args:
        run_round: Runs one round; returns one row of times in nanoseconds per repetition, with equal columns.

    Returns:
        For each column the mean of the two lowest medians.

    Source: ours.
    """
    return Rounds().medians(run_round)


def _agree(low: float, high: float) -> bool:
    return high - low <= max(RESOLUTION_NS, AGREEMENT * abs(high))


def warn_if_busy(apart: Mapping[str, float], total: int) -> None:
    """Log a warning where many of ``total`` measurements did not settle, which are then as long as others made them.

    Args:
        apart: What was measured to the relative distance of its two lowest rounds, as far as there were two.
        total: Number of measurements.
    """
    unsettled = {label: distance for label, distance in apart.items() if distance > BUSY}
    if len(unsettled) > BUSY * total:
        worst = max(unsettled, key=lambda label: unsettled[label])
        _LOGGER.warning(
            "the machine is busy: rounds of %d of %d measurements disagree, those of %r by %.0f %%; measure again when "
            "nothing else runs, or expect times that are too long",
            *(len(unsettled), total, worst, 100 * unsettled[worst]),
        )
