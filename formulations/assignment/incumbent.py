"""What is the best labelling so far, and what must others stay below to be worth finding?

Axes: N nodes.
"""

from dataclasses import dataclass

import numpy as np

from qsync_opt.formulations.assignment.dual import Priced
from qsync_opt.formulations.assignment.model import AssignmentModel, Ints
from qsync_opt.formulations.assignment.relaxation import Relaxation

PROOF = 1e-9
"""Improvements below this share of the objective are not looked for."""


@dataclass(slots=True)
class Incumbent:
    """The best labelling of a model within its limits.

    Attributes:
        relaxation: What plans are found with.
        offset: Constant that is part of the objective when gaps are measured.
        best: The labelling, if there is one.
    """

    relaxation: Relaxation
    offset: float = 0.0
    best: Priced | None = None

    @property
    def model(self) -> AssignmentModel:
        """The model asked about."""
        return self.relaxation.true

    def offer(self, labels_N: Ints) -> None:
        """Keep a labelling if it is feasible and better than the incumbent."""
        if self.model.wanted is not None:
            labels_N = labels_N.copy()
            self.model.wanted.fill(labels_N)
        plan = Priced(labels_N, self.model.objective(labels_N), self.model.excess(labels_N))
        if plan.feasible and plan.objective < self.upper:
            self.best = plan

    def offer_relaxed(self, plan: Priced) -> None:
        """Offer a plan of the relaxed model."""
        if self.relaxation.entry_Y is not None or self.model.wanted is not None:
            self.offer(self.relaxation.labelling(plan.labels_N))
        elif plan.feasible and plan.objective < self.upper:
            self.best = plan

    @property
    def upper(self) -> float:
        """Objective of the incumbent, infinite without one."""
        return np.inf if self.best is None else self.best.objective

    def target(self, gap: float) -> float:
        """Value that a labelling must stay below to be worth finding."""
        return np.inf if self.best is None else self.upper - max(gap, PROOF) * abs(self.upper + self.offset)
