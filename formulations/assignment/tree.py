"""The open nodes of a search tree, and what a search knows at its end.

Axes: N nodes, Z table entries, R limit rows.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qsync_opt.formulations.assignment.dual import DualResult, Priced
from qsync_opt.formulations.assignment.model import Bools, Floats, Ints


@dataclass(slots=True)
class Outcome:
    """What a search knows: the best labelling, a bound, and whether it was cut short."""

    labels_N: Ints | None
    objective: float
    bound: float
    prices_R: Floats
    nodes: int = 0
    out_of_time: bool = False
    interrupted: bool = False
    proved_infeasible: bool = False

    def above(self, bound: float) -> "Outcome":
        """The same, with another bound too that was found for the same problem."""
        return replace(self, bound=max(self.bound, min(bound, self.objective)))


@dataclass(slots=True)
class Leaf:
    """A node that splits at joins lead to, kept for further limits: what they forbid, and its last prices and plans.

    ``bound`` is its dual's under the limits at hand; infinite while it was not searched under them.
    """

    path: tuple[Ints, ...] = ()
    prices_R: Floats | None = None
    plans: list[Priced] = field(default_factory=list)
    bound: float = math.inf

    def shifted(self, change_R: Ints) -> "Leaf":
        """The same under limits that are lower by so much."""
        return Leaf(self.path, self.prices_R, [plan.shifted(change_R) for plan in self.plans])


@dataclass(order=True, slots=True)
class Node:
    """An open node: a bound, its number, the entries left, prices and plans to begin with.

    ``leaf`` is what further limits start from; None below a split that holds under these limits alone. ``steps`` is how
    many minimisations are to bound it next, 0 once it is bounded: leaves of an earlier search are not at first.
    ``dual`` is what that found.
    """

    bound: float
    number: int
    allowed_Z: Bools = field(compare=False)
    prices_R: Floats = field(compare=False)
    plans: list[Priced] = field(compare=False)
    leaf: Leaf | None = field(compare=False, default=None)
    steps: int = field(compare=False, default=0)
    dual: DualResult | None = field(compare=False, default=None)


def take(open_nodes: list[Node], number: int) -> Node:
    """Take the node of a number out of the heap; of number 0, or if it is not there: the one of least bound."""
    for position, node in enumerate(open_nodes) if number else ():
        if node.number == number:
            open_nodes[position] = open_nodes[-1]
            open_nodes.pop()
            heapq.heapify(open_nodes)
            return node
    return heapq.heappop(open_nodes)


def first_nodes(
    leaves: Sequence[Leaf], root_Z: Bools, bound: float, prices_R: Floats, plans: list[Priced], steps: int
) -> list[Node]:
    """The root, or the nodes below it that these leaves are: each forbids the entries of its path.

    Several leaves are to be bounded by this many steps first.
    """
    nodes = []
    for number, leaf in enumerate(leaves):
        allowed_Z = root_Z.copy() if leaf.path else root_Z
        for side in leaf.path:
            allowed_Z[side] = False
        own_R = prices_R if leaf.prices_R is None or not leaf.path else leaf.prices_R
        own = leaf.plans if leaf.path and leaf.plans else plans
        nodes.append(
            Node(bound, number + bool(leaf.path), allowed_Z, own_R, own, leaf, steps if len(leaves) > 1 else 0)
        )
    return nodes
