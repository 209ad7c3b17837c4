"""The codec of compressed all-reduce: scales, codes, sums of codes, and values again.

`reference` is its specification in plain PyTorch; compiled loops on CPUs and CUDA kernels give the same bits.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.gradients import reference
    from qsync_opt.kernels.gradients.codec import CODES, UNIT, Codec, compiled_by
    from qsync_opt.kernels.gradients.reference import FORMS, Encoded, Layout
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["CODES", "FORMS", "UNIT", "Codec", "Encoded", "Layout", "compiled_by", "reference"]
