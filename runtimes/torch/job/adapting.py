"""Keep the plan of a running job current: by new statistics of the model, or by memory and speed of the devices."""

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
    naming_lost_ranks,
    together,
    world,
)
from qsync_opt.runtimes.torch.execution import PLANNED_OPTIONS, AppliedPlan, ApplyOptions, applied_plan, apply, undo
from qsync_opt.runtimes.torch.job.file import with_speed
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.job.planning import shared_plan
from qsync_opt.runtimes.torch.sensitivity import Step, collect_statistics
from qsync_opt.runtimes.torch.support import bare_model, memory_budget
from qsync_opt.sensitivity import ModelStatistics
from qsync_opt.training import Plan, Problem, Replanning, replan

_LOGGER = logging.getLogger(__name__)
MakeProblem = Callable[[ModelStatistics], Problem]
"""Builds the problem from new statistics, with the profiles and limits that the caller keeps."""


class PlanRefresher:
    """Keeps a plan up to date while the model trains under it.

    Every worker calls :meth:`step` once per training step, after the optimizer's. In every ``every``-th call rank 0
    takes the plan off its model, collects statistics on the last batches, solves the problem anew and decides by
    `replan`; all ranks then apply the plan that was decided for. The random streams of the rounding continue where they
    were, so that no rounding error is repeated.
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
        """Start counting steps.

        Args:
            model: With the plan applied (also inside ``DistributedDataParallel``); on workers of a type with a fixed
                precision without one.
            plan: The whole plan, all device types.
            device_type: Of this worker; None if its type is not planned.
            make_problem: Called on rank 0 alone.
            every: Steps between two checks.
            graph: The captured graph.
            improvement: As in `replan`.
            method: As in `solve`.
            loss_step: Function of bare model and batch that returns the loss; by default the model computes it.
            probes: As in `collect_statistics`.
            adaptive_probes: As in `collect_statistics`, for the indicator ``progress``.
            curvature_probes: As in `collect_statistics`, for the indicator ``hessian``.
            batches: How many of the last batches statistics are collected on, at most ``every``. Two or more also tell
                how noisy the gradient is anyway, which a problem in shares of that noise needs
                (`SensitivityTable.relative_to`).

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
        self._statistics: dict[str, Any] = {
            "step": loss_step,
            "graph": graph,
            "probes": probes,
            "adaptive_probes": adaptive_probes,
            "curvature_probes": curvature_probes,
        }
        self._recent: deque[Any] = deque(maxlen=batches)

    def step(self, batch: Any) -> bool:
        """Count one training step; check the model if it is time.

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
            sent = broadcast_json(None if decision is None else decision.plan.to_json())
            together(lambda: self._move(decision.plan if decision is not None else Plan.from_json(sent)))
        return replaced

    def _decide(self) -> Replanning:
        with self._bare() as model:
            statistics = collect_statistics(model, list(self._recent), **self._statistics)
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


class PlanAdapter:
    """Moves all ranks to another plan when a device's memory or speed has changed.

    Every rank calls :meth:`step` once per training step, after the optimizer's. Every ``every`` steps one small
    all-reduce tells whether anything changed on any rank; only then rank 0 solves the job again, from what was measured
    at its start. The plan stays where it still fits and nothing is faster by 3 % or less sensitive by 10 %. The random
    streams of the rounding continue where they were.
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
        """Start watching.

        Args:
            model: As it was given to `apply`.
            plan: As `auto_plan` gave it on this rank.
            options: As for `auto_plan`.
            every: Steps between two checks.
            memory: Bytes that the job may use on this rank's device now; None: as `auto_plan` determines them.
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
        self._before = self._now()
        self._planned_for: dict[str, Any] | None = None  # the present plan may be for other limits than these

    def step(self) -> JobPlan | None:
        """Count one training step; check the cluster if it is time.

        Returns:
            The new plan, if the model runs under another one from now on; on every rank or on none.

        Raises:
            ProblemError: No plan keeps the limits as they are now; the text names those that clash.
            NotReadyError: Another rank failed, with what it said.
        """
        self.steps += 1
        if self.steps % self._every:
            return None
        now, error = self._before, None
        try:
            now = self._now()
        except Exception as failure:  # sent to all ranks below, so that none waits for this one
            error = failure
        if not self._anywhere(error is not None or self._changed(now)):
            return None
        fail_together(error)
        began = time.perf_counter()
        plan = self._solved(now)
        moved = self._move(plan)
        rank, _ = world()
        if rank == 0:
            _LOGGER.warning(
                "the cluster changed: planned again in %.2f s, %s", time.perf_counter() - began, plan.reason
            )
        self.plan, self._before, self._planned_for = plan, now, now
        return plan if moved else None

    def _now(self) -> dict[str, Any]:
        memory = memory_budget(self._device, self._options.memory) if self._memory is None else self._memory()
        speed = 1.0 if self._speed is None else self._speed()
        values = {"memory": _number(memory), "speed": _number(speed)}
        for name, value in values.items():
            check_number(value, f"{name} of this rank's device")
        if not values["speed"]:
            raise ProblemError("speed of this rank's device is 0: it says how many times longer work takes, 2.0 say")
        return {**values, "memory": int(memory)}

    def _changed(self, now: dict[str, Any]) -> bool:
        if now["memory"] < self.plan.memory_bytes.get(self.plan.device_type, 0) and now != self._planned_for:
            return True
        return any(abs(now[name] - self._before[name]) > self._tolerance * self._before[name] for name in now)

    def _anywhere(self, changed: bool) -> bool:
        if world()[1] == 1:
            return changed
        flag = torch.tensor([int(changed)], dtype=torch.int32, device=message_device())
        with naming_lost_ranks():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _solved(self, now: dict[str, Any]) -> JobPlan:
        ranks = gather_json({**now, "type": self.plan.device_type, "before": self._before["memory"]})
        job = self.plan.model
        kept = together(lambda: None if job is None else _with_limits(job, ranks))
        changed = together(lambda: None if kept is None else with_speed(kept, _slowest(ranks)))
        plan = shared_plan(changed, self.plan.device_type, self._options, self.plan)
        # Speeds are relative to the first measurement, which is therefore what must be kept.
        return plan if kept is None else replace(plan, model=kept)

    def _move(self, plan: JobPlan) -> bool:
        """Apply the plan if it is another one than is applied now; True if any rank changed anything."""
        applied = applied_plan(self._model)
        before = _running(applied)
        if not self._anywhere(before != _wanted(plan, applied)):
            return False
        fresh = together(lambda: self._replace(plan, applied))
        if fresh is not None:
            self._apply_options = fresh.options
        return self._anywhere(before != _running(fresh))

    def _replace(self, plan: JobPlan, applied: AppliedPlan | None) -> AppliedPlan | None:
        options, graph = self._apply_options, None
        if applied is not None:
            options, graph = applied.options, applied.graph
            undo(self._model)
        apply(self._model, plan, graph=graph, options=options)
        return applied_plan(self._model)


def _number(value: Any) -> Any:
    """What the user's function returned as a float, if it is a number of some library."""
    try:
        return value if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return value


def _with_limits(job: JobModel, ranks: Sequence[Mapping[str, Any]]) -> JobModel:
    limits: dict[str, int] = {}
    for rank in ranks:
        name = rank["type"]
        # Trials may have shown that less of the memory can be planned with than is there.
        usable = min(1.0, job.limits_bytes[name] / max(1, rank["before"]))
        limit = int(usable * rank["memory"])
        limits[name] = min(limit, limits.get(name, limit))
    return job.with_memory(limits)


def _slowest(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    factors: dict[str, float] = {}
    for rank in ranks:
        factors[rank["type"]] = max(rank["speed"], factors.get(rank["type"], 0.0))
    return factors


_Running = tuple[dict[str, str], tuple[Any, ...]]
"""Precisions that a model runs under, and the values of `PLANNED_OPTIONS`."""


def _wanted(plan: JobPlan, applied: AppliedPlan | None) -> _Running | None:
    """What the model will run under; only the operators that the applied plan distinguishes."""
    if not plan.worthwhile:
        return None
    own, settings = plan.devices[plan.device_type], plan.apply_settings()
    known = own if applied is None else applied.precisions
    precisions = {operator: own[operator] for operator in known}
    return precisions, tuple(getattr(settings, name) for name in PLANNED_OPTIONS)


def _running(applied: AppliedPlan | None) -> _Running | None:
    if applied is None:
        return None
    return dict(applied.precisions), tuple(getattr(applied.options, name) for name in PLANNED_OPTIONS)
