"""Plans applied to a model: every operator runs in its precision, forward and backward.

Users need `apply`, `undo`, and `graphed`, which captures planned passes as CUDA graphs.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.execution.audit import StepAudit
    from qsync_opt.runtimes.torch.execution.checks import is_sharded, operator_kind
    from qsync_opt.runtimes.torch.execution.chunked_loss import loss_heads, loss_layers
    from qsync_opt.runtimes.torch.execution.graphs import CapturedPasses, graphed
    from qsync_opt.runtimes.torch.execution.loss_scaling import LossScaler
    from qsync_opt.runtimes.torch.execution.memory_formats import image_weights
    from qsync_opt.runtimes.torch.execution.operators import device_formats, operator_precisions, run_fixed
    from qsync_opt.runtimes.torch.execution.plans import (
        AUTOCAST_TYPES,
        FORM_OPTIONS,
        PLANNED_OPTIONS,
        TORCH_MODES,
        AppliedPlan,
        ApplyOptions,
        ApplySettings,
        applied_plan,
        apply,
        under_plan,
        undo,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AUTOCAST_TYPES", "FORM_OPTIONS", "PLANNED_OPTIONS", "TORCH_MODES", "AppliedPlan", "ApplyOptions", "ApplySettings",
    "CapturedPasses", "LossScaler", "StepAudit", "applied_plan", "apply", "device_formats", "graphed", "image_weights",
    "is_sharded", "loss_heads", "loss_layers", "operator_kind", "operator_precisions", "run_fixed", "under_plan",
    "undo",
]  # fmt: skip
