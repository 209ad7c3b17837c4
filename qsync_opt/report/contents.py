"""Everything a report says, gathered and computed once; how it looks is `qsync_opt.report.page_part`'s business."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from qsync_opt.report.fronts import Fronts, Progress, check_front, compute_fronts
from qsync_opt.report.measured import Measured
from qsync_opt.report.memory_curve import MemoryCurve, memory_curve
from qsync_opt.training.baselines import uniform_plan
from qsync_opt.training.evaluation import Evaluation, evaluate
from qsync_opt.training.explanation import Explainer, Explanation
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem
from qsync_opt.training.replay import Timeline, replay

DEFAULT_FRONT = "greedy"
LOWEST = "lowest"
"""Label of the plan that gives every operator the lowest precision that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """One precision for the whole model: ``label`` is the format wanted everywhere, or `LOWEST`."""

    label: str
    evaluation: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan and all that is said of it.

    ``explanations`` are by device, in the problem's order of operators. ``memory`` has None for a device of which the
    problem knows only totals per operator. ``fronts`` is None if none was asked for.
    """

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    explanations: Mapping[str, tuple[Explanation, ...]]
    uniform: tuple[Uniform, ...]
    fronts: Fronts | None
    timeline: Timeline
    memory: Mapping[str, MemoryCurve | None]
    measured: Measured | None


def make_report(
    problem: Problem,
    plan: Plan,
    *,
    front: str = DEFAULT_FRONT,
    measured: Measured | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate and explain a plan, and compare it with others.

    Args:
        problem: The problem.
        plan: A plan for it, feasible or not.
        front: Method of the fronts and of the bound: ``"greedy"``, ``"exact"`` (may take long) or ``"none"``.
        measured: What was measured of the plan, to stand beside what is predicted.
        cache: Folder in which points of fronts are kept, so that an interrupted report goes on; None: nowhere.
        progress: Called as points of the fronts are found: done, in all, what comes next.

    Raises:
        ProblemError: The plan or the measurements do not belong to the problem.
        UnsupportedError: No such front.

    Source: ours.
    """
    check_front(front)
    explainer = Explainer(problem, plan)
    if measured is not None:
        measured.check(problem)
    labels: list[str | None] = [*reversed(tuple(problem.formats)), None]
    return Report(
        problem=problem,
        plan=plan,
        evaluation=explainer.evaluation,
        explanations={
            device.name: tuple(explainer.explain(operator.name, device.name) for operator in problem.operators)
            for device in problem.devices
        },
        uniform=tuple(
            Uniform(label=label or LOWEST, evaluation=evaluate(problem, uniform_plan(problem, label)))
            for label in labels
        ),
        fronts=compute_fronts(problem, front, cache=cache, progress=progress),
        timeline=replay(problem, plan),
        memory={name: memory_curve(problem, device) for name, device in explainer.evaluation.devices.items()},
        measured=measured,
    )
