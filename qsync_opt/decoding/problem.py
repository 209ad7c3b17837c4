"""The speculation problem: per regime of batch and context, what plain decoding and each draft cost.

Times are integer nanoseconds and memory integer KiB (1024 bytes). A `Problem` validates itself, whether it comes from a
file or from code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.decoding.acceptance import CONFIDENCES, Acceptance, expected_tokens
from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    LARGEST_INTEGER,
    Document,
    Extras,
    Json,
    Name,
    Optimum,
    check_fields,
    freeze,
    near_match,
)

PROBLEM_FORMAT = "qsync-decoding/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A way to draft; ``memory_kib`` is what it needs beyond plain decoding, once, however many regimes use it."""

    memory_kib: int

    def __post_init__(self) -> None:
        check_fields(self, "draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``length`` tokens of a draft per cycle.

    ``draft_ns`` is the time of one drafted token (for all sequences of the batch), ``verify_ns`` that of the pass that
    judges ``length`` tokens and adds one.
    """

    draft: Name
    length: int
    draft_ns: int
    verify_ns: int
    acceptance: Acceptance

    def __post_init__(self) -> None:
        check_fields(self, f"choice of draft {self.draft!r}")

    @property
    def cycle_ns(self) -> int:
        """Time of one cycle: all drafts and their judgement."""
        return self.length * self.draft_ns + self.verify_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Decoding at one batch size and context: its share of the work, plain decoding, and what may replace it.

    ``plain_ns`` is the time of one token per sequence without speculation.
    """

    name: Name
    weight: float
    plain_ns: int
    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        what = f"regime {self.name!r}"
        check_fields(self, what)
        object.__setattr__(self, "choices", tuple(self.choices))
        keys = set()
        for choice in self.choices:
            if (choice.draft, choice.length) in keys:
                raise ProblemError(
                    f"{what}: draft {choice.draft!r} with length {choice.length} stands twice in choices; keep one"
                )
            keys.add((choice.draft, choice.length))

    def choice(self, draft: str, length: int) -> Choice:
        """The choice of a draft and a length.

        Raises:
            ProblemError: The regime has no such choice.
        """
        for choice in self.choices:
            if choice.draft == draft and choice.length == length:
                return choice
        allowed = ", ".join(f"{choice.draft} x {choice.length}" for choice in self.choices) or "none"
        raise ProblemError(
            f"regime {self.name!r} has no choice of draft {draft!r} with length {length}; allowed are null (plain "
            f"decoding) and {allowed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Document):
    """A speculation problem, checked.

    The objective is the sum over regimes of weight times time per token. ``confidence`` says which value of each
    acceptance counts: with ``"low"`` a regime speculates only if it gains at the lower confidence limit. ``memory_kib``
    limits the memory of all drafts that are used anywhere. ``extras`` holds the file's ``x-*`` keys by path.

    Raises:
        ProblemError: Any rule of the problem format is broken; the text names the regime.

    Source: the problem file format of this package, "qsync-decoding/1"; the drafts are those of QSPEC (EMNLP 2025), the
        choice per regime is ours.
    """

    FORMAT: ClassVar = PROBLEM_FORMAT
    KIND: ClassVar = "problem"
    DIGEST: ClassVar = False

    name: Name
    memory_kib: int
    confidence: str
    drafts: Mapping[Name, Draft]
    regimes: tuple[Regime, ...]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        object.__setattr__(self, "regimes", tuple(self.regimes))
        freeze(self, "drafts", "extras")
        if self.confidence not in CONFIDENCES:
            raise ProblemError(
                f"confidence is {self.confidence!r}{near_match(self.confidence, CONFIDENCES)}; allowed are "
                f"{', '.join(CONFIDENCES)}"
            )
        if not self.regimes:
            raise ProblemError("regimes is empty, but a problem needs at least one regime")
        names = set()
        for regime in self.regimes:
            if regime.name in names:
                raise ProblemError(f"regime {regime.name!r} is named twice; names must be unique")
            names.add(regime.name)
            self._check_choices(regime)
        if sum(draft.memory_kib for draft in self.drafts.values()) > LARGEST_INTEGER:
            raise ProblemError("the drafts' memory in KiB adds up to more than 2**63 - 1; check units")
        longest = (max([r.plain_ns, *(c.cycle_ns for c in r.choices)]) for r in self.regimes)
        if not math.isfinite(sum(r.weight * time_ns for r, time_ns in zip(self.regimes, longest, strict=True))):
            raise ProblemError("weights times times add up to infinity; scale all weights by one factor")

    def _check_choices(self, regime: Regime) -> None:
        for choice in regime.choices:
            what = f"regime {regime.name!r}: the choice of draft {choice.draft!r} with length {choice.length}"
            if choice.draft not in self.drafts:
                raise ProblemError(
                    f"{what} names a draft that drafts lacks{near_match(choice.draft, self.drafts)}; allowed are "
                    f"{', '.join(self.drafts) or 'none'}"
                )
            if choice.acceptance.at(self.confidence) is None:
                raise ProblemError(
                    f"{what} has no acceptance {self.confidence!r}, which confidence asks for; add it, or name another"
                )
            if choice.cycle_ns > LARGEST_INTEGER:
                raise ProblemError(f"{what} takes {choice.cycle_ns:.1e} ns, but sums must be below 2**63; check units")

    def regime(self, name: str) -> Regime:
        """The regime called ``name``."""
        for regime in self.regimes:
            if regime.name == name:
                return regime
        names = [regime.name for regime in self.regimes]
        raise ProblemError(
            f"problem {self.name!r} has no regime {name!r}{near_match(name, names)}; it has {', '.join(names)}"
        )

    def tokens(self, choice: Choice) -> float:
        """Tokens per cycle of a choice at the problem's confidence."""
        acceptance = choice.acceptance.at(self.confidence)
        if acceptance is None:
            raise ProblemError(f"the choice of draft {choice.draft!r} has no acceptance {self.confidence!r}")
        return expected_tokens(acceptance, choice.length)

    def time_per_token_ns(self, choice: Choice) -> float:
        """Nanoseconds per token of a choice at the problem's confidence."""
        return choice.cycle_ns / self.tokens(choice)
