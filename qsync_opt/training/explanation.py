"""Why an operator has its precision: what every other precision would cost, one change at a time.

An `Explainer` evaluates a plan once and then prices each change by what it touches: the operator, the dependent
operators that follow it, and the edges of both. The results are exactly the differences that `evaluate` would give.
"""

from __future__ import annotations

import heapq
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import encode, format_memory, format_sensitivity, format_time
from qsync_opt.model import Role
from qsync_opt.training.evaluation import (
    BrokenLimit,
    CastTime,
    broken_limits,
    cast_buffers_kib,
    edge_casts,
    evaluate,
    iteration_time,
)
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem, ProblemDevice
from qsync_opt.training.propagation import follow_inputs, precisions_by_rank

EXPLANATION_FORMAT = "qsync-explanation/1"
OVERVIEW_OPERATORS = 10
"""How many operators of each kind an overview names."""
_NAMED_INPUTS = 2
"""How many inputs a sentence names before it counts the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A dependent operator that would follow into another precision."""

    operator: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another precision for one operator on one device type, the rest of the plan unchanged.

    All changes are new minus old. ``iteration_change_ns`` is that of the whole cluster, ``own_iteration_change_ns``
    of the iteration that this device type and the fixed-precision devices alone would have, ``compute_change_ns`` of
    the end of its backward pass. ``added_casts`` and ``removed_casts`` include those of pushed operators. ``broken``
    are the limits that the changed plan breaks.
    """

    precision: str
    iteration_change_ns: int
    own_iteration_change_ns: int
    compute_change_ns: int
    memory_change_kib: int
    sensitivity_change: float
    added_casts: tuple[CastTime, ...]
    removed_casts: tuple[CastTime, ...]
    pushed: tuple[Pushed, ...]
    broken: tuple[BrokenLimit, ...]

    @property
    def feasible(self) -> bool:
        """True if the changed plan keeps every limit."""
        return not self.broken

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        broken = [limit.to_json() for limit in self.broken]
        return {**encode(self), "broken": broken, "feasible": self.feasible}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One operator on one device type under a plan.

    ``forward_ns``, ``backward_ns``, ``memory_kib`` and ``sensitivity`` are its own; ``forward_casts`` and
    ``backward_casts`` are charged to it. ``alternatives`` are the other precisions of its table, lowest rank first,
    and empty for operators that the plan does not decide on. ``decided_by`` names the inputs whose format a dependent
    operator follows.
    """

    device: str
    operator: str
    type: str
    role: Role
    precision: str
    forward_ns: int
    backward_ns: int
    memory_kib: int
    sensitivity: float
    forward_casts: tuple[CastTime, ...]
    backward_casts: tuple[CastTime, ...]
    alternatives: tuple[Alternative, ...]
    next_lower: Alternative | None
    next_higher: Alternative | None
    decided_by: tuple[str, ...]

    @property
    def fastest(self) -> Alternative | None:
        """The alternative with which the device type computes fastest; None if there is none."""
        return min(self.alternatives, key=lambda a: (a.compute_change_ns, a.sensitivity_change), default=None)

    @property
    def reason(self) -> str:
        """Why the operator has its precision, in one to three sentences."""
        if self.role is Role.FIXED:
            return f"Fixed: it always runs in {self.precision} on {self.device}."
        if self.role is Role.DEPENDENT:
            if not self.decided_by:
                return f"Dependent without inputs: it runs in {self.precision}, the lowest that its table has."
            inputs = "input" if len(self.decided_by) == 1 else "inputs"
            return f"Follows its {inputs} {_listed(self.decided_by)} into {self.precision}."
        if not self.alternatives:
            return f"{self.precision} is the only precision that it has on {self.device}."
        better = [a for a in self.alternatives if a.feasible and a.sensitivity_change < 0]
        if better:
            best = min(better, key=lambda a: a.sensitivity_change)
            return f"{best.precision} would be better within all limits: {_changes(best)}."
        return " ".join(
            f"{self.precision} is the {extreme} that it has." if other is None else _sentence(verb, other)
            for verb, other, extreme in (
                ("Raising", self.next_higher, "highest"),
                ("Lowering", self.next_lower, "lowest"),
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            **encode(self, version=EXPLANATION_FORMAT),
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "next_lower": None if self.next_lower is None else self.next_lower.precision,
            "next_higher": None if self.next_higher is None else self.next_higher.precision,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The operators of one device type that matter most under a plan.

    ``adjustable`` counts the operators that a plan decides on; ``sensitivity`` is that of the whole device type.
    ``sensitive`` are the operators of highest sensitivity above 0; ``savings`` those whose change alone would shorten
    the computation of the device type most, by their ``fastest`` alternative.
    """

    device: str
    adjustable: int
    sensitivity: float
    sensitive: tuple[Explanation, ...]
    savings: tuple[Explanation, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "adjustable": self.adjustable,
            "sensitivity": self.sensitivity,
            "most_sensitive": [explanation.to_json() for explanation in self.sensitive],
            "most_saving": [
                {**each.to_json(), "instead": each.fastest and each.fastest.precision} for each in self.savings
            ],
        }


class Explainer:
    """Explains any operator of a plan, feasible or not, which is evaluated once.

    Raises:
        ProblemError: The plan does not belong to the problem, or contradicts it.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem = problem
        self.evaluation = evaluate(problem, plan)
        self._precisions = plan.resolve(problem)
        self._operators = {operator.name: operator for operator in problem.operators}
        self._positions = {operator.name: i for i, operator in enumerate(problem.operators)}
        self._users: dict[str, list[str]] = {name: [] for name in self._operators}
        # Backward runs in reverse: a bucket is complete once the first operator that it waits for is done.
        self._first_of_bucket: dict[int, int] = {}
        for position, operator in enumerate(problem.operators):
            for source in operator.inputs:
                self._users[source].append(operator.name)
            if operator.bucket is not None:
                self._first_of_bucket.setdefault(operator.bucket, position)
        self._own_iteration_ns = {
            name: iteration_time(problem, (device,))[1] for name, device in self.evaluation.devices.items()
        }

    def explain(self, operator: str, device: str) -> Explanation:
        """Explain one operator on one device type.

        Raises:
            ProblemError: No such operator or device type; the nearest name is given.

        Source: ours; the exchange of sensitivity for time is what QSync's allocator (IPDPS 2024) decides by.
        """
        position = self.problem.index(operator)
        node, table = self.problem.operators[position], self.problem.device(device)
        time = self.evaluation.devices[device].operators[position]
        cost = table.operators[operator][time.precision]
        steps = precisions_by_rank(self.problem, table, operator)
        here = steps.index(time.precision)
        adjustable = node.role is Role.ADJUSTABLE
        inputs = node.inputs if node.role is Role.DEPENDENT else ()
        ranks = {source: self._delivered_rank(table, self._precisions[device][source]) for source in inputs}
        lower = [self._alternative(operator, table, step) for step in steps[:here] if adjustable]
        higher = [self._alternative(operator, table, step) for step in steps[here + 1 :] if adjustable]
        return Explanation(
            device=device,
            operator=operator,
            type=node.type,
            role=node.role,
            precision=time.precision,
            forward_ns=time.forward_ns,
            backward_ns=time.backward_ns,
            memory_kib=cost.memory_kib,
            sensitivity=cost.sensitivity,
            forward_casts=time.forward_casts,
            backward_casts=time.backward_casts,
            alternatives=(*lower, *higher),
            next_lower=lower[-1] if lower else None,
            next_higher=higher[0] if higher else None,
            decided_by=tuple(source for source, rank in ranks.items() if rank == max(ranks.values())),
        )

    def _delivered_rank(self, device: ProblemDevice, precision: str) -> int:
        return self.problem.rank(device.precisions[precision].output)

    def compute_change_ns(self, operator: str, device: str, precision: str) -> int:
        """`Alternative.compute_change_ns` of an adjustable operator, without the rest of the alternative."""
        table = self.problem.device(device)
        changed = self._changed_precisions(operator, table, precision)
        forward_ns, backward_ns = self._time_changes(table, changed, self._cast_changes(table, changed))
        return forward_ns + sum(backward_ns.values())

    def _alternative(self, operator: str, device: ProblemDevice, precision: str) -> Alternative:
        before, old = self.evaluation.devices[device.name], self._precisions[device.name]
        changed = self._changed_precisions(operator, device, precision)
        casts = self._cast_changes(device, changed)
        forward_ns, backward_ns = self._time_changes(device, changed, casts)
        compute_ns = forward_ns + sum(backward_ns.values())
        costs = [(device.operators[name][old[name]], device.operators[name][new]) for name, new in changed.items()]
        memory_kib = sum(new_cost.memory_kib - old_cost.memory_kib for old_cost, new_cost in costs) + sum(
            times * cast_buffers_kib(self.problem, (cast,)) for cast, times in casts.items() if _is_forward(cast)
        )
        ready = list(before.bucket_ready_ns)
        for bucket, first in self._first_of_bucket.items():
            ready[bucket] += forward_ns + sum(ns for position, ns in backward_ns.items() if position >= first)
        after = replace(
            before,
            bucket_ready_ns=tuple(ready),
            backward_end_ns=before.backward_end_ns + compute_ns,
            memory_kib=before.memory_kib + memory_kib,
        )
        devices = tuple(after if d.name == device.name else d for d in self.evaluation.devices.values())
        _, iteration_ns = iteration_time(self.problem, devices)
        _, own_iteration_ns = iteration_time(self.problem, (after,))
        return Alternative(
            precision=precision,
            iteration_change_ns=iteration_ns - self.evaluation.iteration_ns,
            own_iteration_change_ns=own_iteration_ns - self._own_iteration_ns[device.name],
            compute_change_ns=compute_ns,
            memory_change_kib=memory_kib,
            sensitivity_change=sum((new_cost.sensitivity - old_cost.sensitivity for old_cost, new_cost in costs), 0.0),
            added_casts=tuple(casts.elements()),
            removed_casts=tuple((-casts).elements()),
            pushed=tuple(
                Pushed(operator=name, before=old[name], after=new) for name, new in changed.items() if name != operator
            ),
            broken=broken_limits(self.problem, devices, iteration_ns),
        )

    def _time_changes(
        self, device: ProblemDevice, changed: Mapping[str, str], casts: Counter[CastTime]
    ) -> tuple[int, dict[int, int]]:
        old = self._precisions[device.name]
        forward_ns, backward_ns = 0, {}
        for name, new in changed.items():
            before_cost, after_cost = device.operators[name][old[name]], device.operators[name][new]
            forward_ns += after_cost.forward_ns - before_cost.forward_ns
            backward_ns[self._positions[name]] = after_cost.backward_ns - before_cost.backward_ns
        for cast, times in casts.items():
            if _is_forward(cast):
                forward_ns += times * cast.duration_ns
            else:
                position = self._positions[cast.charged_to]
                backward_ns[position] = backward_ns.get(position, 0) + times * cast.duration_ns
        return forward_ns, backward_ns

    def _changed_precisions(self, operator: str, device: ProblemDevice, precision: str) -> dict[str, str]:
        """New precision of an operator and of the dependent ones that follow it, in forward order."""
        old = self._precisions[device.name]
        changed: dict[str, str] = {}
        queue = [self._positions[operator]]
        while queue:
            node = self.problem.operators[heapq.heappop(queue)]
            if node.name in changed:
                continue
            if node.name == operator:
                after = precision
            else:
                ranks = [self._delivered_rank(device, changed.get(u, old[u])) for u in node.inputs]
                after = follow_inputs(self.problem, precisions_by_rank(self.problem, device, node.name), max(ranks))
            if after == old[node.name]:
                continue
            changed[node.name] = after
            for user in self._users[node.name]:
                if self._operators[user].role is Role.DEPENDENT:
                    heapq.heappush(queue, self._positions[user])
        return changed

    def _cast_changes(self, device: ProblemDevice, changed: Mapping[str, str]) -> Counter[CastTime]:
        """How often each cast happens more (or, below zero, less) than before."""
        old = self._precisions[device.name]
        new = ChainMap(dict(changed), old)
        producers = dict.fromkeys(chain(changed, *(self._operators[name].inputs for name in changed)))
        difference: Counter[CastTime] = Counter()
        for producer in producers:
            users: Sequence[str] = self._users[producer]
            if self.problem.cast_sharing == "edge" and producer not in changed:
                users = [user for user in users if user in changed]
            difference.subtract(self._casts_of(device, producer, users, old))
            difference.update(self._casts_of(device, producer, users, new))
        return Counter({cast: times for cast, times in difference.items() if times})

    def _casts_of(
        self, device: ProblemDevice, producer: str, users: Sequence[str], precisions: Mapping[str, str]
    ) -> list[CastTime]:
        casts: list[CastTime] = []
        shared: set[str] = set()
        for user in users:
            forward, backward = edge_casts(
                device, self._operators[producer], self._operators[user], precisions[producer], precisions[user]
            )
            if forward is not None and not (self.problem.cast_sharing == "producer" and forward.target in shared):
                shared.add(forward.target)
                casts.append(forward)
            if backward is not None:
                casts.append(backward)
        return casts


def overview(explainer: Explainer, device: str, count: int = OVERVIEW_OPERATORS) -> Overview:
    """The operators of a plan that matter most on one device type, at most ``count`` of each kind.

    Raises:
        ProblemError: No such device type, or ``count`` is below 1.

    Source: ours.
    """
    if count < 1:
        raise ProblemError(f"count is {count}, but an overview needs at least 1 operator")
    table = explainer.problem.device(device).operators
    evaluation = explainer.evaluation.devices[device]
    own = {time.name: table[time.name][time.precision].sensitivity for time in evaluation.operators}
    sensitive = sorted((name for name, value in own.items() if value > 0), key=lambda name: -own[name])[:count]
    change_ns = {
        operator.name: min(
            explainer.compute_change_ns(operator.name, device, precision) for precision in table[operator.name]
        )
        for operator in explainer.problem.adjustable
    }
    faster = sorted((name for name, change in change_ns.items() if change < 0), key=change_ns.__getitem__)[:count]
    return Overview(
        device=device,
        adjustable=len(change_ns),
        sensitivity=evaluation.sensitivity,
        sensitive=tuple(explainer.explain(name, device) for name in sensitive),
        savings=tuple(explainer.explain(name, device) for name in faster),
    )


def _is_forward(cast: CastTime) -> bool:
    return cast.charged_to == cast.consumer  # backward casts are charged to the producer


def _sentence(verb: str, alternative: Alternative) -> str:
    text = f"{verb} to {alternative.precision}: {_changes(alternative)}"
    if alternative.broken:
        text += f"; breaks {' and '.join(limit.text for limit in alternative.broken)}"
    return f"{text}."


def _changes(alternative: Alternative) -> str:
    time = _signed(alternative.iteration_change_ns, format_time, "iteration time")
    if alternative.iteration_change_ns == 0 and alternative.compute_change_ns:
        time += f" (its device {_signed(alternative.compute_change_ns, format_time, 'computing')})"
    sensitivity = _signed(alternative.sensitivity_change, format_sensitivity, "sensitivity")
    return f"{sensitivity}, {time}, {_signed(alternative.memory_change_kib, format_memory, 'memory')}"


def _signed(value: float, form: Callable[[float], str], what: str) -> str:
    if value == 0:
        return f"{what} unchanged"
    return f"{what} {'+' if value > 0 else '−'}{form(abs(value))}"


def _listed(names: tuple[str, ...]) -> str:
    listed = " and ".join(repr(name) for name in names[:_NAMED_INPUTS])
    return listed if len(names) <= _NAMED_INPUTS else f"{listed} and {len(names) - _NAMED_INPUTS} more"
