"""Formulations of compression plans: a dynamic program with a bound, an integer program, every plan.

The registry reaches each formulation by its name.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.gradients.dynamic import DynamicFormulation
    from qsync_opt.formulations.gradients.exhaustive import ExhaustiveFormulation
    from qsync_opt.formulations.gradients.ilp import IlpFormulation
    from qsync_opt.formulations.gradients.prices import Prices, priced
    from qsync_opt.formulations.gradients.tables import Tables
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["DynamicFormulation", "ExhaustiveFormulation", "IlpFormulation", "Prices", "Tables", "priced"]
