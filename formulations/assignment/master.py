"""Which prices look best given the plans seen so far? The master linear program of the dual, by a small simplex.

    minimise  sum_i alpha_i cost_i + sum_r box_r t_r
    where     sum_i alpha_i = 1,   sum_i alpha_i excess_ir - t_r + s_r = 0,   alpha, t, s >= 0

Its dual values are the prices (between 0 and the box) that maximise the least of ``cost_i + prices . excess_i``; the
weights alpha mix plans so that the limits hold on average. The basis has one row per limit plus one, so it is inverted
afresh at every pivot.

Axes: I columns (plans), R limit rows.

Source: Kelley's cutting planes, read as Dantzig-Wolfe; standard.
"""

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import Floats, Ints

_TOLERANCE = 1e-11
_ROUNDING = 1e-13
"""Reduced costs below this share of the largest dual value are rounding too. While no mix of plans keeps the limits,
prices are at the box, far above every cost: such noise would be pivoted on without end."""
_BLAND_AFTER = 200
_MAX_PIVOTS = 2000
_LEAST_STEP = 1e-12
_TIE = 1 + 1e-12


class Master:
    """The master program; columns are only ever added."""

    def __init__(self, num_rows: int, box: float, scale: float = 1.0) -> None:
        """Start without columns.

        Args:
            num_rows: Limit rows.
            box: Upper end of every price.
            scale: Size of the costs; reduced costs far below it are rounding.
        """
        self._rows, self.box, self._scale = num_rows, box, scale
        self._cost_I, self._excess_IR = np.zeros(64), np.zeros((64, num_rows))
        self.num_columns = 0  # how many plans it knows
        # Column numbers: 0..R-1 slacks, R..2R-1 box columns, then the plans.
        self._basis: Ints = np.zeros(0, dtype=np.int64)

    def add(self, cost: float, excess_R: Floats) -> None:
        """Add a plan."""
        if self.num_columns == len(self._cost_I):
            self._cost_I = np.concatenate([self._cost_I, self._cost_I])
            self._excess_IR = np.concatenate([self._excess_IR, self._excess_IR])
        self._cost_I[self.num_columns], self._excess_IR[self.num_columns] = cost, excess_R
        self.num_columns += 1
        if not len(self._basis):
            support = np.where(excess_R > 0, np.arange(self._rows) + self._rows, np.arange(self._rows))
            self._basis = np.concatenate([[2 * self._rows], support])

    def solve(self) -> tuple[float, Floats, Floats]:
        """Pivot to the optimum.

        Returns:
            The optimum, the prices (R,), and the plans' weights (I,).
        """
        dual, value, self._basis = _pivot(
            self._cost_I[: self.num_columns], self._excess_IR[: self.num_columns], self._basis, self.box, self._scale
        )
        weights = np.zeros(2 * self._rows + self.num_columns)
        weights[self._basis] = value
        return float(dual[0]), np.clip(-dual[1:], 0.0, self.box), np.maximum(weights[2 * self._rows :], 0.0)


def _row_sums(product: Floats) -> Floats:
    """Sums of rows, one addend after the other as in a loop."""
    result: Floats = np.cumsum(product, axis=1)[:, -1]
    return result


def _inverse_plain(matrix: Floats) -> Floats | None:
    """Inverse by elimination with row exchanges, the same operations in the same order as in `_pivot`."""
    size = len(matrix)
    both = np.concatenate([matrix, np.eye(size)], axis=1)
    for k in range(size):
        pivot = k + int(np.abs(both[k:, k]).argmax())
        if both[pivot, k] == 0.0:
            return None
        both[[k, pivot]] = both[[pivot, k]]
        both[k] = both[k] / both[k, k]
        factor = both[:, k].copy()
        factor[k] = 0.0
        both -= factor[:, None] * both[k]
    return both[:, size:]


def _pivot_plain(
    cost_I: Floats, excess_IR: Floats, basis_B: Ints, box: float, scale: float
) -> tuple[Floats, Floats, Ints]:
    rows = excess_IR.shape[1]
    columns = np.zeros((2 * rows + len(cost_I), rows + 1))
    columns[:rows, 1:], columns[rows : 2 * rows, 1:] = np.eye(rows), -np.eye(rows)
    columns[2 * rows :, 0], columns[2 * rows :, 1:] = 1.0, excess_IR
    cost = np.concatenate([np.zeros(rows), np.full(rows, box), cost_I])
    dual, value, basis = np.zeros(rows + 1), np.zeros(rows + 1), basis_B.copy()
    for pivot in range(_MAX_PIVOTS):
        inverse = _inverse_plain(columns[basis].T)
        if inverse is None:
            break
        basis_B = basis.copy()
        dual = _row_sums(inverse.T * cost[basis])
        value = inverse[:, 0].copy()
        prices = -dual[1:]
        of_plans = _row_sums(excess_IR * prices) if rows else np.zeros(len(cost_I))
        reduced = np.concatenate([prices, box - prices, cost_I + of_plans - dual[0]])
        reduced[basis] = 0.0
        noise = max(_TOLERANCE * scale, _ROUNDING * float(np.abs(dual).max()))
        negative = np.flatnonzero(reduced < -noise)
        if not len(negative):
            break
        entering = int(negative[0] if pivot > _BLAND_AFTER else reduced.argmin())
        direction = _row_sums(inverse * columns[entering])
        positive = direction > _LEAST_STEP
        if not positive.any():
            break
        ratio = np.full(len(value), np.inf)
        ratio[positive] = np.maximum(value[positive], 0.0) / direction[positive]
        ties = np.flatnonzero(ratio <= ratio.min() * _TIE)
        leaving = int(ties[np.argmin(basis[ties])] if pivot > _BLAND_AFTER else ties[direction[ties].argmax()])
        basis[leaving] = entering
    return dual, value, basis_B


@compiled("(float64[::1],float64[:,::1],int64[::1],float64,float64)", plain=_pivot_plain)
def _pivot(cost_I: Floats, excess_IR: Floats, basis_B: Ints, box: float, scale: float) -> tuple[Floats, Floats, Ints]:
    """Dual values, values of the basic columns, and the basis, after pivoting to the optimum."""
    plans, rows = excess_IR.shape
    size = rows + 1
    dual, value, basis = np.zeros(size), np.zeros(size), basis_B.copy()
    found = basis_B.copy()
    both, column, direction = np.empty((size, 2 * size)), np.empty(size), np.empty(size)
    is_basic = np.zeros(2 * rows + plans, dtype=np.bool_)
    for pivot in range(_MAX_PIVOTS):
        both[:] = 0.0
        for b in range(size):
            number = basis[b]
            if number < rows:
                both[1 + number, b] = 1.0
            elif number < 2 * rows:
                both[1 + number - rows, b] = -1.0
            else:
                both[0, b] = 1.0
                for r in range(rows):
                    both[1 + r, b] = excess_IR[number - 2 * rows, r]
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
        found[:] = basis
        for c in range(size):
            total = 0.0
            for b in range(size):
                number = basis[b]
                cost = 0.0 if number < rows else box if number < 2 * rows else cost_I[number - 2 * rows]
                total += both[b, size + c] * cost
            dual[c] = total
            value[c] = both[c, size]
        noise = _TOLERANCE * scale
        for c in range(size):
            noise = max(noise, _ROUNDING * abs(dual[c]))
        is_basic[:] = False
        for b in range(size):
            is_basic[basis[b]] = True
        entering, least = -1, 0.0
        for number in range(2 * rows + plans):
            if is_basic[number]:
                reduced = 0.0
            elif number < rows:
                reduced = -dual[1 + number]
            elif number < 2 * rows:
                reduced = box - -dual[1 + number - rows]
            else:
                total = 0.0
                for r in range(rows):
                    total += excess_IR[number - 2 * rows, r] * -dual[1 + r]
                reduced = cost_I[number - 2 * rows] + total - dual[0]
            if reduced < -noise and (entering < 0 or (pivot <= _BLAND_AFTER and reduced < least)):
                entering, least = number, reduced
        if entering < 0:
            break
        column[:] = 0.0
        if entering < rows:
            column[1 + entering] = 1.0
        elif entering < 2 * rows:
            column[1 + entering - rows] = -1.0
        else:
            column[0] = 1.0
            for r in range(rows):
                column[1 + r] = excess_IR[entering - 2 * rows, r]
        shortest = np.inf
        for b in range(size):
            total = 0.0
            for c in range(size):
                total += both[b, size + c] * column[c]
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
    return dual, value, found
