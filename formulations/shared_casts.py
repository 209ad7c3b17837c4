"""Casts that are counted once per output and target format, however many users want it (producer sharing).

"Some user of u wants format f" is an OR over the nodes that carry u's users. It becomes a chain of join nodes over
zeros and ones (their largest value is the OR), and the cast's price stands between u's carrier and the chain's end.

Axes: A labels of u's carrier, B labels or states of the other node.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment.model import Ints
from qsync_opt.formulations.fold import CONSTANT, Folding, chain_stages
from qsync_opt.formulations.tables import DeviceTables, GraphTables, cast_forward

FORWARD, MEMORY = 0, 2


@dataclass(slots=True)
class SharedCasts:
    """Forward cast times and buffers to be added: (place, kind, amounts)."""

    edges: list[tuple[tuple[int, int], int, Ints]] = field(default_factory=list)
    nodes: list[tuple[int, int, Ints]] = field(default_factory=list)
    constants: list[tuple[int, int]] = field(default_factory=list)

    def add(self, producer: int, cost_A: Ints, wanted: tuple[int, tuple[int, ...]], kind: int) -> None:
        """Charge ``cost_A`` (by label of the producer's carrier) where the node ``wanted`` is in a state marked 1."""
        node, flags = wanted
        flags_B = np.array(flags, dtype=np.int64)
        if not cost_A.any():
            return
        if node == CONSTANT and producer == CONSTANT:
            self.constants.append((kind, int(cost_A[0])))
        elif node == CONSTANT:
            self.nodes.append((producer, kind, cost_A))
        elif producer == CONSTANT:
            self.nodes.append((node, kind, cost_A[0] * flags_B))
        elif producer == node:
            self.nodes.append((node, kind, cost_A * flags_B))
        elif producer < node:
            self.edges.append(((producer, node), kind, np.outer(cost_A, flags_B)))
        else:
            self.edges.append(((node, producer), kind, np.outer(flags_B, cost_A)))


def share_casts(graph: GraphTables, tables: DeviceTables, folding: Folding) -> SharedCasts:
    """Forward casts and buffers of every output, once per target format; adds the OR nodes to ``folding``.

    Source: ours.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for source, target in zip(graph.source_X.tolist(), graph.target_X.tolist(), strict=True):
        users[source].append(target)
    result = SharedCasts()
    for operator, targets in users.items():
        precisions = np.array(folding.maps[folding.map_O[operator]], dtype=np.int64)
        elements = graph.elements_O[operator : operator + 1]
        wanted: set[int] = set()
        for target in targets:
            wanted.update(folding.maps[folding.map_O[target]])
        for precision in sorted(wanted):
            time, buffer = cast_forward(tables, elements, precisions, np.full(len(precisions), precision))
            if time.any() or buffer.any():
                some = _any_user_wants(folding, targets, precision)
                result.add(folding.carrier_O[operator], time, some, FORWARD)
                result.add(folding.carrier_O[operator], buffer, some, MEMORY)
    return result


def _any_user_wants(folding: Folding, targets: list[int], precision: int) -> tuple[int, tuple[int, ...]]:
    """The node, and its states, that tell whether some user wants a precision; CONSTANT if one always does."""
    flags: dict[int, tuple[int, ...]] = {}
    for target in targets:
        own = tuple(int(p == precision) for p in folding.maps[folding.map_O[target]])
        carrier = folding.carrier_O[target]
        if carrier == CONSTANT:
            if own[0]:
                return CONSTANT, (1,)
        elif any(own):
            flags[carrier] = tuple(map(max, flags.get(carrier, own), own))
    if any(all(states) for states in flags.values()):
        return CONSTANT, (1,)
    node, *others = flags
    stages = chain_stages([flags[node], *(flags[other] for other in others)])
    for other, stage in zip(others, stages, strict=True):
        node = folding.add_join(node, other, stage)
    return node, stages[-1].values if stages else flags[node]
