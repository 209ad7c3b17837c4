"""Formulations of the write balance: wrap-around with a bound, exact, integer program, exhaustive.

The registry reaches each formulation by its name.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.checkpoints.exhaustive import ExhaustiveFormulation
    from qsync_opt.formulations.checkpoints.fractional import Fractional, least_time
    from qsync_opt.formulations.checkpoints.program import ExactFormulation, IlpFormulation
    from qsync_opt.formulations.checkpoints.wrap_around import WrapAroundFormulation
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ExactFormulation", "ExhaustiveFormulation", "Fractional", "IlpFormulation", "WrapAroundFormulation", "least_time",
]  # fmt: skip
