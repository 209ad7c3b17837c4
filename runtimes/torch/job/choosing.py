"""What a measured job does: the solver's plan, or what the times of the whole model say is better."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.runtimes.torch.job.candidates import (
    CAPTURED,
    FULL,
    PLANNED,
    WORTH_CAPTURING,
    Rounds,
    StepTime,
    Together,
    Way,
    as_fast,
    choose,
    everywhere,
    fitting,
    is_captured,
    least_sensitive,
    least_sensitive_as_fast,
    most_of,
    step_ns,
    together_ns,
    total_sensitivity,
    words,
    worth_capturing,
)
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, verdict
from qsync_opt.training import BYTES_PER_KIB, Evaluation, Plan, Problem, evaluate, evaluate_device, propagate

_MOST = 8
_NEAR = 0.08
"""Ways that take so much longer by their passes are not tried."""
_SMALL_NEAR = 0.25
"""The same for what needs the least memory with precision for the device types that wait: passes are timed alone, and
in whole steps such a way was 3 % faster than one whose passes took 9 % less."""
_SPARE = 0.04
_FAR = 2.5
_PLAIN = 3
"""How many single ways are tried that a user could have chosen."""
_SIZED_MOST, _SIZED_NEAR = 5, 0.25
"""How many are tried with sized batches, of launched and of captured passes each; `_NEAR` for those."""
_SCALING = 1.05
"""By how much loss scaling is expected to lengthen a step with sized batches, in the order of trials."""
_SIZED_CAPTURING = 0.005
"""As `worth_capturing` has it, with sized batches: there the fastest is wanted."""


def finalists(
    ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int], *, slack: float = 0.0, balanced: bool = False
) -> list[dict[str, Way]]:
    """A few ways to go together, the most promising first.

    Args:
        ways: Of every device type, with times of passes.
        limits_bytes: Memory limit of every device type.
        slack: As in `choose`.
        balanced: As in `choose`.

    Returns:
        For launched and for captured passes: the least sensitive choice among the fastest, also among the ways
        without the solver's plan and with some time to spare; the fastest single ways, and each of them on the slowest
        device type while the others spend their time on precision. Last, what needs the least memory, and that with
        the other device types' precision raised in the same way. With balanced batches, for launched and for captured
        passes: the fastest way of every device type, also without FP16, and the fastest single ways.

    Source:
        Ours.
    """
    if balanced:
        return _sized_finalists(ways, limits_bytes, slack)
    uniform = sorted(everywhere(ways, limits_bytes).items(), key=lambda entry: entry[1])
    plain = [label for label, _ in uniform if not label.endswith(CAPTURED)][:_PLAIN]
    alike: list[dict[str, Way] | None] = [{name: _named(mine, label) for name, mine in ways.items()} for label in plain]
    eagerly = fitting(ways, limits_bytes, captured=False)
    finer: list[dict[str, Way] | None] = [_finer(found, eagerly, slack) for found in alike if found is not None]
    picked: list[list[dict[str, Way] | None]] = []
    for captured in (False, True):
        fits = fitting(ways, limits_bytes, captured=captured)
        simple = {name: [way for way in mine if not way.is_solved] for name, mine in fits.items()}
        picked.append([as_fast(fits, slack=slack), as_fast(simple, slack=slack), as_fast(fits, slack=slack + _SPARE)])
    (eager, *others), (captured_one, *more) = picked
    in_order = [eager, captured_one, *alike[:2], *finer[:2], *alike[2:], *finer[2:], *others, *more]
    unlike = {tuple(way.label for way in found.values()): found for found in in_order if found is not None}
    fastest = min((step_ns(found) for found in unlike.values()), default=0)
    near = [found for found in unlike.values() if step_ns(found) <= (1 + slack) * (1 + _NEAR) * fastest][:_MOST]
    small = _smallest(ways, limits_bytes)
    if small is None or step_ns(small) > _FAR * fastest:
        return near
    last: list[dict[str, Way] | None] = [small]
    if step_ns(small) <= (1 + slack) * (1 + _SMALL_NEAR) * fastest:
        last.append(_finer(small, eagerly, slack))
    for found in last:
        if found is not None and not any(same_ways(found, other) for other in near):
            near.append(found)
    return near


def _sized_finalists(
    ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int], slack: float
) -> list[dict[str, Way]]:
    """Launched passes are not compared with captured ones: a larger batch may no longer wait for its host.

    Passes do not tell what scaling costs in a step, which was 10 % of one for ResNet-50: ways without it are tried too.
    """
    found: dict[tuple[str, ...], dict[str, Way]] = {}
    singles = everywhere(ways, limits_bytes)

    def expected(together: Together) -> float:
        return (_SCALING if any(way.needs_scaling for way in together.values()) else 1) * together_ns(together, True)

    for captured in (False, True):
        fits = fitting(ways, limits_bytes, captured=captured)
        unscaled = {name: [way for way in mine if not way.needs_scaling] for name, mine in fits.items()}
        labels = [label for label in singles if label.endswith(CAPTURED) is captured]
        alike = [{name: _named(mine, label) for name, mine in fits.items()} for label in labels]
        fastest = [_fastest(fits), _fastest(unscaled)]
        candidates = [found for found in (*fastest, *sorted(alike, key=expected)) if found is not None]
        limit = (1 + slack) * (1 + _SIZED_NEAR) * min(map(expected, candidates), default=0.0)
        unlike = {
            tuple(way.label for way in together.values()): together
            for together in candidates
            if expected(together) <= limit
        }
        found |= dict([*unlike.items()][:_SIZED_MOST])
    return [*found.values()]


def _fastest(fits: Mapping[str, Sequence[Way]]) -> dict[str, Way] | None:
    if not all(fits.values()):
        return None
    return {name: min(mine, key=lambda way: (way.pass_ns, way.sensitivity)) for name, mine in fits.items()}


def _smallest(ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int]) -> dict[str, Way] | None:
    """The ways that need the least memory, to which the job turns if memory is taken from it."""
    fits = fitting(ways, limits_bytes, captured=False)
    if not all(fits.values()):
        return None
    return {name: min(mine, key=lambda way: (way.needed_bytes or 0, way.pass_ns)) for name, mine in fits.items()}


def _finer(found: Together, fits: Mapping[str, Sequence[Way]], slack: float) -> dict[str, Way] | None:
    """The slowest device type goes its way; the others take what is least sensitive in the time that it needs.

    Where it needs no loss scaling, they take none that does: all would have to agree on overflows in every step.
    """
    slowest = max(found, key=lambda name: found[name].pass_ns)
    scaled = found[slowest].needs_scaling
    others = {name: [way for way in mine if scaled or not way.needs_scaling] for name, mine in fits.items()}
    return as_fast({**others, slowest: [found[slowest]]}, slack=slack)


def _named(ways: Sequence[Way], label: str) -> Way:
    return next(way for way in ways if way.label == label)


def timed_together(
    ways: Mapping[str, Sequence[Way]],
    limits_bytes: Mapping[str, int],
    steps: Sequence[StepTime],
    *,
    balanced: bool = False,
) -> list[tuple[dict[str, Way], float]]:
    """What was timed in whole steps and can be gone now, with the times in nanoseconds."""
    found = []
    for step in steps:
        if step.taken.keys() != ways.keys() or bool(step.batches) is not balanced:
            continue
        together = {
            name: way for name, mine in ways.items() for way in mine if way.label == step.taken[name] and way.pass_ns
        }
        if len(together) == len(ways) and all(way.fits(limits_bytes[name]) for name, way in together.items()):
            found.append((together, float(step.step_ns)))
    return found


def rounds_of(timed: Sequence[tuple[Together, float]], steps: Sequence[StepTime]) -> list[dict[int, float]]:
    """The turns that they took, by round and place in ``timed``.

    Args:
        timed: As from `timed_together`, with equal batches.
        steps: As for that.
    """
    rounds: list[dict[int, float]] = []
    for place, (together, _) in enumerate(timed):
        labels = {name: way.label for name, way in together.items()}
        turns = next((step.rounds_ns for step in steps if step.taken == labels and not step.batches), ())
        rounds += [{} for _ in range(len(turns) - len(rounds))]
        for found, turn in zip(rounds, turns, strict=False):
            if turn:
                found[place] = float(turn)
    return rounds


def best_step(
    chosen: Together,
    timed: Sequence[tuple[Together, float]],
    *,
    rest_ns: int,
    slack: float,
    balanced: bool = False,
    rounds: Rounds = (),
) -> tuple[Together, float]:
    """What is chosen by passes, or what whole steps say is better, with the time of its step.

    Args:
        chosen: By passes.
        timed: As from `timed_together`.
        rest_ns: What a step takes beside its passes, where nothing was timed.
        slack: As in `choose`.
        balanced: As in `choose`; ``timed`` are steps with sized batches, and one of them is taken.
        rounds: As from `rounds_of`, with equal batches.

    Captured passes count as slower by what they must gain. With equal batches all are compared at once: the least
    sensitive launched way gives way to captured ones only if these are faster by more than times differ anyhow.
    """
    known = [*timed]
    if not balanced and not any(same_ways(chosen, together) for together, _ in timed):
        known.append((chosen, predicted_step_ns(chosen, timed, rest_ns)))
    if not balanced:
        return known[_of_both_kinds(known, slack, rounds)]
    best = [
        mine[least_sensitive(mine, slack, balanced=True)]
        for kind in (False, True)
        if (mine := [entry for entry in known if is_captured(entry[0]) is kind])
    ]
    if len(best) == 1:
        return best[0]
    eager, captured = best
    return captured if worth_capturing(captured[1], eager[1], least=_SIZED_CAPTURING) else eager


def _of_both_kinds(known: Sequence[tuple[Together, float]], slack: float, rounds: Rounds) -> int:
    """The best launched way, if one is as fast as captured ones slowed by what they must gain, or the best of these."""
    times = {place: time for place, (_, time) in enumerate(known)}
    finest = {place: total_sensitivity(together) for place, (together, _) in enumerate(known)}
    captured = [place for place, (together, _) in enumerate(known) if is_captured(together)]
    weighed = {place: time / (1 - WORTH_CAPTURING * (place in captured)) for place, time in times.items()}
    last = {place: math.inf if place in captured else value for place, value in finest.items()}
    found = least_sensitive_as_fast(weighed, last, rounds, most_of(slack))
    if found not in captured:
        return found
    return least_sensitive_as_fast({place: times[place] for place in captured}, finest, (), most_of(slack))


def predicted_step_ns(together: Together, timed: Sequence[tuple[Together, float]], rest_ns: int) -> float:
    """Time of a step that was timed, or that was not: its passes, and what steps that were timed took beside theirs."""
    for other, time in timed:
        if same_ways(together, other):
            return time
    like = [entry for entry in timed if is_captured(entry[0]) is is_captured(together)]
    beside = [time - step_ns(other) for other, time in like]
    return max(0.0, step_ns(together) + (statistics.median(beside) if beside else rest_ns))


def full_everywhere(ways: Mapping[str, Sequence[Way]], limits_bytes: Mapping[str, int]) -> dict[str, Way] | None:
    """FP32 on every device type, None where one has no room for it."""
    found = {
        name: way
        for name, mine in ways.items()
        for way in mine
        if way.name == FULL and not way.captured and way.fits(limits_bytes[name])
    }
    return found if len(found) == len(ways) else None


def step_words(timed: Sequence[tuple[Together, float]]) -> str:
    """What whole steps took, for the reason of a plan; empty if none were timed."""
    if not timed:
        return ""
    told = []
    for together, time in sorted(timed, key=lambda entry: entry[1]):
        labels = {name: way.label for name, way in together.items()}
        same = len(set(labels.values())) == 1
        name = next(iter(labels.values())) if same else " and ".join(f"{way} on {n}" for n, way in labels.items())
        told.append(f"{name} {time / 1e6:.2f} ms")
    return f"; whole steps: {', '.join(told)}"


def same_ways(one: Together, other: Together) -> bool:
    """Whether every device type goes the same way in both, in the same precisions."""
    return {name: (w.label, w.precisions) for name, w in one.items()} == {
        name: (w.label, w.precisions) for name, w in other.items()
    }


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
