"""Why has an operator its precision? What every other precision would cost, one change at a time.

An `Explainer` evaluates a plan once and then prices each change by what it touches: the operator, the dependent
operators that follow it, and the edges of both. The results are exactly the differences that `evaluate` would give.
"""

from __future__ import annotations

import heapq
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io import format_memory, format_sensitivity, format_time
from qsync_opt.model import Role
from qsync_opt.training.evaluation import (
    CastTime,
    DeviceEvaluation,
    cast_buffer_kib,
    edge_casts,
    evaluate,
    iteration_time,
)
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem, ProblemDevice
from qsync_opt.training.propagation import follow, ladder

_NAMED = 2
"""How many inputs are named before the rest is counted."""


def reason(explanation: Explanation) -> str:
    """Why the operator has its precision, in one to three sentences."""
    precision, device = explanation.precision, explanation.device
    if explanation.role is Role.FIXED:
        return f"Fixed: it always runs in {precision} on {device}."
    if explanation.role is Role.DEPENDENT:
        if not explanation.decided_by:
            return f"Dependent without inputs: it runs in {precision}, the lowest that its table has."
        inputs = "input" if len(explanation.decided_by) == 1 else "inputs"
        return f"Follows its {inputs} {_some(explanation.decided_by)} into {precision}."
    if not explanation.alternatives:
        return f"{precision} is the only precision that it has on {device}."
    better = [a for a in explanation.alternatives if a.feasible and a.sensitivity_change < 0]
    if better:
        best = min(better, key=lambda a: a.sensitivity_change)
        return f"{best.precision} would be better within all limits: {_changes(best)}."
    higher, lower = explanation.next_higher, explanation.next_lower
    sentences = [
        f"{precision} is the highest that it has." if higher is None else _sentence("Raising", higher),
        f"{precision} is the lowest that it has." if lower is None else _sentence("Lowering", lower),
    ]
    return " ".join(sentences)


def _sentence(verb: str, alternative: Alternative) -> str:
    text = f"{verb} to {alternative.precision}: {_changes(alternative)}"
    if alternative.broken:
        text += f"; breaks {' and '.join(limit.text for limit in alternative.broken)}"
    return f"{text}."


def _changes(alternative: Alternative) -> str:
    time_ns, memory_kib = alternative.iteration_change_ns, alternative.memory_change_kib
    changes = [
        _signed(alternative.sensitivity_change, format_sensitivity, "sensitivity"),
        _signed(time_ns, format_time, "iteration time"),
        _signed(memory_kib, format_memory, "memory"),
    ]
    if time_ns == 0 and alternative.compute_change_ns:
        changes[1] += f" (its device {_signed(alternative.compute_change_ns, format_time, 'computing')})"
    return ", ".join(changes)


def _signed(value: float, form: Callable[[float], str], what: str) -> str:
    if value == 0:
        return f"{what} unchanged"
    return f"{what} {'+' if value > 0 else '−'}{form(abs(value))}"


def _some(names: tuple[str, ...]) -> str:
    shown = " and ".join(repr(name) for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


EXPLANATION_FORMAT = "qsync-explanation/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLimit:
    """A limit that does not hold: of the iteration time in ns (``device`` is None), or of a device's memory in KiB."""

    device: str | None
    value: int
    limit: int

    @property
    def text(self) -> str:
        """What is broken and by how much."""
        if self.device is None:
            return f"the latency limit of {format_time(self.limit)} by {format_time(self.value - self.limit)}"
        excess = format_memory(self.value - self.limit)
        return f"the memory limit of {self.device}, {format_memory(self.limit)}, by {excess}"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        kind = "latency" if self.device is None else "memory"
        return {"kind": kind, "device": self.device, "value": self.value, "limit": self.limit}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A dependent operator that would follow into another precision."""

    operator: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another precision for one operator on one device type, everything else in the plan left as it is.

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
        return {
            "precision": self.precision,
            "iteration_change_ns": self.iteration_change_ns,
            "own_iteration_change_ns": self.own_iteration_change_ns,
            "compute_change_ns": self.compute_change_ns,
            "memory_change_kib": self.memory_change_kib,
            "sensitivity_change": self.sensitivity_change,
            "added_casts": [_cast_json(cast) for cast in self.added_casts],
            "removed_casts": [_cast_json(cast) for cast in self.removed_casts],
            "pushed": [{"operator": p.operator, "before": p.before, "after": p.after} for p in self.pushed],
            "broken": [limit.to_json() for limit in self.broken],
            "feasible": self.feasible,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """New minus old of one device type; ``backward_ns`` by position, ``casts`` below zero where they go."""

    forward_ns: int
    backward_ns: Mapping[int, int]
    memory_kib: int
    sensitivity: float
    casts: Counter[CastTime]
    pushed: tuple[Pushed, ...]

    @property
    def compute_ns(self) -> int:
        return self.forward_ns + sum(self.backward_ns.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One operator on one device type under a plan.

    ``forward_ns``, ``backward_ns``, ``memory_kib`` and ``sensitivity`` are its own; ``forward_casts`` and
    ``backward_casts`` are charged to it. ``alternatives`` are the other precisions of its table, lowest rank first,
    and empty for operators that the plan does not decide on. ``decided_by`` names the inputs whose format a dependent
    operator follows. ``reason`` says it in words.
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
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "format": EXPLANATION_FORMAT,
            "device": self.device,
            "operator": self.operator,
            "type": self.type,
            "role": self.role.value,
            "precision": self.precision,
            "forward_ns": self.forward_ns,
            "backward_ns": self.backward_ns,
            "memory_kib": self.memory_kib,
            "sensitivity": self.sensitivity,
            "forward_casts": [_cast_json(cast) for cast in self.forward_casts],
            "backward_casts": [_cast_json(cast) for cast in self.backward_casts],
            "alternatives": [alternative.to_json() for alternative in self.alternatives],
            "next_lower": None if self.next_lower is None else self.next_lower.precision,
            "next_higher": None if self.next_higher is None else self.next_higher.precision,
            "decided_by": list(self.decided_by),
            "reason": self.reason,
        }


class Explainer:
    """A plan that has been evaluated once, ready to explain any operator of it."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Evaluate the plan.

        Args:
            problem: The problem.
            plan: A plan for it, feasible or not.

        Raises:
            ProblemError: The plan does not belong to the problem, or contradicts it.
        """
        self.problem = problem
        self.evaluation = evaluate(problem, plan)
        self._precisions = plan.resolve(problem)
        self._positions = {operator.name: i for i, operator in enumerate(problem.operators)}
        self._users: dict[str, list[str]] = {operator.name: [] for operator in problem.operators}
        first: dict[int, int] = {}
        for position, operator in enumerate(problem.operators):
            for source in operator.inputs:
                self._users[source].append(operator.name)
            if operator.bucket is not None:
                first.setdefault(operator.bucket, position)
        # Backward runs in reverse: a bucket is complete once the first operator that it waits for is done.
        self._bucket_first = first
        self._own_iteration_ns = {
            name: iteration_time(problem, (device,))[1] for name, device in self.evaluation.devices.items()
        }

    def explain(self, operator: str, device: str) -> Explanation:
        """Explain one operator on one device type.

        Raises:
            ProblemError: No such operator or device type; the nearest name is given.

        Source: ours; the exchange of sensitivity for time is what QSync's allocator (IPDPS 2024) decides by.
        """
        node = self.problem.operators[self.problem.index(operator)]
        table = self.problem.device(device)
        time = self.evaluation.devices[device].operators[self._positions[operator]]
        cost = table.operators[operator][time.precision]
        steps = ladder(self.problem, table, operator)
        alternatives = (
            tuple(self._alternative(operator, table, step) for step in steps if step != time.precision)
            if node.role is Role.ADJUSTABLE
            else ()
        )
        rank = self.problem.rank(time.precision)
        lower = [a for a in alternatives if self.problem.rank(a.precision) < rank]
        higher = [a for a in alternatives if self.problem.rank(a.precision) > rank]
        explanation = Explanation(
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
            alternatives=alternatives,
            next_lower=lower[-1] if lower else None,
            next_higher=higher[0] if higher else None,
            decided_by=self._decided_by(operator, table) if node.role is Role.DEPENDENT else (),
            reason="",
        )
        return replace(explanation, reason=reason(explanation))

    def _decided_by(self, operator: str, device: ProblemDevice) -> tuple[str, ...]:
        inputs = tuple(dict.fromkeys(self.problem.operators[self._positions[operator]].inputs))
        ranks = [self._delivered_rank(device, self._precisions[device.name][source]) for source in inputs]
        return tuple(source for source, rank in zip(inputs, ranks, strict=True) if rank == max(ranks))

    def _delivered_rank(self, device: ProblemDevice, precision: str) -> int:
        return self.problem.rank(device.precisions[precision].output)

    def compute_change_ns(self, operator: str, device: str, precision: str) -> int:
        """What `Alternative` says of it, for a small part of what all of it takes; the operator must be adjustable."""
        return self._change(operator, self.problem.device(device), precision).compute_ns

    def _change(self, operator: str, device: ProblemDevice, precision: str) -> _Change:
        old = self._precisions[device.name]
        changed = self._push(operator, device, precision)
        forward_ns, memory_kib, sensitivity = 0, 0, 0.0
        backward_ns: dict[int, int] = {}
        for name, after in changed.items():
            before_cost, after_cost = device.operators[name][old[name]], device.operators[name][after]
            forward_ns += after_cost.forward_ns - before_cost.forward_ns
            backward_ns[self._positions[name]] = after_cost.backward_ns - before_cost.backward_ns
            memory_kib += after_cost.memory_kib - before_cost.memory_kib
            sensitivity += after_cost.sensitivity - before_cost.sensitivity
        casts, buffers_kib = self._cast_changes(device, changed)
        for cast, times in casts.items():
            position = self._positions[cast.charged_to]
            if cast.charged_to == cast.consumer:  # a forward cast; backward ones are charged to the producer
                forward_ns += times * cast.duration_ns
            else:
                backward_ns[position] = backward_ns.get(position, 0) + times * cast.duration_ns
        return _Change(
            forward_ns=forward_ns,
            backward_ns=backward_ns,
            memory_kib=memory_kib + buffers_kib,
            sensitivity=sensitivity,
            casts=casts,
            pushed=tuple(
                Pushed(operator=name, before=old[name], after=after)
                for name, after in changed.items()
                if name != operator
            ),
        )

    def _push(self, operator: str, device: ProblemDevice, precision: str) -> dict[str, str]:
        """Precision of every operator that changes if one does, in forward order."""
        old = self._precisions[device.name]
        changed: dict[str, str] = {}
        waiting = [self._positions[operator]]
        while waiting:
            position = heapq.heappop(waiting)
            node = self.problem.operators[position]
            if node.name in changed:
                continue
            if node.name == operator:
                after = precision
            else:
                ranks = [self._delivered_rank(device, changed.get(u, old[u])) for u in node.inputs]
                after = follow(self.problem, ladder(self.problem, device, node.name), max(ranks))
            if after == old[node.name]:
                continue
            changed[node.name] = after
            for user in self._users[node.name]:
                if self.problem.operators[self._positions[user]].role is Role.DEPENDENT:
                    heapq.heappush(waiting, self._positions[user])
        return changed

    def _cast_changes(self, device: ProblemDevice, changed: dict[str, str]) -> tuple[Counter[CastTime], int]:
        """How often each cast happens more (or, below zero, less) than before, and the KiB of buffers gained."""
        old = self._precisions[device.name]
        new = ChainMap(changed, old)
        producers = dict.fromkeys(changed)
        for name in changed:
            producers.update(dict.fromkeys(self.problem.operators[self._positions[name]].inputs))
        difference: Counter[CastTime] = Counter()
        buffers_kib = 0
        for producer in producers:
            users: Sequence[str] = self._users[producer]
            if self.problem.cast_sharing == "edge" and producer not in changed:
                users = [user for user in users if user in changed]
            for precisions, sign in ((old, -1), (new, 1)):
                casts, kib = self._casts_of(device, producer, users, precisions)
                buffers_kib += sign * kib
                for cast in casts:
                    difference[cast] += sign
        return Counter({cast: times for cast, times in difference.items() if times}), buffers_kib

    def _casts_of(
        self, device: ProblemDevice, producer: str, users: Sequence[str], precisions: Mapping[str, str]
    ) -> tuple[list[CastTime], int]:
        """Casts on the edges from one operator to some of its users, and the KiB of their buffers."""
        node = self.problem.operators[self._positions[producer]]
        casts: list[CastTime] = []
        buffers_kib = 0
        shared: set[str] = set()
        for user in users:
            consumer = self.problem.operators[self._positions[user]]
            there, back = edge_casts(device, node, consumer, precisions[producer], precisions[user])
            if there is not None and not (self.problem.cast_sharing == "producer" and there.target in shared):
                shared.add(there.target)
                casts.append(there)
                buffers_kib += cast_buffer_kib(self.problem, node, there.target)
            if back is not None:
                casts.append(back)
        return casts, buffers_kib

    def _alternative(self, operator: str, device: ProblemDevice, precision: str) -> Alternative:
        change = self._change(operator, device, precision)
        before = self.evaluation.devices[device.name]
        ready = list(before.bucket_ready_ns)
        for bucket, first in self._bucket_first.items():
            ready[bucket] += change.forward_ns + sum(
                ns for position, ns in change.backward_ns.items() if position >= first
            )
        after = replace(
            before,
            bucket_ready_ns=tuple(ready),
            backward_end_ns=before.backward_end_ns + change.compute_ns,
            memory_kib=before.memory_kib + change.memory_kib,
        )
        devices = tuple(after if d.name == device.name else d for d in self.evaluation.devices.values())
        _, iteration_ns = iteration_time(self.problem, devices)
        _, own_after_ns = iteration_time(self.problem, (after,))
        return Alternative(
            precision=precision,
            iteration_change_ns=iteration_ns - self.evaluation.iteration_ns,
            own_iteration_change_ns=own_after_ns - self._own_iteration_ns[device.name],
            compute_change_ns=change.compute_ns,
            memory_change_kib=change.memory_kib,
            sensitivity_change=change.sensitivity,
            added_casts=tuple(change.casts.elements()),
            removed_casts=tuple((-change.casts).elements()),
            pushed=change.pushed,
            broken=broken_limits(self.problem, devices, iteration_ns),
        )


def broken_limits(problem: Problem, devices: Sequence[DeviceEvaluation], iteration_ns: int) -> tuple[BrokenLimit, ...]:
    """The limits that an evaluated plan breaks: memory by device, then latency."""
    broken = [
        BrokenLimit(device=device.name, value=device.memory_kib, limit=device.memory_limit_kib)
        for device in devices
        if device.memory_kib > device.memory_limit_kib
    ]
    if iteration_ns > problem.latency_limit_ns:
        broken.append(BrokenLimit(device=None, value=iteration_ns, limit=problem.latency_limit_ns))
    return tuple(broken)


def _cast_json(cast: CastTime) -> dict[str, Any]:
    return {
        "producer": cast.producer,
        "consumer": cast.consumer,
        "source": cast.source,
        "target": cast.target,
        "duration_ns": cast.duration_ns,
        "charged_to": cast.charged_to,
    }


MOST_TELLING = 10
"""How many operators of each kind are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """An operator that would compute for less time in another precision; ``instead`` is the one that saves most."""

    explanation: Explanation
    instead: Alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The most telling operators of one device type under a plan.

    ``adjustable`` counts the operators that a plan decides on; ``sensitivity`` is that of the whole device type.
    ``sensitive`` are the operators with most sensitivity, those without any left out; ``savings`` those whose change
    would shorten the computation of the device type most, everything else left as it is.
    """

    device: str
    adjustable: int
    sensitivity: float
    sensitive: tuple[Explanation, ...]
    savings: tuple[Saving, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "adjustable": self.adjustable,
            "sensitivity": self.sensitivity,
            "most_sensitive": [explanation.to_json() for explanation in self.sensitive],
            "most_saving": [{**s.explanation.to_json(), "instead": s.instead.precision} for s in self.savings],
        }


def overview(explainer: Explainer, device: str, count: int = MOST_TELLING) -> Overview:
    """Name the operators of a plan that tell most on one device type.

    Args:
        explainer: The plan.
        device: Name of a device type of its problem.
        count: Operators of each kind at most.

    Raises:
        ProblemError: No such device type, or ``count`` is below 1.

    Source: ours.
    """
    if count < 1:
        raise ProblemError(f"count is {count}, but an overview needs at least 1 operator")
    problem = explainer.problem
    problem.device(device)
    found = explainer.evaluation.devices[device]
    table = problem.device(device).operators
    own = {
        operator.name: table[operator.name][time.precision].sensitivity
        for operator, time in zip(problem.operators, found.operators, strict=True)
    }
    # Sorting keeps the forward order of equals.
    sensitive = sorted((name for name, value in own.items() if value > 0), key=lambda name: -own[name])[:count]
    saved_ns = {
        operator.name: min(
            explainer.compute_change_ns(operator.name, device, precision) for precision in table[operator.name]
        )
        for operator in problem.adjustable
    }
    quicker = sorted((name for name, change in saved_ns.items() if change < 0), key=saved_ns.__getitem__)[:count]
    savings = []
    for name in quicker:
        explanation = explainer.explain(name, device)
        instead = min(explanation.alternatives, key=lambda a: (a.compute_change_ns, a.sensitivity_change))
        savings.append(Saving(explanation=explanation, instead=instead))
    return Overview(
        device=device,
        adjustable=len(problem.adjustable),
        sensitivity=found.sensitivity,
        sensitive=tuple(explainer.explain(name, device) for name in sensitive),
        savings=tuple(savings),
    )
