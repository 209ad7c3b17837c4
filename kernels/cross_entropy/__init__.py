"""Cross-entropy of rows of logits with its gradient, by one CUDA kernel that reads and writes each logit once."""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.cross_entropy.rows import cross_entropy_rows
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["cross_entropy_rows"]
