"""How long does each tensor live in a training step? From what operators keep and what the program holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qsync_opt.model.graph import OpGraph


class Kept(NamedTuple):
    """What an operator keeps for its backward pass: inputs by position, and whether its result."""

    inputs: tuple[int, ...]
    output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """Which results are given back when: during or after the forward or backward pass of an operator (positions).

    Those of neither live until the step is over.
    """

    forward: Mapping[int, tuple[int, ...]]
    backward: Mapping[int, tuple[int, ...]]


class Lifetimes:
    """Lifetimes of results in a graph.

    Args:
        graph: The model.
        roots: Operator to the one whose storage its result lives in, where that is another.
        held: Operator to the operator after which the program lets go of its result; "" or missing: after the step.
    """

    def __init__(self, graph: OpGraph, roots: Mapping[str, str], held: Mapping[str, str]) -> None:
        index = {operator.name: i for i, operator in enumerate(graph)}
        self._roots = [index[self._root(graph, roots, operator.name)] for operator in graph]
        self._inputs = [tuple(self._roots[index[source]] for source in operator.inputs) for operator in graph]
        self._held = [index.get(held.get(operator.name, ""), -1) for operator in graph]

    @staticmethod
    def _root(graph: OpGraph, roots: Mapping[str, str], name: str) -> str:
        seen = {name}
        while True:
            after = roots.get(name, name)
            if after in seen or after not in graph:
                return name
            seen.add(after)
            name = after

    def root(self, position: int) -> int:
        """Position of the operator in whose storage a result lives."""
        return self._roots[position]

    def releases(self, kept: Sequence[Kept]) -> Releases:
        """When each result is given back.

        Args:
            kept: Per operator, in order.
        """
        first: dict[int, int] = {}
        # Backward runs from the last operator to the first: the first keeper is the last to let go.
        for position in range(len(kept) - 1, -1, -1):
            saves = kept[position]
            for i in saves.inputs:
                first[self._inputs[position][i]] = position
            if saves.output:
                first[self._roots[position]] = position
        forward: dict[int, list[int]] = {}
        backward: dict[int, list[int]] = {}
        for position, root in enumerate(self._roots):
            if root != position or self._held[position] < 0:
                continue
            keeper = first.get(position)
            if keeper is None:
                forward.setdefault(self._held[position], []).append(position)
            else:
                backward.setdefault(keeper, []).append(position)
        return Releases(
            forward={k: tuple(v) for k, v in forward.items()}, backward={k: tuple(v) for k, v in backward.items()}
        )
