"""Methods that plan serving: `chain` and `exact` by prices, `ilp` by a solver, the paper's heuristic, and an oracle."""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.serving.certified import ChainFormulation, ExactFormulation
    from qsync_opt.formulations.serving.exhaustive import ExhaustiveFormulation
    from qsync_opt.formulations.serving.ilp import IlpFormulation, build_program
    from qsync_opt.formulations.serving.paper import PaperFormulation
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ChainFormulation", "ExactFormulation", "ExhaustiveFormulation", "IlpFormulation", "PaperFormulation",
    "build_program",
]  # fmt: skip
