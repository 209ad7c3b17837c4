"""What is recorded of one operator in a pass: moments of its operands, results and gradients.

One record class per kind of operator, and the summary that merges them.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.records.batch import CAST_BEFORE_BACKWARD, cast_pending, finish_batch
    from qsync_opt.runtimes.torch.sensitivity.records.convolution import ConvolutionRecord
    from qsync_opt.runtimes.torch.sensitivity.records.matrix import MatrixRecord
    from qsync_opt.runtimes.torch.sensitivity.records.operator import (
        AttentionRecord,
        LookupRecord,
        MomentQueue,
        OperatorRecord,
    )
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
    "CAST_BEFORE_BACKWARD", "AttentionRecord", "ConvolutionRecord", "GradientScatter", "LookupRecord", "MatrixRecord",
    "MomentQueue", "Norms", "OperatorRecord", "SignalTensors", "cast_pending", "finish_batch", "loss_curvature",
    "normalized", "signals_on_host",
]  # fmt: skip
