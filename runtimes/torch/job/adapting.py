"""Follow a cluster that changes while the job runs: another plan for all ranks at the same step, without measuring."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from qsync_opt.errors import ModelError, NotReadyError, ProblemError
from qsync_opt.io import check_integer, check_number
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.ddp import (
    broadcast_json,
    fail_together,
    gather_json,
    message_device,
    others_needed,
    together,
    world,
)
from qsync_opt.runtimes.torch.execution import AppliedPlan, ApplyOptions, applied_plan, apply, undo
from qsync_opt.runtimes.torch.job.file import with_speed
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.job.planning import shared_plan
from qsync_opt.runtimes.torch.sensitivity import Step, collect_statistics
from qsync_opt.runtimes.torch.support import bare_model, memory_budget
from qsync_opt.sensitivity import ModelStatistics
from qsync_opt.training import Plan, Problem, Replanning, plan_from_json, replan

MakeProblem = Callable[[ModelStatistics], Problem]
"""Builds the problem from new statistics, with the profiles and limits that the caller keeps."""


class PlanRefresher:
    """Keeps a plan up to date while the model trains under it.

    Every worker calls :meth:`step` once per training step, after the optimizer's. In every ``every``-th call rank 0
    takes the plan off its model, collects statistics on the last batches it was given, solves the problem anew and
    decides by `replan`; all ranks then put the plan that was decided for on their models. The random streams of the
    rounding go on where they were, so that no rounding error is repeated.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        device_type: str | None,
        *,
        make_problem: MakeProblem,
        every: int,
        graph: OpGraph | None = None,
        improvement: float = 0.1,
        method: Any = "greedy",
        loss_step: Step | None = None,
        probes: int = 1,
        adaptive_probes: int = 0,
        curvature_probes: int = 0,
        batches: int = 1,
    ) -> None:
        """Begin to count steps.

        Args:
            model: With the plan applied (also inside ``DistributedDataParallel``); on workers of a type with a fixed
                precision without one.
            plan: The whole plan, all device types.
            device_type: Of this worker; None if its type is not planned.
            make_problem: Called on rank 0 alone.
            every: Steps between two looks.
            graph: The captured graph.
            improvement: As in `replan`.
            method: As in `solve`.
            loss_step: Function of bare model and batch that returns the loss; by default the model computes it.
            probes: As in `collect_statistics`.
            adaptive_probes: As in `collect_statistics`, for the indicator ``progress``.
            curvature_probes: As in `collect_statistics`, for the indicator ``hessian``.
            batches: How many of the last batches are looked at. Of two or more the statistics know how much the
                gradient scatters anyway, which a problem in shares of that noise needs
                (`SensitivityTable.relative_to`). At most ``every``.

        Raises:
            NotReadyError: ``device_type`` is given but no plan is applied.
            ModelError: The plan lacks the device type.
            ProblemError: ``every`` or ``batches`` is out of range.
        """
        check_integer(every, "every", minimum=1)
        check_integer(batches, "batches", minimum=1)
        if batches > every:
            raise ProblemError(f"batches is {batches}, but between two looks there are {every}: look less often")
        if device_type is not None:
            if device_type not in plan.devices:
                raise ModelError(f"the plan has no device type {device_type!r}: it has {', '.join(plan.devices)}")
            if applied_plan(model) is None:
                raise NotReadyError("no plan is applied to this model: apply(model, plan) comes first")
        self.plan = plan
        self.steps = 0
        self.decisions: list[Replanning] = []
        self._model = model
        self._device_type = device_type
        self._make_problem = make_problem
        self._every = every
        self._graph = graph
        self._improvement = improvement
        self._method = method
        self._loss_step = loss_step
        self._probes = probes
        self._adaptive_probes = adaptive_probes
        self._curvature_probes = curvature_probes
        self._recent: deque[Any] = deque(maxlen=batches)

    def step(self, batch: Any) -> bool:
        """Count one training step; look at the model again if it is time.

        Args:
            batch: What the last step was trained on; rank 0's is used.

        Returns:
            True if the model runs under another plan from now on. The same on every rank.

        Raises:
            NotReadyError: Another rank failed, with what it said.
            ProblemError: As in `replan`, on rank 0.
        """
        self.steps += 1
        rank, _ = world()
        if rank == 0:
            self._recent.append(batch)
        if self.steps % self._every:
            return False
        decision = together(lambda: self._decide() if rank == 0 else None)
        replaced = bool(broadcast_json(decision is not None and decision.replaced))
        if replaced:
            told = broadcast_json(None if decision is None else decision.plan.to_json())
            together(lambda: self._move(decision.plan if decision is not None else plan_from_json(told)))
        return replaced

    def _decide(self) -> Replanning:
        with self._bare() as model:
            statistics = collect_statistics(
                model,
                list(self._recent),
                step=self._loss_step,
                graph=self._graph,
                probes=self._probes,
                adaptive_probes=self._adaptive_probes,
                curvature_probes=self._curvature_probes,
            )
        decision = replan(self._make_problem(statistics), self.plan, improvement=self._improvement, method=self._method)
        self.decisions.append(decision)
        return decision

    @contextlib.contextmanager
    def _bare(self) -> Iterator[nn.Module]:
        """The model without wrapper and plan; the plan is put back at the end."""
        model = bare_model(self._model)
        applied = applied_plan(model)
        if applied is None:
            yield model
            return
        precisions, options, device_type = applied.precisions, applied.options, applied.device_type
        undo(model)
        try:
            yield model
        finally:
            apply(model, precisions, graph=self._graph, options=options)
            if (fresh := applied_plan(model)) is not None:
                fresh.device_type = device_type

    def _move(self, plan: Plan) -> None:
        if self._device_type is not None:
            applied = applied_plan(self._model)
            if applied is None:
                raise NotReadyError("the plan was taken off the model: put it on again, or refresh no further")
            if self._device_type not in plan.devices:
                raise ProblemError(f"the new plan has no device type {self._device_type!r}: check make_problem")
            options, mine = applied.options, plan.devices[self._device_type]
            if any(mine.get(name) != precision for name, precision in applied.precisions.items()):
                options = replace(options, autocast=None)  # which carries out one precision everywhere
            undo(self._model)
            apply(self._model, plan, self._device_type, graph=self._graph, options=options)
        self.plan = plan


_LOGGER = logging.getLogger(__name__)


class PlanAdapter:
    """Moves all ranks to another plan when a device's memory or speed has changed.

    Every rank calls :meth:`step` once per training step, after the optimizer's. Every ``every`` steps the ranks tell
    each other, in one small all-reduce, whether anything changed; only then rank 0 solves the job again, from what was
    measured at its start. The plan stays where it still fits and nothing is faster by 3 % or less sensitive by 10 %.
    The noise of the rounding goes on where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: JobPlan,
        *,
        options: PlanningOptions | None = None,
        every: int = 10,
        memory: Callable[[], int] | None = None,
        speed: Callable[[], float] | None = None,
        tolerance: float = 0.1,
    ) -> None:
        """Begin to watch.

        Args:
            model: As it was given to `apply`.
            plan: As `auto_plan` gave it on this rank.
            options: As for `auto_plan`.
            every: Steps between two looks.
            memory: Bytes that the job may use on this rank's device now; None: as `auto_plan` finds them out.
            speed: How many times longer this rank's device takes now than when it was measured; None: as long.
            tolerance: Relative change of memory or time from which on the job is planned again. Less memory than the
                plan needs is a change always.

        Raises:
            ProblemError: ``every``, ``tolerance``, or what ``memory`` or ``speed`` returned is unusable.
        """
        check_integer(every, "every", minimum=1)
        check_number(tolerance, "tolerance")
        self.plan = plan
        self.steps = 0
        self._model = model
        self._options = options or PlanningOptions()
        self._every = every
        self._memory = memory
        self._speed = speed
        self._tolerance = tolerance
        self._device = next((p.device for p in bare_model(model).parameters()), torch.device("cpu"))
        self._apply_options = ApplyOptions(kernels=self._options.kernels)
        self._facts = self._now()
        self._planned_for: dict[str, Any] | None = None  # the present plan may be for other limits than these

    def step(self) -> JobPlan | None:
        """Count one training step; look at the cluster if it is time.

        Returns:
            The new plan, if the model runs under another one from now on; on every rank or on none.

        Raises:
            ProblemError: No plan keeps the limits as they are now; the text names those that clash.
            NotReadyError: Another rank failed, with what it said.
        """
        self.steps += 1
        if self.steps % self._every:
            return None
        now, error = self._facts, None
        try:
            now = self._now()
        except Exception as failure:  # told to all ranks below, so that none waits for this one
            error = failure
        if not self._anywhere(error is not None or self._changed(now)):
            return None
        fail_together(error)
        began = time.perf_counter()
        found = self._solved(now)
        moved = self._move(found)
        rank, _ = world()
        if rank == 0:
            _LOGGER.warning(
                "the cluster changed: planned again in %.2f s, %s", time.perf_counter() - began, found.reason
            )
        self.plan, self._facts, self._planned_for = found, now, now
        return found if moved else None

    def _now(self) -> dict[str, Any]:
        memory = memory_budget(self._device, self._options.memory) if self._memory is None else self._memory()
        speed = 1.0 if self._speed is None else self._speed()
        facts = {"memory": _number(memory), "speed": _number(speed)}
        for name, value in facts.items():
            check_number(value, f"{name} of this rank's device")
        if not facts["speed"]:
            raise ProblemError("speed of this rank's device is 0: it says how many times longer work takes, 2.0 say")
        return {**facts, "memory": int(memory)}

    def _changed(self, now: dict[str, Any]) -> bool:
        if now["memory"] < self.plan.memory_bytes.get(self.plan.device_type, 0) and now != self._planned_for:
            return True
        return any(abs(now[name] - self._facts[name]) > self._tolerance * self._facts[name] for name in now)

    def _anywhere(self, changed: bool) -> bool:
        if world()[1] == 1:
            return changed
        flag = torch.tensor([int(changed)], dtype=torch.int32, device=message_device())
        with others_needed():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _solved(self, now: dict[str, Any]) -> JobPlan:
        """A plan for the smallest memory and the slowest worker of each type."""
        told = gather_json({**now, "type": self.plan.device_type, "before": self._facts["memory"]})
        made = self.plan.model
        kept = together(lambda: None if made is None else _with_limits(made, told))
        changed = together(lambda: None if kept is None else with_speed(kept, _slowest(told)))
        found = shared_plan(changed, self.plan.device_type, self._options, self.plan)
        # Speeds are told relative to the first measurement, which is therefore what must be kept.
        return found if kept is None else replace(found, model=kept)

    def _move(self, found: JobPlan) -> bool:
        """Put the plan on the model if it is another one than is applied now; True if any rank changed anything."""
        applied = applied_plan(self._model)
        before = _carried_out(applied)
        if not self._anywhere(before != _wanted(found, applied)):
            return False
        fresh = together(lambda: self._put(found, applied))
        if fresh is not None:
            self._apply_options = fresh.options
        return self._anywhere(before != _carried_out(fresh))

    def _put(self, found: JobPlan, applied: AppliedPlan | None) -> AppliedPlan | None:
        """The plan on this rank's model, in place of the one that is applied."""
        options, graph = self._apply_options, None
        if applied is not None:
            options, graph = applied.options, applied.graph
            undo(self._model)
        apply(self._model, found, graph=graph, options=options)
        return applied_plan(self._model)


def _number(told: Any) -> Any:
    """What the user's function returned as a float, if it is a number of some library."""
    try:
        return told if isinstance(told, str) else float(told)
    except (TypeError, ValueError):
        return told


def _with_limits(made: JobModel, told: Sequence[Mapping[str, Any]]) -> JobModel:
    """The job with the smallest memory that any worker of each type has now."""
    limits: dict[str, int] = {}
    for fact in told:
        name = fact["type"]
        # Trials may have shown that less of the memory can be planned with than is there.
        usable = min(1.0, made.cluster.device(name).memory_limit_bytes / max(1, fact["before"]))
        limit = int(usable * fact["memory"])
        limits[name] = min(limit, limits.get(name, limit))
    return made.with_memory(limits)


def _slowest(told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times longer the slowest worker of each type takes now."""
    factors: dict[str, float] = {}
    for fact in told:
        factors[fact["type"]] = max(fact["speed"], factors.get(fact["type"], 0.0))
    return factors


def _wanted(found: JobPlan, applied: AppliedPlan | None) -> tuple[dict[str, str], str | None, bool] | None:
    """What the model will run under; of the operators only those that are told apart now."""
    if not found.worthwhile:
        return None
    mine, name = found.devices[found.device_type], found.device_type
    known = mine if applied is None else applied.precisions
    return {operator: mine[operator] for operator in known}, found.autocast.get(name), name in found.captured


def _carried_out(applied: AppliedPlan | None) -> tuple[dict[str, str], str | None, bool] | None:
    """What a model runs under, and how."""
    return None if applied is None else (dict(applied.precisions), applied.options.autocast, applied.options.captured)
