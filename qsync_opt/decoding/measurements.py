"""Measured times and acceptances, and the problem that they make.

A file of measurements ("qsync-decoding-measurements/1") holds, per regime, the time of one pass over 1, 2, ... tokens
of each sequence and of one drafted token, and per draft how many tokens each draft position accepted:

    {"format": "qsync-decoding-measurements/1", "name": "h100", "memory_kib": 100, "confidence_level": 0.95,
     "lengths": [1, 2, 3, 4],
     "drafts": {"A8": {"memory_kib": 40, "accepted": [950, 910], "judged": [1000, 950],
                       "sequences": [{"accepted": [480, 465], "judged": [500, 480]},
                                     {"accepted": [470, 445], "judged": [500, 470]}]}},
     "regimes": [{"name": "b1", "weight": 0.7, "verify_ns": {"1": 100, "5": 110}, "draft_ns": {"A8": 30}}]}
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from qsync_opt.decoding.acceptance import Acceptance, AcceptanceCounts, clustered_interval
from qsync_opt.decoding.problem import PROBLEM_FORMAT, Choice, Draft, Problem, Regime
from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Fields,
    Json,
    Name,
    check_fields,
    check_integer,
    freeze,
    load_file,
    near_match,
)

MEASUREMENTS_FORMAT = "qsync-decoding-measurements/1"


def _read_times(data: Any, place: str) -> dict[int, int]:
    fields, times = Fields(data, place), {}
    for key in fields:
        if not key.isascii() or not key.isdigit() or int(key) < 1:
            raise ProblemError(f"{place} has the key {key!r}, but keys are numbers of tokens from 1, such as '4'")
        times[int(key)] = fields.integer(key)
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMeasurement:
    """A draft: its memory, and what became of its tokens by draft position (see `AcceptanceCounts`).

    ``sequences`` holds the same counts text by text, if they are known; they add up to the others. Tokens of one
    text are alike, so that without them the interval of the acceptance is too narrow.
    """

    memory_kib: int
    accepted: tuple[int, ...]
    judged: tuple[int, ...]
    sequences: Annotated[tuple[AcceptanceCounts, ...], Json(omitted=True)] = ()

    def __post_init__(self) -> None:
        check_fields(self, "draft")
        AcceptanceCounts(accepted=self.accepted, judged=self.judged)
        object.__setattr__(self, "sequences", tuple(self.sequences))
        if any(len(found.judged) != len(self.judged) for found in self.sequences):
            raise ProblemError(f"draft: every one of sequences needs as many positions as judged, {len(self.judged)}")
        if self.sequences and AcceptanceCounts.summed(self.sequences) != self.counts:
            raise ProblemError("draft: the counts of sequences do not add up to accepted and judged")

    @classmethod
    def of_sequences(cls, memory_kib: int, sequences: Sequence[AcceptanceCounts]) -> DraftMeasurement:
        """From the counts of each text, at least one."""
        whole = AcceptanceCounts.summed(sequences)
        return cls(memory_kib=memory_kib, accepted=whole.accepted, judged=whole.judged, sequences=tuple(sequences))

    @property
    def counts(self) -> AcceptanceCounts:
        """The counts by position."""
        return AcceptanceCounts(accepted=self.accepted, judged=self.judged)

    def interval(self, length: int, level: float) -> Acceptance:
        """The acceptance at a length: by how texts differ, or by tokens where fewer than two are known."""
        return clustered_interval(self.sequences or [self.counts], length, level)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeTimes:
    """One regime: its share of the work, and measured times in nanoseconds.

    ``verify_ns`` maps tokens per sequence to the time of a pass over them; that of 1 is plain decoding. ``draft_ns``
    maps drafts to the time of one drafted token.
    """

    name: Name
    weight: float
    verify_ns: Annotated[
        Mapping[int, int],
        Json(read=_read_times, write=lambda times: {str(tokens): time for tokens, time in times.items()}),
    ]
    draft_ns: Mapping[Name, int]

    def __post_init__(self) -> None:
        what = f"regime {self.name!r}"
        check_fields(self, what)
        for tokens, time_ns in self.verify_ns.items():
            check_integer(tokens, f"{what}: tokens of verify_ns", minimum=1)
            check_integer(time_ns, f"{what}: verify_ns of {tokens} tokens")
        freeze(self, "verify_ns", "draft_ns")
        if 1 not in self.verify_ns:
            raise ProblemError(f"{what}: verify_ns lacks the key '1', the time of plain decoding; measure and add it")

    def verify(self, tokens: int) -> int | None:
        """Nanoseconds of a pass over some tokens of each sequence; None beyond the largest measured number.

        Measured times are made monotone (a pass over more tokens takes no less), and lines connect them.
        """
        sizes = sorted(self.verify_ns)
        if tokens > sizes[-1]:
            return None
        times, highest = [], 0
        for size in sizes:
            highest = max(highest, self.verify_ns[size])
            times.append(highest)
        right = bisect.bisect_left(sizes, tokens)
        if sizes[right] == tokens:
            return times[right]
        span, step = sizes[right] - sizes[right - 1], tokens - sizes[right - 1]
        return times[right - 1] - (times[right - 1] - times[right]) * step // span


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements(Document):
    """What was measured of one model on one device.

    Args:
        memory_kib: Limit of the drafts' memory in KiB.
        confidence_level: Of the two-sided intervals of acceptance.
        lengths: Draft lengths that may be planned.
        drafts: By name.
        regimes: The regimes of batch and context.

    Raises:
        ProblemError: A value is unusable; the text names its place.
    """

    FORMAT: ClassVar = MEASUREMENTS_FORMAT
    KIND: ClassVar = "measurements"

    name: Name
    memory_kib: int
    confidence_level: Annotated[float, Json(optional=True)] = 0.95
    lengths: Annotated[tuple[int, ...], Json(minimum=1)]
    drafts: Mapping[Name, DraftMeasurement]
    regimes: tuple[RegimeTimes, ...]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "measurements")
        object.__setattr__(self, "regimes", tuple(self.regimes))
        freeze(self, "drafts", "extras")
        for length in self.lengths:
            check_integer(length, "lengths", minimum=1)
        if not self.lengths:
            raise ProblemError("lengths is empty; give the draft lengths that may be planned, such as [1, 2, 4]")
        if len(set(self.lengths)) < len(self.lengths):
            raise ProblemError(f"lengths is {list(self.lengths)}, but each must stand once")
        if not 0 < self.confidence_level < 1:
            raise ProblemError(f"confidence_level is {self.confidence_level!r}, but it must be above 0 and below 1")
        for regime in self.regimes:
            for draft in regime.draft_ns:
                if draft not in self.drafts:
                    raise ProblemError(
                        f"regime {regime.name!r}: draft_ns names {draft!r}, which drafts lacks"
                        f"{near_match(draft, self.drafts)}; allowed are {', '.join(self.drafts) or 'none'}"
                    )


def load_measurements(path: str | os.PathLike[str]) -> Measurements:
    """Read and check a file of measurements.

    Raises:
        ProblemError: The file is missing, truncated, of another format, or holds unusable values.

    Source: ours, "qsync-decoding-measurements/1".
    """
    measurements: Measurements = load_file(path, {MEASUREMENTS_FORMAT: Measurements.from_json})
    return measurements


def build_problem(measurements: Measurements, confidence: str = "low") -> Problem:
    """The speculation problem of measurements.

    A draft's acceptance at a length is the interval over its first positions: by how texts differ where their counts
    are given, else as if tokens were independent. Lengths beyond the largest measured pass of a regime, or beyond the
    measured positions of a draft, are left out: nothing is extrapolated. Extension keys of the file and of its regimes
    are kept.

    Args:
        measurements: What was measured.
        confidence: The value of each acceptance that the plan goes by: ``"low"``, ``"mid"`` or ``"high"``.

    Raises:
        ProblemError: An unknown confidence.

    Source: ours.
    """
    regimes = []
    for regime in measurements.regimes:
        choices = []
        for draft, draft_ns in regime.draft_ns.items():
            measured = measurements.drafts[draft]
            for length in measurements.lengths:
                verify_ns = regime.verify(length + 1)
                if verify_ns is None or length > len(measured.judged):
                    continue
                acceptance = measured.interval(length, measurements.confidence_level)
                choices.append(
                    Choice(draft=draft, length=length, draft_ns=draft_ns, verify_ns=verify_ns, acceptance=acceptance)
                )
        plain_ns = regime.verify_ns[1]
        regimes.append(Regime(name=regime.name, weight=regime.weight, plain_ns=plain_ns, choices=tuple(choices)))
    return Problem(
        name=measurements.name,
        memory_kib=measurements.memory_kib,
        confidence=confidence,
        drafts={name: Draft(memory_kib=draft.memory_kib) for name, draft in measurements.drafts.items()},
        regimes=tuple(regimes),
        extras={path: value for path, value in measurements.extras.items() if path[0] != "drafts"},
    )


def load_speculation(path: str | os.PathLike[str]) -> Problem:
    """The problem of a file that holds one, or measurements that make one.

    Raises:
        ProblemError: The file is missing, truncated, of another format, or holds unusable values.

    Source: ours.
    """
    problem: Problem = load_file(
        path,
        {
            PROBLEM_FORMAT: Problem.from_json,
            MEASUREMENTS_FORMAT: lambda data: build_problem(Measurements.from_json(data)),
        },
    )
    return problem
