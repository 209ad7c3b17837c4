"""Precision plans for synchronous data-parallel training on hybrid GPU clusters.

Public names are loaded on first use, so that importing this package loads neither torch nor a solver.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.cluster import Cluster, DataSheet, data_sheet, load_cluster
    from qsync_opt.costs import CostModel, DeviceProfile, load_profile, roofline_profile
    from qsync_opt.errors import QSyncError
    from qsync_opt.model import Operator, OpGraph, Role, RoleTable, load_graph
    from qsync_opt.model.onnx import read_onnx, read_weights
    from qsync_opt.report import make_report, write_report
    from qsync_opt.runtime import Runtime
    from qsync_opt.runtimes.torch.capture import capture, capture_model
    from qsync_opt.runtimes.torch.checkpoints import Checkpoints, PlanState
    from qsync_opt.runtimes.torch.ddp import ShareSampler, global_count, global_mean
    from qsync_opt.runtimes.torch.execution import ApplyOptions, LossScaler, apply, graphed, undo
    from qsync_opt.runtimes.torch.gradients import compress_gradients
    from qsync_opt.runtimes.torch.job import (
        JobPlan,
        PlanAdapter,
        PlanningOptions,
        PlanRefresher,
        auto_plan,
        noise_horizon,
    )
    from qsync_opt.runtimes.torch.messages import full_graph, partition_graph
    from qsync_opt.runtimes.torch.profiling import profile
    from qsync_opt.runtimes.torch.sensitivity import collect_statistics
    from qsync_opt.runtimes.torch.steps import profile_steps
    from qsync_opt.runtimes.torch.support import TrainingExample, measure_iteration
    from qsync_opt.sensitivity import (
        Indicator,
        ModelKnowledge,
        SensitivityTable,
        load_statistics,
        plan_variance,
        save_statistics,
        sensitivities,
        weight_sensitivities,
    )
    from qsync_opt.serving import plan_serving
    from qsync_opt.steps import StepCosts, StepPredictor, load_step_costs, profile_from_steps
    from qsync_opt.systems import System, evaluate, load_plan, load_problem, solve
    from qsync_opt.training import (
        Evaluation,
        Explainer,
        Explanation,
        FastestPlan,
        Front,
        Plan,
        PointStatus,
        Problem,
        Replanning,
        Solution,
        TerminationStatus,
        Timeline,
        build_problem,
        compare_plans,
        fastest,
        identical_blocks,
        memory_breakdown,
        pareto_front,
        replan,
        uniform_plan,
        write_trace,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__version__ = "0.1.0"
__all__ = [
    "ApplyOptions", "Checkpoints", "Cluster", "CostModel", "DataSheet", "DeviceProfile", "Evaluation", "Explainer",
    "Explanation", "FastestPlan", "Front", "Indicator", "JobPlan", "LossScaler", "ModelKnowledge", "OpGraph",
    "Operator", "Plan", "PlanAdapter", "PlanRefresher", "PlanState", "PlanningOptions", "PointStatus", "Problem",
    "QSyncError", "Replanning", "Role", "RoleTable", "Runtime", "SensitivityTable", "ShareSampler", "Solution",
    "StepCosts", "StepPredictor", "System", "TerminationStatus", "Timeline", "TrainingExample", "__version__", "apply",
    "auto_plan", "build_problem", "capture", "capture_model", "collect_statistics", "compare_plans",
    "compress_gradients", "data_sheet", "evaluate", "fastest", "full_graph", "global_count", "global_mean", "graphed",
    "identical_blocks", "load_cluster", "load_graph", "load_plan", "load_problem", "load_profile", "load_statistics",
    "load_step_costs", "make_report", "measure_iteration", "memory_breakdown", "noise_horizon", "pareto_front",
    "partition_graph", "plan_serving", "plan_variance", "profile", "profile_from_steps", "profile_steps", "read_onnx",
    "read_weights", "replan", "roofline_profile", "save_statistics", "sensitivities", "solve", "undo", "uniform_plan",
    "weight_sensitivities", "write_report", "write_trace",
]  # fmt: skip
