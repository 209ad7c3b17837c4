"""Checkpoints of planned training: the model, the optimizer and the plan, saved together.

`Checkpoints` writes and restores them on any number of workers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.checkpoints.checkpoints import Checkpoints
    from qsync_opt.runtimes.torch.checkpoints.interchange import export_checkpoint, import_checkpoint
    from qsync_opt.runtimes.torch.checkpoints.loader import ResumableLoader
    from qsync_opt.runtimes.torch.checkpoints.reading import Reader
    from qsync_opt.runtimes.torch.checkpoints.resuming import (
        PlanState,
        RankState,
        decide,
        in_present_order,
        plan_of_ranks,
        resume_plan,
    )
    from qsync_opt.runtimes.torch.checkpoints.state import join_state, split_state
    from qsync_opt.runtimes.torch.checkpoints.storage import RankFile, WritePlan, plan_writes, write_file
    from qsync_opt.runtimes.torch.checkpoints.trainer import TrainerCheckpoints
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Checkpoints", "PlanState", "RankFile", "RankState", "Reader", "ResumableLoader", "TrainerCheckpoints", "WritePlan",
    "decide", "export_checkpoint", "import_checkpoint", "in_present_order", "join_state", "plan_of_ranks",
    "plan_writes", "resume_plan", "split_state", "write_file",
]  # fmt: skip
