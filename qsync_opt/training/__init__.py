"""Precision plans for training: problems, plans, their evaluation, fronts and explanations.

`build_problem` makes a problem, `solve` plans it, and `evaluate` checks a plan without trusting any solver.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.solving import PROOF_GAP, PointStatus, TerminationStatus, relative_gap
    from qsync_opt.training.blocks import identical_blocks, merge_groups
    from qsync_opt.training.buckets import (
        BucketOptions,
        GradientBucket,
        gradient_buckets,
        gradient_users,
        merge_by_operator,
        operator_buckets,
    )
    from qsync_opt.training.build import build_problem
    from qsync_opt.training.calibration import MeasuredPasses, calibrate, uniform_choices
    from qsync_opt.training.comparison import PlanDifference, compare_plans
    from qsync_opt.training.evaluation import (
        BYTES_PER_KIB,
        DeviceEvaluation,
        Evaluation,
        broken_limits,
        cast_buffers_kib,
        evaluate,
        evaluate_device,
        iteration_time,
    )
    from qsync_opt.training.explanation import Alternative, Explainer, Explanation, Overview, overview
    from qsync_opt.training.intervals import (
        INTERVALS_KEY,
        IterationInterval,
        interval_problem,
        iteration_interval,
        operator_intervals,
    )
    from qsync_opt.training.memory import (
        MEMORY_KEY,
        OPERATORS_KEY,
        MemoryTimeline,
        memory_breakdown,
        memory_timeline,
    )
    from qsync_opt.training.pareto import GAPS, Front, FrontCache, front_key, pareto_front
    from qsync_opt.training.plan import Plan, load_plan, uniform_plan
    from qsync_opt.training.planner import Answer, FastestPlan, Solution, SolveOptions, fastest, solve
    from qsync_opt.training.pricing import problem_inputs, problem_role, uniform_precisions
    from qsync_opt.training.problem import (
        MI_ELEMENTS,
        NO_LIMIT_NS,
        SCHEMES_KEY,
        CastCost,
        Communication,
        OperatorCost,
        Problem,
        ProblemDevice,
        ProblemOperator,
        load_problem,
    )
    from qsync_opt.training.profile_choice import (
        ChoiceMethod,
        Measurement,
        ProfileChoice,
        choose_profiles,
        plan_regret,
        profile_groups,
    )
    from qsync_opt.training.propagation import follow_inputs, precisions_by_rank, propagate
    from qsync_opt.training.replanning import Change, Replanning, replan
    from qsync_opt.training.shares import (
        FastestShares,
        SharesEvaluation,
        SharesPlan,
        SharesProblem,
        at_batch,
        build_shares_problem,
        evaluate_shares,
        fastest_shares,
    )
    from qsync_opt.training.timeline import (
        COMMUNICATION,
        COMPUTE,
        NS_PER_US,
        Timeline,
        TimelineEvent,
        replay,
        trace_json,
        write_trace,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BYTES_PER_KIB", "COMMUNICATION", "COMPUTE", "GAPS", "INTERVALS_KEY", "MEMORY_KEY", "MI_ELEMENTS", "NO_LIMIT_NS",
    "NS_PER_US", "OPERATORS_KEY", "PROOF_GAP", "SCHEMES_KEY", "Alternative", "Answer", "BucketOptions", "CastCost",
    "Change", "ChoiceMethod", "Communication", "DeviceEvaluation", "Evaluation", "Explainer", "Explanation",
    "FastestPlan", "FastestShares", "Front", "FrontCache", "GradientBucket", "IterationInterval", "MeasuredPasses",
    "Measurement", "MemoryTimeline", "OperatorCost", "Overview", "Plan", "PlanDifference", "PointStatus", "Problem",
    "ProblemDevice", "ProblemOperator", "ProfileChoice", "Replanning", "SharesEvaluation", "SharesPlan",
    "SharesProblem", "Solution", "SolveOptions", "TerminationStatus", "Timeline", "TimelineEvent", "at_batch",
    "broken_limits", "build_problem", "build_shares_problem", "calibrate", "cast_buffers_kib", "choose_profiles",
    "compare_plans", "evaluate", "evaluate_device", "evaluate_shares", "fastest", "fastest_shares", "follow_inputs",
    "front_key", "gradient_buckets", "gradient_users", "identical_blocks", "interval_problem", "iteration_interval",
    "iteration_time", "load_plan", "load_problem", "memory_breakdown", "memory_timeline", "merge_by_operator",
    "merge_groups", "operator_buckets", "operator_intervals", "overview", "pareto_front", "plan_regret",
    "precisions_by_rank", "problem_inputs", "problem_role", "profile_groups", "propagate", "relative_gap", "replan",
    "replay", "solve", "trace_json", "uniform_choices", "uniform_plan", "uniform_precisions", "write_trace",
]  # fmt: skip
