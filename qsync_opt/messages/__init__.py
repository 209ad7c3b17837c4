"""Widths of the messages of full-graph GNN training: problems, plans and their evaluation.

A `Problem` holds the messages of every exchange and what the links cost, a `Plan` the bits of each message.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.messages.evaluation import Evaluation, evaluate
    from qsync_opt.messages.learned import with_learned_packing
    from qsync_opt.messages.plan import PLAN_FORMAT, Plan, in_rounds, uniform_plan
    from qsync_opt.messages.problem import (
        FORMAT,
        Exchange,
        Pair,
        Problem,
        all_to_all_round,
        by_bytes,
        ring_rounds,
        variance_factor,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "FORMAT", "PLAN_FORMAT", "Evaluation", "Exchange", "Pair", "Plan", "Problem", "all_to_all_round", "by_bytes",
    "evaluate", "in_rounds", "ring_rounds", "uniform_plan", "variance_factor", "with_learned_packing",
]  # fmt: skip
