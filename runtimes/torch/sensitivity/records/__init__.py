"""What is recorded of one operator in a pass: moments of its operands, results and gradients.

One record class per kind of operator, and the summary that merges them.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.records.batch import CAST_BEFORE_BACKWARD, cast_pending, finish_batch
    from qsync_opt.runtimes.torch.sensitivity.records.moments import MomentQueue
    from qsync_opt.runtimes.torch.sensitivity.records.operator import OperatorRecord, measure_lookup
    from qsync_opt.runtimes.torch.sensitivity.records.signals import (
        GradientScatter,
        Norms,
        SignalTensors,
        loss_curvature,
        normalized,
        signals_on_host,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CAST_BEFORE_BACKWARD", "GradientScatter", "MomentQueue", "Norms", "OperatorRecord", "SignalTensors",
    "cast_pending", "finish_batch", "loss_curvature", "measure_lookup", "normalized", "signals_on_host",
]  # fmt: skip
