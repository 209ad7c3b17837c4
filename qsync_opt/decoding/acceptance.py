"""How often drafted tokens are accepted: intervals, counts by draft position, and the tokens that a cycle yields."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
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


def acceptance_by_position(acceptances: Mapping[int, float]) -> list[float]:
    """The acceptances of draft positions that yield as many tokens per cycle as one acceptance for each length does.

    Args:
        acceptances: By length, the one acceptance with which a draft of that length yields its tokens; positions
            between two lengths are alike.

    Returns:
        One for each position of the longest draft, inside [0, 1].
    """
    positions: list[float] = []
    tokens = reached = 1.0
    for length, acceptance in sorted(acceptances.items()):
        more = length - len(positions)
        expected = max(expected_tokens(acceptance, length), tokens)  # no draft yields less than its beginning does
        value = _acceptance_of(1 + (expected - tokens) / reached, more) if reached else 0.0
        positions += [value] * more
        tokens += reached * (expected_tokens(value, more) - 1)
        reached *= value**more
    return positions


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


def _normal(level: float) -> float:
    """Standard deviations on either side of a normal mean that hold a share ``level``."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _student(level: float, freedom: int) -> float:
    """The same of Student's distribution, for a standard deviation that was estimated.

    Source: Abramowitz and Stegun, "Handbook of mathematical functions", 26.7.5, within 0.1 % at 95 % from 3 degrees of
        freedom on; exact below.
    """
    if freedom == 1:
        return math.tan(math.pi * level / 2)
    if freedom == 2:
        return level * math.sqrt(2 / (1 - level * level))
    z = _normal(level)
    terms: tuple[float, ...] = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / float(freedom) ** power for power, term in enumerate(terms))


def _wilson(share: float, trials: float, level: float) -> Acceptance:
    z = _normal(level)
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

    @classmethod
    def summed(cls, counts: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
        """The counts of several sequences together; all have the same number of positions."""
        return cls(
            accepted=tuple(map(sum, zip(*(found.accepted for found in counts), strict=True))),
            judged=tuple(map(sum, zip(*(found.judged for found in counts), strict=True))),
        )

    def interval(self, length: int, level: float = 0.95) -> Acceptance:
        """The Wilson interval of the one acceptance that yields as many tokens as the first ``length`` positions do.

        Where positions are alike that is the share of accepted among judged tokens. Later tokens of a draft are often
        accepted more often than the first ones, so that this share promises too many; with it alone, where some
        position was never judged. Tokens count as independent, which those of one text are not: where there are several
        texts, see `clustered_interval`.
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

    def _weights(self, length: int) -> list[float]:
        """By how much `measured_tokens` rises with one more accepted token of each position."""
        shares = [
            accepted / judged for accepted, judged in zip(self.accepted[:length], self.judged[:length], strict=True)
        ]
        following = 1.0
        behind = []  # tokens that an accepted one of each position brings, itself included
        for share in reversed(shares):
            behind.append(following)
            following = 1 + share * following
        before = itertools.accumulate(shares[:-1], lambda a, b: a * b, initial=1.0)
        return [
            reached * tokens / judged
            for reached, tokens, judged in zip(before, reversed(behind), self.judged[:length], strict=True)
        ]


def tokens_deviation(sequences: Sequence[AcceptanceCounts], length: int) -> float | None:
    """The standard deviation of the tokens per cycle that several texts show together, as a sample of all texts.

    Tokens of one text are alike, so that what varies is the text: this is the deviation of a ratio estimator over
    texts, linearized. None where fewer than two sequences drafted, or some position was never judged.

    Args:
        sequences: The counts of each text, all with the same positions.
        length: Drafted tokens per cycle.

    Source: W. G. Cochran, "Sampling techniques", 3rd edition, 1977, sections 2.11 and 9A.
    """
    sequences = [found for found in sequences if found.judged[:1] > (0,)]
    if len(sequences) < 2:
        return None
    whole = AcceptanceCounts.summed(sequences)
    if whole.measured_tokens(length) is None:
        return None
    weights = whole._weights(length)
    shares = [accepted / judged for accepted, judged in zip(whole.accepted, whole.judged, strict=False) if judged]
    residuals = (
        sum(weight * (found.accepted[k] - shares[k] * found.judged[k]) for k, weight in enumerate(weights))
        for found in sequences
    )
    count = len(sequences)
    return math.sqrt(count / (count - 1) * math.fsum(residual**2 for residual in residuals))


def clustered_interval(sequences: Sequence[AcceptanceCounts], length: int, level: float = 0.95) -> Acceptance:
    """The interval of `AcceptanceCounts.interval` for several texts, of which tokens of one are alike.

    Wilson's interval over as many tokens as would, were they independent, vary as the texts do (the effective sample
    size), fewer by how uncertain that is with few texts, and never more than there are. With fewer than two texts that
    drafted, or a position that was never judged, tokens count as independent.

    Args:
        sequences: The counts of each text, at least one, all with the same positions.
        length: Drafted tokens per cycle.
        level: Confidence level of the two-sided interval.

    Raises:
        ProblemError: A level out of range.

    Source: E. L. Korn and B. I. Graubard, "Confidence intervals for proportions with small expected number of positive
        counts estimated from survey data", Survey Methodology 1998; here with Wilson's interval.
    """
    whole = AcceptanceCounts.summed(sequences)
    independent = whole.interval(length, level)
    deviation, tokens = tokens_deviation(sequences, length), whole.measured_tokens(length)
    if not deviation or tokens is None:
        return independent
    share = _acceptance_of(tokens, length)
    if not 0 < share < 1:
        return independent
    # Tokens per change of the one acceptance: the derivative of `expected_tokens`.
    slope = math.fsum(k * share ** (k - 1) for k in range(1, length + 1))
    drafted = sum(found.judged[:1] > (0,) for found in sequences)
    wider = _student(level, drafted - 1) / _normal(level)
    effective = share * (1 - share) * (slope / (deviation * wider)) ** 2
    return _wilson(share, min(effective, sum(whole.judged[:length])), level)
