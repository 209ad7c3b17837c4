"""Folding: the decision that each operator's precision follows from; dependent operators fold into it.

Every operator is carried by one node, or by none if its precision is constant; a map gives its precision for each
label of the node. A dependent operator that reads several nodes gets a join node: its states are pairs of classes of
two parents, where a class stands for the step of the operator's ladder that this parent requires. More than two
parents make a chain of joins. A join with many readers, as of a concatenation that others extend, is followed by a
node for the larger step alone: the readers need no more, and tables over many such nodes stay small.
"""

from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment import Bools, Derived, Ints, Wanted
from qsync_opt.formulations.training.tables import DeviceTables, GraphTables

CONSTANT = -1
"""Carrier of an operator whose precision never changes."""
_PAIR = 2
_MANY_INPUTS = 3


@dataclass(frozen=True, slots=True)
class _Stage:
    """One join of a chain: classes of its two parents' labels and the larger value of each pair of classes."""

    left_classes: tuple[int, ...]
    right_classes: tuple[int, ...]
    num_right: int
    values: tuple[int, ...]

    @property
    def distinct(self) -> tuple[int, ...]:
        """Every value once."""
        return tuple(dict.fromkeys(self.values))


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a dependent operator is carried: by its input ``carrier``, or by a chain of joins."""

    carrier: int | None
    chain: tuple[tuple[int, _Stage], ...]
    first: int
    map_id: int
    reduced: bool = False


def _classes(values: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Class of each label (equal values, one class) and the value of each class."""
    distinct = tuple(dict.fromkeys(values))
    return tuple(distinct.index(value) for value in values), distinct


def chain_stages(contributions: list[tuple[int, ...]], *, reduced: bool) -> list[_Stage]:
    """Joins that give the largest of several contributions; one contribution per label of each parent.

    Every join but the first has the last one as its left parent, or the node of its value if ``reduced``.
    """
    stages = []
    left = contributions[0]
    for right in contributions[1:]:
        left_classes, left_values = _classes(left)
        right_classes, right_values = _classes(right)
        values = tuple(max(a, b) for a in left_values for b in right_values)
        stages.append(_Stage(left_classes, right_classes, len(right_values), values))
        left = stages[-1].distinct if reduced else values
    return stages


@dataclass(slots=True)
class Folding:
    """Nodes with their label counts, the carrier and map of every operator, and the joins."""

    sizes: list[int] = field(default_factory=list)
    carrier_O: list[int] = field(default_factory=list)
    map_O: list[int] = field(default_factory=list)
    maps: list[tuple[int, ...]] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    ties: list[tuple[int, int, Bools]] = field(default_factory=list)
    _wanted: list[tuple[int, dict[int, tuple[int, ...]]]] = field(default_factory=list)
    _wanted_ties: dict[tuple[int, ...], Bools] = field(default_factory=dict)
    _map_ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    _stage_parts: dict[_Stage, tuple[tuple[tuple[int, ...], ...], Bools, Bools]] = field(default_factory=dict)
    _value_parts: dict[_Stage, tuple[tuple[tuple[int, ...], ...], Bools]] = field(default_factory=dict)
    _joins: dict[tuple[int, int, _Stage], int] = field(default_factory=dict)

    def map_id(self, precisions: tuple[int, ...]) -> int:
        """Number of a label-to-precision map."""
        number = self._map_ids.setdefault(precisions, len(self.maps))
        if number == len(self.maps):
            self.maps.append(precisions)
        return number

    def add_join(self, left: int, right: int, stage: _Stage, *, reduced: bool) -> int:
        """The join node below two parents, or of its value if ``reduced``; added if there is none yet.

        Concatenations of concatenations share what they have in common.
        """
        known = self._joins.get((left, right, stage))
        if known is not None:
            return known
        parts = self._stage_parts.get(stage)
        if parts is None:
            table = tuple(tuple(a * stage.num_right + b for b in stage.right_classes) for a in stage.left_classes)
            states = np.arange(len(stage.values))
            fits_left = np.array(stage.left_classes)[:, None] == states[None, :] // stage.num_right
            fits_right = np.array(stage.right_classes)[:, None] == states[None, :] % stage.num_right
            parts = self._stage_parts[stage] = (table, fits_left, fits_right)
        node = len(self.sizes)
        self.sizes.append(len(stage.values))
        group_L = (0,) * len(stage.values) if reduced else stage.values
        self.derived.append(Derived(node=node, first=left, second=right, label_AB=parts[0], group_L=group_L))
        self.ties.append((left, node, parts[1]))
        self.ties.append((right, node, parts[2]))
        if reduced:
            node = self._add_value(node, stage)
        self._joins[left, right, stage] = node
        return node

    def _add_value(self, join: int, stage: _Stage) -> int:
        parts = self._value_parts.get(stage)
        if parts is None:
            distinct = stage.distinct
            number_A = tuple(distinct.index(value) for value in stage.values)
            table = tuple((number,) * len(number_A) for number in number_A)
            parts = self._value_parts[stage] = (table, np.array(number_A)[:, None] == np.arange(len(distinct)))
        node = len(self.sizes)
        self.sizes.append(len(stage.distinct))
        self.derived.append(Derived(node=node, first=join, second=join, label_AB=parts[0], group_L=stage.distinct))
        self.ties.append((join, node, parts[1]))
        return node

    def add_wanted(self, flags: dict[int, tuple[int, ...]]) -> int:
        """Add a node that must be 1 where any of these nodes takes a label marked 1; returns it."""
        node = len(self.sizes)
        self.sizes.append(2)
        for source, own in flags.items():
            tie = self._wanted_ties.get(own)
            if tie is None:
                tie = self._wanted_ties[own] = np.array([[not flag, True] for flag in own])
            self.ties.append((source, node, tie))
        self._wanted.append((node, flags))
        return node

    def wanted(self) -> Wanted | None:
        """What `add_wanted` has added."""
        if not self._wanted:
            return None
        pairs = [pair for _, flags in self._wanted for pair in flags.items()]
        width = max(len(flags) for _, flags in pairs)
        counts = [len(flags) for _, flags in self._wanted]
        return Wanted(
            node_H=np.array([node for node, _ in self._wanted], dtype=np.int64),
            start_H=np.cumsum(counts) - np.array(counts, dtype=np.int64),
            source_P=np.array([source for source, _ in pairs], dtype=np.int64),
            flag_PA=np.array([(*flags, *(0,) * (width - len(flags))) for _, flags in pairs], dtype=np.int64),
        )

    def map_array(self) -> Ints:
        """All maps as one array, padded with zeros, shape (maps, labels)."""
        width = max(map(len, self.maps))
        return np.array([(*m, *(0,) * (width - len(m))) for m in self.maps], dtype=np.int64)


def fold(graph: GraphTables, tables: DeviceTables, tied_to: dict[int, int], *, shared: bool = False) -> Folding:
    """Choose the carrier of every operator.

    Args:
        graph: The operators.
        tables: One device type's costs.
        tied_to: Adjustable operators that must take the precision of an earlier one.
        shared: Casts are counted once per output, which makes every large join one of many readers.

    Returns:
        The folding; nodes are numbered in forward order.
    """
    result = Folding()
    weights = 1 << np.arange(tables.available_OP.shape[1])
    sets = (tables.available_OP @ weights).tolist()
    ladders = {code: tuple(p for p in range(len(weights)) if code >> p & 1) for code in set(sets)}
    output = tables.output_P.tolist()
    recipes: dict[tuple[object, ...], _Recipe] = {}
    carriers, map_ids = result.carrier_O, result.map_O
    continued = _continued(graph)
    for operator, code in enumerate(sets):
        if graph.dependent_O[operator]:
            local: dict[int, int] = {}
            inputs = graph.inputs[operator]
            reduced = tuple(inputs[:_PAIR]) in continued or (shared and len(inputs) >= _MANY_INPUTS)
            key: list[object] = [code, reduced]
            for source in inputs:
                carrier = carriers[source]
                key.append(CONSTANT if carrier == CONSTANT else local.setdefault(carrier, len(local)))
                key.append(map_ids[source])
            signature = tuple(key)
            recipe = recipes.get(signature)
            if recipe is None:
                recipe = recipes[signature] = _make_recipe(result, signature, ladders[code], output)
            carriers.append(_follow(result, recipe, list(local)))
            map_ids.append(recipe.map_id)
        else:
            map_ids.append(result.map_id(ladders[code]))
            if len(ladders[code]) == 1:
                carriers.append(CONSTANT)
            elif operator in tied_to:
                carriers.append(carriers[tied_to[operator]])
            else:
                carriers.append(len(result.sizes))
                result.sizes.append(len(ladders[code]))
    return result


def _continued(graph: GraphTables) -> set[tuple[int, ...]]:
    """First two inputs that several dependent operators share, at least one of them with further inputs."""
    longest: dict[tuple[int, ...], tuple[int, int]] = {}
    for operator in np.flatnonzero(graph.dependent_O).tolist():
        inputs = graph.inputs[operator]
        if len(inputs) >= _PAIR:
            count, most = longest.get(tuple(inputs[:_PAIR]), (0, 0))
            longest[tuple(inputs[:_PAIR])] = count + 1, max(most, len(inputs))
    return {pair for pair, (count, most) in longest.items() if count > 1 and most >= _MANY_INPUTS}


def _follow(folding: Folding, recipe: _Recipe, parents: list[int]) -> int:
    if recipe.carrier is not None:
        return CONSTANT if recipe.carrier == CONSTANT else parents[recipe.carrier]
    node = parents[recipe.first]
    for other, stage in recipe.chain:
        node = folding.add_join(node, parents[other], stage, reduced=recipe.reduced)
    return node


def _make_recipe(
    folding: Folding, signature: tuple[object, ...], ladder: tuple[int, ...], output: list[int]
) -> _Recipe:
    """How a dependent operator follows its inputs.

    ``signature`` is its set of precisions, whether joins are reduced, and a carrier (local) and map for each input.
    """

    def step(precision: int) -> int:
        delivered = output[precision]
        return next((i for i, p in enumerate(ladder) if p >= delivered), len(ladder) - 1)

    required: dict[int, tuple[int, ...]] = {}
    base = 0
    numbers: list[int] = list(signature[2:])  # type: ignore[arg-type]
    for local, map_id in zip(numbers[::2], numbers[1::2], strict=True):
        steps = tuple(step(precision) for precision in folding.maps[map_id])
        if local == CONSTANT:
            base = max(base, steps[0])
        else:
            required[local] = tuple(map(max, required.get(local, steps), steps))
    required = {local: tuple(max(base, s) for s in steps) for local, steps in required.items()}
    free = [local for local, steps in required.items() if set(steps) != {base}]
    if not free:
        return _Recipe(CONSTANT, (), 0, folding.map_id((ladder[base],)))
    if len(free) == 1:
        return _Recipe(free[0], (), 0, folding.map_id(tuple(ladder[s] for s in required[free[0]])))
    reduced = bool(signature[1])
    stages = chain_stages([required[local] for local in free], reduced=reduced)
    values = stages[-1].distinct if reduced else stages[-1].values
    final = folding.map_id(tuple(ladder[s] for s in values))
    return _Recipe(None, tuple(zip(free[1:], stages, strict=True)), free[0], final, reduced)
