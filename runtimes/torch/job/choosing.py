"""What a measured job computes in: the solver's plan, or the candidate that times of the whole model say is better."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from qsync_opt.runtimes.torch.job.candidates import (
    CAPTURED,
    COMPILED,
    COMPILED_CAPTURED,
    FORMS,
    FULL,
    LAUNCHED,
    PLANNED,
    SIZED_TOLERANCE,
    Candidate,
    ExecutionMode,
    Modes,
    StepTime,
    fitting,
    form_of,
    labels,
    least_sensitive_candidate,
    passes_ns,
    total_sensitivity,
    uniform_times,
)
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import Alternative, JobModel, JobPlan, verdict
from qsync_opt.training import BYTES_PER_KIB, Evaluation, Problem, Solution, evaluate_device, propagate

_STEP_TOLERANCE = 0.018
"""Relative difference of whole steps, timed in turn, that counts as none; with sized batches `SIZED_TOLERANCE`."""
_WORTH = {LAUNCHED: 0.0, CAPTURED: 0.01, COMPILED: 0.01, COMPILED_CAPTURED: 0.015}
"""Share of the time that a form of passes must save, because it asks more of a model."""
_SIZED_WORTH = 0.005
"""The same for all forms but launched ones with sized batches."""
_WORTH_MOVING, _LESS_SENSITIVE = 0.03, 0.1
"""Relative gain of time, or of sensitivity, for which a running job moves to another plan."""
TimedCandidate = tuple[Candidate, float]
"""With the nanoseconds of its whole step."""
Rounds = Sequence[Mapping[int, float]]
"""By round: candidate to time."""
_AGREEING = 0.85
"""Share of rounds that must fall on the same side of the tolerance for a comparison to be decided: 4 of 4, 6 of 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the job computes in, and why; ``candidate`` is None where no times of the model were taken."""

    candidate: Candidate | None
    worthwhile: bool
    reason: str
    expected_ns: int | None = None


def decide(
    job: JobModel,
    problem: Problem,
    solution: Solution,
    others: tuple[Alternative, ...],
    options: PlanningOptions,
    present: JobPlan | None = None,
) -> Decision:
    """Take the solver's plan or, with times of the whole model, the best candidate.

    Args:
        job: Perhaps with such times.
        problem: Of the job as it is now.
        solution: With the solver's plan.
        others: What the plan is compared with where there are no times.
        options: Slack, least gain, and how local batches will be sized.
        present: What the job runs under now. It stays where it fits and nothing else is clearly better: moving costs
            steps, and memory that swings about a limit would have the job move back and forth.

    Source:
        Ours.
    """
    assert solution.evaluation is not None
    limits, modes = job.limits_bytes, modes_now(job, problem, solution, options)
    workers = job.workers if options.sizes_batches else None
    chosen = choose_by_passes(modes, limits, slack=options.slack, workers=workers) if modes else None
    if chosen is None:
        evaluation = solution.evaluation
        worthwhile, reason = verdict(evaluation.iteration_ns, evaluation.objective, others, options.least_gain)
        return Decision(candidate=None, worthwhile=worthwhile, reason=reason)
    timed = timed_candidates(_unchanged(job, modes), limits, job.steps, sized=options.sizes_batches)
    # All-reduces that nothing hides, and the optimizer: the same whatever the passes are computed in.
    backward_end_ns = max(device.backward_end_ns for device in solution.evaluation.devices.values())
    rest_ns = solution.evaluation.iteration_ns - backward_end_ns

    def step_ns(candidate: Candidate) -> float:
        return expected_step_ns(candidate, timed, rest_ns, workers)

    # With sized batches, passes say too little to set a candidate beside those whose steps were timed.
    if not timed or (workers is None and not any(_is_same(chosen, candidate) for candidate, _ in timed)):
        best = choose_by_steps([*timed, (chosen, step_ns(chosen))], slack=options.slack, sized=workers is not None)
    else:
        best = choose_by_steps(timed, slack=options.slack, sized=workers is not None)
    stays = None if present is None else _pick(modes, limits, present.taken, present.plan.devices)
    if stays is not None and not _is_clearly_better(best, stays, step_ns):
        best = stays
    full = _full_everywhere(modes, limits)
    gain = 1.0 if full is None else 1 - step_ns(best) / max(1.0, step_ns(full))
    worthwhile = full is None or gain >= options.least_gain
    if full is None:
        verdict_text = "training in FP32 would not fit into memory"
    elif not worthwhile or all(mode.is_plain for mode in best.values()):
        best, worthwhile = full, False
        verdict_text = f"nothing is faster than FP32 by {options.least_gain:.0%}: the model is left alone"
    else:
        verdict_text = f"{gain:.1%} less time per sample than in FP32"
    measured = _pass_words(best, uniform_times(modes, limits), compiled=options.compiled)
    return Decision(
        candidate=best,
        worthwhile=worthwhile,
        reason=f"{verdict_text}; {measured}{_step_words(timed)}",
        expected_ns=round(step_ns(best)),
    )


def choose_by_passes(
    modes: Modes, limits_bytes: Mapping[str, int], *, slack: float = 0.0, workers: Mapping[str, int] | None = None
) -> dict[str, ExecutionMode] | None:
    """The least sensitive of the candidates whose passes are as fast as any.

    Args:
        modes: Of every device type, with times of passes.
        limits_bytes: Memory limit of every device type.
        slack: How much longer than the fastest candidate a step may take (0.1: 10 %), beyond what noise leaves open.
        workers: As in `passes_ns`.

    Returns:
        One mode per device type, all of one form; None if a device type has none that fits into its memory. An
        all-reduce that one worker begins while it computes and the other at its end would keep the first one's
        multiprocessors busy with waiting.

    Source:
        Ours; the objective is QSync's (IPDPS 2024): the least sensitivity among the fastest.
    """
    of_forms = (
        least_sensitive_candidate(fitting(modes, limits_bytes, form), slack=slack, workers=workers) for form in FORMS
    )
    return min(
        (candidate for candidate in of_forms if candidate is not None),
        key=lambda candidate: passes_ns(candidate, workers) / (1 - _WORTH[form_of(candidate)]),
        default=None,
    )


def choose_by_steps(timed: Sequence[TimedCandidate], *, slack: float = 0.0, sized: bool = False) -> Candidate:
    """The least sensitive of the candidates whose steps are as fast as any.

    Candidates that are not launched count as slower by what their form must gain, and are taken only where no candidate
    of a form before theirs is as fast.
    """
    tolerance = step_tolerance(slack, sized=sized)

    def counted_ns(entry: TimedCandidate) -> float:
        gain = _WORTH[form_of(entry[0])]
        return entry[1] / (1 - (min(gain, _SIZED_WORTH) if sized else gain))

    limit_ns = tolerance * min(map(counted_ns, timed))
    form = next(form for form in FORMS if any(form_of(e[0]) == form and e[1] <= limit_ns for e in timed))
    own = [entry for entry in timed if form_of(entry[0]) == form]
    limit_ns = min(limit_ns, tolerance * min(time for _, time in own)) if form != LAUNCHED else limit_ns
    near = [entry for entry in own if entry[1] <= limit_ns]
    return min(near, key=lambda entry: (total_sensitivity(entry[0]), entry[1]))[0]


def step_tolerance(slack: float, *, sized: bool) -> float:
    """How many times as long as the fastest a step may take that counts as fast as it."""
    return (1 + slack) * (1 + (SIZED_TOLERANCE if sized else _STEP_TOLERANCE))


def timed_candidates(
    modes: Modes, limits_bytes: Mapping[str, int], steps: Sequence[StepTime], *, sized: bool = False
) -> list[TimedCandidate]:
    """The candidates whose whole steps were timed and whose modes are there and fit now."""
    timed: list[TimedCandidate] = []
    for step in steps:
        if step.taken.keys() == modes.keys() and bool(step.batches) is sized:
            candidate = _pick(modes, limits_bytes, step.taken)
            if candidate is not None:
                timed.append((candidate, float(step.step_ns)))
    return timed


def _pick(
    modes: Modes,
    limits_bytes: Mapping[str, int],
    taken: Mapping[str, str],
    devices: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, ExecutionMode] | None:
    """The modes with these labels, and in these precisions; None if one is not there, was not timed or does not fit."""
    candidate = {
        name: mode
        for name, own in modes.items()
        for mode in own
        if mode.label == taken.get(name)
        and (devices is None or mode.precisions.items() <= devices.get(name, {}).items())
        and mode.fits(limits_bytes[name])
        and mode.pass_ns
    }
    return candidate if len(candidate) == len(modes) else None


def expected_step_ns(
    candidate: Candidate, timed: Sequence[TimedCandidate], rest_ns: float, workers: Mapping[str, int] | None = None
) -> float:
    """The measured time of a candidate's step, else that of its passes and what other steps took beside theirs.

    Args:
        candidate: Steps of the same form are asked for what they took beside passes; where there are none, those of
            captured ones, whose all-reduces come after the passes too, and of launched ones.
        timed: Candidates with measured steps.
        rest_ns: Predicted time beside the passes, where no step of the kind was timed.
        workers: As in `passes_ns`.
    """
    for other, time in timed:
        if _is_same(candidate, other):
            return time
    own = form_of(candidate)
    for form in (own,) if own == LAUNCHED else (own, CAPTURED, LAUNCHED):
        beside = [t - passes_ns(other, workers) for other, t in timed if form_of(other) == form]
        if beside:
            break
    return max(0.0, passes_ns(candidate, workers) + (statistics.median(beside) if beside else rest_ns))


def modes_now(
    job: JobModel, problem: Problem, solution: Solution, options: PlanningOptions
) -> dict[str, tuple[ExecutionMode, ...]]:
    """The measured modes with the solver's present plan, and with the all-reduces that they expose.

    Captured and compiled passes hand over all gradients at their end, so that no all-reduce is hidden.
    """
    assert solution.evaluation is not None
    hidden_ns = _hidden_ns(problem, solution.evaluation)
    modes = {}
    for name, own in job.modes.items():
        modes[name] = tuple(
            mode if form == LAUNCHED else replace(mode, pass_ns=mode.pass_ns + hidden_ns)
            for form in FORMS
            if options.allows(form)
            if (measured := [mode for mode in own if mode.form == form])
            for mode in (
                measured
                if "compiled" in form and all(mode.name != PLANNED for mode in measured)
                else _with_present_plan(name, measured, problem, solution)
            )
        )
    return modes


def _with_present_plan(
    name: str, measured: Sequence[ExecutionMode], problem: Problem, solution: Solution
) -> list[ExecutionMode]:
    """Launched or captured modes of a device type with the solver's present plan in place of the one that was measured.

    If it is another plan, its time is the predicted one, corrected by how far the prediction was off for the plan that
    was measured, or for FP32 if none was.
    """
    assert solution.plan is not None
    assert solution.evaluation is not None
    others = [mode for mode in measured if mode.name != PLANNED]
    before = next((mode for mode in reversed(measured) if mode.name in (PLANNED, FULL)), measured[-1])
    now = replace(before, name=PLANNED, autocast=None)
    if any(solution.plan.devices[name][n] != p for n, p in before.precisions.items()):
        device, evaluation = problem.device(name), solution.evaluation.devices[name]
        predicted = evaluate_device(problem, device, propagate(problem, device, before.precisions))
        now = replace(
            now,
            precisions={operator: solution.plan.devices[name][operator] for operator in before.precisions},
            sensitivity=evaluation.sensitivity,
            pass_ns=round(before.pass_ns / max(1, predicted.backward_end_ns) * evaluation.backward_end_ns),
            needed_bytes=None if before.needed_bytes is None else evaluation.memory_kib * BYTES_PER_KIB,
        )
    return others if set(now.precisions.values()) <= {FULL} else [*others, now]


def _hidden_ns(problem: Problem, evaluation: Evaluation) -> int:
    durations = problem.communication.allreduce_ns
    ends = [start + time for start, time in zip(evaluation.bucket_start_ns, durations, strict=True)]
    after = max(ends, default=0) - max(device.backward_end_ns for device in evaluation.devices.values())
    return sum(durations) - max(0, after)


def _unchanged(job: JobModel, modes: Modes) -> dict[str, list[ExecutionMode]]:
    """The modes that are as they were when whole steps were timed: the solver's plan may be another by now."""
    timed = {name: [mode.precisions for mode in own if mode.name == PLANNED] for name, own in job.modes.items()}
    return {
        name: [mode for mode in own if mode.name != PLANNED or mode.precisions in timed[name]]
        for name, own in modes.items()
    }


def shares(job: JobModel, candidate: Candidate | None) -> dict[str, float]:
    """Share of the global batch of one worker of each type.

    Args:
        job: With the steps of candidates whose batches were sized, which then say it; else times of passes do.
        candidate: What the job computes in; None: equal batches.
    """
    speeds: Mapping[str, float] = dict.fromkeys(job.workers, 1.0)
    if candidate is not None:
        sized = next((s.batches for s in job.steps if s.batches and s.taken == labels(candidate)), None)
        speeds = sized or {name: 1 / max(1, mode.pass_ns) for name, mode in candidate.items()}
    total = sum(count * speeds[name] for name, count in job.workers.items())
    return {name: speed / total for name, speed in speeds.items()}


def _full_everywhere(modes: Modes, limits_bytes: Mapping[str, int]) -> dict[str, ExecutionMode] | None:
    """FP32 on every device type, None where one has no room for it."""
    full = {
        name: mode for name, own in fitting(modes, limits_bytes, LAUNCHED).items() for mode in own if mode.name == FULL
    }
    return full if len(full) == len(modes) else None


def _is_clearly_better(candidate: Candidate, present: Candidate, step_ns: Callable[[Candidate], float]) -> bool:
    is_finer = total_sensitivity(candidate) < (1 - _LESS_SENSITIVE) * total_sensitivity(present)
    return is_finer or step_ns(candidate) < (1 - _WORTH_MOVING) * step_ns(present)


def _is_same(one: Candidate, other: Candidate) -> bool:
    return labels(one) == labels(other) and all(mode.precisions == other[n].precisions for n, mode in one.items())


def _pass_words(chosen: Candidate, uniform: Mapping[str, int], *, compiled: bool) -> str:
    own = ", ".join(f"{mode.label} on {name}" for name, mode in chosen.items())
    compared = ", ".join(f"{name} {time / 1e6:.2f} ms" for name, time in sorted(uniform.items(), key=lambda e: e[1]))
    what = "compiled passes" if compiled else "passes"
    return f"measured {what}: {compared or 'no single way fits everywhere'}; {own} {passes_ns(chosen) / 1e6:.2f} ms"


def _step_words(timed: Sequence[TimedCandidate]) -> str:
    """Times of whole steps, for the reason of a plan; empty if none were taken."""
    texts = []
    for candidate, time in sorted(timed, key=lambda entry: entry[1]):
        names = labels(candidate)
        same = len(set(names.values())) == 1
        label = next(iter(names.values())) if same else " and ".join(f"{mode} on {n}" for n, mode in names.items())
        texts.append(f"{label} {time / 1e6:.2f} ms")
    return f"; whole steps: {', '.join(texts)}" if texts else ""


def paired_times(rounds: Rounds) -> dict[int, float]:
    """Time of each candidate from rounds in which candidates take turns; what slows a whole round cancels out.

    The reference is the fastest of the candidates with the most turns, by its median. Others take as many times as
    long as the median of their ratios to it within common rounds. A candidate that took only the first turn is compared
    with the fastest of that round, so that one that was dropped for being slow stays as much slower.

    Args:
        rounds: All candidates take part in the first.
    """
    turns = {i: [times[i] for times in rounds if i in times] for times in rounds for i in times}
    if not turns:
        return {}
    most = max(map(len, turns.values()))
    median = {i: statistics.median(times) for i, times in turns.items() if len(times) == most}
    reference = min(median, key=median.__getitem__)
    paired = {
        i: median[reference] * statistics.median(_ratios(rounds, i, reference))
        for i, times in turns.items()
        if len(times) > 1 or i == reference
    }
    first = rounds[0]
    quickest = min(paired.keys() & first.keys(), key=first.__getitem__)
    return {i: paired[i] if i in paired else paired[quickest] * first[i] / first[quickest] for i in turns}


def least_sensitive(times: Mapping[int, float], sensitivities: Mapping[int, float], tolerance: float) -> int:
    """The least sensitive candidate of those that take at most ``tolerance`` times as long as the fastest."""
    limit = tolerance * min(times.values())
    return min((i for i, time in times.items() if time <= limit), key=lambda i: (sensitivities[i], times[i]))


def undecided(rounds: Rounds, sensitivities: Mapping[int, float], tolerance: float) -> list[int]:
    """Candidates to time again because noise leaves the choice of `least_sensitive` open; none if it is decided.

    The chosen candidate and every less sensitive one are compared with their fastest rival. Where rounds disagree on
    whether the tolerance is kept, both take another turn.
    """
    times = paired_times(rounds)
    if len(times) < 2:
        return []
    order = {i: (sensitivities[i], time) for i, time in times.items()}
    chosen = least_sensitive(times, sensitivities, tolerance)
    again: set[int] = set()
    for index in times:
        if order[index] > order[chosen]:
            continue
        rival = min((other for other in times if other != index), key=times.__getitem__)
        ratios = _ratios(rounds, index, rival)
        slower = sum(ratio > tolerance for ratio in ratios) / len(ratios)
        if max(slower, 1 - slower) < _AGREEING:
            again |= {index, rival}
    return sorted(again)


def _ratios(rounds: Rounds, index: int, other: int) -> list[float]:
    return [times[index] / times[other] for times in rounds if index in times and other in times]
