"""The core as paths through layers: one step per core node, one arc per label, one point per labels of open nodes.

A labelling of the core is a path from the first point to the last; an arc adds to the objective and to the rows. A
search represents a partial labelling by the point that it has reached and the amounts so far.

Axes: T steps, S points (of all steps; the last one is the end), K arcs (in order of their steps), R limit rows.
"""

import math
from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.core.core import Core
from qsync_opt.formulations.assignment.core.frontier import order_of, slots_of
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints

_MOST_ARCS = 4096
"""Arcs of one step; a core that needs more is not laid out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """A core laid out in steps.

    Attributes:
        node_T: Core node of each step.
        first_T1: First arc of each step, and the number of arcs.
        point_T1: First point of each step, and the end.
        source_K: Point that an arc leaves.
        target_K: Point that it reaches.
        label_K: Label that it stands for.
        objective_K: What it adds to the objective.
        rows_KR: What it adds to each row.
        excess_R: Rows of the core's base minus limits.
    """

    node_T: Ints
    first_T1: Ints
    point_T1: Ints
    source_K: Ints
    target_K: Ints
    label_K: Ints
    objective_K: Floats
    rows_KR: Ints
    excess_R: Ints

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.node_T)

    @property
    def num_points(self) -> int:
        """Number of points."""
        return int(self.point_T1[-1]) + 1

    @property
    def step_K(self) -> Ints:
        """Step of each arc."""
        return np.repeat(np.arange(self.num_steps), np.diff(self.first_T1))

    def keep(self, kept_K: Bools) -> "Layers":
        """The same layers with fewer arcs."""
        counts = np.bincount(self.step_K[kept_K], minlength=self.num_steps)
        return Layers(
            node_T=self.node_T, first_T1=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            point_T1=self.point_T1, source_K=self.source_K[kept_K], target_K=self.target_K[kept_K],
            label_K=self.label_K[kept_K], objective_K=self.objective_K[kept_K],
            rows_KR=np.ascontiguousarray(self.rows_KR[kept_K]), excess_R=self.excess_R,
        )  # fmt: skip


def lay_out(core: Core) -> Layers | None:
    """Layers of a core, its nodes in the order of the core search; None if some step would have too many arcs.

    Source: path decomposition; ours.
    """
    order = order_of(core)
    first, point = [0], [0]
    blocks: list[tuple[Ints, Ints, Ints, Floats, Ints]] = []
    for c, edges, kept, sizes in slots_of(core, order):
        node = core.nodes[c]
        num_labels = len(node.labels_A)
        if not sizes and not kept:
            objective, rows, label = node.objective_A, node.rows_AR, np.arange(num_labels)
            source = target = np.zeros(num_labels, dtype=np.int64)
            points = 1
        else:
            shape = (*sizes, num_labels)
            if len(shape) > _MOST_ARCS.bit_length() or math.prod(shape) > _MOST_ARCS:
                return None
            grid = np.indices(shape).reshape(len(shape), -1)
            label = grid[-1]
            objective, rows = node.objective_A[label], node.rows_AR[label]
            for slot, edge, is_first in edges:
                at = (label, grid[slot]) if is_first else (grid[slot], label)
                objective, rows = objective + edge.objective_AB[at], rows + edge.rows_ABR[at]
            source = np.arange(grid.shape[1]) // num_labels
            target = np.zeros(grid.shape[1], dtype=np.int64)
            for slot in kept:
                target = target * shape[slot] + grid[slot]
            points = math.prod(sizes)
        here = np.flatnonzero(np.isfinite(objective))
        blocks.append(
            (source[here] + point[-1], target[here] + point[-1] + points, label[here], objective[here], rows[here])
        )
        first.append(first[-1] + len(here))
        point.append(point[-1] + points)
    if not blocks:
        return None
    source_K, target_K, label_K, objective_K, rows_KR = (np.concatenate(part) for part in zip(*blocks, strict=True))
    return Layers(
        node_T=np.array(order, dtype=np.int64), first_T1=np.array(first, dtype=np.int64),
        point_T1=np.array(point, dtype=np.int64), source_K=source_K.astype(np.int64),
        target_K=target_K.astype(np.int64), label_K=label_K.astype(np.int64), objective_K=objective_K,
        rows_KR=np.ascontiguousarray(rows_KR), excess_R=core.excess_R,
    )  # fmt: skip
