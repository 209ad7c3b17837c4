"""Variance and time of a plan, by the rules of the problem format alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from qsync_opt.io import format_time
from qsync_opt.messages.plan import Plan
from qsync_opt.messages.problem import Problem

ROUNDING = 1e-9
"""Relative excess over a limit that counts as rounding: times and variances are sums of floating-point numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A plan under a problem.

    ``time_ns`` is the sum of all exchanges on their links, ``exchange_ns`` the time of each, ``codec_ns`` what packing
    and unpacking take as far as bytes decide, ``exposed_ns`` that and what of exchanges no computation hides,
    ``mean_bits`` the mean width of the numbers sent.
    """

    objective: float
    feasible: bool
    violations: tuple[str, ...]
    variance: float
    time_ns: float
    exposed_ns: float
    codec_ns: float
    exchange_ns: Mapping[str, float]
    message_bytes: float
    mean_bits: float

    @property
    def waiting_ns(self) -> float:
        """What of the exchanges no computation hides, without packing and unpacking."""
        return self.exposed_ns - self.codec_ns

    def to_json(self) -> dict[str, Any]:
        """The keys that the command line prints with ``--json``."""
        return {
            "objective": self.objective,
            "feasible": self.feasible,
            "violations": list(self.violations),
            "variance": self.variance,
            "time_ns": self.time_ns,
            "exposed_ns": self.exposed_ns,
            "codec_ns": self.codec_ns,
            "exchange_ns": dict(self.exchange_ns),
            "message_bytes": self.message_bytes,
            "mean_bits": self.mean_bits,
        }


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Evaluate a plan, trusting no solver.

    Raises:
        ProblemError: The plan is not of this problem.

    Source: the problem file format of this package, "qsync-messages/1".
    """
    plan.check(problem)
    factors = np.zeros(256)
    for width, factor in problem.menu.items():
        factors[width] = factor
    variances: list[float] = []
    exchange_ns: dict[str, float] = {}
    codec: list[float] = []
    message_bytes, numbers = 0.0, 0
    for exchange in problem.exchanges:
        times, all_totals = [], []
        for group, widths in zip(exchange.rounds, plan.bits[exchange.name], strict=True):
            totals = []
            for pair, chosen in zip(group, widths, strict=True):
                total = int(chosen.sum(dtype=np.int64))
                totals.append(total)
                variances.append(float((pair.beta * factors[chosen]).sum()))
                message_bytes += exchange.dim * total / 8
                numbers += exchange.dim * chosen.size
            times.append(exchange.round_ns(group, totals))
            all_totals += totals
        exchange_ns[exchange.name] = math.fsum(times)
        codec.append(exchange.codec_ns(all_totals))
    variance, time_ns = math.fsum(variances), math.fsum(exchange_ns.values())
    waited = [max(0.0, exchange_ns[each.name] - each.hidden_ns) for each in problem.exchanges]
    codec_ns, exposed_ns = math.fsum(codec), math.fsum([*waited, *codec])
    violations = []
    if problem.time_limit_ns is not None and exposed_ns > problem.time_limit_ns + ROUNDING * (time_ns + codec_ns):
        violations.append(
            f"exposed exchanges take {format_time(exposed_ns)}, which exceeds the limit of "
            f"{format_time(problem.time_limit_ns)}"
        )
    if problem.variance_limit is not None and variance > problem.variance_limit * (1 + ROUNDING):
        violations.append(f"the variance is {variance:.9g}, which exceeds the limit of {problem.variance_limit:.9g}")
    return Evaluation(
        objective=problem.goal(variance, exposed_ns),
        feasible=not violations,
        violations=tuple(violations),
        variance=variance,
        time_ns=time_ns,
        exposed_ns=exposed_ns,
        codec_ns=codec_ns,
        exchange_ns=MappingProxyType(exchange_ns),
        message_bytes=message_bytes,
        mean_bits=8 * message_bytes / numbers if numbers else 0.0,
    )
