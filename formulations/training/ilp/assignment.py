"""The assignment problem as the integer program sees it: choices, products, shared loads, limits.

The `assignment` package is the general model, with a solver of its own. This second description is separate on
purpose: `ilp` is the independent check of that solver, so it shares neither its reading of a problem nor its reductions
nor its arithmetic. It also writes a shared load as one row, where the general model needs nodes for it, which is the
tighter program. The first half of the module knows nothing of precisions.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.training.tables import segments
from qsync_opt.model import Role
from qsync_opt.training import BYTES_PER_KIB, Problem, ProblemDevice, ProblemOperator, follow_inputs, precisions_by_rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MEMORY = 0
"""Index of the memory resource; segment s is resource s + 1."""
MEMORY_LIMIT = "memory"


@dataclass(slots=True, kw_only=True, eq=False)
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


@dataclass(slots=True, kw_only=True, eq=False)
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
_Masks = dict[tuple[int, int], Ints]
"""By node and other node (-1: none), a mask over states or pairs of states."""


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

    def excess(self, states: Sequence[int]) -> dict[Limit, int]:
        """Load of each limit minus its bound."""
        total_R = self.load_R(states)
        return {limit: int(total_R[list(limit.resources)].sum()) - limit.bound for limit in self.limits}


@dataclass(slots=True)
class _Carrier:
    """What an operator's precision follows from: a precision for each state of a node, or a constant precision."""

    node: int | None
    precisions: tuple[str, ...]


def build_assignment(problem: Problem, device: ProblemDevice) -> Assignment:
    """The assignment of one device type.

    Args:
        problem: The problem.
        device: One of its devices.

    Returns:
        The assignment: its choices are named like the adjustable operators that have more than one precision; limits
        are ``time[s]`` for each segment s, and ``memory``. The peers' own part of the limit is not in it (`peers_ns`).

    Source: ours; solving per device type and collapsing dependent operators are exact, by the rules of the format.
    """
    return _Builder(problem, device).finish()


def read_back(problem: Problem, device: ProblemDevice, labels: dict[str, str]) -> dict[str, str]:
    """Precision of every adjustable operator, those with a single precision included."""
    return {o.name: labels.get(o.name) or next(iter(device.operators[o.name])) for o in problem.adjustable}


class _Builder:
    """Collects nodes and loads, operator by operator."""

    def __init__(self, problem: Problem, device: ProblemDevice) -> None:
        self.problem = problem
        self.device = device
        self.segments = segments(problem)
        self.num_resources = self.segments.count + 1
        self.nodes: list[Node] = []
        self.carriers: dict[str, _Carrier] = {}
        self.pair_loads: dict[tuple[int, int], Ints] = {}
        self.shared: list[tuple[str, _Masks, Ints]] = []
        self.constant_R = np.zeros(self.num_resources, np.int64)
        self.constant_cost = 0.0
        for position, operator in enumerate(problem.operators):
            self._add_operator(position, operator)
        if problem.cast_sharing == "producer":
            self._share_casts()

    # -- operators ---------------------------------------------------------------------------------------------

    def _add_operator(self, position: int, operator: ProblemOperator) -> None:
        steps = precisions_by_rank(self.problem, self.device, operator.name)
        if operator.role is Role.ADJUSTABLE and len(steps) > 1:
            carrier = _Carrier(self._add_choice(operator.name, steps), steps)
        elif operator.role is Role.DEPENDENT:
            carrier = self._join(operator, steps)
        else:
            carrier = _Carrier(None, steps[:1])
        self.carriers[operator.name] = carrier
        costs = [self.device.operators[operator.name][precision] for precision in carrier.precisions]
        load_SR = np.zeros((len(costs), self.num_resources), np.int64)
        segment = 1 + self.segments.segment[position]
        for s, cost in enumerate(costs):
            load_SR[s, MEMORY] += cost.memory_kib
            load_SR[s, 1] += cost.forward_ns
            load_SR[s, segment] += cost.backward_ns
        self._add_loads(carrier.node, load_SR)
        cost_S = np.array([cost.sensitivity for cost in costs])
        if carrier.node is None:
            self.constant_cost += float(cost_S[0])
        else:
            self.nodes[carrier.node].cost_S += cost_S
        for source in operator.inputs:
            self._add_edge(source, operator.name)

    def _add_choice(self, name: str, labels: tuple[str, ...]) -> int:
        load_SR = np.zeros((len(labels), self.num_resources), np.int64)
        self.nodes.append(Choice(name=name, labels=labels, cost_S=np.zeros(len(labels)), load_SR=load_SR))
        return len(self.nodes) - 1

    def _join(self, operator: ProblemOperator, steps: tuple[str, ...]) -> _Carrier:
        """Carrier of a dependent operator: the highest rank that its inputs deliver decides."""
        floor = -1
        ranks: dict[int, Ints] = {}
        for source in operator.inputs:
            carrier = self.carriers[source]
            rank_S = np.array(
                [self.problem.rank(self.device.precisions[p].output) for p in carrier.precisions], np.int64
            )
            floor = max(floor, int(rank_S.min()))
            if carrier.node is not None:
                known_S = ranks.get(carrier.node)
                ranks[carrier.node] = rank_S if known_S is None else np.maximum(known_S, rank_S)
        ranks = {node: np.maximum(rank_S, floor) for node, rank_S in ranks.items()}
        varying = {node: rank_S for node, rank_S in ranks.items() if rank_S.max() > rank_S.min()}
        if not varying:
            # Where every node always delivers the same rank, that rank may still lie above the constants' floor.
            highest = max((int(rank_S.max()) for rank_S in ranks.values()), default=floor)
            return _Carrier(None, (follow_inputs(self.problem, steps, highest),))
        node, rank_S = next(iter(varying.items()))
        for other, other_S in list(varying.items())[1:]:
            node, rank_S = self._product(f"{operator.name}#{len(self.nodes)}", node, rank_S, other, other_S)
        return _Carrier(node, tuple(follow_inputs(self.problem, steps, int(rank)) for rank in rank_S))

    def _product(self, name: str, left: int, left_rank_S: Ints, right: int, right_rank_S: Ints) -> tuple[int, Ints]:
        left_ranks, left_class_S = np.unique(left_rank_S, return_inverse=True)
        right_ranks, right_class_S = np.unique(right_rank_S, return_inverse=True)
        rank_S = np.maximum.outer(left_ranks, right_ranks).ravel()
        product = Product(
            name=name,
            left=left,
            left_class_S=left_class_S.astype(np.int64),
            right=right,
            right_class_S=right_class_S.astype(np.int64),
            cost_S=np.zeros(len(rank_S)),
            load_SR=np.zeros((len(rank_S), self.num_resources), np.int64),
        )
        self.nodes.append(product)
        return len(self.nodes) - 1, rank_S

    # -- edges -------------------------------------------------------------------------------------------------

    def _add_loads(self, node: int | None, load_SR: Ints) -> None:
        if node is None:
            self.constant_R += load_SR[0]
        else:
            self.nodes[node].load_SR += load_SR

    def _add_edge(self, producer: str, consumer: str) -> None:
        """Casts in both directions and the cast buffer of one edge (forward part elsewhere if casts are shared)."""
        source = self.problem.operators[self.problem.index(producer)]
        segment = 1 + self.segments.segment[self.problem.index(producer)]
        share = self.problem.cast_sharing == "producer"
        precisions = self.device.precisions

        def load_R(source_format: str, target: str) -> Ints:
            result_R = np.zeros(self.num_resources, np.int64)
            if not share:
                result_R += self._forward_cast_R(precisions[source_format].output, target, source.output_elements)
            result_R[segment] += self.device.cast_ns(
                precisions[target].gradient_output, precisions[source_format].gradient_input, source.output_elements
            )
            return result_R

        self._add_pair(self.carriers[producer], self.carriers[consumer], load_R)

    def _forward_cast_R(self, source: str, target: str, elements: int) -> Ints:
        result_R = np.zeros(self.num_resources, np.int64)
        if source != target:
            result_R[MEMORY] = -(-elements * self.problem.formats[target] // BYTES_PER_KIB)
            result_R[1] = self.device.cast_ns(source, target, elements)
        return result_R

    def _add_pair(self, left: _Carrier, right: _Carrier, load_R: Callable[[str, str], Ints]) -> None:
        if left.node is not None and left.node == right.node:
            both = zip(left.precisions, right.precisions, strict=True)
            self._add_loads(left.node, np.array([load_R(a, b) for a, b in both]))
        elif left.node is None:
            self._add_loads(right.node, np.array([load_R(left.precisions[0], b) for b in right.precisions]))
        elif right.node is None:
            self._add_loads(left.node, np.array([load_R(a, right.precisions[0]) for a in left.precisions]))
        else:
            load_GHR = np.array([[load_R(a, b) for b in right.precisions] for a in left.precisions])
            key = (left.node, right.node)
            if left.node > right.node:
                key, load_GHR = (right.node, left.node), load_GHR.swapaxes(0, 1)
            self.pair_loads[key] = self.pair_loads.get(key, 0) + load_GHR

    # -- shared casts ------------------------------------------------------------------------------------------

    def _share_casts(self) -> None:
        """Per producer and pair of formats, one forward cast and buffer however many consumers want it."""
        consumers: dict[str, list[str]] = {}
        for operator in self.problem.operators:
            for source in dict.fromkeys(operator.inputs):
                consumers.setdefault(source, []).append(operator.name)
        for producer, users in consumers.items():
            own = self.carriers[producer]
            outputs = tuple(self.device.precisions[p].output for p in own.precisions)
            wanted = dict.fromkeys(p for user in users for p in self.carriers[user].precisions)
            for source in dict.fromkeys(outputs):
                for target in wanted:
                    if source != target:
                        self._share_cast(producer, users, outputs, source, target)

    def _share_cast(self, producer: str, users: list[str], outputs: tuple[str, ...], source: str, target: str) -> None:
        elements = self.problem.operators[self.problem.index(producer)].output_elements
        cast_R = self._forward_cast_R(source, target, elements)
        own = self.carriers[producer]
        here_S = np.array([output == source for output in outputs])
        masks: _Masks = {}
        for user in users:
            wants = self.carriers[user]
            wants_S = np.array([precision == target for precision in wants.precisions])
            if not wants_S.any():
                continue
            if wants.node is None or wants.node == own.node:
                mask_S = here_S & wants_S  # broadcasts where either is constant
                if own.node is None:
                    self.constant_R += cast_R
                    return
                key, mask = (own.node, -1), mask_S
            elif own.node is None:
                key, mask = (wants.node, -1), wants_S
            else:
                key, mask = (own.node, wants.node), np.outer(here_S, wants_S)
                if own.node > wants.node:
                    key, mask = (wants.node, own.node), mask.T
            masks[key] = masks.get(key, 0) | mask.astype(np.int64)
        masks = {key: mask for key, mask in masks.items() if mask.any()}
        if len(masks) > 1:
            self.shared.append((f"{producer}:{source}>{target}", masks, cast_R))
            return
        for (node, other), mask in masks.items():  # a single condition is an ordinary load
            if other < 0:
                self._add_loads(node, mask[:, None] * cast_R)
            else:
                self.pair_loads[node, other] = self.pair_loads.get((node, other), 0) + mask[:, :, None] * cast_R

    # -- the whole ---------------------------------------------------------------------------------------------

    def finish(self) -> Assignment:
        masks: dict[tuple[int, int], list[Ints]] = {}
        for _, own, _ in self.shared:
            for key, mask in own.items():
                if key[1] >= 0:
                    masks.setdefault(key, []).append(mask)
        index: dict[tuple[int, int], int] = {}
        for key in dict.fromkeys([*self.pair_loads, *masks]):
            product = reduce_pair(self.nodes, key, self.pair_loads.get(key), masks.get(key, []))
            if product is not None:
                index[key] = len(self.nodes)
                self.nodes.append(product)
        limits = [
            Limit(
                name=f"time[{s}]",
                resources=tuple(range(1, s + 2)),
                bound=self.problem.latency_limit_ns - self.segments.tail_ns[s],
            )
            for s in range(self.segments.count)
        ]
        limits.append(Limit(name=MEMORY_LIMIT, resources=(MEMORY,), bound=self.device.memory_limit_kib))
        return Assignment(
            name=f"{self.problem.name}/{self.device.name}",
            resources=("memory_kib", *(f"segment[{s}]_ns" for s in range(self.segments.count))),
            nodes=tuple(self.nodes),
            shared=tuple(make_shared(*shared, self.nodes, index) for shared in self.shared),
            limits=tuple(limits),
            constant_R=self.constant_R,
            constant_cost=self.constant_cost,
        )


def reduce_pair(
    nodes: Sequence[Node], key: tuple[int, int], load_GHR: Ints | None, masks: list[Ints]
) -> Product | None:
    """The product of a pair of nodes over classes of equal rows; None where the load separates into the two nodes."""
    left, right = (nodes[node] for node in key)
    num_resources = left.load_SR.shape[1]
    shape = (left.num_states, right.num_states, num_resources)
    if load_GHR is None:
        load_GHR = np.zeros(shape, np.int64)
    rest_GHR = load_GHR - load_GHR[:, :1] - load_GHR[:1, :] + load_GHR[:1, :1]
    if not masks and not rest_GHR.any():
        left.load_SR += load_GHR[:, 0]
        right.load_SR += load_GHR[0] - load_GHR[0, 0]
        return None
    if not masks and _fold_into_join(nodes, key, load_GHR):
        return None
    # Row and column 0 go to the nodes, so that more rows are equal and more classes coincide.
    left.load_SR += load_GHR[:, 0]
    right.load_SR += load_GHR[0] - load_GHR[0, 0]
    signature = np.concatenate([rest_GHR, *(mask[:, :, None] for mask in masks)], axis=2)
    left_class_S = _classes(signature.reshape(shape[0], -1))
    right_class_S = _classes(signature.swapaxes(0, 1).reshape(shape[1], -1))
    first_G = [int(np.argmax(left_class_S == g)) for g in range(left_class_S.max() + 1)]
    first_H = [int(np.argmax(right_class_S == h)) for h in range(right_class_S.max() + 1)]
    reduced_GHR = rest_GHR[np.ix_(first_G, first_H)]
    return Product(
        name=f"{left.name}|{right.name}",
        left=key[0],
        left_class_S=left_class_S,
        right=key[1],
        right_class_S=right_class_S,
        cost_S=np.zeros(len(first_G) * len(first_H)),
        load_SR=reduced_GHR.reshape(-1, num_resources),
    )


def _fold_into_join(nodes: Sequence[Node], key: tuple[int, int], load_GHR: Ints) -> bool:
    """Charge the load to a join of the other node, if the join's state determines it."""
    join = nodes[key[1]]
    if not isinstance(join, Product) or key[0] not in (join.left, join.right):
        return False
    on_left = key[0] == join.left
    class_S = join.left_class_S if on_left else join.right_class_S
    states = range(join.num_states)
    seen = [np.flatnonzero(class_S == (s // join.num_right if on_left else s % join.num_right)) for s in states]
    if any((load_GHR[seen[s], s] != load_GHR[seen[s][0], s]).any() for s in states):
        return False
    join.load_SR += np.array([load_GHR[seen[s][0], s] for s in states])
    return True


def make_shared(
    name: str,
    masks: dict[tuple[int, int], Ints],
    load_R: Ints,
    nodes: Sequence[Node],
    index: dict[tuple[int, int], int],
) -> Shared:
    """A shared load with its conditions as states of nodes; ``index`` numbers the products of node pairs."""
    conditions = []
    for (node, other), mask in masks.items():
        if other < 0:
            conditions.append(Condition(node=node, mask_S=mask.astype(np.bool_)))
            continue
        product = nodes[index[node, other]]
        assert isinstance(product, Product)  # pairs of nodes are products by construction
        mask_S = np.zeros(product.num_states, np.bool_)
        for a, b in zip(*np.nonzero(mask), strict=True):
            mask_S[product.left_class_S[a] * product.num_right + product.right_class_S[b]] = True
        conditions.append(Condition(node=index[node, other], mask_S=mask_S))
    return Shared(name=name, conditions=tuple(conditions), load_R=load_R)


def _classes(rows: Ints) -> Ints:
    """Number equal rows alike, in order of first appearance."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(rows)], np.int64)
