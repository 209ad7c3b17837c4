"""Precision plans for synchronous data-parallel training on hybrid GPU clusters.

Public names are loaded on first use, so that importing this package loads neither torch nor a solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_opt.baselines import uniform_plan as uniform_plan
    from qsync_opt.blocks import identical_blocks as identical_blocks
    from qsync_opt.build import build_problem as build_problem
    from qsync_opt.cluster import Cluster as Cluster
    from qsync_opt.cluster import load_cluster as load_cluster
    from qsync_opt.comparison import compare_plans as compare_plans
    from qsync_opt.datasheets import DataSheet as DataSheet
    from qsync_opt.datasheets import data_sheet as data_sheet
    from qsync_opt.device_profile import DeviceProfile as DeviceProfile
    from qsync_opt.device_profile import load_profile as load_profile
    from qsync_opt.errors import QSyncError as QSyncError
    from qsync_opt.evaluation import Evaluation as Evaluation
    from qsync_opt.evaluation import evaluate as evaluate
    from qsync_opt.explanation import Explainer as Explainer
    from qsync_opt.explanation import Explanation as Explanation
    from qsync_opt.graph import Operator as Operator
    from qsync_opt.graph import OpGraph as OpGraph
    from qsync_opt.graph import Role as Role
    from qsync_opt.graph_file import load_graph as load_graph
    from qsync_opt.indicator import sensitivities as sensitivities
    from qsync_opt.memory import memory_breakdown as memory_breakdown
    from qsync_opt.onnx_reader import read_onnx as read_onnx
    from qsync_opt.onnx_reader import read_weights as read_weights
    from qsync_opt.pareto import Front as Front
    from qsync_opt.pareto import pareto_front as pareto_front
    from qsync_opt.plan import Plan as Plan
    from qsync_opt.plan import load_plan as load_plan
    from qsync_opt.planner import FastestPlan as FastestPlan
    from qsync_opt.planner import fastest as fastest
    from qsync_opt.planner import solve as solve
    from qsync_opt.plugins import CostModel as CostModel
    from qsync_opt.plugins import Indicator as Indicator
    from qsync_opt.plugins import ModelKnowledge as ModelKnowledge
    from qsync_opt.plugins import Runtime as Runtime
    from qsync_opt.problem import Problem as Problem
    from qsync_opt.problem_file import load_problem as load_problem
    from qsync_opt.replanning import Replanning as Replanning
    from qsync_opt.replanning import replan as replan
    from qsync_opt.replay import Timeline as Timeline
    from qsync_opt.replay import write_trace as write_trace
    from qsync_opt.report import make_report as make_report
    from qsync_opt.report import write_report as write_report
    from qsync_opt.roles import RoleTable as RoleTable
    from qsync_opt.roofline import roofline_profile as roofline_profile
    from qsync_opt.runtimes.torch.adapting import PlanAdapter as PlanAdapter
    from qsync_opt.runtimes.torch.apply import apply as apply
    from qsync_opt.runtimes.torch.apply import undo as undo
    from qsync_opt.runtimes.torch.apply_options import ApplyOptions as ApplyOptions
    from qsync_opt.runtimes.torch.capture import capture as capture
    from qsync_opt.runtimes.torch.capture import capture_model as capture_model
    from qsync_opt.runtimes.torch.checkpoints import Checkpoints as Checkpoints
    from qsync_opt.runtimes.torch.graphs import graphed as graphed
    from qsync_opt.runtimes.torch.horizon import noise_horizon as noise_horizon
    from qsync_opt.runtimes.torch.job_options import PlanningOptions as PlanningOptions
    from qsync_opt.runtimes.torch.job_plan import JobPlan as JobPlan
    from qsync_opt.runtimes.torch.loss_scaling import LossScaler as LossScaler
    from qsync_opt.runtimes.torch.measure import TrainingExample as TrainingExample
    from qsync_opt.runtimes.torch.measure import measure_iteration as measure_iteration
    from qsync_opt.runtimes.torch.plan_state import PlanState as PlanState
    from qsync_opt.runtimes.torch.planning import auto_plan as auto_plan
    from qsync_opt.runtimes.torch.profiler import profile as profile
    from qsync_opt.runtimes.torch.refresh import PlanRefresher as PlanRefresher
    from qsync_opt.runtimes.torch.statistics import collect_statistics as collect_statistics
    from qsync_opt.runtimes.torch.step_profile import profile_steps as profile_steps
    from qsync_opt.sensitivity_table import SensitivityTable as SensitivityTable
    from qsync_opt.solution import PointStatus as PointStatus
    from qsync_opt.solution import Solution as Solution
    from qsync_opt.solution import TerminationStatus as TerminationStatus
    from qsync_opt.statistics_file import load_statistics as load_statistics
    from qsync_opt.statistics_file import save_statistics as save_statistics
    from qsync_opt.step_bridge import profile_from_steps as profile_from_steps
    from qsync_opt.step_costs import StepCosts as StepCosts
    from qsync_opt.step_costs import load_step_costs as load_step_costs
    from qsync_opt.step_predictor import StepPredictor as StepPredictor
    from qsync_opt.weight_indicator import weight_sensitivities as weight_sensitivities
    from qsync_opt.whole_plan import plan_variance as plan_variance

__version__ = "0.1.0"

# Public name -> module that defines it; the block above repeats it for type checkers (a test compares the two).
# No public name may be that of a sub-module: importing the sub-module would replace it.
_PUBLIC = {
    "QSyncError": "qsync_opt.errors",
    "OpGraph": "qsync_opt.graph",
    "Operator": "qsync_opt.graph",
    "Role": "qsync_opt.graph",
    "load_graph": "qsync_opt.graph_file",
    "read_onnx": "qsync_opt.onnx_reader",
    "RoleTable": "qsync_opt.roles",
    "Cluster": "qsync_opt.cluster",
    "load_cluster": "qsync_opt.cluster",
    "DeviceProfile": "qsync_opt.device_profile",
    "load_profile": "qsync_opt.device_profile",
    "load_statistics": "qsync_opt.statistics_file",
    "save_statistics": "qsync_opt.statistics_file",
    "sensitivities": "qsync_opt.indicator",
    "plan_variance": "qsync_opt.whole_plan",
    "SensitivityTable": "qsync_opt.sensitivity_table",
    "build_problem": "qsync_opt.build",
    "uniform_plan": "qsync_opt.baselines",
    "identical_blocks": "qsync_opt.blocks",
    "memory_breakdown": "qsync_opt.memory",
    "write_trace": "qsync_opt.replay",
    "make_report": "qsync_opt.report",
    "write_report": "qsync_opt.report",
    "Timeline": "qsync_opt.replay",
    "Evaluation": "qsync_opt.evaluation",
    "evaluate": "qsync_opt.evaluation",
    "Explainer": "qsync_opt.explanation",
    "Explanation": "qsync_opt.explanation",
    "Plan": "qsync_opt.plan",
    "load_plan": "qsync_opt.plan",
    "FastestPlan": "qsync_opt.planner",
    "fastest": "qsync_opt.planner",
    "solve": "qsync_opt.planner",
    "Problem": "qsync_opt.problem",
    "load_problem": "qsync_opt.problem_file",
    "replan": "qsync_opt.replanning",
    "Replanning": "qsync_opt.replanning",
    "PointStatus": "qsync_opt.solution",
    "Solution": "qsync_opt.solution",
    "TerminationStatus": "qsync_opt.solution",
    "capture": "qsync_opt.runtimes.torch.capture",
    "capture_model": "qsync_opt.runtimes.torch.capture",
    "collect_statistics": "qsync_opt.runtimes.torch.statistics",
    "noise_horizon": "qsync_opt.runtimes.torch.horizon",
    "profile": "qsync_opt.runtimes.torch.profiler",
    "TrainingExample": "qsync_opt.runtimes.torch.measure",
    "measure_iteration": "qsync_opt.runtimes.torch.measure",
    "apply": "qsync_opt.runtimes.torch.apply",
    "undo": "qsync_opt.runtimes.torch.apply",
    "ApplyOptions": "qsync_opt.runtimes.torch.apply_options",
    "graphed": "qsync_opt.runtimes.torch.graphs",
    "CostModel": "qsync_opt.plugins",
    "Runtime": "qsync_opt.plugins",
    "DataSheet": "qsync_opt.datasheets",
    "data_sheet": "qsync_opt.datasheets",
    "Front": "qsync_opt.pareto",
    "Indicator": "qsync_opt.plugins",
    "ModelKnowledge": "qsync_opt.plugins",
    "compare_plans": "qsync_opt.comparison",
    "pareto_front": "qsync_opt.pareto",
    "read_weights": "qsync_opt.onnx_reader",
    "roofline_profile": "qsync_opt.roofline",
    "weight_sensitivities": "qsync_opt.weight_indicator",
    "auto_plan": "qsync_opt.runtimes.torch.planning",
    "PlanningOptions": "qsync_opt.runtimes.torch.job_options",
    "JobPlan": "qsync_opt.runtimes.torch.job_plan",
    "PlanRefresher": "qsync_opt.runtimes.torch.refresh",
    "PlanAdapter": "qsync_opt.runtimes.torch.adapting",
    "PlanState": "qsync_opt.runtimes.torch.plan_state",
    "Checkpoints": "qsync_opt.runtimes.torch.checkpoints",
    "LossScaler": "qsync_opt.runtimes.torch.loss_scaling",
    "StepCosts": "qsync_opt.step_costs",
    "load_step_costs": "qsync_opt.step_costs",
    "StepPredictor": "qsync_opt.step_predictor",
    "profile_from_steps": "qsync_opt.step_bridge",
    "profile_steps": "qsync_opt.runtimes.torch.step_profile",
}
# Packages that only some names need, with what installs them.
_EXTRAS = {"torch": "torch", "onnxscript": "torch"}

__all__ = ["__version__", *_PUBLIC]


def _load(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRAS:
            raise
        from qsync_opt.errors import NotInstalledError

        raise NotInstalledError(
            f"qsync_opt.{name} needs {missing.name}, which is not installed: "
            f"pip install 'qsync-opt[{_EXTRAS[missing.name]}]'"
        ) from missing
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker that saw this would take every name for a public one
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
