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

from qsync_opt.formulations.assignment.model import Floats, Ints

_TOLERANCE = 1e-11
_BLAND_AFTER = 200
_MAX_PIVOTS = 2000


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
        self._cost_I, self._excess_IR = np.zeros(0), np.zeros((0, num_rows))
        # Column numbers: 0..R-1 slacks, R..2R-1 box columns, then the plans.
        self._basis: Ints = np.zeros(0, dtype=np.int64)

    @property
    def num_columns(self) -> int:
        """How many plans it knows."""
        return len(self._cost_I)

    def add(self, cost: float, excess_R: Floats) -> None:
        """Add a plan."""
        self._cost_I = np.append(self._cost_I, cost)
        self._excess_IR = np.concatenate([self._excess_IR, excess_R[None]])
        if not len(self._basis):
            support = np.where(excess_R > 0, np.arange(self._rows) + self._rows, np.arange(self._rows))
            self._basis = np.concatenate([[2 * self._rows], support])

    def _column(self, number: int) -> Floats:
        column = np.zeros(self._rows + 1)
        if number < self._rows:
            column[1 + number] = 1.0
        elif number < 2 * self._rows:
            column[1 + number - self._rows] = -1.0
        else:
            column[0], column[1:] = 1.0, self._excess_IR[number - 2 * self._rows]
        return column

    def solve(self) -> tuple[float, Floats, Floats]:
        """Pivot to the optimum.

        Returns:
            The optimum, the prices (R,), and the plans' weights (I,).
        """
        cost = np.concatenate([np.zeros(self._rows), np.full(self._rows, self.box), self._cost_I])
        for pivot in range(_MAX_PIVOTS):
            inverse = np.linalg.inv(np.stack([self._column(int(b)) for b in self._basis], axis=1))
            dual = cost[self._basis] @ inverse
            prices = -dual[1:]
            reduced = np.concatenate([prices, self.box - prices, self._cost_I + self._excess_IR @ prices - dual[0]])
            reduced[self._basis] = 0.0
            negative = np.flatnonzero(reduced < -_TOLERANCE * self._scale)
            if not len(negative):
                break
            entering = int(negative[0] if pivot > _BLAND_AFTER else reduced.argmin())
            direction, value = inverse @ self._column(entering), inverse[:, 0]
            ratio = np.full(len(value), np.inf)
            positive = direction > 1e-12
            ratio[positive] = np.maximum(value[positive], 0.0) / direction[positive]
            if not positive.any():
                break
            ties = np.flatnonzero(ratio <= ratio.min() * (1 + 1e-12))
            leaving = int(
                ties[np.argmin(self._basis[ties])] if pivot > _BLAND_AFTER else ties[direction[ties].argmax()]
            )
            self._basis[leaving] = entering
        weights = np.zeros(len(cost))
        weights[self._basis] = inverse[:, 0]
        return float(dual[0]), np.clip(prices, 0.0, self.box), np.maximum(weights[2 * self._rows :], 0.0)
