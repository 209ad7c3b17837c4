"""The Lagrangian dual: prices of the limits that give the best lower bound, by cutting planes.

For prices p >= 0, ``min_x objective(x) + p . (rows(x) - limits)`` is a lower bound for every feasible labelling.

Axes: N nodes, Z table entries, R limit rows, I plans (labellings that are cuts of the dual).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.elimination import Elimination
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Floats, Ints

_TOLERANCE = 1e-11
_ROUNDING = 1e-13
"""Reduced costs below this share of the largest dual value are rounding too. While no mix of plans keeps the limits,
prices are at their upper end, far above every cost: pivoting on such noise would never end."""
_BLAND_AFTER = 200
_MAX_PIVOTS = 2000
_LEAST_STEP = 1e-12
_TIE = 1 + 1e-12
_BOX = 1e9
_NEGLIGIBLE = 1e-12
"""Differences of the bound below this share of the largest objective seen are rounding."""
_FEW_ROWS = 12
"""Up to this many rows are all in the master from the start."""
_BEYOND = 1e-3
"""Relative overshoot of a step towards a level, against rounding."""
_FLOAT_SLACK = 1e-13
"""Relative rounding error by which bounds are lowered."""


@dataclass(slots=True)
class Priced:
    """A labelling with its objective and its excess over the limits."""

    labels_N: Ints
    objective: float
    excess_R: Ints

    @property
    def key(self) -> tuple[float, bytes]:
        """Equal for labellings that are the same cut."""
        return self.objective, self.excess_R.tobytes()

    @property
    def feasible(self) -> bool:
        """True if every limit holds."""
        return bool((self.excess_R <= 0).all())

    def shifted(self, change_R: Ints) -> Priced:
        """The same labelling under limits that are lower by ``change_R``."""
        return Priced(self.labels_N, self.objective, self.excess_R + change_R)


@dataclass(slots=True)
class DualResult:
    """The best bound, its prices, and the plans with their weights in the last master program."""

    bound: float
    prices_R: Floats
    plans: list[Priced]
    weights_I: Floats
    proved_infeasible: bool = False


@dataclass(slots=True)
class Pricer:
    """Evaluates the Lagrangian of a model, which may be a relaxation with more nodes than the true one.

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
    deadline: float = np.inf,
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
        weight: Factor on the objective; 0 leaves feasibility alone.
        stop_at_feasible: Stop at the first feasible plan.
        deadline: ``time.monotonic()`` value at which to stop.

    Returns:
        The best bound and its prices. ``proved_infeasible`` is set if no entry is left to choose.

    Source: Kelley's cutting planes with in-out steps (Ben-Ameur and Neto 2007).
    """
    num_rows = len(pricer.model.limits_R)
    best, best_prices = -np.inf, np.zeros(num_rows) if prices_R is None else prices_R
    query, weights = best_prices, np.zeros(0)
    master: _LazyMaster | None = None
    if plans and prices_R is not None and num_rows:
        # Plans of a neighbouring problem say more about the prices than its prices do.
        master = _LazyMaster(plans, weight)
        target = master.solve(plans)[1]
        # Where no mix of them keeps the limits, the prices are far too high to be of use.
        query = prices_R if master.beyond(target) else target
    known = {plan.key for plan in plans}
    full_step = False
    for step in range(max_steps):
        bound, plan = pricer.lagrangian(query, allowed_Z, weight)
        if bound == np.inf:
            return DualResult(np.inf, query, plans, np.zeros(len(plans)), proved_infeasible=True)
        if bound > best:
            best, best_prices = bound, query
        is_new = plan.key not in known
        known.add(plan.key)
        plans.append(plan)
        if best >= upper or (stop_at_feasible and plan.feasible) or not num_rows or time.monotonic() > deadline:
            break
        if master is None:
            master = _LazyMaster(plans, weight)
        value, target, weights = master.solve(plans)
        # A full step that returns a known plan adds no cut: what is left is rounding.
        if value - best <= tolerance * abs(value) + master.negligible or (full_step and not is_new):
            if not master.add_violated(weights):
                break
            value, target, weights = master.solve(plans)
        near = value - best <= 30 * (tolerance * abs(value) + master.negligible)
        # Half-way steps damp the jumps; an occasional full step shows whether the maximum is reached.
        full_step = near or step % 6 == 5
        query = target if full_step else (best_prices + target) / 2
        if value > upper and best > -np.inf:
            query, full_step = master.first_reaching(upper, best_prices, query, plans), False
    return DualResult(best, best_prices, plans, np.append(weights, np.zeros(len(plans) - len(weights))))


class _LazyMaster:
    """The master program over the rows that matter so far; rows are added when the mix of plans breaks them."""

    def __init__(self, plans: list[Priced], weight: float) -> None:
        excess_IR = np.stack([plan.excess_R for plan in plans]).astype(np.float64)
        self._scale_R = np.maximum(np.abs(excess_IR).max(axis=0), 1.0)
        size = max(abs(plan.objective) for plan in plans) * weight
        self._weight, self._size = weight, size or 1.0
        self._box = _BOX * size if size else 1.0
        self.negligible = _NEGLIGIBLE * self._size
        num_rows = len(self._scale_R)
        self._scaled_IR = np.zeros((0, num_rows))
        worst = np.argsort(-(excess_IR / self._scale_R).max(axis=0), kind="stable")
        self._active: Ints = np.arange(num_rows) if num_rows <= _FEW_ROWS else np.sort(worst[: _FEW_ROWS // 2])
        self._master = Master(len(self._active), self._box, self._size)

    def solve(self, plans: list[Priced]) -> tuple[float, Floats, Floats]:
        """Add new plans and solve; returns the optimum, prices of all rows and the plans' weights."""
        fresh = [plan.excess_R / self._scale_R for plan in plans[len(self._scaled_IR) :]]
        self._scaled_IR = np.concatenate([self._scaled_IR, np.stack(fresh)]) if fresh else self._scaled_IR
        for number in range(self._master.num_plans, len(plans)):
            self._master.add(plans[number].objective * self._weight, self._scaled_IR[number, self._active])
        value, scaled, weights = self._master.solve()
        prices_R = np.zeros(len(self._scale_R))
        prices_R[self._active] = scaled / self._scale_R[self._active]
        return value, prices_R, weights

    def beyond(self, prices_R: Floats) -> bool:
        """True if a price is at its upper end."""
        return bool((prices_R * self._scale_R >= self._box).any())

    def first_reaching(self, level: float, start_R: Floats, end_R: Floats, plans: list[Priced]) -> Floats:
        """The prices nearest to ``start_R``, on the line to ``end_R``, at which no known plan is below a level.

        Beyond them the bound says no more than that nothing is below the level; ``end_R`` if it is not reached.
        """
        cost_I = np.array([plan.objective * self._weight for plan in plans])
        from_I = cost_I + self._scaled_IR @ (start_R * self._scale_R)
        to_I = cost_I + self._scaled_IR @ (end_R * self._scale_R)
        if (to_I <= level).any():
            return end_R
        below = from_I < level
        step = float(((level - from_I[below]) / (to_I[below] - from_I[below])).max(initial=0.0))
        return start_R + min(1.0, step * (1 + _BEYOND)) * (end_R - start_R)

    def add_violated(self, weights_I: Floats) -> bool:
        """Add rows that the mix of plans breaks; returns whether there were any."""
        mix_R = weights_I @ self._scaled_IR
        mix_R[self._active] = 0.0
        worst = np.argsort(-mix_R, kind="stable")[: _FEW_ROWS // 2]
        worst = worst[mix_R[worst] > 1e-9]
        if not len(worst):
            return False
        self._active = np.union1d(self._active, worst)
        self._master = Master(len(self._active), self._box, self._size)
        return True


class Master:
    """The master program, solved by the simplex method from its last basis; columns are only added."""

    def __init__(self, num_rows: int, box: float, scale: float = 1.0) -> None:
        """Start without columns.

        Args:
            num_rows: Limit rows.
            box: Upper end of every price.
            scale: Size of the costs; reduced costs far below it are rounding.
        """
        self._rows, self.box, self._scale = num_rows, box, scale
        # Columns: slacks of the rows, their prices' upper ends, then plans; the first entry counts plans.
        self._cost_C, self._column_CB = np.zeros(2 * num_rows + 64), np.zeros((2 * num_rows + 64, 1 + num_rows))
        self._cost_C[num_rows : 2 * num_rows] = box
        self._column_CB[:num_rows, 1:] = np.eye(num_rows)
        self._column_CB[num_rows : 2 * num_rows, 1:] -= np.eye(num_rows)
        self._count = 2 * num_rows
        self._basis: Ints = np.zeros(0, dtype=np.int64)

    @property
    def num_plans(self) -> int:
        """Number of plans."""
        return self._count - 2 * self._rows

    def add(self, cost: float, excess_R: Floats) -> None:
        """Add a plan."""
        if self._count == len(self._cost_C):
            self._cost_C = np.concatenate([self._cost_C, self._cost_C])
            self._column_CB = np.concatenate([self._column_CB, self._column_CB])
        self._cost_C[self._count] = cost
        self._column_CB[self._count, 0], self._column_CB[self._count, 1:] = 1.0, excess_R
        self._count += 1
        if not len(self._basis):
            support = np.where(excess_R > 0, np.arange(self._rows) + self._rows, np.arange(self._rows))
            self._basis = np.concatenate([[2 * self._rows], support])

    def solve(self) -> tuple[float, Floats, Floats]:
        """Pivot to the optimum.

        Returns:
            The optimum, the prices (R,), and the plans' weights (I,).
        """
        dual, value, self._basis = _pivot(
            self._cost_C[: self._count], self._column_CB[: self._count], self._basis, self._scale
        )
        weights = np.zeros(self._count)
        weights[self._basis] = value
        return float(dual[0]), np.clip(-dual[1:], 0.0, self.box), np.maximum(weights[2 * self._rows :], 0.0)


@compiled("(float64[::1],float64[:,::1],int64[::1],float64)")
def _pivot(cost_C: Floats, column_CB: Floats, basis_B: Ints, scale: float) -> tuple[Floats, Floats, Ints]:
    """Dual values, values of the basic columns, and the basis, after pivoting to the optimum."""
    columns, size = column_CB.shape
    dual, value, basis = np.zeros(size), np.zeros(size), basis_B.copy()
    last = basis_B.copy()
    both, direction = np.empty((size, 2 * size)), np.empty(size)
    is_basic = np.zeros(columns, dtype=np.bool_)
    for pivot in range(_MAX_PIVOTS):
        both[:] = 0.0
        for b in range(size):
            both[:size, b] = column_CB[basis[b]]
            both[b, size + b] = 1.0
        singular = False
        for k in range(size):
            best = k
            for r in range(k + 1, size):
                if abs(both[r, k]) > abs(both[best, k]):
                    best = r
            if both[best, k] == 0.0:
                singular = True
                break
            if best != k:
                for c in range(2 * size):
                    both[k, c], both[best, c] = both[best, c], both[k, c]
            head = both[k, k]
            for c in range(2 * size):
                both[k, c] /= head
            for r in range(size):
                factor = both[r, k]
                if r != k:
                    for c in range(2 * size):
                        both[r, c] -= factor * both[k, c]
        if singular:
            break
        last[:] = basis
        for c in range(size):
            total = 0.0
            for b in range(size):
                total += both[b, size + c] * cost_C[basis[b]]
            dual[c], value[c] = total, both[c, size]
        noise = _TOLERANCE * scale
        for c in range(size):
            noise = max(noise, _ROUNDING * abs(dual[c]))
        is_basic[:] = False
        for b in range(size):
            is_basic[basis[b]] = True
        entering, least = -1, 0.0
        for number in range(columns):
            if not is_basic[number]:
                total = 0.0
                for r in range(1, size):
                    total += column_CB[number, r] * -dual[r]
                reduced = cost_C[number] + total - dual[0] * column_CB[number, 0]
                if reduced < -noise and (entering < 0 or (pivot <= _BLAND_AFTER and reduced < least)):
                    entering, least = number, reduced
        if entering < 0:
            break
        shortest = np.inf
        for b in range(size):
            total = 0.0
            for c in range(size):
                total += both[b, size + c] * column_CB[entering, c]
            direction[b] = total
            if total > _LEAST_STEP:
                shortest = min(shortest, max(value[b], 0.0) / total)
        if shortest == np.inf:
            break
        leaving = -1
        for b in range(size):
            if direction[b] > _LEAST_STEP and max(value[b], 0.0) / direction[b] <= shortest * _TIE:
                if leaving < 0:
                    leaving = b
                elif pivot > _BLAND_AFTER:
                    if basis[b] < basis[leaving]:
                        leaving = b
                elif direction[b] > direction[leaving]:
                    leaving = b
        basis[leaving] = entering
    return dual, value, last
