"""Precision plans for synchronous data-parallel training on hybrid GPU clusters.

Public names are loaded on first use, so that importing this package loads neither torch nor a solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_opt.cluster.cluster import Cluster as Cluster
    from qsync_opt.cluster.cluster import load_cluster as load_cluster
    from qsync_opt.cluster.datasheets import DataSheet as DataSheet
    from qsync_opt.cluster.datasheets import data_sheet as data_sheet
    from qsync_opt.costs.profile import DeviceProfile as DeviceProfile
    from qsync_opt.costs.profile import load_profile as load_profile
    from qsync_opt.costs.roofline import roofline_profile as roofline_profile
    from qsync_opt.costs.sources import CostModel as CostModel
    from qsync_opt.errors import QSyncError as QSyncError
    from qsync_opt.model.graph import Operator as Operator
    from qsync_opt.model.graph import OpGraph as OpGraph
    from qsync_opt.model.graph import Role as Role
    from qsync_opt.model.graph import load_graph as load_graph
    from qsync_opt.model.onnx.reader import read_onnx as read_onnx
    from qsync_opt.model.onnx.reader import read_weights as read_weights
    from qsync_opt.model.roles import RoleTable as RoleTable
    from qsync_opt.report import make_report as make_report
    from qsync_opt.report import write_report as write_report
    from qsync_opt.runtime import Runtime as Runtime
    from qsync_opt.runtimes.torch.capture.model import capture as capture
    from qsync_opt.runtimes.torch.capture.model import capture_model as capture_model
    from qsync_opt.runtimes.torch.checkpoints.checkpoints import Checkpoints as Checkpoints
    from qsync_opt.runtimes.torch.checkpoints.resuming import PlanState as PlanState
    from qsync_opt.runtimes.torch.execution.graphs import graphed as graphed
    from qsync_opt.runtimes.torch.execution.loss_scaling import LossScaler as LossScaler
    from qsync_opt.runtimes.torch.execution.plans import ApplyOptions as ApplyOptions
    from qsync_opt.runtimes.torch.execution.plans import apply as apply
    from qsync_opt.runtimes.torch.execution.plans import undo as undo
    from qsync_opt.runtimes.torch.job.adapting import PlanAdapter as PlanAdapter
    from qsync_opt.runtimes.torch.job.adapting import PlanRefresher as PlanRefresher
    from qsync_opt.runtimes.torch.job.measuring import noise_horizon as noise_horizon
    from qsync_opt.runtimes.torch.job.options import PlanningOptions as PlanningOptions
    from qsync_opt.runtimes.torch.job.plan import JobPlan as JobPlan
    from qsync_opt.runtimes.torch.job.planning import auto_plan as auto_plan
    from qsync_opt.runtimes.torch.profiling.profiler import profile as profile
    from qsync_opt.runtimes.torch.sensitivity.statistics import collect_statistics as collect_statistics
    from qsync_opt.runtimes.torch.steps.profile import profile_steps as profile_steps
    from qsync_opt.runtimes.torch.support.iteration import TrainingExample as TrainingExample
    from qsync_opt.runtimes.torch.support.iteration import measure_iteration as measure_iteration
    from qsync_opt.sensitivity.indicators import Indicator as Indicator
    from qsync_opt.sensitivity.indicators import ModelKnowledge as ModelKnowledge
    from qsync_opt.sensitivity.rectifiers import plan_variance as plan_variance
    from qsync_opt.sensitivity.scores import sensitivities as sensitivities
    from qsync_opt.sensitivity.statistics import load_statistics as load_statistics
    from qsync_opt.sensitivity.statistics import save_statistics as save_statistics
    from qsync_opt.sensitivity.table import SensitivityTable as SensitivityTable
    from qsync_opt.sensitivity.weights import weight_sensitivities as weight_sensitivities
    from qsync_opt.steps.bridge import profile_from_steps as profile_from_steps
    from qsync_opt.steps.costs import StepCosts as StepCosts
    from qsync_opt.steps.costs import load_step_costs as load_step_costs
    from qsync_opt.steps.predictor import StepPredictor as StepPredictor
    from qsync_opt.training.blocks import identical_blocks as identical_blocks
    from qsync_opt.training.build import build_problem as build_problem
    from qsync_opt.training.comparison import compare_plans as compare_plans
    from qsync_opt.training.evaluation import Evaluation as Evaluation
    from qsync_opt.training.evaluation import evaluate as evaluate
    from qsync_opt.training.explanation import Explainer as Explainer
    from qsync_opt.training.explanation import Explanation as Explanation
    from qsync_opt.training.memory import memory_breakdown as memory_breakdown
    from qsync_opt.training.pareto import Front as Front
    from qsync_opt.training.pareto import pareto_front as pareto_front
    from qsync_opt.training.plan import Plan as Plan
    from qsync_opt.training.plan import load_plan as load_plan
    from qsync_opt.training.plan import uniform_plan as uniform_plan
    from qsync_opt.training.planner import FastestPlan as FastestPlan
    from qsync_opt.training.planner import fastest as fastest
    from qsync_opt.training.planner import solve as solve
    from qsync_opt.training.problem import Problem as Problem
    from qsync_opt.training.problem_file import load_problem as load_problem
    from qsync_opt.training.replanning import Replanning as Replanning
    from qsync_opt.training.replanning import replan as replan
    from qsync_opt.training.solution import PointStatus as PointStatus
    from qsync_opt.training.solution import Solution as Solution
    from qsync_opt.training.solution import TerminationStatus as TerminationStatus
    from qsync_opt.training.timeline import Timeline as Timeline
    from qsync_opt.training.timeline import write_trace as write_trace

__version__ = "0.1.0"

# Public name -> module that defines it; the block above repeats it for type checkers (a test compares the two).
# No public name may be that of a sub-module: importing the sub-module would replace it.
_PUBLIC = {
    "QSyncError": "qsync_opt.errors",
    "OpGraph": "qsync_opt.model.graph",
    "Operator": "qsync_opt.model.graph",
    "Role": "qsync_opt.model.graph",
    "load_graph": "qsync_opt.model.graph",
    "read_onnx": "qsync_opt.model.onnx.reader",
    "RoleTable": "qsync_opt.model.roles",
    "Cluster": "qsync_opt.cluster.cluster",
    "load_cluster": "qsync_opt.cluster.cluster",
    "DeviceProfile": "qsync_opt.costs.profile",
    "load_profile": "qsync_opt.costs.profile",
    "load_statistics": "qsync_opt.sensitivity.statistics",
    "save_statistics": "qsync_opt.sensitivity.statistics",
    "sensitivities": "qsync_opt.sensitivity.scores",
    "plan_variance": "qsync_opt.sensitivity.rectifiers",
    "SensitivityTable": "qsync_opt.sensitivity.table",
    "build_problem": "qsync_opt.training.build",
    "uniform_plan": "qsync_opt.training.plan",
    "identical_blocks": "qsync_opt.training.blocks",
    "memory_breakdown": "qsync_opt.training.memory",
    "write_trace": "qsync_opt.training.timeline",
    "make_report": "qsync_opt.report",
    "write_report": "qsync_opt.report",
    "Timeline": "qsync_opt.training.timeline",
    "Evaluation": "qsync_opt.training.evaluation",
    "evaluate": "qsync_opt.training.evaluation",
    "Explainer": "qsync_opt.training.explanation",
    "Explanation": "qsync_opt.training.explanation",
    "Plan": "qsync_opt.training.plan",
    "load_plan": "qsync_opt.training.plan",
    "FastestPlan": "qsync_opt.training.planner",
    "fastest": "qsync_opt.training.planner",
    "solve": "qsync_opt.training.planner",
    "Problem": "qsync_opt.training.problem",
    "load_problem": "qsync_opt.training.problem_file",
    "replan": "qsync_opt.training.replanning",
    "Replanning": "qsync_opt.training.replanning",
    "PointStatus": "qsync_opt.training.solution",
    "Solution": "qsync_opt.training.solution",
    "TerminationStatus": "qsync_opt.training.solution",
    "capture": "qsync_opt.runtimes.torch.capture.model",
    "capture_model": "qsync_opt.runtimes.torch.capture.model",
    "collect_statistics": "qsync_opt.runtimes.torch.sensitivity.statistics",
    "noise_horizon": "qsync_opt.runtimes.torch.job.measuring",
    "profile": "qsync_opt.runtimes.torch.profiling.profiler",
    "TrainingExample": "qsync_opt.runtimes.torch.support.iteration",
    "measure_iteration": "qsync_opt.runtimes.torch.support.iteration",
    "apply": "qsync_opt.runtimes.torch.execution.plans",
    "undo": "qsync_opt.runtimes.torch.execution.plans",
    "ApplyOptions": "qsync_opt.runtimes.torch.execution.plans",
    "graphed": "qsync_opt.runtimes.torch.execution.graphs",
    "CostModel": "qsync_opt.costs.sources",
    "Runtime": "qsync_opt.runtime",
    "DataSheet": "qsync_opt.cluster.datasheets",
    "data_sheet": "qsync_opt.cluster.datasheets",
    "Front": "qsync_opt.training.pareto",
    "Indicator": "qsync_opt.sensitivity.indicators",
    "ModelKnowledge": "qsync_opt.sensitivity.indicators",
    "compare_plans": "qsync_opt.training.comparison",
    "pareto_front": "qsync_opt.training.pareto",
    "read_weights": "qsync_opt.model.onnx.reader",
    "roofline_profile": "qsync_opt.costs.roofline",
    "weight_sensitivities": "qsync_opt.sensitivity.weights",
    "auto_plan": "qsync_opt.runtimes.torch.job.planning",
    "PlanningOptions": "qsync_opt.runtimes.torch.job.options",
    "JobPlan": "qsync_opt.runtimes.torch.job.plan",
    "PlanRefresher": "qsync_opt.runtimes.torch.job.adapting",
    "PlanAdapter": "qsync_opt.runtimes.torch.job.adapting",
    "PlanState": "qsync_opt.runtimes.torch.checkpoints.resuming",
    "Checkpoints": "qsync_opt.runtimes.torch.checkpoints.checkpoints",
    "LossScaler": "qsync_opt.runtimes.torch.execution.loss_scaling",
    "StepCosts": "qsync_opt.steps.costs",
    "load_step_costs": "qsync_opt.steps.costs",
    "StepPredictor": "qsync_opt.steps.predictor",
    "profile_from_steps": "qsync_opt.steps.bridge",
    "profile_steps": "qsync_opt.runtimes.torch.steps.profile",
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
