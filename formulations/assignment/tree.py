"""The open nodes of a search tree, and what a search knows at its end.

Axes: N nodes, Z table entries, R limit rows.
"""

import heapq
from dataclasses import dataclass, field, replace

from qsync_opt.formulations.assignment.dual import Priced
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


@dataclass(order=True, slots=True)
class Node:
    """An open node: a bound, its number, the entries left, prices and plans to begin with.

    ``path`` is what splits at joins forbid there; None below a split of another kind.
    """

    bound: float
    number: int
    allowed_Z: Bools = field(compare=False)
    prices_R: Floats = field(compare=False)
    plans: list[Priced] = field(compare=False)
    path: tuple[Ints, ...] | None = field(compare=False, default=None)


def take(open_nodes: list[Node], number: int) -> Node:
    """Take the node of a number out of the heap; of number 0, or if it is not there: the one of least bound."""
    for position, node in enumerate(open_nodes) if number else ():
        if node.number == number:
            open_nodes[position] = open_nodes[-1]
            open_nodes.pop()
            heapq.heapify(open_nodes)
            return node
    return heapq.heappop(open_nodes)
