"""Precision plans for synchronous data-parallel training on hybrid GPU clusters.

Public names are loaded on first use, so that importing this package loads neither torch nor a solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_opt.evaluation import Evaluation as Evaluation
    from qsync_opt.evaluation import evaluate as evaluate
    from qsync_opt.plan import Plan as Plan
    from qsync_opt.plan import load_plan as load_plan
    from qsync_opt.planner import FastestPlan as FastestPlan
    from qsync_opt.planner import fastest as fastest
    from qsync_opt.planner import solve as solve
    from qsync_opt.problem import Problem as Problem
    from qsync_opt.problem_file import load_problem as load_problem
    from qsync_opt.solution import PointStatus as PointStatus
    from qsync_opt.solution import Solution as Solution
    from qsync_opt.solution import TerminationStatus as TerminationStatus

__version__ = "0.1.0"

# Public name -> module that defines it; the block above repeats it for type checkers (a test compares the two).
# No public name may be that of a sub-module: importing the sub-module would replace it.
_PUBLIC = {
    "Evaluation": "qsync_opt.evaluation",
    "evaluate": "qsync_opt.evaluation",
    "Plan": "qsync_opt.plan",
    "load_plan": "qsync_opt.plan",
    "FastestPlan": "qsync_opt.planner",
    "fastest": "qsync_opt.planner",
    "solve": "qsync_opt.planner",
    "Problem": "qsync_opt.problem",
    "load_problem": "qsync_opt.problem_file",
    "PointStatus": "qsync_opt.solution",
    "Solution": "qsync_opt.solution",
    "TerminationStatus": "qsync_opt.solution",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
