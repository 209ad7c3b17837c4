"""The plan of one rank as state, for checkpoints that a framework or the user's own script writes."""

from __future__ import annotations

from typing import Any

from torch import nn

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.jsonio import Fields
from qsync_opt.runtimes.torch.agreement import digest, world
from qsync_opt.runtimes.torch.apply import applied_plan
from qsync_opt.runtimes.torch.resuming import RankState

PLAN_STATE_FORMAT = "qsync-plan-state/1"
_SHOWN = 3


class PlanState:
    """What a rank's model runs under and where its rounding is, with ``state_dict`` and ``load_state_dict``.

    It is plain JSON data: whatever keeps such objects can keep it, ``accelerator.register_for_checkpointing`` say.
    Every rank has a state of its own. `Checkpoints` holds it already.
    """

    def __init__(self, model: nn.Module) -> None:
        """Stand for the plan on a model, also inside ``DistributedDataParallel`` or ``torch.compile``."""
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """The state now."""
        state = RankState.of(self._model, world()[0], None).to_json()
        return {"format": PLAN_STATE_FORMAT, "digest": digest(state["precisions"]), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the rounding was.

        Args:
            state_dict: From `state_dict`, perhaps through a file.

        Raises:
            ModelError: The model runs under another plan now; the first operators that differ are named.
            ProblemError: It is no such state, or was changed.
        """
        data = dict(state_dict)
        if data.pop("format", None) != PLAN_STATE_FORMAT:
            raise ProblemError(
                f"the state of a plan must have the format {PLAN_STATE_FORMAT!r}; give what state_dict() gave"
            )
        said = data.pop("digest", None)
        state = RankState.from_fields(Fields(data, "state of a plan"))
        if said != digest(state.to_json()["precisions"]):
            raise ProblemError("the state of a plan was changed after it was written: its digest differs")
        applied = applied_plan(self._model)
        now = {} if applied is None else applied.precisions
        before = state.precisions or {}
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            shown = ", ".join(
                f"{name!r} was {before.get(name, 'unplanned')} and is {now.get(name, 'unplanned')}"
                for name in names[:_SHOWN]
            )
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise ModelError(
                f"the checkpoint was made under another plan: {shown}{more}; apply the plan it was made under, or go "
                "on under this one without loading the old plan's state"
            )
        if applied is not None:
            applied.go_on_at(state.seed, state.offset, state.step)
