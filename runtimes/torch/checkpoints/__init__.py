"""Checkpoints of planned training: the model, the optimizer and the plan, saved together.

`Checkpoints` writes and restores them on any number of workers.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.checkpoints.checkpoints import Checkpoints
    from qsync_opt.runtimes.torch.checkpoints.files import (
        begin,
        file_facts,
        files_in,
        finish,
        write_manifest,
    )
    from qsync_opt.runtimes.torch.checkpoints.resuming import (
        PlanState,
        RankState,
        decide,
        in_present_order,
        plan_of_ranks,
        resume_plan,
    )
    from qsync_opt.runtimes.torch.checkpoints.state import join_state, split_state
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Checkpoints", "PlanState", "RankState", "begin", "decide", "file_facts", "files_in", "finish",
    "in_present_order", "join_state", "plan_of_ranks", "resume_plan", "split_state", "write_manifest",
]  # fmt: skip
