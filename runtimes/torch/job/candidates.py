"""What a job can compute in: execution modes of each device type, and candidates, which take one mode for every type.

A mode is one that a user could choose without a solver (FP32, BF16 or FP16 autocast, one precision everywhere) or one
that a solver proposes: the plan of the job, or the fastest plan of a device type by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from qsync_opt.errors import ProblemError, SolverError
from qsync_opt.io import Json, freeze
from qsync_opt.model import Role
from qsync_opt.numerics import number_format
from qsync_opt.runtimes.torch.execution import AUTOCAST_TYPES, TORCH_MODES
from qsync_opt.training import (
    BYTES_PER_KIB,
    Communication,
    Problem,
    ProblemDevice,
    SharesPlan,
    evaluate_device,
    fastest,
    propagate,
    solve,
    uniform_plan,
)

FULL = "FP32"
PLANNED = "plan"
OWN, OWN_UNSCALED = "own plan", "own plan without FP16"
"""The fastest plan of a device type by itself, among all formats and among those without loss scaling."""
JOINT = "joint plan"
"""The precisions of the joint plan of local batches and precisions."""
LAUNCHED, CAPTURED, COMPILED, COMPILED_CAPTURED = "launched", "captured", "compiled", "compiled, captured"
FORMS = (LAUNCHED, CAPTURED, COMPILED, COMPILED_CAPTURED)
"""How the passes of a mode are executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionMode:
    """How the workers of one device type compute, and what that was measured to cost.

    Attributes:
        name: ``"FP32"``, ``"BF16 autocast"``, ``"INT8"``, ``"plan"``, ``"own plan"`` and such.
        precisions: Of every adjustable operator.
        autocast: Its precision where torch itself carries it out (``torch.autocast`` or TF32), else None.
        sensitivity: Total over the operators, for this device type.
        pass_ns: Forward and backward pass on the slowest of the workers; with loss scaling, of the gradients too.
        needed_bytes: Peak memory of a step on the worker that needs most; None if a worker ran out of memory, could
            not run, capture or compile the mode, or left that out because other modes are faster.
        captured: Whether passes are replayed as CUDA graphs.
        compiled: Whether the model is compiled.
        regional: Whether its repeated blocks are then compiled once for all of them.
        channels_last: Whether weights of convolutions lie channels last.
        waits_for_host: Whether the device had nothing left to do when the host had launched the timed passes, so that
            ``pass_ns`` of launched passes says nothing of how long it computes.
    """

    name: str
    precisions: Mapping[str, str]
    autocast: str | None = None
    sensitivity: float = 0.0
    pass_ns: int = 0
    needed_bytes: int | None = 0
    captured: Annotated[bool, Json(omitted=True)] = False
    compiled: Annotated[bool, Json(omitted=True)] = False
    regional: Annotated[bool, Json(omitted=True)] = False
    channels_last: Annotated[bool, Json(omitted=True)] = False
    waits_for_host: Annotated[bool, Json(omitted=True)] = False

    def __post_init__(self) -> None:
        freeze(self, "precisions")
        for precision in set(self.precisions.values()):
            number_format(precision)
        if self.autocast not in (None, *AUTOCAST_TYPES, *TORCH_MODES):
            allowed = ", ".join((*AUTOCAST_TYPES, *TORCH_MODES))
            raise ProblemError(f"{self.name}: autocast is {self.autocast!r}, but allowed are {allowed} and null")

    @property
    def label(self) -> str:
        """Name, with how passes are executed, compiled and laid out."""
        parts = (self.way, "by blocks" if self.regional else "", "channels last" if self.channels_last else "")
        return ", ".join(part for part in parts if part)

    @property
    def way(self) -> str:
        """Name, with how passes are executed: the same on devices for which another build or layout is faster."""
        return self.name if self.form == LAUNCHED else f"{self.name}, {self.form}"

    @property
    def form(self) -> str:
        """How passes are executed: one of `FORMS`."""
        return FORMS[self.captured + 2 * self.compiled]

    @property
    def carrier(self) -> str | None:
        """`ApplyOptions.autocast`: what torch itself carries out, FP32 included."""
        return FULL if self.autocast is None and set(self.precisions.values()) == {FULL} else self.autocast

    @property
    def is_solved(self) -> bool:
        """Whether a solver proposed it; modes of one name then differ between device types."""
        return self.name in (PLANNED, OWN, OWN_UNSCALED, JOINT)

    @property
    def is_plain(self) -> bool:
        """Whether it is what the model does by itself."""
        changed = self.autocast is not None or self.form != LAUNCHED or self.channels_last
        return not changed and set(self.precisions.values()) <= {FULL}

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients pass through FP16, so that losses are scaled and all ranks agree on overflows."""
        return "FP16" in self.precisions.values()

    def fits(self, limit_bytes: float) -> bool:
        """Whether it keeps a memory limit."""
        return self.needed_bytes is not None and self.needed_bytes <= limit_bytes

    def slowed(self, factor: float) -> ExecutionMode:
        """The same mode on a device that takes ``factor`` times as long."""
        return replace(self, pass_ns=round(factor * self.pass_ns))


Modes = Mapping[str, Sequence[ExecutionMode]]
"""Execution modes of every device type."""
Candidate = Mapping[str, ExecutionMode]
"""One execution mode for every device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Time of a whole training step under a candidate: passes, loss scaling, all-reduces and the optimizer.

    Attributes:
        taken: Device type to the label of its mode.
        step_ns: On the slowest worker; with sized batches for as many samples in total as with equal ones.
        batches: Device type to the samples of one of its workers, where batches were sized; empty: equal batches.
        rounds_ns: Its time in each round of the benchmark, 0 where it was not timed; empty: it was timed only once.
    """

    taken: Mapping[str, str]
    step_ns: Annotated[int, Json(minimum=1)]
    batches: Annotated[Mapping[str, Annotated[int, Json(minimum=1)]], Json(omitted=True)] = field(default_factory=dict)
    rounds_ns: Annotated[tuple[int, ...], Json(omitted=True)] = ()

    def __post_init__(self) -> None:
        freeze(self, "taken", "batches")
        if self.batches and self.batches.keys() != self.taken.keys():
            raise ProblemError("a step: batches and taken are of different device types")


def possible_modes(problem: Problem, plan: Mapping[str, Mapping[str, str]]) -> dict[str, list[ExecutionMode]]:
    """The modes of every device type, not timed: one precision everywhere, from the finest, and the plan if it differs.

    Args:
        problem: Gives sensitivities, and which precisions an operator has on a device.
        plan: Device type to operator to precision.
    """
    modes: dict[str, list[ExecutionMode]] = {}
    for device in problem.devices:
        available = {precision for operator in problem.adjustable for precision in device.operators[operator.name]}
        modes[device.name] = []
        for precision in reversed([name for name in problem.formats if name in available]):
            mode = _predicted_mode(problem, device, precision, uniform_plan(problem, precision).devices[device.name])
            if precision in AUTOCAST_TYPES and set(mode.precisions.values()) <= {precision, FULL}:
                mode = replace(mode, name=f"{precision} autocast", autocast=precision)
            elif precision == "TF32" and set(mode.precisions.values()) <= {precision, FULL}:
                mode = replace(mode, autocast=precision)
            modes[device.name].append(mode)
        planned = _predicted_mode(problem, device, PLANNED, plan[device.name])
        if not planned.is_plain:
            modes[device.name].append(planned)
    return modes


def fastest_modes(problem: Problem, known: Modes, *, slack: float) -> dict[str, list[ExecutionMode]]:
    """The modes of `fastest_plans`, not timed, as far as no known mode is the same."""
    modes = {}
    for name, plans in fastest_plans(problem, slack=slack).items():
        proposed = [_predicted_mode(problem, problem.device(name), label, plan) for label, plan in plans.items()]
        modes[name] = [mode for mode in proposed if mode.precisions not in [other.precisions for other in known[name]]]
    return modes


def joint_modes(problem: Problem, joint: SharesPlan) -> dict[str, list[ExecutionMode]]:
    """The modes of a joint plan, not timed: one for every device type, whatever other modes are the same."""
    devices = joint.precisions.devices
    return {d.name: [_predicted_mode(problem, d, JOINT, devices[d.name])] for d in problem.devices}


def _predicted_mode(problem: Problem, device: ProblemDevice, name: str, entry: Mapping[str, str]) -> ExecutionMode:
    precisions = {o.name: entry[o.name] for o in problem.operators if o.role is Role.ADJUSTABLE}
    evaluation = evaluate_device(problem, device, propagate(problem, device, precisions))
    return ExecutionMode(
        name=name,
        precisions=precisions,
        sensitivity=evaluation.sensitivity,
        needed_bytes=evaluation.memory_kib * BYTES_PER_KIB,
    )


_SEARCH_S = 2.0
SIZED_TOLERANCE = 0.003
"""Relative difference of times that counts as none where local batches are sized: there the fastest is wanted."""


def fastest_plans(problem: Problem, *, slack: float = 0.0) -> dict[str, dict[str, dict[str, str]]]:
    """The least sensitive of each device type's fastest plans, whatever the other types do.

    Args:
        problem: Of the job. All-reduces and the optimizer are left out: they take as long under every plan, and an
            all-reduce that one plan hides would conceal what another one gains.
        slack: As in `build_problem`.

    Returns:
        Device type to the name of the mode to operator to precision: among all formats and, where that plan has FP16,
        among those without it. A device type without a plan that fits has none.

    Source:
        Ours.
    """
    plans: dict[str, dict[str, dict[str, str]]] = {}
    for device in problem.devices:
        plan = _fastest_passes(problem, device, slack)
        plans[device.name] = {} if plan is None else {OWN: plan}
        if plan is not None and "FP16" in plan.values():
            unscaled = _fastest_passes(problem, _without_fp16(problem, device), slack)
            if unscaled is not None and "FP16" not in unscaled.values():
                plans[device.name][OWN_UNSCALED] = unscaled
    return plans


def _without_fp16(problem: Problem, device: ProblemDevice) -> ProblemDevice:
    """The device with FP16 only where an adjustable operator has nothing else."""
    tables = dict(device.operators)
    for operator in problem.operators:
        others = {name: cost for name, cost in tables[operator.name].items() if name != "FP16"}
        if operator.role is Role.ADJUSTABLE and others:
            tables[operator.name] = others
    return replace(device, operators=tables)


def _fastest_passes(problem: Problem, device: ProblemDevice, slack: float) -> dict[str, str] | None:
    buckets = (0,) * len(problem.communication.allreduce_ns)
    alone = replace(
        problem,
        devices=(device,),
        communication=Communication(allreduce_ns=buckets, peer_ready_ns=buckets),
        optimizer_ns=0,
        optimum=None,
    )
    try:
        quickest = fastest(alone, time_limit_s=_SEARCH_S)
        if quickest is None:
            return None
        limit_ns = round((1 + slack) * (1 + SIZED_TOLERANCE) * quickest.evaluation.iteration_ns)
        best = solve(replace(alone, latency_limit_ns=limit_ns), "greedy").plan or quickest.plan
    except SolverError:
        return None
    return {o.name: best.devices[device.name][o.name] for o in problem.operators if o.role is Role.ADJUSTABLE}


def labels(candidate: Candidate) -> dict[str, str]:
    """Device type to the label of its mode."""
    return {name: mode.label for name, mode in candidate.items()}


def total_sensitivity(candidate: Candidate) -> float:
    """Over all device types."""
    return math.fsum(mode.sensitivity for mode in candidate.values())


def form_of(candidate: Candidate) -> str:
    """How all device types execute their passes: one of `FORMS`."""
    return next(iter(candidate.values())).form


def passes_ns(candidate: Candidate, workers: Mapping[str, int] | None = None) -> float:
    """Forward and backward pass of a step, as passes alone predict it.

    Args:
        candidate: With measured passes.
        workers: Number of workers of each type, if batches are sized so that none waits: the time is for as many
            samples in total as with equal batches. None: equal batches, for which the slowest type decides.
    """
    if workers is None:
        return max(mode.pass_ns for mode in candidate.values())
    return sum(workers.values()) / sum(workers[name] / max(1, mode.pass_ns) for name, mode in candidate.items())


def fitting(modes: Modes, limits_bytes: Mapping[str, int], form: str) -> dict[str, list[ExecutionMode]]:
    """The modes of a form that keep the memory limits."""
    return {
        name: [mode for mode in own if mode.form == form and mode.fits(limits_bytes[name])]
        for name, own in modes.items()
    }


def uniform_candidates(modes: Modes) -> dict[str, dict[str, ExecutionMode]]:
    """The candidates in which all device types run the same way that no solver proposed, by name and form."""
    by_way = {name: {mode.way: mode for mode in own if not mode.is_solved} for name, own in modes.items()}
    shared = dict.fromkeys(way for own in by_way.values() for way in own)
    return {
        way: {name: own[way] for name, own in by_way.items()}
        for way in shared
        if all(way in own for own in by_way.values())
    }


def uniform_times(modes: Modes, limits_bytes: Mapping[str, int]) -> dict[str, int]:
    """Nanoseconds of a pass for each of the `uniform_candidates` that fits, in every form, by name and form."""
    kinds = (fitting(modes, limits_bytes, form) for form in FORMS)
    return {
        label: round(passes_ns(candidate)) for fits in kinds for label, candidate in uniform_candidates(fits).items()
    }


_PASS_TOLERANCE = 0.02
"""Relative difference of two times of passes that is noise."""


def least_sensitive_candidate(
    fits: Modes, *, slack: float = 0.0, workers: Mapping[str, int] | None = None
) -> dict[str, ExecutionMode] | None:
    """The least sensitive mode of every device type with which passes are as fast as they can be.

    Args:
        fits: Modes that may be taken; the result is None if a device type has none.
        slack: How much longer than the fastest candidate a step may take (0.1: 10 %), beyond what noise leaves open.
        workers: As in `passes_ns`. With equal batches every type has the time that the slowest one needs.
    """
    if not all(fits.values()):
        return None
    fastest_ns = {name: min(mode.pass_ns for mode in own) for name, own in fits.items()}
    margin = (1 + slack) * (1 + (_PASS_TOLERANCE if workers is None else SIZED_TOLERANCE))
    candidate = {}
    for name, own in fits.items():
        limit_ns = margin * (max(fastest_ns.values()) if workers is None else fastest_ns[name])
        allowed = [mode for mode in own if mode.pass_ns <= limit_ns]
        candidate[name] = min(allowed, key=lambda mode: (mode.sensitivity, mode.pass_ns))
    return candidate


_MOST, _UNIFORM = 5, 3
"""Shortlisted candidates with launched and with captured passes each, and how many of them are uniform."""
NEAR, _SIZED_NEAR = 0.08, 0.25
"""How much longer than the fastest of its kind a candidate's passes may take, with equal and with sized batches."""
_LEAN_FAR, _LEAN_NEAR = 2.5, 1.25
"""The candidate that needs the least memory is timed if its passes take at most so many times as long as the fastest
ones, and with more precision beside it if they take at most so many times: in whole steps such a candidate was 3 %
faster than one whose passes, timed alone, took 9 % less."""


def shortlist(
    modes: Modes, limits_bytes: Mapping[str, int], *, slack: float = 0.0, workers: Mapping[str, int] | None = None
) -> list[dict[str, ExecutionMode]]:
    """A few candidates whose whole steps are worth timing, launched and captured; compiling takes too long.

    Args:
        modes: With times of passes.
        limits_bytes: Memory limit of every device type.
        slack: As in `least_sensitive_candidate`.
        workers: As in `passes_ns`.

    Returns:
        The least sensitive of the fastest candidates and the fastest uniform ones. With equal batches, these also with
        more precision on the device types that wait, and the candidate that needs the least memory, to which a job
        moves when memory is taken from it; where a compiled candidate is clearly faster than all but that, the fastest
        one stands for them. With sized batches, also the joint plan, and the fastest without FP16.
        Launched candidates are not compared with captured ones by passes: captured passes may hinder other workers, and
        a larger batch may no longer wait for its host.

    Source:
        Ours.
    """

    def expected_ns(candidate: Candidate) -> float:
        return passes_ns(candidate, workers)

    chosen: dict[tuple[str, ...], dict[str, ExecutionMode]] = {}

    def add(proposed: Iterable[dict[str, ExecutionMode] | None], margin: float) -> None:
        distinct = {tuple(labels(candidate).values()): candidate for candidate in proposed if candidate is not None}
        limit_ns = (1 + slack) * (1 + margin) * min(map(expected_ns, distinct.values()), default=0.0)
        near = [label for label, candidate in distinct.items() if expected_ns(candidate) <= limit_ns]
        chosen.update({label: distinct[label] for label in near[:_MOST]})

    for form in (LAUNCHED, CAPTURED):
        fits = fitting(modes, limits_bytes, form)
        uniform = sorted(uniform_candidates(fits).values(), key=expected_ns)[:_UNIFORM]
        best = least_sensitive_candidate(fits, slack=slack, workers=workers)
        if workers is None:
            add([best, *uniform, *(_refined(candidate, fits, slack) for candidate in uniform)], NEAR)
        else:
            unscaled = {name: [mode for mode in own if not mode.needs_scaling] for name, own in fits.items()}
            joint = {name: mode for name, own in fits.items() for mode in own if mode.name == JOINT}
            first = [joint] if joint.keys() == fits.keys() else []
            add(
                [*first, best, least_sensitive_candidate(unscaled, slack=slack, workers=workers), *uniform], _SIZED_NEAR
            )
    if workers is None and chosen:
        chosen = _beside_compiled(chosen, modes, limits_bytes, slack)
    launched = fitting(modes, limits_bytes, LAUNCHED)
    if workers is None and all(launched.values()):
        lean = {n: min(own, key=lambda mode: (mode.needed_bytes or 0, mode.pass_ns)) for n, own in launched.items()}
        ratio = passes_ns(lean) / max(1.0, min(map(passes_ns, chosen.values())))
        extra = [lean] if ratio <= _LEAN_FAR else []
        extra += [_refined(lean, launched, slack)] if ratio <= (1 + slack) * _LEAN_NEAR else []
        chosen.update({tuple(labels(candidate).values()): candidate for candidate in extra})
    return [*chosen.values()]


def _beside_compiled(
    chosen: Mapping[tuple[str, ...], dict[str, ExecutionMode]],
    modes: Modes,
    limits_bytes: Mapping[str, int],
    slack: float,
) -> dict[tuple[str, ...], dict[str, ExecutionMode]]:
    """Those that may be as fast as the fastest compiled candidate, and one that says what steps take beside passes.

    That is the fastest captured one, if there is one: compiled steps are estimated by captured ones first.
    """
    compiled_ns = math.inf
    for form in (COMPILED, COMPILED_CAPTURED):
        fits = fitting(modes, limits_bytes, form)
        if all(fits.values()):
            compiled_ns = min(compiled_ns, max(min(mode.pass_ns for mode in own) for own in fits.values()))
    near_ns = (1 + slack) * (1 + NEAR) * compiled_ns
    beside = min(chosen, key=lambda label: (form_of(chosen[label]) != CAPTURED, passes_ns(chosen[label])))
    return {label: own for label, own in chosen.items() if label == beside or passes_ns(own) <= near_ns}


def _refined(candidate: Candidate, fits: Modes, slack: float) -> dict[str, ExecutionMode]:
    """The slowest device type keeps its mode; the others spend the time that it needs on precision.

    Where it needs no loss scaling, they take no mode that does: all would have to agree on overflows in every step.
    """
    slowest = max(candidate, key=lambda name: candidate[name].pass_ns)
    scaled = candidate[slowest].needs_scaling
    others = {name: [mode for mode in own if scaled or not mode.needs_scaling] for name, own in fits.items()}
    return least_sensitive_candidate({**others, slowest: [candidate[slowest]]}, slack=slack) or dict(candidate)
