"""The plan of one rank as state, for checkpoints that a framework or the user's own script writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io.codec import Fields
from qsync_opt.runtimes.torch.checkpoints.resuming import RankState
from qsync_opt.runtimes.torch.ddp.agreement import digest, gather_json, world
from qsync_opt.runtimes.torch.execution.plans import applied_plan

PLAN_STATE_FORMAT, PLAN_STATES_FORMAT = "qsync-plan-state/1", "qsync-plan-states/1"
_SHOWN = 3


class PlanState:
    """What a rank's model runs under and where its rounding is, with ``state_dict`` and ``load_state_dict``.

    It is plain JSON data: whatever keeps such objects can keep it, ``accelerator.register_for_checkpointing`` say.
    Every rank has a state of its own. `Checkpoints` holds it already.
    """

    def __init__(self, model: nn.Module, *, all_ranks: bool = False) -> None:
        """Stand for the plan on a model, also inside ``DistributedDataParallel`` or ``torch.compile``.

        Args:
            model: With its plan.
            all_ranks: Hold the states of all ranks, where one file is kept for all, as Accelerate does. Every rank
                must call `state_dict` then.
        """
        self._model = model
        self._all_ranks = all_ranks

    def state_dict(self) -> dict[str, Any]:
        """The state now."""
        if self._all_ranks:
            return {"format": PLAN_STATES_FORMAT, "ranks": gather_json(self._own())}
        return self._own()

    def _own(self) -> dict[str, Any]:
        state = RankState.of(self._model, world()[0], None).to_json()
        return {"format": PLAN_STATE_FORMAT, "digest": _digest(state), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the rounding was.

        Args:
            state_dict: From `state_dict`, perhaps through a file; of this rank or of all.

        Raises:
            ModelError: The model runs under another plan now, and the first operators that differ are named; or there
                were fewer ranks.
            ProblemError: It is no such state, or was changed.
        """
        if not isinstance(state_dict, Mapping):
            raise ProblemError(f"the state of a plan is a {type(state_dict).__name__}; give what state_dict() gave")
        data = dict(state_dict)
        if data.get("format") == PLAN_STATES_FORMAT:
            data = _of_this_rank(data)
        if data.pop("format", None) != PLAN_STATE_FORMAT:
            raise ProblemError(
                f"the state of a plan must have the format {PLAN_STATE_FORMAT!r}; give what state_dict() gave"
            )
        said = data.pop("digest", None)
        state = RankState.from_fields(Fields(data, "state of a plan"))
        if said != _digest(state.to_json()):
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
        autocast = None if applied is None else applied.options.autocast
        if state.autocast != autocast:
            raise ModelError(
                f"the checkpoint was made under {_autocast_words(state.autocast)}, and this job runs under "
                f"{_autocast_words(autocast)}; apply the plan it was made under"
            )
        if applied is not None:
            applied.go_on_at(state.seed, state.offset, state.step)


def _digest(state: Mapping[str, Any]) -> str:
    """Of what the rank runs under."""
    autocast = state.get("autocast")
    return digest(state["precisions"] if autocast is None else [state["precisions"], autocast])


def _autocast_words(number_format: str | None) -> str:
    return "no autocast" if number_format is None else f"autocast in {number_format}"


def _of_this_rank(data: dict[str, Any]) -> dict[str, Any]:
    """The state of this rank among those of all."""
    fields = Fields(data, "states of a plan")
    fields.version(PLAN_STATES_FORMAT)
    states = fields.sequence("ranks")
    fields.finish()
    rank, size = world()
    if rank >= len(states):
        raise ModelError(
            f"the checkpoint was made by {len(states)} ranks and this job has {size}: go on without loading the plan's "
            "state, or use qsync_opt.Checkpoints, which plans anew for another cluster"
        )
    mine = states[rank]
    if not isinstance(mine, dict):
        fields.fail(f"ranks[{rank}] is no object")
    return dict(mine)
