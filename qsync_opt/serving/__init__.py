"""Serving a language model over unequal devices: which device runs which layers, in which weight scheme.

The problem, its plans, an evaluation in integers that knows no solver, and profiles that problems are built from.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.serving.evaluation import HARM_SLACK, Evaluation, StageTimes, decode_ns, evaluate, prefill_ns
    from qsync_opt.serving.harm import HARM_FORMAT, Harm, load_harm
    from qsync_opt.serving.learned import fill_serving_profile, learned_serving_profile
    from qsync_opt.serving.plan import PLAN_FORMAT, Plan, Stage, load_plan
    from qsync_opt.serving.planner import (
        Prediction,
        ServeWorkload,
        ServingDevice,
        ServingMeasurement,
        ServingPlan,
        StagePrediction,
        build_serving_problem,
        default_microbatches,
        plan_serving,
        predict,
        rounding_harm,
    )
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
    from qsync_opt.serving.profile import (
        CACHE_PAGE,
        KINDS,
        PROFILE_FORMAT,
        SCHEME_BITS,
        PhaseCosts,
        ServeModel,
        ServingProfile,
        Table,
        load_serving_profile,
        profile_json,
        roofline_serving_profile,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CACHE_PAGE", "HARM_FORMAT", "HARM_SLACK", "KINDS", "PLAN_FORMAT", "PROBLEM_FORMAT", "PROFILE_FORMAT",
    "SCHEME_BITS", "Device", "Ends", "Evaluation", "Group", "Harm", "Microbatch", "PhaseCosts", "Plan",
    "Prediction", "Problem", "ServeModel", "ServeWorkload", "ServingDevice", "ServingMeasurement", "ServingPlan",
    "ServingProfile", "Stage", "StagePrediction", "StageTimes", "Table", "Times", "build_serving_problem",
    "decode_ns", "default_microbatches", "evaluate", "fill_serving_profile", "learned_serving_profile", "load_harm",
    "load_plan", "load_problem", "load_serving_profile", "plan_serving", "predict", "prefill_ns", "profile_json",
    "roofline_serving_profile", "rounding_harm",
]  # fmt: skip
