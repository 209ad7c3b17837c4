"""Look at a model again while it trains: statistics every k steps, and another plan if it is clearly better."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from qsync_opt.errors import ModelError, NotReadyError, ProblemError
from qsync_opt.io.codec import check_integer
from qsync_opt.model.graph import OpGraph
from qsync_opt.runtimes.torch.ddp.agreement import broadcast_json, together, world
from qsync_opt.runtimes.torch.execution.plans import applied_plan, apply, undo
from qsync_opt.runtimes.torch.sensitivity.statistics import Step, collect_statistics
from qsync_opt.runtimes.torch.support.models import bare_model
from qsync_opt.sensitivity.statistics import ModelStatistics
from qsync_opt.training.plan import Plan, plan_from_json
from qsync_opt.training.problem import Problem
from qsync_opt.training.replanning import Replanning, replan

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
