"""The assignment problem as the linear programs of `ilp` see it: choices, products, shared loads, limits.

The neutral core for further formulations is the `assignment` package, which bounds and searches by itself. This second
description is kept apart on purpose: `ilp` and `textbook` are the independent check of that core, so they must not
share its reading of a problem, its reductions or its arithmetic. It also writes a shared load as one row, where the
core needs nodes for it, which is the tighter program. Nothing here knows what a precision is.

* A **choice** is a free decision between labels.
* A **product** looks at two earlier nodes, each through a grouping of its states into classes; its state is the pair
  of classes. Products carry what depends on two decisions at once (pairwise loads), and joins: nodes whose state
  follows from others.
* A **shared** load is paid once if any of its conditions holds, each a set of states of one node.
* A **limit** bounds the sum of some resources from above.

Axis letters: N nodes, S states of one node (labels of a choice; classes g and h of a product, g slow), R resources.
Loads are exact integers; costs are real and never negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A free decision: ``load_SR`` and ``cost_S`` by label."""

    name: str
    labels: tuple[str, ...]
    cost_S: Floats
    load_SR: Ints

    @property
    def num_states(self) -> int:
        """Number of labels."""
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The pair of a class of node ``left`` and a class of node ``right`` (indices of earlier nodes).

    ``left_class_S`` maps each state of the left node to its class, 0-based without holes; likewise right. State
    ``g * num_right + h`` stands for classes g and h.
    """

    name: str
    left: int
    left_class_S: Ints
    right: int
    right_class_S: Ints
    cost_S: Floats
    load_SR: Ints

    @property
    def num_left(self) -> int:
        """Number of classes on the left."""
        return int(self.left_class_S.max()) + 1

    @property
    def num_right(self) -> int:
        """Number of classes on the right."""
        return int(self.right_class_S.max()) + 1

    @property
    def num_states(self) -> int:
        """Number of class pairs."""
        return self.num_left * self.num_right


Node = Choice | Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """True when node ``node`` is in a state of ``mask_S``."""

    node: int
    mask_S: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """``load_R`` (never negative), paid once if any condition holds."""

    name: str
    conditions: tuple[Condition, ...]
    load_R: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The sum of ``resources`` (indices) is at most ``bound``."""

    name: str
    resources: tuple[int, ...]
    bound: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The whole: nodes in order (a product stands after the nodes it looks at), constants, shared loads, limits."""

    name: str
    resources: tuple[str, ...]
    nodes: tuple[Node, ...]
    shared: tuple[Shared, ...]
    limits: tuple[Limit, ...]
    constant_R: Ints
    constant_cost: float

    @property
    def choices(self) -> tuple[tuple[int, Choice], ...]:
        """The choices with their node index."""
        return tuple((i, node) for i, node in enumerate(self.nodes) if isinstance(node, Choice))

    def states(self, labels: Mapping[str, str]) -> list[int]:
        """State of every node for one label per choice (by the choices' names)."""
        result: list[int] = []
        for node in self.nodes:
            if isinstance(node, Choice):
                result.append(node.labels.index(labels[node.name]))
            else:
                g = int(node.left_class_S[result[node.left]])
                h = int(node.right_class_S[result[node.right]])
                result.append(g * node.num_right + h)
        return result

    def cost(self, states: Sequence[int]) -> float:
        """Total cost of the states of all nodes."""
        return math.fsum(
            [self.constant_cost, *(float(node.cost_S[s]) for node, s in zip(self.nodes, states, strict=True))]
        )

    def load_R(self, states: Sequence[int]) -> Ints:
        """Total load of the states of all nodes, by resource."""
        total_R = self.constant_R.copy()
        for node, state in zip(self.nodes, states, strict=True):
            total_R += node.load_SR[state]
        for shared in self.shared:
            if any(condition.mask_S[states[condition.node]] for condition in shared.conditions):
                total_R += shared.load_R
        return total_R

    def excess(self, states: Sequence[int]) -> dict[str, int]:
        """How far each broken limit is exceeded, by its name."""
        total_R = self.load_R(states)
        over = {limit.name: int(total_R[list(limit.resources)].sum()) - limit.bound for limit in self.limits}
        return {name: value for name, value in over.items() if value > 0}
