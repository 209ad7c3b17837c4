"""What a measured job does: the solver's plan, or what the times of the whole model say is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.runtimes.torch.job.candidates import FULL, PLANNED, Way, choose, everywhere, words
from qsync_opt.runtimes.torch.job.job_finalists import (
    best_step,
    finalists,
    full_everywhere,
    predicted_step_ns,
    rounds_of,
    same_ways,
    step_words,
    timed_together,
)
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, verdict
from qsync_opt.training.evaluation import BYTES_PER_KIB, Evaluation, evaluate, evaluate_device
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem
from qsync_opt.training.propagation import propagate

_WORTH_MOVING, _LESS_SENSITIVE = 0.03, 0.1
"""Relative gain of time, or of sensitivity, for which a running job moves to another plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The fields of a `JobPlan` that depend on which way every device type takes."""

    plan: Plan
    evaluation: Evaluation
    worthwhile: bool
    reason: str
    expected_ns: int | None
    taken: Mapping[str, str]
    autocast: Mapping[str, str]
    captured: tuple[str, ...]
    shares: Mapping[str, float]

    def fields(self) -> dict[str, Any]:
        """As `JobPlan` wants them."""
        return {
            "plan": self.plan,
            "iteration_ns": self.evaluation.iteration_ns,
            "memory_bytes": self.evaluation.memory_bytes,
            "sensitivity": self.evaluation.objective,
            "worthwhile": self.worthwhile,
            "reason": self.reason,
            "expected_ns": self.expected_ns,
            "taken": self.taken,
            "autocast": self.autocast,
            "captured": self.captured,
            "shares": self.shares,
        }


def decide(
    made: JobModel,
    problem: Problem,
    plan: Plan,
    evaluation: Evaluation,
    others: tuple[Alternative, ...],
    options: PlanningOptions,
    present: JobPlan | None = None,
) -> Decision:
    """Take the solver's plan, or with times of the whole model the way that is best on every device type.

    Args:
        made: The job, perhaps with such times.
        problem: Of the job as it is now.
        plan: The solver's.
        evaluation: Of that.
        others: What the plan is compared with where there are no times.
        options: Slack, least gain, and how local batches will be sized.
        present: What the job runs under now. It stays where it fits and nothing else is clearly better: moving costs
            steps, and memory that swings about a limit would have the job move back and forth.

    Source:
        Ours.
    """
    limits = _limits(made)
    ways = _ways_now(made, problem, plan, evaluation, options)
    balanced = options.sizes_batches
    chosen = choose(ways, limits, slack=options.slack, balanced=balanced) if ways else None
    if chosen is None:
        worthwhile, reason = verdict(evaluation.iteration_ns, evaluation.objective, others, options.least_gain)
        return Decision(
            plan=plan,
            evaluation=evaluation,
            worthwhile=worthwhile,
            reason=reason,
            expected_ns=None,
            taken={},
            autocast={},
            captured=(),
            shares=_shares(made, None),
        )
    # All-reduces that nothing hides, and the optimizer: the same whatever the passes are computed in.
    rest_ns = evaluation.iteration_ns - max(device.backward_end_ns for device in evaluation.devices.values())
    timed = timed_together(_as_timed(made, ways), limits, made.steps, balanced=balanced)
    full = full_everywhere(ways, limits)

    def time_of(found: Mapping[str, Way]) -> float:
        if balanced and not any(same_ways(found, together) for together, _ in timed):
            return _time(made, found, rest_ns)
        return predicted_step_ns(found, timed, rest_ns)

    if timed or not balanced:
        rounds = [] if balanced else rounds_of(timed, made.steps)
        best, _ = best_step(chosen, timed, rest_ns=rest_ns, slack=options.slack, balanced=balanced, rounds=rounds)
        chosen = dict(best)
    stays = None if present is None else _present(ways, limits, present)
    if stays is not None and not _clearly_better(chosen, stays, time_of):
        chosen = stays
    gain = 1.0 if full is None else 1 - time_of(chosen) / max(1.0, time_of(full))
    worthwhile = full is None or gain >= options.least_gain
    if full is None:
        said = "training in FP32 would not fit into memory"
    elif not worthwhile or all(way.is_plain for way in chosen.values()):
        chosen, worthwhile = full, False
        said = f"nothing is faster than FP32 by {options.least_gain:.0%}: the model is left alone"
    else:
        said = f"{gain:.1%} less time per sample than in FP32"
    reason = f"{said}; {words(chosen, everywhere(ways, limits), compiled=options.compiled)}{step_words(timed)}"
    whole = Plan(problem=plan.problem, devices={name: way.precisions for name, way in chosen.items()})
    found = plan if all(way.name == PLANNED for way in chosen.values()) else whole
    return Decision(
        plan=found,
        evaluation=evaluate(problem, found),
        worthwhile=worthwhile,
        reason=reason,
        expected_ns=round(time_of(chosen)),
        taken={name: way.label for name, way in chosen.items()},
        autocast={name: way.autocast for name, way in chosen.items() if way.autocast is not None},
        captured=tuple(name for name, way in chosen.items() if way.captured),
        shares=_shares(made, chosen if balanced else None),
    )


def _present(ways: Mapping[str, Sequence[Way]], limits: Mapping[str, int], present: JobPlan) -> dict[str, Way] | None:
    """The ways that the job goes now, None if one of them is not there any more or no longer fits."""
    found = {}
    for name, mine in ways.items():
        entry = present.plan.devices.get(name, {})
        for way in mine:
            same = all(entry.get(operator) == precision for operator, precision in way.precisions.items())
            if way.label == present.taken.get(name) and same and way.fits(limits[name]) and way.pass_ns:
                found[name] = way
    return found if len(found) == len(ways) else None


def _clearly_better(
    chosen: Mapping[str, Way], present: Mapping[str, Way], time_of: Callable[[Mapping[str, Way]], float]
) -> bool:
    ours, theirs = (math.fsum(way.sensitivity for way in found.values()) for found in (chosen, present))
    return time_of(chosen) < (1 - _WORTH_MOVING) * time_of(present) or ours < (1 - _LESS_SENSITIVE) * theirs


def worth_racing(
    made: JobModel, problem: Problem, plan: Plan, evaluation: Evaluation, options: PlanningOptions
) -> list[dict[str, Way]]:
    """The ways to go together whose whole steps should be timed; arguments as for `decide`."""
    ways = _ways_now(made, problem, plan, evaluation, options)
    balanced = options.sizes_batches
    found = finalists(ways, _limits(made), slack=options.slack, balanced=balanced)
    return [] if all(way.is_plain for entry in found for way in entry.values()) else found


def _limits(made: JobModel) -> dict[str, int]:
    return {device.name: device.memory_limit_bytes for device in made.cluster.devices}


def _ways_now(
    made: JobModel, problem: Problem, plan: Plan, evaluation: Evaluation, options: PlanningOptions
) -> dict[str, tuple[Way, ...]]:
    ways = _with_the_plan(made, problem, plan, evaluation, capture=options.capture)
    return _with_all_reduces(ways, _hidden_ns(problem, evaluation))


def _as_timed(made: JobModel, ways: Mapping[str, Sequence[Way]]) -> dict[str, list[Way]]:
    """Those ways that are as they were when whole steps were timed: the solver's plan may be another by now."""
    known = {name: [way.precisions for way in mine if way.name == PLANNED] for name, mine in made.ways.items()}
    return {
        name: [way for way in mine if way.name != PLANNED or way.precisions in known[name]]
        for name, mine in ways.items()
    }


def _hidden_ns(problem: Problem, evaluation: Evaluation) -> int:
    """How long all-reduces take that passes hide, unless they are captured and hand over all gradients at their end."""
    lasting = problem.communication.allreduce_ns
    ends = [start + time for start, time in zip(evaluation.bucket_start_ns, lasting, strict=True)]
    after = max(ends, default=0) - max(device.backward_end_ns for device in evaluation.devices.values())
    return sum(lasting) - max(0, after)


def _with_all_reduces(ways: Mapping[str, Sequence[Way]], hidden_ns: int) -> dict[str, tuple[Way, ...]]:
    return {
        name: tuple(replace(way, pass_ns=way.pass_ns + hidden_ns) if way.captured else way for way in mine)
        for name, mine in ways.items()
    }


def _time(made: JobModel, chosen: Mapping[str, Way], rest_ns: int) -> float:
    """Of a step with balanced local batches, for as many samples as there are in a step with equal ones."""
    counts = {device.name: device.count for device in made.cluster.devices}
    return sum(counts.values()) / sum(counts[name] / max(1, way.pass_ns) for name, way in chosen.items()) + rest_ns


def _shares(made: JobModel, chosen: Mapping[str, Way] | None) -> dict[str, float]:
    """Share of the global batch of one worker of each type: equal, or as fast as it is.

    By whole steps with sized batches, where they were timed, else by passes with equal ones.
    """
    speeds: Mapping[str, float]
    if chosen is None:
        speeds = dict.fromkeys((device.name for device in made.cluster.devices), 1.0)
    else:
        labels = {name: way.label for name, way in chosen.items()}
        sized = next((step.batches for step in made.steps if step.batches and step.taken == labels), None)
        speeds = sized or {name: 1 / max(1, way.pass_ns) for name, way in chosen.items()}
    total = sum(device.count * speeds[device.name] for device in made.cluster.devices)
    return {name: speed / total for name, speed in speeds.items()}


def _with_the_plan(
    made: JobModel, problem: Problem, plan: Plan, evaluation: Evaluation, *, capture: bool
) -> dict[str, tuple[Way, ...]]:
    """The measured ways, with the solver's plan of now in place of the one that was measured, if it is another.

    Its time is then the predicted one, corrected by how far the prediction was off for the plan that was measured, or
    for FP32 if that was the plan.
    """
    found: dict[str, tuple[Way, ...]] = {}
    for name, ways in made.ways.items():
        kinds = (False, True) if capture else (False,)
        present = [[way for way in ways if way.captured is captured] for captured in kinds]
        found[name] = tuple(
            way for mine in present if mine for way in _of_one_kind(name, mine, problem, plan, evaluation)
        )
    return found


def _of_one_kind(
    name: str, ways: Sequence[Way], problem: Problem, plan: Plan, evaluation: Evaluation
) -> tuple[Way, ...]:
    """The same for the ways that are captured, or for those that are not."""
    others = tuple(way for way in ways if way.name != PLANNED)
    measured = next((way for way in reversed(ways) if way.name in (PLANNED, FULL)), ways[-1])
    now = Way(name=PLANNED, precisions={n: plan.devices[name][n] for n in measured.precisions})
    if now.is_plain:
        return others
    if now.precisions != measured.precisions:
        device, mine = problem.device(name), evaluation.devices[name]
        before = evaluate_device(problem, device, propagate(problem, device, measured.precisions))
        off = measured.pass_ns / max(1, before.backward_end_ns)
        measured = replace(
            now,
            captured=measured.captured,
            sensitivity=mine.sensitivity,
            pass_ns=round(off * mine.backward_end_ns),
            needed_bytes=None if measured.needed_bytes is None else mine.memory_kib * BYTES_PER_KIB,
        )
    return (*others, replace(measured, name=PLANNED))
