"""Compressed all-reduce: a scheme for every gradient bucket, by time and variance.

Problems, plans and their evaluation, and the schemes as data; formulations choose, a runtime carries out.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.gradients.build import SchemeTimes, build_problem, load_scheme_times, uniform_plan
    from qsync_opt.gradients.compression import (
        BLOCK,
        LEAST_EXPONENT,
        BucketStatistics,
        Code,
        GradientScheme,
        Moments,
        Scheme,
        Transport,
        scheme,
        schemes,
    )
    from qsync_opt.gradients.evaluation import VARIANCE_SLACK, Evaluation, evaluate, evaluate_choices
    from qsync_opt.gradients.explanation import BucketExplanation, OtherScheme, explain_buckets
    from qsync_opt.gradients.joint import (
        GRADIENT_COSTS_FORMAT,
        GradientCosts,
        JointEvaluation,
        JointPlan,
        JointProblem,
        build_joint_problem,
        communication_problem,
        evaluate_joint,
        load_gradient_costs,
        training_part,
        under_schemes,
    )
    from qsync_opt.gradients.plan import PLAN_FORMAT, Plan
    from qsync_opt.gradients.problem import PROBLEM_FORMAT, Bucket, Choice, Objective, Problem
    from qsync_opt.gradients.recorded import (
        RECORDED_FORMAT,
        RecordedReductions,
        Reduction,
        load_recorded_reductions,
        predicted_reductions,
        reductions_timeline,
    )
    from qsync_opt.gradients.stepping import (
        Computation,
        ReductionModel,
        fastest_scheme,
        fit_reductions,
        is_as_fast,
        plan_reductions,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BLOCK", "GRADIENT_COSTS_FORMAT", "LEAST_EXPONENT", "PLAN_FORMAT", "PROBLEM_FORMAT", "RECORDED_FORMAT",
    "VARIANCE_SLACK", "Bucket", "BucketExplanation", "BucketStatistics", "Choice", "Code", "Computation", "Evaluation",
    "GradientCosts", "GradientScheme", "JointEvaluation", "JointPlan", "JointProblem", "Moments", "Objective",
    "OtherScheme", "Plan", "Problem", "RecordedReductions", "Reduction", "ReductionModel", "Scheme", "SchemeTimes",
    "Transport", "build_joint_problem", "build_problem", "communication_problem", "evaluate", "evaluate_choices",
    "evaluate_joint", "explain_buckets", "fastest_scheme", "fit_reductions", "is_as_fast", "load_gradient_costs",
    "load_recorded_reductions", "load_scheme_times", "plan_reductions", "predicted_reductions", "reductions_timeline",
    "scheme", "schemes", "training_part", "under_schemes", "uniform_plan",
]  # fmt: skip
