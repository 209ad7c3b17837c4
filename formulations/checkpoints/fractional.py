"""The relaxation of the write balance, solved exactly: rows may be divided.

min T subject to  sum_w x_cw = bytes_c,  sum_c x_cw <= T rate_w,  sum_{w on h, c} x_cw <= T rate_h,  x >= 0

Pieces with the same writers are one class c. For a fixed T this is a flow from classes over writers to hosts; if it
does not carry all bytes, the minimum cut names classes S that need a longer T = bytes(S) / capacity(S), where
capacity(S) = sum_h min(rate_h, sum of the rates of the writers on h that hold a class of S). T rises from cut to cut
until all bytes flow: then the last cut proves T least.

Source: discrete Newton method for parametric flows (Dinkelbach, 1967; Radzik, 1998); its use here is ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from qsync_opt.checkpoints import Problem

_EPSILON = 1e-12
"""Flow below this share of all bytes is none: flows are sums of floating-point numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fractional:
    """A least time in seconds, and the bytes that each writer gets of each class of pieces.

    ``classes`` are the pieces by number, ``bytes_CW`` maps for each class those of its writers that get some to bytes,
    or, where the class is less than rounding, all of its writers to 0.
    """

    seconds: float
    classes: tuple[tuple[int, ...], ...]
    bytes_CW: tuple[dict[str, float], ...]


def least_time(problem: Problem) -> Fractional:
    """Solve the relaxation; every piece must have a writer.

    Source: ours; see the module.
    """
    by_order: dict[tuple[str, ...], list[int]] = {}
    for number, piece in enumerate(problem.pieces):
        by_order.setdefault(piece.writers, []).append(number)
    by_writers: dict[frozenset[str], list[int]] = {}
    for names, numbers in by_order.items():
        by_writers.setdefault(frozenset(names), []).extend(numbers)
    order = {name: place for place, name in enumerate(problem.writers)}
    classes = tuple(tuple(sorted(numbers)) for numbers in by_writers.values())
    writers = [sorted(names, key=order.__getitem__) for names in by_writers]
    sizes = [sum(problem.pieces[number].num_bytes for number in numbers) for numbers in classes]
    if not classes:
        return Fractional(seconds=0.0, classes=(), bytes_CW=())
    network = _Network(problem, writers, sizes)
    seconds = network.time_of_cut(range(len(classes)))
    while (cut := network.fill(seconds)) is not None:
        longer = network.time_of_cut(cut)
        if longer <= seconds * (1.0 + _EPSILON):  # what is missing is rounding
            break
        seconds = longer
    return Fractional(seconds=seconds, classes=classes, bytes_CW=tuple(network.shares()))


class _Network:
    """Flow from a source over classes, writers and hosts to a sink, with capacities that grow with time."""

    def __init__(self, problem: Problem, writers: list[list[str]], sizes: list[int]) -> None:
        self._problem, self._writers, self._sizes = problem, writers, sizes
        self._least = _EPSILON * sum(sizes)
        hosts = {name: 1 + len(sizes) + len(problem.writers) + k for k, name in enumerate(problem.hosts)}
        nodes = {name: 1 + len(sizes) + k for k, name in enumerate(problem.writers)}
        self._sink = 1 + len(sizes) + len(nodes) + len(hosts)
        # Edge e leads to heads[e] and has the rest spare[e]; edge e ^ 1 is its reverse.
        self._heads: list[int] = []
        self._spare: list[float] = []
        self._edges: list[list[int]] = [[] for _ in range(self._sink + 1)]
        for number, size in enumerate(sizes):
            self._add(0, 1 + number, float(size))
        self._first = len(self._heads)
        for number, names in enumerate(writers):
            for name in names:
                self._add(1 + number, nodes[name], math.inf)
        self._timed: list[tuple[int, float]] = []
        for name, writer in problem.writers.items():
            self._timed.append((self._add(nodes[name], hosts[writer.host], 0.0), writer.bytes_per_s))
        for name, rate in problem.hosts.items():
            self._timed.append((self._add(hosts[name], self._sink, 0.0), rate))

    def _add(self, tail: int, head: int, capacity: float) -> int:
        edge = len(self._heads)
        self._heads += [head, tail]
        self._spare += [capacity, 0.0]
        self._edges[tail].append(edge)
        self._edges[head].append(edge + 1)
        return edge

    def time_of_cut(self, classes: Iterable[int]) -> float:
        """Seconds that some classes need together at least."""
        numbers = list(classes)
        names = {name for number in numbers for name in self._writers[number]}
        by_host: dict[str, list[float]] = {}
        for name in names:
            writer = self._problem.writers[name]
            by_host.setdefault(writer.host, []).append(writer.bytes_per_s)
        rate = math.fsum(min(self._problem.hosts[host], math.fsum(rates)) for host, rates in by_host.items())
        return sum(self._sizes[number] for number in numbers) / rate

    def fill(self, seconds: float) -> list[int] | None:
        """Carry as much as can be written in time; returns the classes in the way, None if all is carried."""
        for edge, rate in self._timed:
            self._spare[edge] = max(0.0, seconds * rate - self._spare[edge ^ 1])
        while (levels := self._levels())[self._sink] >= 0:
            self._augment(levels)
        rest = sum(self._spare[edge] for edge in self._edges[0])
        return None if rest <= self._least else [c for c in range(len(self._sizes)) if levels[1 + c] >= 0]

    def _levels(self) -> list[int]:
        levels = [-1] * len(self._edges)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                head = self._heads[edge]
                if levels[head] < 0 and self._spare[edge] > self._least:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Fill every shortest path (a blocking flow, as in Dinic's method)."""
        heads, spare, edges, least = self._heads, self._spare, self._edges, self._least
        following = [0] * len(edges)
        path: list[int] = []
        node = 0
        while True:
            if node == self._sink:
                amount = min(spare[edge] for edge in path)
                for edge in path:
                    spare[edge] -= amount
                    spare[edge ^ 1] += amount
                # Go back to the tail of the first edge that is full now.
                keep = next(k for k, edge in enumerate(path) if spare[edge] <= least)
                node = heads[path[keep] ^ 1]
                del path[keep:]
                continue
            if following[node] < len(edges[node]):
                edge = edges[node][following[node]]
                if spare[edge] > least and levels[heads[edge]] == levels[node] + 1:
                    path.append(edge)
                    node = heads[edge]
                else:
                    following[node] += 1
            elif path:
                node = heads[path.pop() ^ 1]
                following[node] += 1
            else:
                return

    def shares(self) -> list[dict[str, float]]:
        """Bytes that each writer of each class carries."""
        edge, result = self._first, []
        for names in self._writers:
            amounts = {}
            for name in names:
                if self._spare[edge ^ 1] > self._least:
                    amounts[name] = self._spare[edge ^ 1]
                edge += 2
            result.append(amounts or dict.fromkeys(names, 0.0))  # a class may be as small as rounding
        return result
