"""Time and memory of a whole training step under a plan, predicted from recorded steps.

`fit_step_costs` learns costs from traces, and `StepPredictor` composes them for any plan.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.steps.audit import AuditedWorker, audit_worker, overlay_json, predicted_timeline
    from qsync_opt.steps.bridge import profile_from_steps
    from qsync_opt.steps.cases import StepFlow, result_format, scaled_costs, scaled_operators
    from qsync_opt.steps.cluster import (
        bucket_borders,
        bucket_segments,
        cluster_step,
        cluster_timeline,
        network_tails,
        slowed_segments,
        worker_step,
    )
    from qsync_opt.steps.costs import PHASE_LABELS, Case, CaseCost, RecordedTimelines, StepCosts, load_step_costs
    from qsync_opt.steps.fitting import KeptTensors, StepSample, fit_step_costs, kernel_paces, with_residuals
    from qsync_opt.steps.memory_timeline import Block
    from qsync_opt.steps.plans import MIXED, covering_plans, nearest_available
    from qsync_opt.steps.predictor import PlannedStep, StepPredictor
    from qsync_opt.steps.queues import NOTHING, Work
    from qsync_opt.steps.trace import (
        BACKWARD,
        BEGIN,
        CLIP,
        COPIES,
        FORWARD,
        LAUNCHES,
        NODE,
        OPTIMIZER,
        PHASES,
        PREFIX,
        WAITS,
        ZERO_GRAD,
        Change,
        Kernel,
        Launch,
        Node,
        Range,
        Span,
        StepEvents,
        StepSpans,
        charge_step,
        operator_label,
        phase_label,
        read_chrome_trace,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BACKWARD", "BEGIN", "CLIP", "COPIES", "FORWARD", "LAUNCHES", "MIXED", "NODE", "NOTHING", "OPTIMIZER", "PHASES",
    "PHASE_LABELS", "PREFIX", "WAITS", "ZERO_GRAD", "AuditedWorker", "Block", "Case", "CaseCost", "Change",
    "KeptTensors", "Kernel", "Launch", "Node", "PlannedStep", "Range", "RecordedTimelines", "Span", "StepCosts",
    "StepEvents", "StepFlow", "StepPredictor", "StepSample", "StepSpans", "Work", "audit_worker", "bucket_borders",
    "bucket_segments", "charge_step", "cluster_step", "cluster_timeline", "covering_plans", "fit_step_costs",
    "kernel_paces", "load_step_costs", "nearest_available", "network_tails", "operator_label", "overlay_json",
    "phase_label", "predicted_timeline", "profile_from_steps", "read_chrome_trace", "result_format", "scaled_costs",
    "scaled_operators", "slowed_segments", "with_residuals", "worker_step",
]  # fmt: skip
