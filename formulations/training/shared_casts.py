"""Casts that are counted once per output and target format, however many users want it (producer sharing).

"Some user of u wants format f" is an OR over the nodes that carry u's users. It becomes a node of its own that may be 0
only beside labels that do not want f; the cast's price stands between u's carrier and that node. Nothing forces it to
be 0, but a cast costs time and memory, so it never helps to pay for one that nobody wants. Users are tied to this node
alone, not to each other, so however many there are, they are minimised out one by one.

Axes: A labels of u's carrier, B labels or states of the other node.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment.model import Ints
from qsync_opt.formulations.training.fold import CONSTANT, Folding
from qsync_opt.formulations.training.tables import DeviceTables, GraphTables, cast_forward

FORWARD, BACKWARD, MEMORY = 0, 1, 2


@dataclass(slots=True)
class SharedCasts:
    """Forward cast times and buffers to be added, as Python numbers: what they are charged to, kind, amounts.

    An edge's amounts are a row for its first node and one for its second: its table is their outer product.
    """

    edges: list[tuple[tuple[int, int], int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    nodes: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    constants: list[tuple[int, int]] = field(default_factory=list)

    def add(self, producer: int, cost_A: tuple[int, ...], wanted: tuple[int, tuple[int, ...]], kind: int) -> None:
        """Charge ``cost_A`` (by label of the producer's carrier) where the node ``wanted`` is in a state marked 1."""
        node, flags_B = wanted
        if not any(cost_A):
            return
        if node == CONSTANT and producer == CONSTANT:
            self.constants.append((kind, cost_A[0]))
        elif node == CONSTANT:
            self.nodes.append((producer, kind, cost_A))
        elif producer == CONSTANT:
            self.nodes.append((node, kind, tuple(cost_A[0] * flag for flag in flags_B)))
        elif producer == node:
            both = zip(cost_A, flags_B, strict=True)
            self.nodes.append((node, kind, tuple(cost * flag for cost, flag in both)))
        elif producer < node:
            self.edges.append(((producer, node), kind, cost_A, flags_B))
        else:
            self.edges.append(((node, producer), kind, flags_B, cost_A))

    def edge_batches(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Kind, node pairs (X, 2) and tables (X, A, B) of edges of equal shape."""
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, (_, kind, first, second) in enumerate(self.edges):
            groups[kind, len(first), len(second)].append(number)
        for (kind, _, _), members in groups.items():
            pairs, _, firsts, seconds = zip(*(self.edges[number] for number in members), strict=True)
            one, two = np.array(firsts, dtype=np.int64), np.array(seconds, dtype=np.int64)
            yield kind, np.array(pairs, dtype=np.int64), one[:, :, None] * two[:, None, :]

    def node_batches(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Kind, nodes (X,) and amounts (X, A) of nodes of equally many labels."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (_, kind, amounts) in enumerate(self.nodes):
            groups[kind, len(amounts)].append(number)
        for (kind, _), members in groups.items():
            nodes, _, amounts_X = zip(*(self.nodes[number] for number in members), strict=True)
            yield kind, np.array(nodes, dtype=np.int64), np.array(amounts_X, dtype=np.int64)


def share_casts(graph: GraphTables, tables: DeviceTables, folding: Folding) -> SharedCasts:
    """Forward casts and buffers of every output, once per target format; adds the OR nodes to ``folding``.

    Source: ours.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for source, target in zip(graph.source_X.tolist(), graph.target_X.tolist(), strict=True):
        users[source].append(target)
    rank = np.arange(len(tables.bytes_P))
    every = (graph.elements_O[:, None, None], rank[None, :, None], rank[None, None, :])
    time_OPP, buffer_OPP = (amounts.transpose(0, 2, 1).tolist() for amounts in cast_forward(tables, *every))
    result = SharedCasts()
    wants = _Wants(folding)
    for operator, targets in users.items():
        precisions = folding.maps[folding.map_O[operator]]
        carrier = folding.carrier_O[operator]
        for precision in wants.precisions(targets):
            times, buffers = time_OPP[operator][precision], buffer_OPP[operator][precision]
            time, buffer = tuple([times[p] for p in precisions]), tuple([buffers[p] for p in precisions])
            if any(time) or any(buffer):
                some = wants.any_user(targets, precision)
                result.add(carrier, time, some, FORWARD)
                result.add(carrier, buffer, some, MEMORY)
    return result


class _Wants:
    """Which precisions users want; users share few maps from labels to precisions, so answers are kept by map."""

    def __init__(self, folding: Folding) -> None:
        self._folding = folding
        self._flags: dict[tuple[int, int], tuple[tuple[int, ...], bool]] = {}
        self._sorted: dict[tuple[int, ...], list[int]] = {}

    def precisions(self, targets: list[int]) -> list[int]:
        """What some label of some user runs in, ascending."""
        folding = self._folding
        key = tuple([folding.map_O[target] for target in targets])
        found = self._sorted.get(key)
        if found is None:
            found = sorted({p for number in key for p in folding.maps[number]})
            self._sorted[key] = found
        return found

    def any_user(self, targets: list[int], precision: int) -> tuple[int, tuple[int, ...]]:
        """The node, and its states, that tell whether some user wants a precision; CONSTANT if one always does."""
        folding = self._folding
        flags: dict[int, tuple[int, ...]] = {}
        for target in targets:
            number = folding.map_O[target]
            known = self._flags.get((number, precision))
            if known is None:
                own = tuple([int(p == precision) for p in folding.maps[number]])
                known = self._flags[number, precision] = own, any(own)
            own, is_any = known
            carrier = folding.carrier_O[target]
            if carrier == CONSTANT:
                if own[0]:
                    return CONSTANT, (1,)
            elif is_any:
                before = flags.get(carrier)
                flags[carrier] = own if before is None else tuple(map(max, before, own))
        for states in flags.values():
            if all(states):
                return CONSTANT, (1,)
        if len(flags) > 1:
            return folding.add_wanted(flags), (0, 1)
        return next(iter(flags.items()))
