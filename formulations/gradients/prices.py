"""The priced form of a compression problem: a price of time for each bucket, a lower bound, and a plan near it.

For every bucket j the reductions from j on must end in time: ``ready_j + sum_(k >= j) time_k <= deadline``. With a
price ``lambda_j >= 0`` on each of these rows the buckets separate: bucket k pays ``mu_k = sum_(j <= k) lambda_j`` for
each nanosecond and takes the choice of least ``variance + mu_k * time``. The sum is a lower bound for any prices
(Lagrangian relaxation).

Source: ours. The rows are nested, so that a greedy method solves the linear relaxation (A. Federgruen, H. Groenevelt,
    "The greedy procedure for resource allocation problems", Operations Research 34, 1986), and the prices are its dual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qsync_opt.formulations.gradients.tables import Floats, Ints, Tables

ROUNDING = 1e-13
"""Relative error of the sums in bounds, which are lowered by it."""


class _Segment(NamedTuple):
    """A step along the lower convex hull of a bucket's choices, to a slower one of less variance."""

    rate: float
    bucket: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of time and what they prove.

    ``least_K[k]`` is the least priced cost of the buckets after k, and ``owed_K[k]`` the priced slack of the rows that
    begin after k + 1, so that a partial plan of buckets 0 to k costs at least ``variance + least - owed - mu * slack``
    in the end. Variances count from the least of each bucket, times from the fastest.
    """

    mu_K: Floats
    least_K: Floats
    owed_K: Floats
    rest_K: Ints
    """Time of the buckets after k at their fastest."""
    deadline: int
    bound: float
    """Lower bound of the sum of variances, in the unit of the problem."""
    picks_K: list[int]
    """A plan that keeps the deadline."""

    def completed(self, k: int, ends_L: Ints, variances_L: Floats) -> Floats:
        """Lower bounds of what plans cost in the end that reach bucket k at these ends and variances."""
        slack_L = self.deadline - ends_L - self.rest_K[k]
        bounds_L: Floats = variances_L + (self.least_K[k] - self.owed_K[k]) - self.mu_K[k] * slack_L
        return bounds_L


def relative_variances(tables: Tables) -> tuple[Floats, ...]:
    """Variances of each bucket's choices beyond its least one."""
    return tuple(variances_C - variances_C[-1] for variances_C in tables.variances_KC)


def least_variance(tables: Tables) -> float:
    """What every plan pays."""
    return float(sum(variances_C[-1] for variances_C in tables.variances_KC))


def _segments(tables: Tables) -> list[_Segment]:
    segments = []
    for k, (times_C, variances_C) in enumerate(zip(tables.times_KC, tables.variances_KC, strict=True)):
        here = 0
        while here < len(times_C) - 1:
            rates = (variances_C[here] - variances_C[here + 1 :]) / (times_C[here + 1 :] - times_C[here])
            step = len(rates) - 1 - int(np.argmax(rates[::-1]))  # the farthest of equal ones
            target = here + 1 + step
            segments.append(_Segment(float(rates[step]), k, target, int(times_C[target] - times_C[here])))
            here = target
    return sorted(segments, key=lambda segment: (-segment.rate, segment.bucket, segment.target))


def priced(tables: Tables, deadline: int) -> Prices:
    """Prices, bound and a plan for one deadline, which the fastest choices must keep."""
    K = len(tables.times_KC)
    fastest_K = np.array([times_C[0] for times_C in tables.times_KC], dtype=np.int64)
    after_K = np.cumsum(fastest_K[::-1])[::-1]
    slack_K: Ints = deadline - tables.ready_K - after_K
    relaxed_K: Floats = slack_K.astype(float)
    mu_K, frozen_from = np.zeros(K), K
    picks_K, stuck = [0] * K, set[int]()
    for segment in _segments(tables):
        k = segment.bucket
        if k < frozen_from:
            room = float(relaxed_K[: k + 1].min())
            relaxed_K[: k + 1] -= min(room, segment.length)
            if room < segment.length:
                first = int(np.argmin(relaxed_K[: k + 1]))  # the first row without slack
                mu_K[first:frozen_from] = segment.rate
                frozen_from = first
        if k not in stuck and segment.length <= slack_K[: k + 1].min():
            slack_K[: k + 1] -= segment.length
            picks_K[k] = segment.target
        else:
            stuck.add(k)
    _fill(tables, picks_K, slack_K)
    return _prices(tables, deadline, mu_K, picks_K)


def _fill(tables: Tables, picks_K: list[int], slack_K: Ints) -> None:
    """Spend what slack is left, on the largest fall of variance first; changes both arguments."""
    while True:
        best, move = 0.0, None
        room_K = np.minimum.accumulate(slack_K)
        for k, (times_C, variances_C) in enumerate(zip(tables.times_KC, tables.variances_KC, strict=True)):
            pick = picks_K[k]
            target = int(np.searchsorted(times_C, times_C[pick] + room_K[k], side="right")) - 1
            fall = float(variances_C[pick] - variances_C[target])
            if fall > best:
                best, move = fall, (k, target, int(times_C[target] - times_C[pick]))
        if move is None:
            return
        k, target, spent = move
        picks_K[k] = target
        slack_K[: k + 1] -= spent


def _prices(tables: Tables, deadline: int, mu_K: Floats, picks_K: list[int]) -> Prices:
    fastest_K = np.array([times_C[0] for times_C in tables.times_KC], dtype=np.int64)
    after_K = np.cumsum(fastest_K[::-1])[::-1]
    slack_K = (deadline - tables.ready_K - after_K).astype(float)
    own_K = np.array(
        [
            float(np.min(variances_C + mu * (times_C - times_C[0])))
            for variances_C, times_C, mu in zip(relative_variances(tables), tables.times_KC, mu_K, strict=True)
        ]
    )
    lambda_K = np.diff(mu_K, prepend=0.0)
    owing_K = lambda_K * slack_K
    total = float(own_K.sum() - owing_K.sum())
    error = ROUNDING * float(own_K.sum() + np.abs(owing_K).sum())
    lowest = least_variance(tables)
    return Prices(
        mu_K=mu_K,
        least_K=own_K[::-1].cumsum()[::-1] - own_K,
        owed_K=owing_K[::-1].cumsum()[::-1] - owing_K,
        rest_K=after_K - fastest_K,
        deadline=deadline,
        bound=lowest + max(0.0, total - error),
        picks_K=picks_K,
    )
