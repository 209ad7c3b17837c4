"""Which way of computing does each device type take? From times of the real model, not from predictions.

A way is one that a user could have chosen without a solver (FP32, BF16 or FP16 autocast, one precision everywhere), or
one that a solver found: the plan of the job, or the fastest of a device type by itself. With equal batches the slowest
device type decides how long a step takes; the others have time left, which they spend on precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from qsync_opt.io.codec import Fields
from qsync_opt.numerics.formats import number_format
from qsync_opt.runtimes.torch.job.paired_rounds import least_sensitive_as_fast

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
