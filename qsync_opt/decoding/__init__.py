"""Speculative decoding: for each regime of batch and context, which draft and how many tokens of it, or none.

A `Problem` holds times and acceptances, a `Plan` one choice per regime; `evaluate` trusts no solver. `Measurements`
become a problem by `build_problem`, `explain` says why a regime speculates or not, and `Controller` follows what is
accepted while a server runs.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.decoding.acceptance import (
        Acceptance,
        AcceptanceCounts,
        acceptance_by_position,
        clustered_interval,
        expected_tokens,
        tokens_deviation,
        wilson_interval,
    )
    from qsync_opt.decoding.controller import Controller, ControllerOptions, Graph, Judged
    from qsync_opt.decoding.evaluation import Evaluation, RegimeEvaluation, evaluate
    from qsync_opt.decoding.explanation import explain
    from qsync_opt.decoding.measurements import (
        DraftMeasurement,
        Measurements,
        RegimeTimes,
        build_problem,
        load_measurements,
        load_speculation,
    )
    from qsync_opt.decoding.plan import Plan, Selection
    from qsync_opt.decoding.problem import Choice, Draft, Problem, Regime
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Acceptance", "AcceptanceCounts", "Choice", "Controller", "ControllerOptions", "Draft", "DraftMeasurement",
    "Evaluation", "Graph", "Judged", "Measurements", "Plan", "Problem", "Regime", "RegimeEvaluation", "RegimeTimes",
    "Selection", "acceptance_by_position", "build_problem", "clustered_interval", "evaluate", "expected_tokens",
    "explain", "load_measurements", "load_speculation", "tokens_deviation", "wilson_interval",
]  # fmt: skip
