"""Which prices of the limits give the best lower bound? Cutting planes over the exact priced minimum.

For prices p >= 0, ``min_x objective(x) + p . (rows(x) - limits)`` is a lower bound for every feasible labelling.

Axes: N nodes, Z table entries, R limit rows, I plans seen.
"""

from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment.elimination import Elimination
from qsync_opt.formulations.assignment.master import Master
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints

_BOX = 1e9
_FLOAT_SLACK = 1e-13
"""Relative rounding error granted to a bound: bounds are lowered by it."""


@dataclass(slots=True)
class Priced:
    """A labelling that is a priced minimum, or was tried."""

    labels_N: Ints
    objective: float
    excess_R: Ints

    @property
    def feasible(self) -> bool:
        """True if every limit holds."""
        return bool((self.excess_R <= 0).all())


@dataclass(slots=True)
class DualResult:
    """The best bound found, its prices, and the plans with their weights in the last master."""

    bound: float
    prices_R: Floats
    plans: list[Priced]
    weights_I: Floats
    proved_infeasible: bool = False


@dataclass(slots=True)
class Pricer:
    """Evaluates the Lagrangian of a model; the relaxed model may have more nodes than the true one.

    Attributes:
        model: The problem.
        elimination: Its exact minimiser.
        count: Minimisations so far.
    """

    model: AssignmentModel
    elimination: Elimination
    count: int = field(default=0)

    def lagrangian(self, prices_R: Floats, allowed_Z: Bools, weight: float = 1.0) -> tuple[float, Priced]:
        """Lower bound at some prices (lowered by its rounding error), and the labelling that attains it."""
        self.count += 1
        cost_Z = self.model.priced(prices_R, allowed_Z, weight)
        value, labels_N = self.elimination.minimise(cost_Z)
        if value == np.inf:
            return value, Priced(labels_N, np.inf, np.zeros(len(prices_R), dtype=np.int64))
        plan = Priced(labels_N, self.model.objective(labels_N), self.model.excess(labels_N))
        limits = self.model.limits_R.astype(np.float64)
        size = abs(value) + float(prices_R @ np.abs(limits))
        return value - float(prices_R @ limits) - _FLOAT_SLACK * size, plan


def maximise(
    pricer: Pricer,
    allowed_Z: Bools,
    *,
    prices_R: Floats | None,
    plans: list[Priced],
    upper: float,
    tolerance: float,
    max_steps: int,
    weight: float = 1.0,
    stop_at_feasible: bool = False,
) -> DualResult:
    """Maximise the Lagrangian bound.

    Args:
        pricer: The model.
        allowed_Z: Entries that may be chosen.
        prices_R: Prices to begin with.
        plans: Plans that respect ``allowed_Z``, to begin with; the list grows.
        upper: Stop as soon as the bound reaches this: nothing better can be below.
        tolerance: Stop when the bound is proved within this share of the dual's maximum.
        max_steps: Most minimisations.
        weight: Factor on the objective; 0 asks for feasibility alone.
        stop_at_feasible: Stop at the first feasible plan.

    Returns:
        The best bound and its prices. ``proved_infeasible`` is set if no entry is left to choose.

    Source: Kelley's cutting planes with in-out steps (Ben-Ameur and Neto 2007).
    """
    num_rows = len(pricer.model.limits_R)
    best, best_prices = -np.inf, np.zeros(num_rows) if prices_R is None else prices_R
    scale_R: Floats | None = None
    master: Master | None = None
    query = best_prices
    weights = np.zeros(0)
    for step in range(max_steps):
        bound, plan = pricer.lagrangian(query, allowed_Z, weight)
        if bound == np.inf:
            return DualResult(np.inf, query, plans, np.zeros(len(plans)), proved_infeasible=True)
        if bound > best:
            best, best_prices = bound, query
        plans.append(plan)
        if best >= upper or (stop_at_feasible and plan.feasible) or not num_rows:
            break
        if scale_R is None:
            excess = np.abs(np.stack([p.excess_R for p in plans])).max(axis=0)
            scale_R = np.maximum(excess.astype(np.float64), 1.0)
        if master is None:
            size = max(abs(plan.objective * weight), max(p.objective for p in plans) * weight, 1e-300)
            master = Master(num_rows, _BOX * size if weight else 1.0)
        for known in plans[master.num_columns :]:
            master.add(known.objective * weight, known.excess_R / scale_R)
        value, scaled, weights = master.solve()
        if value - best <= tolerance * abs(value):
            break
        target = scaled / scale_R
        # Half-way steps damp the jumps; a full step now and then tells whether the maximum is reached.
        near = value - best <= 30 * tolerance * abs(value)
        query = target if near or step % 6 == 5 else (best_prices + target) / 2
    return DualResult(best, best_prices, plans, np.append(weights, np.zeros(len(plans) - len(weights))))
