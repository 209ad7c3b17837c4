"""Serving a language model over unequal devices: which device runs which layers, in which weight scheme.

The problem, its plans, and an evaluation in integers that knows no solver.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.serving.evaluation import HARM_SLACK, Evaluation, StageTimes, decode_ns, evaluate, prefill_ns
    from qsync_opt.serving.plan import PLAN_FORMAT, Plan, Stage, load_plan
    from qsync_opt.serving.problem import (
        PROBLEM_FORMAT,
        Device,
        Ends,
        Group,
        Microbatch,
        Problem,
        Times,
        load_problem,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "HARM_SLACK", "PLAN_FORMAT", "PROBLEM_FORMAT", "Device", "Ends", "Evaluation", "Group", "Microbatch", "Plan",
    "Problem", "Stage", "StageTimes", "Times", "decode_ns", "evaluate", "load_plan", "load_problem", "prefill_ns",
]  # fmt: skip
