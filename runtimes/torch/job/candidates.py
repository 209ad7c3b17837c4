"""Which way of computing does each device type take? From times of the real model, not from predictions.

A way is one that a user could have chosen without a solver (FP32, BF16 or FP16 autocast, one precision everywhere), or
one that a solver found: the plan of the job, or the fastest of a device type by itself. With equal batches the slowest
device type decides how long a step takes; the others have time left, which they spend on precision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from qsync_opt.errors import SolverError
from qsync_opt.io import Fields
from qsync_opt.model import Role
from qsync_opt.numerics import number_format
from qsync_opt.training import Communication, Problem, ProblemDevice, fastest, solve

Rounds = Sequence[Mapping[int, float]]
"""By round: candidate to time."""
LEVEL = 0.07
"""A way is shown to be slower, or as fast, if chance alone says so no more often: 4 rounds of 4, 7 of 8, 11 of 14."""
_ALIKE = 0.995
"""What takes at least such a share of another one's time is not faster."""


def paired_medians(rounds: Rounds) -> dict[int, float]:
    """Median time of some candidates that took turns, without what slowed all of a round.

    Args:
        rounds: Candidate to time. Those that are in all rounds are compared within each of them.
    """
    if not rounds:
        return {}
    steady = [index for index in rounds[0] if all(index in entry for entry in rounds)]
    found = {
        index: statistics.median(entry[index] for entry in rounds if index in entry)
        for index in {i for entry in rounds for i in entry}
    }
    if len(steady) < 2:
        return found
    pace = [statistics.geometric_mean(entry[index] for index in steady) for entry in rounds]
    usual = statistics.median(pace)
    for index in steady:
        found[index] = usual * statistics.median(entry[index] / own for entry, own in zip(rounds, pace, strict=True))
    return found


def paired_times(rounds: Rounds) -> dict[int, float]:
    """The same where some took more turns than others: all beside the one that took most, within common rounds.

    Args:
        rounds: Candidate to time.
    """
    turns = {index: [entry[index] for entry in rounds if index in entry] for entry in rounds for index in entry}
    if not turns:
        return {}
    steady = max(turns, key=lambda index: (len(turns[index]), -index))
    usual = statistics.median(turns[steady])
    found = {}
    for index, times in turns.items():
        ratios = _ratios(rounds, index, steady)
        found[index] = usual * statistics.median(ratios) if ratios else statistics.median(times)
    return found


def times_of_race(rounds: Rounds, captured: Collection[int] = ()) -> dict[int, float]:
    """The same for a race: what took only the first turn was slower then, and is as much slower still.

    Without this a host that is busier in later rounds would have what left the race seem the fastest.

    Args:
        rounds: Candidate to time, the first of all candidates.
        captured: Candidates that take no further turn however fast they are; theirs is the time of the first.

    Returns:
        Of candidates without further turns, as many times the time of the first round's fastest that has some as it
        was in that round; the times of the first round if there is no other.
    """
    later = {index for entry in rounds[1:] for index in entry}
    if not later:
        return dict(rounds[0]) if rounds else {}
    found = paired_times([{i: ns for i, ns in entry.items() if i in later} for entry in rounds])
    first = rounds[0]
    quickest = min(later & first.keys(), key=lambda i: first[i])
    pace = found[quickest] / first[quickest]
    return {i: found[i] if i in later else ns if i in captured else pace * ns for i, ns in first.items()}


def shown(ratios: Sequence[float], most: float) -> bool | None:
    """Whether one way is shown to be slower than another by more than it may be; None: neither that nor the contrary.

    Args:
        ratios: Its time over the other's, by round.
        most: What the ratio may be.

    Source:
        The sign test (Dixon and Mood, JASA 41, 1946), one-sided at `LEVEL` for either answer.
    """
    over = sum(ratio > most for ratio in ratios)
    if _by_chance(len(ratios), over) <= LEVEL:
        return True
    return False if _by_chance(len(ratios), len(ratios) - over) <= LEVEL else None


def least_sensitive_as_fast(
    times: Mapping[int, float], sensitivities: Mapping[int, float], rounds: Rounds, most: float
) -> int:
    """The least sensitive candidate of those that take at most so many times as long as the fastest.

    What rounds show counts; where they leave it open, the median of the ratios within rounds; without common rounds,
    the times.

    Args:
        times: Of every candidate, at least one.
        sensitivities: Of the same; of equals the faster is taken.
        rounds: Turns, as far as they took some.
        most: At least 1.
    """
    slower: list[int] = []
    for index, quickest in _in_order(times, sensitivities):
        if index == quickest:
            return index
        if _is_like(index, slower, rounds):
            continue
        ratios = _ratios(rounds, index, quickest)
        found = shown(ratios, most)
        if found is None:
            found = (statistics.median(ratios) if ratios else times[index] / times[quickest]) > most
        if not found:
            return index
        slower.append(index)
    return min(times, key=lambda index: times[index])


def undecided(rounds: Rounds, sensitivities: Mapping[int, float], most: float) -> list[int]:
    """Who should take another turn: the fastest, and the least sensitive that may be as fast; none if that is known.

    Others, which are more sensitive, would not be taken in either case. Where the least sensitive is the fastest itself
    as far as one can see, the next fastest takes turns with it.

    Args:
        rounds: Turns until now; candidates without any are left out.
        sensitivities: By candidate; the least sensitive of those as fast as any is wanted, of equals the faster.
        most: As in `least_sensitive_as_fast`.
    """
    times = paired_times(rounds)
    slower: list[int] = []
    in_order = _in_order(times, sensitivities)
    for place, (index, quickest) in enumerate(in_order):
        if index == quickest:
            others = [other for other, _ in in_order[place + 1 :]]
            rival = min(others, key=lambda other: times[other], default=index)
        elif _is_like(index, slower, rounds):
            continue
        else:
            rival = quickest
        found = rival != index and shown(_ratios(rounds, index, rival), most)
        if found is None:
            return sorted((index, rival))
        if not found or index == quickest:
            break
        slower.append(index)
    return []


def _in_order(times: Mapping[int, float], sensitivities: Mapping[int, float]) -> list[tuple[int, int]]:
    """From the least sensitive on, each with the fastest of all."""
    quickest = min(times, key=lambda index: times[index], default=0)
    return [(index, quickest) for index in sorted(times, key=lambda i: (sensitivities[i], times[i]))]


def _is_like(index: int, slower: Sequence[int], rounds: Rounds) -> bool:
    """Whether it is no faster than one that is too slow: another trial of the same would only be another chance."""
    return any((ratios := _ratios(rounds, index, other)) and statistics.median(ratios) > _ALIKE for other in slower)


def _ratios(rounds: Rounds, index: int, other: int) -> list[float]:
    return [entry[index] / entry[other] for entry in rounds if index in entry and other in entry]


def _by_chance(rounds: int, count: int) -> float:
    """How often a fair coin shows as many heads, or more."""
    return math.fsum(math.comb(rounds, heads) for heads in range(count, rounds + 1)) / 2.0**rounds


PLANNED = "plan"
OWN, OWN_UNSCALED = "own plan", "own plan without FP16"
"""The fastest plan of a device type by itself, among all formats and among those without loss scaling."""
FULL = "FP32"
CAPTURED = ", captured"
WORTH_CAPTURING = 0.02
_NOISE = 0.02
"""Relative difference of two times of passes that says nothing."""
_STEP_NOISE, SIZED_NOISE = 0.018, 0.003
"""The same for whole steps, which are timed in turn; with sized batches the fastest is wanted, and precision last."""
Together = Mapping[str, "Way"]
"""A way for every device type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way for the workers of a device type to compute.

    Attributes:
        name: ``"FP32"``, ``"BF16 autocast"``, ``"INT8"``, ``"plan"``, ``"own plan"`` and such.
        precisions: Of every adjustable operator.
        autocast: Format of ``torch.autocast`` where that carries it out, else None.
        sensitivity: Total over the operators, for this device type.
        pass_ns: Forward and backward pass on the slowest of the workers.
        needed_bytes: At the peak of a step on the worker that needs most; None if one of them ran out of memory,
            could not capture its passes, or did not try because they are slow as it is.
        captured: Whether passes are replayed as CUDA graphs.
    """

    name: str
    precisions: Mapping[str, str]
    autocast: str | None = None
    sensitivity: float = 0.0
    pass_ns: int = 0
    needed_bytes: int | None = 0
    captured: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "precisions", MappingProxyType(dict(self.precisions)))

    @property
    def label(self) -> str:
        """Name, with whether passes are captured."""
        return f"{self.name}{CAPTURED}" if self.captured else self.name

    @property
    def is_solved(self) -> bool:
        """Whether a solver found it, for this device type alone or with the others; its name then says little."""
        return self.name in (PLANNED, OWN, OWN_UNSCALED)

    @property
    def is_plain(self) -> bool:
        """Whether it is what the model does by itself."""
        return self.autocast is None and not self.captured and set(self.precisions.values()) <= {FULL}

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients pass through FP16, so that losses are scaled and all ranks agree on overflows."""
        return "FP16" in self.precisions.values()

    def fits(self, limit_bytes: int) -> bool:
        """Whether it keeps a memory limit."""
        return self.needed_bytes is not None and self.needed_bytes <= limit_bytes

    def slowed(self, factor: float) -> Way:
        """The same on a device that takes so many times longer."""
        return replace(self, pass_ns=round(factor * self.pass_ns))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "name": self.name,
            "precisions": dict(self.precisions),
            "autocast": self.autocast,
            "sensitivity": self.sensitivity,
            "pass_ns": self.pass_ns,
            "needed_bytes": self.needed_bytes,
            **({"captured": True} if self.captured else {}),
        }

    @classmethod
    def from_json(cls, data: object, where: str) -> Way:
        """Read what `to_json` wrote.

        Raises:
            ProblemError: It is something else.
            UnsupportedError: No such precision.
        """
        fields = Fields(data, where)
        precisions, autocast = fields.mapping("precisions"), fields.take("autocast")
        for precision in precisions.values():
            if not isinstance(precision, str):
                fields.fail(f"precisions holds {precision!r}, but it must map operators to names of precisions")
            number_format(precision)
        if autocast is not None and autocast not in ("BF16", "FP16"):
            fields.fail(f"autocast is {autocast!r}, but allowed are BF16, FP16 and null")
        ran_out = fields.take("needed_bytes") is None
        found = cls(
            name=fields.text("name"),
            precisions=precisions,
            autocast=autocast,
            sensitivity=fields.number("sensitivity"),
            pass_ns=fields.integer("pass_ns"),
            needed_bytes=None if ran_out else fields.integer("needed_bytes"),
            captured=fields.flag("captured"),
        )
        fields.finish()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a whole training step of the job takes: passes, loss scaling, all-reduces and the optimizer.

    Attributes:
        taken: Device type to the label of the way that it goes.
        step_ns: On the slowest worker; with sized batches for as many samples in all as with equal ones.
        batches: Device type to the samples of one of its workers, where batches were sized; empty: all as planned with.
        rounds_ns: Its time in each round in which candidates took turns, 0 where it took none; empty: it never did.
    """

    taken: Mapping[str, str]
    step_ns: int
    batches: Mapping[str, int] = field(default_factory=dict)
    rounds_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("taken", "batches"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        sized = {"batches": dict(self.batches)} if self.batches else {}
        turns = {"rounds_ns": list(self.rounds_ns)} if self.rounds_ns else {}
        return {"taken": dict(self.taken), "step_ns": self.step_ns, **sized, **turns}

    @classmethod
    def from_json(cls, data: object, where: str) -> StepTime:
        """Read what `to_json` wrote.

        Raises:
            ProblemError: It is something else.
        """
        fields = Fields(data, where)
        told = Fields(fields.mapping("taken"), f"{where}: taken")
        taken = {name: told.text(name) for name in [*told]}
        sized = Fields(fields.mapping("batches") if "batches" in fields else {}, f"{where}: batches")
        batches = {name: sized.integer(name, minimum=1) for name in [*sized]}
        if batches and batches.keys() != taken.keys():
            fields.fail("batches and taken are of different device types")
        turns = fields.sequence("rounds_ns") if "rounds_ns" in fields else ()
        for turn in turns:
            if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
                fields.fail(f"rounds_ns holds {turn!r}, but allowed are whole nanoseconds from 0 on")
        found = cls(taken=taken, step_ns=fields.integer("step_ns", minimum=1), batches=batches, rounds_ns=tuple(turns))
        told.finish()
        sized.finish()
        fields.finish()
        return found


def choose(
    ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int], *, slack: float = 0.0, balanced: bool = False
) -> dict[str, Way] | None:
    """The way of every device type: as fast as can be together, then with the least sensitivity.

    Args:
        ways: Of every device type.
        limits_bytes: Memory limit of every device type.
        slack: How much longer than the fastest choice a step may take (0.1: 10 %), beyond what noise leaves open.
        balanced: Whether local batches will be sized by speed, so that no device type waits for another and each
            takes as little time as it can.

    Returns:
        One way per device type, all captured or none; None if one of them has none that fits into its memory. An
        all-reduce that one worker begins while it computes and the other at its end would keep the first one's
        multiprocessors busy with waiting. Captured passes ask more of a model, and are taken only if they are
        faster by 2 %.

    Source:
        Ours; the objective is QSync's (IPDPS 2024): the least sensitivity among the fastest.
    """
    eager, captured = (
        as_fast(fitting(ways, limits_bytes, captured=kind), slack=slack, balanced=balanced) for kind in (False, True)
    )
    if eager is None or captured is None:
        return eager or captured
    return captured if worth_capturing(together_ns(captured, balanced), together_ns(eager, balanced)) else eager


def fitting(
    ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int], *, captured: bool
) -> dict[str, list[Way]]:
    """The ways of one kind that keep the memory limits."""
    return {
        name: [way for way in found if way.captured is captured and way.fits(limits_bytes[name])]
        for name, found in ways.items()
    }


def is_captured(together: Together) -> bool:
    """Whether any device type goes its way with captured passes."""
    return any(way.captured for way in together.values())


def worth_capturing(captured_ns: float, eager_ns: float, *, least: float = WORTH_CAPTURING) -> bool:
    """Whether captured passes are faster by such a share that what they ask of a model is worth it."""
    return captured_ns < (1 - least) * eager_ns


def most_of(slack: float, *, balanced: bool = False) -> float:
    """How many times as long as the fastest a step may take that counts as fast as it."""
    return (1 + slack) * (1 + (SIZED_NOISE if balanced else _STEP_NOISE))


def least_sensitive(timed: Sequence[tuple[Together, float]], slack: float, *, balanced: bool = False) -> int:
    """Which of some ways to go together is the least sensitive among those as fast as any.

    Args:
        timed: With the times of their steps.
        slack: As in `choose`.
        balanced: As in `choose`.
    """
    times = {place: time for place, (_, time) in enumerate(timed)}
    sensitivities = {place: total_sensitivity(together) for place, (together, _) in enumerate(timed)}
    return least_sensitive_as_fast(times, sensitivities, (), most_of(slack, balanced=balanced))


def total_sensitivity(together: Together) -> float:
    """Over all device types."""
    return math.fsum(way.sensitivity for way in together.values())


def as_fast(
    fitting: Mapping[str, Sequence[Way]], *, slack: float = 0.0, balanced: bool = False
) -> dict[str, Way] | None:
    """The least sensitive way of every device type with which a step is as fast as it can be; arguments of `choose`."""
    if not all(fitting.values()):
        return None
    fastest = {name: min(way.pass_ns for way in found) for name, found in fitting.items()}
    slowest = max(fastest.values())
    chosen = {}
    for name, found in fitting.items():
        limit = (1 + slack) * (1 + _NOISE) * (fastest[name] if balanced else slowest)
        allowed = [way for way in found if way.pass_ns <= limit]
        chosen[name] = min(allowed, key=lambda way: (way.sensitivity, way.pass_ns))
    return chosen


def together_ns(chosen: Mapping[str, Way], balanced: bool) -> float:
    """A pass of all, of the slowest or with batches for which each takes as long."""
    if not balanced:
        return step_ns(chosen)
    return len(chosen) / sum(1 / max(1, way.pass_ns) for way in chosen.values())


def step_ns(chosen: Mapping[str, Way]) -> int:
    """Forward and backward pass of the slowest device type."""
    return max(way.pass_ns for way in chosen.values())


def everywhere(ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int]) -> dict[str, int]:
    """Time of every way that all device types have and have room for, the same on all of them; name to nanoseconds."""
    found: dict[str, list[int]] = {}
    for name, mine in ways.items():
        for way in mine:
            if not way.is_solved and way.fits(limits_bytes[name]):
                found.setdefault(way.label, []).append(way.pass_ns)
    return {name: max(times) for name, times in found.items() if len(times) == len(ways)}


def words(chosen: Mapping[str, Way], uniform: Mapping[str, int], *, compiled: bool = False) -> str:
    """What was measured and taken, for the reason of a plan."""
    taken = ", ".join(f"{way.label} on {name}" for name, way in chosen.items())
    compared = ", ".join(f"{name} {time / 1e6:.2f} ms" for name, time in sorted(uniform.items(), key=lambda e: e[1]))
    what = "compiled passes" if compiled else "passes"
    return f"measured {what}: {compared or 'no single way fits everywhere'}; {taken} {step_ns(chosen) / 1e6:.2f} ms"


_SCALED = "FP16"
_SEARCH_S = 2.0


def own_plans(problem: Problem, *, slack: float = 0.0) -> dict[str, dict[str, dict[str, str]]]:
    """The least sensitive plan of every device type among the fastest of its passes, whatever the others do.

    Args:
        problem: Of the job. All-reduces and the optimizer are left out: they take as long under every plan, and those
            that hide behind the passes of one would hide what another one gains.
        slack: As in `build_problem`.

    Returns:
        Device type to the name of the way to operator to precision: among all formats and, where that one has FP16,
        among those whose losses need no scaling. A device type without a plan that fits has none.

    Source:
        Ours.
    """
    return {device.name: _of_device(problem, device, slack) for device in problem.devices}


def _of_device(problem: Problem, device: ProblemDevice, slack: float) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, mine in ((OWN, device), (OWN_UNSCALED, _without(problem, device, _SCALED))):
        plan = _fastest_passes(problem, mine, slack)
        scaled = plan is not None and _SCALED in plan.values()
        if plan is None or plan in found.values() or (scaled and mine is not device):
            continue
        found[name] = plan
    return found


def _without(problem: Problem, device: ProblemDevice, precision: str) -> ProblemDevice:
    """The same, but with a precision only where an adjustable operator has no other."""
    tables = dict(device.operators)
    for operator in problem.operators:
        others = {name: cost for name, cost in tables[operator.name].items() if name != precision}
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
        limit_ns = round((1 + slack) * (1 + SIZED_NOISE) * quickest.evaluation.iteration_ns)
        best = solve(replace(alone, latency_limit_ns=limit_ns), "greedy").plan or quickest.plan
    except SolverError:
        return None
    return {o.name: best.devices[device.name][o.name] for o in problem.operators if o.role is Role.ADJUSTABLE}
