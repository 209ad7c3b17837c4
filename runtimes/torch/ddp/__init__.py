"""Workers that train together: process groups, agreement between ranks, and measured collectives.

Nothing here knows a plan.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.ddp.agreement import (
        broadcast_json,
        companion_group,
        digest,
        fail_together,
        fingerprint,
        gather_json,
        gather_together,
        message_device,
        naming_lost_ranks,
        require_agreement,
        require_equal,
        together,
        world,
    )
    from qsync_opt.runtimes.torch.ddp.collectives import (
        CollectiveCost,
        clamped_share,
        measure_collectives,
        measure_slowdown,
        never_falling,
    )
    from qsync_opt.runtimes.torch.ddp.launch import RESULT, WorkerError, Workers
    from qsync_opt.runtimes.torch.ddp.shares import ShareSampler, global_count, global_mean, split_samples
    from qsync_opt.runtimes.torch.ddp.workers import (
        fit_all_reduce,
        free_port,
        measure_all_reduce,
        process_group,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "RESULT", "CollectiveCost", "ShareSampler", "WorkerError", "Workers", "broadcast_json", "clamped_share",
    "companion_group", "digest", "fail_together", "fingerprint", "fit_all_reduce", "free_port", "gather_json",
    "gather_together", "global_count", "global_mean", "measure_all_reduce", "measure_collectives", "measure_slowdown",
    "message_device", "naming_lost_ranks", "never_falling", "process_group", "require_agreement", "require_equal",
    "split_samples", "together", "world",
]  # fmt: skip
