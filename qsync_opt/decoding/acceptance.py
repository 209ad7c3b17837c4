"""How often drafted tokens are accepted: intervals, counts by draft position, and the tokens that a cycle yields."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

from qsync_opt.errors import ProblemError
from qsync_opt.io import Json, check_fields, check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The probability that a drafted token is accepted, given that those before it were: estimate and limits.

    ``mid`` is the estimate, ``low`` and ``high`` the limits of its confidence interval; one that is not known is None.

    Raises:
        ProblemError: A value is no probability, or they are out of order.
    """

    low: Annotated[float | None, Json(omitted=True)] = None
    mid: Annotated[float | None, Json(omitted=True)] = None
    high: Annotated[float | None, Json(omitted=True)] = None

    def __post_init__(self) -> None:
        check_fields(self, "acceptance")
        values = [(name, getattr(self, name)) for name in CONFIDENCES]
        present = [(name, value) for name, value in values if value is not None]
        for name, value in present:
            if value > 1:
                raise ProblemError(f"acceptance: {name} is {value!r}, but a probability is at most 1")
        for (lower, least), (upper, most) in itertools.pairwise(present):
            if least > most:
                raise ProblemError(
                    f"acceptance: {lower} is {least!r} and {upper} is {most!r}, but {lower} must not exceed {upper}"
                )

    def at(self, confidence: str) -> float | None:
        """The value called ``confidence``, one of `CONFIDENCES`; None if it is not known."""
        value: float | None = getattr(self, confidence)
        return value


CONFIDENCES = ("low", "mid", "high")
"""The values of an `Acceptance`, from the most careful one."""


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens that one cycle yields: the accepted drafts and one token of the verifier.

    (1 - a^(length + 1)) / (1 - a), computed without cancellation where a is near 1; length + 1 at a = 1.

    Args:
        acceptance: Probability a that a drafted token is accepted, given that those before it were.
        length: Drafted tokens per cycle.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023, Eq. 1.
    """
    if acceptance >= 1:
        return float(length + 1)
    if acceptance <= 0:
        return 1.0
    return -math.expm1((length + 1) * math.log(acceptance)) / (1 - acceptance)


def _acceptance_of(tokens: float, length: int) -> float:
    """The acceptance with which `expected_tokens` yields so many tokens: its inverse, by bisection."""
    if tokens <= 1:
        return 0.0
    if tokens >= length + 1:
        return 1.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_tokens(middle, length) < tokens else (low, middle)
    return high


def wilson_interval(successes: int, trials: int, level: float = 0.95) -> Acceptance:
    """The Wilson score interval of a probability, with the observed share in the middle.

    Unlike the normal interval it is inside [0, 1] and has a width at shares of 0 and 1. Without trials it is [0, 1].

    Args:
        successes: Accepted tokens.
        trials: Tokens that were judged.
        level: Confidence level of the two-sided interval, above 0 and below 1.

    Raises:
        ProblemError: More successes than trials, or a level out of range.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    check_integer(trials, "trials")
    if check_integer(successes, "successes") > trials:
        raise ProblemError(f"{successes} successes of {trials} trials: there are at most as many successes as trials")
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise ProblemError(f"confidence level is {level!r}, but it must be above 0 and below 1, such as 0.95")
    if trials == 0:
        return Acceptance(low=0.0, mid=0.5, high=1.0)
    return _wilson(successes / trials, trials, level)


def _wilson(share: float, trials: int, level: float) -> Acceptance:
    z = NormalDist().inv_cdf((1 + level) / 2)
    weight = z * z / trials
    center = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return Acceptance(low=max(0.0, min(center - half, share)), mid=share, high=min(1.0, max(center + half, share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """What became of drafted tokens, by their position in the draft.

    ``judged[i]`` is how many cycles judged the token at position i (all tokens before it were accepted), and
    ``accepted[i]`` how many of these accepted it.

    Raises:
        ProblemError: The lists differ in length, or a position accepts more than it judges.
    """

    accepted: tuple[int, ...]
    judged: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, "acceptance counts")
        if len(self.accepted) != len(self.judged):
            raise ProblemError(
                f"acceptance counts: accepted has {len(self.accepted)} positions and judged {len(self.judged)}, but "
                "both need one value per draft position"
            )
        for position, (accepted, judged) in enumerate(zip(self.accepted, self.judged, strict=True)):
            if accepted > judged:
                raise ProblemError(
                    f"acceptance counts: position {position} accepted {accepted} of {judged} judged tokens, but it "
                    "cannot accept more than it judges"
                )

    @classmethod
    def of_cycles(cls, accepted_lengths: Sequence[int], length: int) -> AcceptanceCounts:
        """The counts of cycles that drafted ``length`` tokens each and accepted the given numbers of them."""
        return cls(
            accepted=tuple(sum(n > position for n in accepted_lengths) for position in range(length)),
            judged=tuple(sum(n >= position for n in accepted_lengths) for position in range(length)),
        )

    def interval(self, length: int, level: float = 0.95) -> Acceptance:
        """The Wilson interval of the one acceptance that yields as many tokens as the first ``length`` positions do.

        Where positions are alike that is the share of accepted among judged tokens. Later tokens of a draft are often
        accepted more often than the first ones, so that this share promises too many; with it alone, where some
        position was never judged.
        """
        judged = sum(self.judged[:length])
        pooled = wilson_interval(sum(self.accepted[:length]), judged, level)
        tokens = self.measured_tokens(length)
        return pooled if tokens is None else _wilson(_acceptance_of(tokens, length), judged, level)

    def measured_tokens(self, length: int) -> float | None:
        """Tokens per cycle of ``length`` drafts by the measured acceptance of each position; None where none is."""
        if length > len(self.judged) or not all(self.judged[:length]):
            return None
        total = reached = 1.0
        for accepted, judged in zip(self.accepted[:length], self.judged[:length], strict=True):
            reached *= accepted / judged
            total += reached
        return total
