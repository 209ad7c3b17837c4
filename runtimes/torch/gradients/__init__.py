"""Compressed all-reduce in PyTorch: a communication hook for ``DistributedDataParallel`` that carries out plans.

It also measures what planning needs: times of the schemes by bucket size, and statistics of gradients.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.gradients.hook import GradientCompression, compress_gradients
    from qsync_opt.runtimes.torch.gradients.measuring import measure_schemes
    from qsync_opt.runtimes.torch.gradients.sharded import ShardedCompression, compress_sharded_gradients
    from qsync_opt.runtimes.torch.gradients.statistics import bucket_statistics
    from qsync_opt.runtimes.torch.gradients.transports import Reducer
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "GradientCompression", "Reducer", "ShardedCompression", "bucket_statistics", "compress_gradients",
    "compress_sharded_gradients", "measure_schemes",
]  # fmt: skip
