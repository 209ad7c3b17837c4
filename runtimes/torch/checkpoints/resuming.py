"""The plan in a checkpoint: its state on every rank, and which plan a resumed job continues under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from torch import nn

import qsync_opt
from qsync_opt.errors import ModelError, NotReadyError, ProblemError, first_few
from qsync_opt.io import Fields, Json, decode, encode, freeze
from qsync_opt.runtimes.torch.ddp import digest, gather_json, world
from qsync_opt.runtimes.torch.execution import (
    AUTOCAST_TYPES,
    TORCH_MODES,
    AppliedPlan,
    ApplyOptions,
    applied_plan,
    apply,
    undo,
)
from qsync_opt.runtimes.torch.job import JobPlan
from qsync_opt.training import Change, Plan

_Any64 = Annotated[int, Json(minimum=-(2**63))]


def _autocast(value: Any, place: str) -> str | None:
    allowed = (*AUTOCAST_TYPES, *TORCH_MODES)
    if value not in (None, *allowed):
        raise ProblemError(f"{place} is {value!r}, but allowed are {', '.join(allowed)} and null")
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """How one rank computes, and the position of its rounding in the random stream.

    ``device_type`` is None on a rank without a plan. ``precisions`` are of its adjustable operators, None if no plan
    is applied. ``seed`` and ``offset`` are those of the kernels, ``step`` is their counter on the device if they have
    one. ``autocast`` is as in `ApplyOptions`.
    """

    device_type: Annotated[str | None, Json(empty=True)]
    precisions: Mapping[str, str] | None
    seed: _Any64
    offset: _Any64
    step: int | None
    autocast: Annotated[str | None, Json(omitted=True, read=_autocast)] = None

    @classmethod
    def of(cls, model: nn.Module, rank: int, plan: JobPlan | None) -> RankState:
        """What a rank's model runs under now."""
        applied = applied_plan(model)
        if applied is None:
            name = None if plan is None else plan.device_type
            return cls(device_type=name, precisions=None, seed=0, offset=0, step=None)
        kernels = applied.options.kernels
        return cls(
            device_type=applied.device_type or (plan.device_type if plan else f"rank {rank}"),
            precisions=applied.precisions,
            seed=kernels.seed,
            offset=kernels.offset,
            step=None if kernels.step is None else int(kernels.step),
            autocast=applied.options.autocast,
        )


def plan_of_ranks(ranks: Sequence[RankState]) -> Plan | None:
    """The plan that some ranks run under together, None if none of them has one."""
    devices = {r.device_type: r.precisions for r in ranks if r.device_type is not None and r.precisions is not None}
    return Plan(problem="checkpoint", devices=devices) if devices else None


def digest_of_ranks(ranks: Sequence[RankState]) -> str:
    """Fingerprint of what all ranks run under."""
    return digest([[r.device_type, r.precisions and dict(r.precisions), *filter(None, [r.autocast])] for r in ranks])


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `Checkpoints.load` found and did.

    Attributes:
        step: Of the checkpoint.
        plan: Under which the job continues, of all ranks; None without one.
        replanned: True if that is not the checkpoint's, because the cluster is another one or the caller wants it.
        changes: Device type to operator to precision before (None: not planned) and after; empty if nothing changed.
        reason: In words.
    """

    step: int
    plan: Plan | None
    replanned: bool
    reason: str
    changes: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self, "changes", depth=2)

    def describe(self) -> str:
        """A few lines for people."""
        rows = [f"resumed at step {self.step}: {self.reason}"]
        for device, changed in self.changes.items():
            each = [f"{name} {before or 'unplanned'} > {after}" for name, (before, after) in changed.items()]
            rows.append(f"  {device}: {first_few(each)}")
        return "\n".join(rows)


def require_same_operators(
    saved: Sequence[RankState], present: Sequence[RankState], versions: Mapping[str, str]
) -> None:
    """Refuse a checkpoint whose plan names other operators than the present one.

    Raises:
        ModelError: The text names the first operators that differ, and the version that wrote the checkpoint if it is
            another one.
    """
    before, after = ({name for r in ranks for name in r.precisions or ()} for ranks in (saved, present))
    if not before or not after or before == after:
        return
    parts = [
        f"{', '.join(map(repr, sorted(names)[:3]))} {where}"
        for names, where in ((before - after, "in the checkpoint only"), (after - before, "in this model only"))
        if names
    ]
    version = versions.get("qsync_opt", qsync_opt.__version__)
    by = f" (written by qsync_opt {version})" if version != qsync_opt.__version__ else ""
    raise ModelError(
        f"the checkpoint is of another model{by}: planned operators differ, {'; '.join(parts)}; build the model that "
        "was trained, or load the weights alone with torch.distributed.checkpoint"
    )


def in_present_order(saved: Sequence[RankState], present: Sequence[RankState]) -> list[RankState]:
    """The ranks of a checkpoint in the order of the present ones, if there are as many of each device type.

    A restart may number the workers anew; a rank then continues from what another one of its type left.
    """
    left: dict[str | None, list[RankState]] = {}
    for state in saved:
        left.setdefault(state.device_type, []).append(state)
    ordered = [left[state.device_type].pop(0) for state in present if left.get(state.device_type)]
    return ordered if len(ordered) == len(saved) == len(present) else list(saved)


def decide(
    step: int, saved: Sequence[RankState], present: Sequence[RankState], tight: Sequence[str], wanted: str
) -> Resumed:
    """Choose the plan that the job continues under.

    Args:
        step: Of the checkpoint.
        saved: Its ranks, from `in_present_order`.
        present: The ranks of this job, before anything is loaded.
        tight: Device types whose memory is now too small for the checkpoint's plan.
        wanted: ``"checkpoint"``: its plan continues if the cluster is the same. ``"present"``: the present one does.
    """
    before, after = plan_of_ranks(saved), plan_of_ranks(present)
    types = [[rank.device_type or "without a plan" for rank in ranks] for ranks in (saved, present)]
    if digest_of_ranks(saved) == digest_of_ranks(present):
        return Resumed(step=step, plan=after, replanned=False, reason="the plan is the one of the checkpoint")
    if wanted == "checkpoint" and types[0] == types[1] and not tight:
        reason = "the cluster is the same: the checkpoint's plan goes on"
        return Resumed(step=step, plan=before, replanned=False, reason=reason)
    if wanted == "present":
        reason = "the present plan was asked for"
    elif types[0] != types[1]:
        counts = [", ".join(f"{n} x {name}" for name, n in Counter(names).items()) for names in types]
        reason = f"the cluster is another one ({counts[0]} before, {counts[1]} now): it was planned anew"
    else:
        reason = f"the checkpoint's plan no longer fits into the memory of {', '.join(tight)}: it was planned anew"
    return Resumed(step=step, plan=after, replanned=True, reason=reason, changes=_changes(before, after))


def _changes(before: Plan | None, after: Plan | None) -> dict[str, dict[str, Change]]:
    if after is None:
        return {}
    result = {}
    for device, precisions in after.devices.items():
        old = {} if before is None else before.devices.get(device, {})
        changed = {name: (old.get(name), now) for name, now in precisions.items() if old.get(name) != now}
        if changed:
            result[device] = changed
    return result


def resume_plan(model: nn.Module, rank: int, saved: Sequence[RankState], resumed: Resumed) -> None:
    """Apply the plan that the job continues under, at the checkpoint's position in the random stream, on one rank."""
    own = saved[rank] if rank < len(saved) else None
    applied = applied_plan(model)
    if own is not None and not resumed.replanned:
        applied = _adopted(model, applied, own)
    if applied is None:
        return
    if own is not None and own.precisions is not None:
        applied.go_on_at(own.seed, own.offset, own.step)
        return
    # A rank that the checkpoint does not know: it starts behind all others, so that no noise is repeated.
    kernels = applied.options.kernels
    offset = max((state.offset for state in saved), default=0)
    counters = [state.step for state in saved if state.step is not None]
    applied.go_on_at(kernels.seed, max(offset, kernels.offset), max(counters, default=None))


def _adopted(model: nn.Module, applied: AppliedPlan | None, own: RankState) -> AppliedPlan | None:
    """Apply the checkpoint's plan to the model, in place of another one or none."""
    graph, options = None, ApplyOptions()
    if applied is not None:
        graph, options = applied.graph, applied.options
    if (own.precisions, own.autocast) == (applied and applied.precisions, options.autocast):
        return applied
    if applied is not None:
        undo(model)
    if own.precisions is None:
        return None
    options = replace(options, autocast=own.autocast)
    apply(model, own.precisions, graph=graph, options=options)
    fresh = applied_plan(model)
    if fresh is None:
        raise NotReadyError("the plan was taken off while the checkpoint was loaded: load from one thread only")
    fresh.device_type = own.device_type
    return fresh


PLAN_STATE_FORMAT, PLAN_STATES_FORMAT = "qsync-plan-state/1", "qsync-plan-states/1"


class PlanState:
    """A rank's plan and the position of its rounding, with ``state_dict`` and ``load_state_dict``.

    For other checkpointing, such as ``accelerator.register_for_checkpointing``: the state is plain JSON data. Every
    rank has its own. `Checkpoints` contains it already.
    """

    def __init__(self, model: nn.Module, *, all_ranks: bool = False) -> None:
        """Take a model, also inside ``DistributedDataParallel`` or ``torch.compile``.

        Args:
            model: With its plan.
            all_ranks: Include the states of all ranks, for one file of all ranks as Accelerate writes it. Every rank
                must then call `state_dict`.
        """
        self._model = model
        self._all_ranks = all_ranks

    def state_dict(self) -> dict[str, Any]:
        """The state now."""
        if self._all_ranks:
            return {"format": PLAN_STATES_FORMAT, "ranks": gather_json(self._own())}
        return self._own()

    def _own(self) -> dict[str, Any]:
        state = RankState.of(self._model, world()[0], None)
        return {"format": PLAN_STATE_FORMAT, "digest": _digest(state), **encode(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the rounding where it was.

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
        saved_digest = data.pop("digest", None)
        state = decode(RankState, data, "state of a plan")
        if saved_digest != _digest(state):
            raise ProblemError("the state of a plan was changed after it was written: its digest differs")
        applied = applied_plan(self._model)
        now = {} if applied is None else applied.precisions
        before = state.precisions or {}
        changed = [
            f"{name!r} was {before.get(name, 'unplanned')} and is {now.get(name, 'unplanned')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise ModelError(
                f"the checkpoint was made under another plan: {first_few(changed)}; apply the plan it was made under, "
                "or go on under this one without loading the old plan's state"
            )
        autocast = None if applied is None else applied.options.autocast
        if state.autocast != autocast:
            words = ["no autocast" if name is None else f"autocast in {name}" for name in (state.autocast, autocast)]
            raise ModelError(
                f"the checkpoint was made under {words[0]}, and this job runs under {words[1]}; apply the plan it was "
                "made under"
            )
        if applied is not None:
            applied.go_on_at(state.seed, state.offset, state.step)


def _digest(state: RankState) -> str:
    return digest(state.precisions if state.autocast is None else [state.precisions, state.autocast])


def _of_this_rank(data: dict[str, Any]) -> dict[str, Any]:
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
