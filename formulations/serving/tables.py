"""A serving problem as arrays, for one micro-batch option or one order of devices.

Axes: G groups, K kinds, T device types, S schemes, J stages. Devices that may be exchanged without changing anything
are one type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.serving import HARM_SLACK, Plan, Problem, Stage, decode_ns, prefill_ns

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The numbers of one micro-batch option; phases (prefill, decode) are the last axis of times.

    ``harm_limit`` is infinite where there is none, and includes the rounding that the evaluation allows.
    """

    option: int
    prefill_parts: int
    decode_parts: int
    steps: int
    kind_G: NDArray[np.intp]
    time_KTS2: Array
    memory_KS: Array
    harm_GS: Array
    harm_limit: float
    limit_T: Array
    count_T: NDArray[np.intp]
    first_T2: Array
    last_T2: Array
    first_memory_T: Array
    last_memory_T: Array
    link_TT2: Array

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.kind_G)

    @property
    def types(self) -> int:
        """Number of device types."""
        return len(self.count_T)

    def total(self, prefill_J: Sequence[float], decode_J: Sequence[float]) -> float:
        """Objective for the stage times of both phases."""
        return float(
            prefill_ns(prefill_J, self.prefill_parts)  # type: ignore[arg-type]
            + decode_ns(decode_J, self.decode_parts, self.steps)  # type: ignore[arg-type]
        )

    def totals(self, prefill_NJ: Array, decode_NJ: Array) -> Array:
        """Objectives of many candidates at once."""
        prefill_N = prefill_NJ.sum(1) + (self.prefill_parts - 1) * prefill_NJ.max(1)
        if self.steps == 0:
            return np.asarray(prefill_N)
        sum_N, most_N, parts = decode_NJ.sum(1), decode_NJ.max(1), self.decode_parts
        return np.asarray(
            prefill_N + (self.steps - 1) * np.maximum(sum_N, parts * most_N) + sum_N + (parts - 1) * most_N
        )

    def most_ns(self) -> float:
        """An objective that no plan is above: every group, end and link at its slowest."""
        groups_2 = self.time_KTS2.max((1, 2))[self.kind_G].sum(0)
        ends_2 = self.first_T2.max(0) + self.last_T2.max(0)
        prefill, decode = groups_2 + ends_2 + self.link_TT2.max((0, 1)) * float(self.count_T.sum())
        return float(self.prefill_parts * prefill + self.steps * self.decode_parts * decode)

    def in_order(self, order: Sequence[int]) -> Tables:
        """The tables of one order of device types: each stage becomes a type of its own."""
        pick = np.asarray(order)
        return replace(
            self,
            time_KTS2=self.time_KTS2[:, pick],
            limit_T=self.limit_T[pick],
            count_T=np.ones(len(pick), dtype=np.intp),
            first_T2=self.first_T2[pick],
            last_T2=self.last_T2[pick],
            first_memory_T=self.first_memory_T[pick],
            last_memory_T=self.last_memory_T[pick],
            link_TT2=self.link_TT2[np.ix_(pick, pick)],
        )


def stages_of(ends: Sequence[int] | NDArray[np.intp]) -> NDArray[np.intp]:
    """The stage of each group, given where stages end."""
    return np.asarray(np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0)))


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate plan in numbers: device type and end of each stage, scheme of each group.

    The last end is the number of groups.
    """

    order: tuple[int, ...]
    ends: tuple[int, ...]
    schemes: tuple[int, ...]

    def stage_G(self) -> NDArray[np.intp]:
        """The stage of each group."""
        return stages_of(self.ends)


def device_types(problem: Problem) -> list[list[int]]:
    """Devices by type: two are of one type if exchanging them changes nothing.

    Source: ours.
    """
    names = [device.name for device in problem.devices]

    def same(a: int, b: int) -> bool:
        x, y = names[a], names[b]
        if problem.devices[a].memory_kib != problem.devices[b].memory_kib:
            return False
        if problem.costs[x] != problem.costs[y] or problem.ends[x] != problem.ends[y]:
            return False
        links = problem.links
        return links[x, y] == links[y, x] and all(
            links[x, z] == links[y, z] and links[z, x] == links[z, y] for z in names if z not in (x, y)
        )

    types: list[list[int]] = []
    for device in range(len(names)):
        for members in types:
            if same(members[0], device):
                members.append(device)
                break
        else:
            types.append([device])
    return types


def build_tables(problem: Problem) -> tuple[list[Tables], list[list[int]]]:
    """The tables of every micro-batch option, and the devices of each type."""
    types = device_types(problem)
    names = [problem.devices[members[0]].name for members in types]
    kinds = list(dict.fromkeys(group.kind for group in problem.groups))
    schemes = problem.schemes
    options = range(len(problem.microbatches))

    def array(values: Any) -> Array:
        return np.asarray(values, dtype=np.float64)

    time_KTSO2 = array([[[problem.costs[t][k][s] for s in schemes] for t in names] for k in kinds])
    weights_KS = array([[problem.weights_kib[k][s] for s in schemes] for k in kinds])
    state_KO = array([problem.state_kib[k] for k in kinds])
    first_TO2 = array([problem.ends[t].first for t in names])
    last_TO2 = array([problem.ends[t].last for t in names])
    link_TTO2 = np.zeros((len(names), len(names), len(options), 2))
    for a, b in itertools.product(range(len(types)), repeat=2):
        source, target = types[a][0], types[b][0]
        if a == b and len(types[a]) > 1:
            target = types[a][1]
        if source != target:
            link_TTO2[a, b] = problem.links[problem.devices[source].name, problem.devices[target].name]
    limit = problem.harm_limit
    result = [
        Tables(
            option=o,
            prefill_parts=problem.microbatches[o].prefill,
            decode_parts=problem.microbatches[o].decode,
            steps=problem.new_tokens - 1,
            kind_G=np.asarray([kinds.index(group.kind) for group in problem.groups]),
            time_KTS2=time_KTSO2[:, :, :, o],
            memory_KS=weights_KS + state_KO[:, o, None],
            harm_GS=array([[problem.harm[group.name][s] for s in schemes] for group in problem.groups]),
            harm_limit=math.inf if limit is None else limit * (1 + HARM_SLACK / 2),
            limit_T=array([problem.devices[members[0]].memory_kib for members in types]),
            count_T=np.asarray([len(members) for members in types]),
            first_T2=first_TO2[:, o],
            last_T2=last_TO2[:, o],
            first_memory_T=array([problem.ends[t].first_kib for t in names]),
            last_memory_T=array([problem.ends[t].last_kib for t in names]),
            link_TT2=link_TTO2[:, :, o],
        )
        for o in options
    ]
    return result, types


def rough_ns(tables: Tables) -> float:
    """About the objective of a plan that shares the groups out over all devices."""
    once_2 = tables.time_KTS2.mean((1, 2))[tables.kind_G].sum(0)
    devices = float(tables.count_T.sum())
    return max(float(tables.prefill_parts * once_2[0] + tables.steps * once_2[1] * tables.decode_parts) / devices, 1.0)


def to_plan(problem: Problem, types: list[list[int]], option: int, draft: Draft) -> Plan:
    """The plan that a draft stands for; devices of one type are used in the problem's order."""
    free = [iter(members) for members in types]
    stages, begin = [], 0
    for kind, end in zip(draft.order, draft.ends, strict=True):
        device = problem.devices[next(free[kind])].name
        stages.append(Stage(device=device, groups=tuple(group.name for group in problem.groups[begin:end])))
        begin = end
    schemes = {g.name: problem.schemes[s] for g, s in zip(problem.groups, draft.schemes, strict=True)}
    return Plan(microbatch=option, stages=tuple(stages), schemes=schemes)
