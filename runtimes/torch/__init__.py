"""Plans on PyTorch: capture, profiling, applying plans, distributed training, checkpoints.

`TorchRuntime` is the registered adapter; each folder does one part of the work.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.runtime import TorchRuntime
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["TorchRuntime"]
