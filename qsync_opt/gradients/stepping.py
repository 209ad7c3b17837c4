"""The time of a training step under any plan of schemes, predicted from steps that were recorded under some.

Gradients are computed on one stream, buckets are reduced in order on another. While a reduction runs, its codec and its
sums take processor (or multiprocessor) time from the computation beside it, and the other way around: both are slower,
by as much as the scheme says:

    ready_k = the computation up to bucket k, at speed 1, or 1 - slowdown of the scheme that is reduced meanwhile
    start_k = max(ready_k, end_(k-1)),    end_k = the reduction of bucket k, at speed 1, or 1 / stretch beside those

A step lasts from the end of the last reduction of the step before to the end of its own, so that the iteration is the
last end. Where a processor has waited for that one, its caches are cold and others may have had it: computation begins
later, by a time that is measured after pauses (`Computation`).

Source: ours.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.gradients.build import SchemeTimes, uniform_plan
from qsync_opt.gradients.compression import BucketStatistics, scheme
from qsync_opt.gradients.evaluation import VARIANCE_SLACK
from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Bucket, Choice, Objective, Problem
from qsync_opt.gradients.recorded import RecordedReductions, Reduction
from qsync_opt.systems import solve

_ROUNDS = 5
"""Of planning, and predicting anew when buckets are ready under the plan."""
_FASTER = 0.02
"""Share by which a mixture is to be faster than the fastest single scheme, where that costs no variance."""
_CLEARLY_FASTER = 0.05
"""Share by which it must be faster if it has more variance."""
_RIDGE = 1e-3
_FIRM = 100.0
"""Weight of a time that was measured of a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Steps without reductions (`qsync_opt.runtimes.torch.gradients.GradientCompression.computation`).

    Attributes:
        alone_ns: Of one among others.
        later_ns: By how much longer one takes after a pause, by the pause in nanoseconds, rising.
    """

    alone_ns: int
    later_ns: Mapping[int, int] = field(default_factory=dict)

    def after_ns(self, pause_ns: float) -> float:
        """By how much longer a step takes after a pause, between those measured; beyond, as after the longest."""
        return float(np.interp(pause_ns, [0, *self.later_ns], [0, *self.later_ns.values()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionModel:
    """What steps are predicted from: see `fit_reductions`.

    Attributes:
        workers: That reduce.
        elements: Of each bucket.
        segments_ns: Computation up to each bucket, from the bucket before it (the first: from the end of the step
            before), with nothing beside it.
        times_ns: Of each bucket's reduction, by scheme.
        slowdowns: Share by which computation beside a reduction is slower, by scheme.
        stretches: How many times as long a reduction takes beside computation, by scheme; 1 where it is not known, and
            where ``times_ns`` are of steps, which contain it.
        computation: Of whole steps, where they were timed.
        error: Share by which predicted steps differ from recorded ones that they were not fitted to, a root mean
            square; 0 if it is not known.
    """

    workers: int
    elements: tuple[int, ...]
    segments_ns: tuple[int, ...]
    times_ns: Mapping[str, tuple[int, ...]]
    slowdowns: Mapping[str, float]
    stretches: Mapping[str, float] = field(default_factory=dict)
    computation: Computation | None = None
    error: float = 0.0

    @classmethod
    def of_times(cls, times: SchemeTimes, elements: Sequence[int], segments_ns: Sequence[int]) -> ReductionModel:
        """The model from schemes that were timed alone, and computation up to each bucket.

        Args:
            times: Of the schemes, with what ``measure_schemes(..., beside=True)`` measures.
            elements: Of each bucket.
            segments_ns: As of the class: such as the devices' times of `qsync_opt.steps.StepPredictor.segments_of`.

        Raises:
            ProblemError: The numbers of buckets and segments differ.
        """
        if len(elements) != len(segments_ns):
            raise ProblemError(
                f"{len(elements)} buckets have sizes and {len(segments_ns)} a time up to them; each needs both"
            )
        return cls(
            workers=times.workers,
            elements=tuple(elements),
            segments_ns=tuple(segments_ns),
            times_ns={name: tuple(times.ns(name, size) for size in elements) for name in times.times_ns},
            slowdowns={name: times.slowdowns.get(name, 0.0) for name in times.times_ns},
            stretches=times.stretches,
        )

    def single(self, name: str) -> Plan:
        """The plan that gives every bucket one scheme."""
        return uniform_plan(name, self.elements, self.workers)

    def predict(self, plan: Plan) -> tuple[Reduction, ...]:
        """When each bucket is ready, begins and ends under a plan; the iteration takes until the last end.

        Raises:
            ProblemError: The plan is for another number of workers or buckets, or names a scheme that was not recorded.
        """
        names = list(plan.schemes.values())
        if len(names) != len(self.elements) or plan.workers not in (None, self.workers):
            raise ProblemError(
                f"the plan has {len(names)} buckets of {plan.workers or 'some'} workers, but steps were recorded with "
                f"{len(self.elements)} buckets and {self.workers} workers; record steps of this job"
            )
        missing = next((name for name in names if name not in self.times_ns), None)
        if missing is not None:
            raise ProblemError(f"scheme {missing!r} was not recorded; recorded are {', '.join(self.times_ns)}")
        work, reductions = [*map(float, self.segments_ns)], [float(self.times_ns[n][k]) for k, n in enumerate(names)]
        ready: list[float] = []
        result: list[Reduction] = []
        now = start = 0.0
        while len(result) < len(names):
            k, own = len(ready), len(result)
            computes, reduces = k < len(names), own < k
            if computes and not work[k]:
                ready.append(now)
                start = start if reduces else now
                continue
            if reduces and not reductions[own]:
                ready_ns = round(ready[own])
                start_ns = max(ready_ns, result[-1].end_ns if result else 0)
                end_ns = start_ns + round(now - start)
                result.append(Reduction(scheme=names[own], ready_ns=ready_ns, start_ns=start_ns, end_ns=end_ns))
                start = now
                continue
            speed = 1.0 - self.slowdowns[names[own]] if reduces else 1.0
            pace = 1.0 / self.stretches.get(names[own], 1.0) if computes else 1.0
            passed = min(
                work[k] / speed if computes and speed else math.inf, reductions[own] / pace if reduces else math.inf
            )
            now += passed
            if computes:
                work[k] = 0.0 if passed == work[k] / (speed or 1.0) else max(0.0, work[k] - speed * passed)
            if reduces:
                reductions[own] = 0.0 if passed == reductions[own] / pace else max(0.0, reductions[own] - pace * passed)
        if self.computation is None:
            return tuple(result)
        # As long as each step of this plan waits at its end, the next begins later.
        later_ns = round(self.computation.after_ns(_waited_ns(result)))
        return tuple(
            replace(
                each,
                ready_ns=each.ready_ns + later_ns,
                start_ns=each.start_ns + later_ns,
                end_ns=each.end_ns + later_ns,
            )
            for each in result
        )

    def problem(
        self,
        statistics: Sequence[BucketStatistics],
        under: Plan,
        *,
        latency_limit_ns: int | None = None,
        noise_share: float | None = None,
        schemes: Iterable[str] | None = None,
    ) -> Problem:
        """The compression problem of a step whose buckets are ready when they are under a plan.

        Its evaluation of ``under`` is the prediction; of other plans it is close, because their reductions slow the
        computation down by another share. With ``latency_limit_ns`` the variance is minimised, else the time, within
        ``noise_share`` of the gradients' own noise if that is given.

        Raises:
            ProblemError: As of `predict`, or the statistics are of other buckets.
        """
        sizes = [each.elements for each in statistics]
        if sizes != list(self.elements):
            raise ProblemError(
                f"statistics are of buckets of {sizes} elements, but steps were recorded with {list(self.elements)}; "
                "take both from one job"
            )
        chosen = [scheme(name) for name in (self.times_ns if schemes is None else schemes)]
        predicted = self.predict(under)
        compute_end_ns = predicted[-1].ready_ns

        def time_ns(name: str, k: int) -> int:
            """Of a bucket's reduction, as much of which is beside computation as under the plan."""
            when, alone_ns, stretch = predicted[k], self.times_ns[name][k], self.stretches.get(name, 1.0)
            if name == when.scheme:
                return when.time_ns
            whole_ns = max(1, self.times_ns[when.scheme][k])
            beside_ns = max(0, min(when.end_ns, compute_end_ns) - when.start_ns)
            share = min(1.0, beside_ns / self.stretches.get(when.scheme, 1.0) / whole_ns)
            return round(alone_ns * (1 + (stretch - 1) * share))

        buckets = tuple(
            Bucket(
                name=f"b{k}",
                ready_ns=when.ready_ns,
                choices={
                    each.name: Choice(time_ns=time_ns(each.name, k), variance=each.mean_variance(bucket, self.workers))
                    for each in chosen
                },
            )
            for k, (bucket, when) in enumerate(zip(statistics, predicted, strict=True))
        )
        noise = math.fsum(bucket.noise for bucket in statistics)
        return Problem(
            name="recorded steps",
            compute_end_ns=compute_end_ns,
            tail_ns=0,
            latency_limit_ns=latency_limit_ns,
            variance_limit=None if noise_share is None else noise_share * noise,
            objective=Objective.LATENCY if latency_limit_ns is None else Objective.VARIANCE,
            buckets=buckets,
            extras={("x-workers",): self.workers, ("x-elements",): sizes},
        )


def _waited_ns(step: Sequence[Reduction]) -> int:
    """For how long nothing is computed at the end of a step."""
    return step[-1].end_ns - step[-1].ready_ns


def fit_reductions(records: Iterable[RecordedReductions], computation: Computation | None = None) -> ReductionModel:
    """The model of a job's steps, from some steps under each scheme (each record of one plan).

    Segments and slowdowns are those of the least squares ``gap_k = segment_k + sum of slowdown * time beside``, over
    the gaps between buckets in all records. A bucket's time under a scheme is the median of those recorded.

    Args:
        records: Of one job.
        computation: Of steps without reductions, where they were timed: what segments add up to, and how much later
            they begin. Where reductions fill every gap, nothing else tells segments from slowdowns.

    The model's ``error`` is cross-validated: each record is predicted from the others. Record every scheme twice, some
    steps apart: a record without which a scheme would be missing is predicted by the whole model, which errs less.

    Raises:
        ProblemError: There is no record, they are of unlike jobs, or a scheme was not recorded for a bucket.

    Source: ours.
    """
    records = list(records)
    jobs = {(record.workers, record.elements) for record in records}
    if len(jobs) != 1:
        raise ProblemError(
            f"records are of {len(jobs)} jobs (numbers of workers and sizes of buckets), but one model needs records "
            "of one"
        )
    workers, elements = jobs.pop()
    recorded = [record.usual() for record in records]
    for name in dict.fromkeys(each.scheme for step in recorded for each in step):
        for k in range(len(elements)):
            if not any(step[k].scheme == name for step in recorded):
                raise ProblemError(f"scheme {name!r} was not recorded for bucket b{k}; record a step that has it there")
    model = _model(workers, elements, recorded, computation)
    squares = []
    for k, step in enumerate(recorded):
        rest = [*recorded[:k], *recorded[k + 1 :]]
        known = all(any(other[b].scheme == each.scheme for other in rest) for b, each in enumerate(step))
        plan = Plan(schemes={f"b{b}": each.scheme for b, each in enumerate(step)})
        predicted = (_model(workers, elements, rest, computation) if known else model).predict(plan)
        squares.append((predicted[-1].end_ns / max(1, step[-1].end_ns) - 1) ** 2)
    return replace(model, error=math.sqrt(statistics.fmean(squares)))


def _model(
    workers: int, elements: tuple[int, ...], recorded: Sequence[Sequence[Reduction]], computation: Computation | None
) -> ReductionModel:
    """The model fitted to some steps; schemes that a bucket lacks in all of them are left out."""
    count = len(elements)
    times_ns = {}
    for name in dict.fromkeys(each.scheme for step in recorded for each in step):
        own = [[_taken_ns(step, k) for step in recorded if step[k].scheme == name] for k in range(count)]
        if all(own):
            times_ns[name] = tuple(round(statistics.median(each)) for each in own)
    names = list(dict.fromkeys(each.scheme for step in recorded for each in step))
    gaps, beside = zip(*(_gaps(step, names) for step in recorded), strict=True)
    gaps_RK, alone_ns = np.array(gaps), None
    if computation is not None:
        alone_ns = computation.alone_ns
        gaps_RK[:, 0] = np.maximum(gaps_RK[:, 0] - [computation.after_ns(_waited_ns(step)) for step in recorded], 0.0)
    segments, slowdowns = _fitted(gaps_RK, np.array(beside), alone_ns)
    return ReductionModel(
        workers=workers,
        elements=elements,
        segments_ns=tuple(round(float(segment)) for segment in segments),
        times_ns=times_ns,
        slowdowns={name: float(share) for name, share in zip(names, slowdowns, strict=True)},
        computation=computation,
    )


def _taken_ns(step: Sequence[Reduction], bucket: int) -> int:
    """From when a reduction could have begun: a thread that must wake up on a busy machine is late."""
    free_ns = step[bucket - 1].end_ns if bucket else 0
    return step[bucket].end_ns - max(step[bucket].ready_ns, free_ns)


def _gaps(step: Sequence[Reduction], names: Sequence[str]) -> tuple[list[float], list[list[float]]]:
    """Time from bucket to bucket, and how much of it reductions under each scheme ran beside."""
    gaps, beside, before = [], [], 0
    for k, each in enumerate(step):
        own = dict.fromkeys(names, 0.0)
        for other in step[:k]:
            own[other.scheme] += max(0, min(other.end_ns, each.ready_ns) - max(other.start_ns, before))
        gaps.append(float(each.ready_ns - before))
        beside.append(list(own.values()))
        before = each.ready_ns
    return gaps, beside


def _fitted(gaps_RK: np.ndarray, beside_RKC: np.ndarray, computation_ns: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Segments, and the shares by which computation is slower."""
    records, buckets = gaps_RK.shape
    kinds = beside_RKC.shape[2]
    matrix = np.concatenate([np.tile(np.eye(buckets), (records, 1)), beside_RKC.reshape(-1, kinds)], axis=1)
    values = gaps_RK.reshape(-1)
    if computation_ns is not None:
        whole = np.concatenate([np.ones(buckets), np.zeros(kinds)])
        matrix, values = np.vstack([matrix, _FIRM * whole]), np.append(values, _FIRM * computation_ns)
    # Where every gap is filled by reductions, segments and shares are not told apart: the least shares then.
    scale = math.sqrt(_RIDGE) * float(np.linalg.norm(beside_RKC.reshape(-1, kinds), axis=0).max(initial=0.0))
    ridge = np.concatenate([np.zeros((kinds, buckets)), scale * np.eye(kinds)], axis=1)
    solution = np.linalg.lstsq(np.concatenate([matrix, ridge]), np.append(values, np.zeros(kinds)), rcond=None)[0]
    shares = np.clip(solution[buckets:], 0.0, 1.0)
    segments = np.maximum(gaps_RK - beside_RKC @ shares, 0.0).mean(axis=0)
    if computation_ns is not None and segments.any():
        segments *= computation_ns / segments.sum()
    return segments, shares


def plan_reductions(
    model: ReductionModel,
    statistics: Sequence[BucketStatistics],
    *,
    noise_share: float | None = None,
    schemes: Iterable[str] | None = None,
) -> Plan:
    """The plan of least variance among those that are predicted to be as fast as the fastest single scheme.

    Where a mixture without more variance than that scheme is faster by 2 %, the plan is too; more variance must make it
    faster by 5 %. Among very many mixtures some are predicted to be fast by chance: where predictions err by more than
    that (``model.error``), a mixture must be faster by as much as they err, or the plan is the fastest single scheme.
    Plans are made for the times at which buckets are ready, predicted anew under each, and only the prediction decides.

    Args:
        model: Of the job's steps.
        statistics: Of each bucket.
        noise_share: Most variance, as a share of the noise that batches give the gradient; None: no limit.
        schemes: Those to choose from; all that were recorded by default.

    Raises:
        ProblemError: A scheme was not recorded, the statistics are of other buckets, or every plan has more variance
            than is allowed.

    Source: ours.
    """
    names = list(model.times_ns if schemes is None else schemes)
    choices = [bucket.choices for bucket in model.problem(statistics, model.single(names[0]), schemes=names).buckets]
    allowed = math.inf if noise_share is None else noise_share * math.fsum(bucket.noise for bucket in statistics)
    kept: dict[tuple[str, ...], _Weighed] = {}

    def weigh(plan: Plan) -> _Weighed | None:
        """What a plan is predicted to cost, if it has no more variance than is allowed."""
        variance = math.fsum(own[name].variance for own, name in zip(choices, plan.schemes.values(), strict=True))
        if variance > allowed * (1 + VARIANCE_SLACK):
            return None
        row = _Weighed(plan=plan, iteration_ns=model.predict(plan)[-1].end_ns, variance=variance)
        return kept.setdefault(tuple(plan.schemes.values()), row)

    def improve(plan: Plan, latency_limit_ns: int | None) -> None:
        """Weigh the optimum for the times at which buckets are ready under a plan, and so on under that."""
        for _ in range(_ROUNDS):
            problem = model.problem(
                statistics, plan, latency_limit_ns=latency_limit_ns, noise_share=noise_share, schemes=names
            )
            solution = solve(problem)
            if solution.plan is None or solution.plan == plan:
                return
            plan = solution.plan
            weigh(plan)

    for name in names:
        weigh(model.single(name))
    single = fastest_scheme(model, statistics, noise_share=noise_share, schemes=names)
    fastest_single = None if single is None else weigh(single)
    improve(single or model.single(names[0]), None)
    if not kept:
        raise ProblemError(
            f"every plan of {', '.join(names)} has more variance than noise_share={noise_share} allows; allow more, or "
            "record FP32 too"
        )
    fastest = min(kept.values(), key=lambda row: row.iteration_ns)

    def quietest(limit_ns: int) -> _Weighed:
        """The plan of least variance found within a time."""
        improve(fastest.plan, limit_ns)
        best = min((row for row in kept.values() if row.iteration_ns <= limit_ns), key=lambda row: row.variance)
        while True:  # one bucket at a time, by what is predicted
            changed = [
                row
                for bucket, own in best.plan.schemes.items()
                for name in names
                if name != own and (row := weigh(replace(best.plan, schemes={**best.plan.schemes, bucket: name})))
            ]
            better = [row for row in changed if row.iteration_ns <= limit_ns and row.variance < best.variance]
            if not better:
                return best
            best = min(better, key=lambda row: row.variance)

    if fastest_single is None:
        return quietest(fastest.iteration_ns).plan
    single_ns = fastest_single.iteration_ns
    faster_ns = int((1 - max(_FASTER, model.error)) * single_ns)
    if model.error > _FASTER and fastest.iteration_ns > faster_ns:
        return fastest_single.plan
    better = quietest(max(fastest.iteration_ns, faster_ns))
    if better.variance <= fastest_single.variance:
        return better.plan
    clearly_ns = int((1 - max(_CLEARLY_FASTER, model.error)) * single_ns)
    if fastest.iteration_ns <= clearly_ns:
        return quietest(clearly_ns).plan
    return fastest_single.plan if model.error > _FASTER else quietest(single_ns).plan


def fastest_scheme(
    model: ReductionModel,
    statistics: Sequence[BucketStatistics],
    *,
    noise_share: float | None = None,
    schemes: Iterable[str] | None = None,
) -> Plan | None:
    """The scheme that is predicted to be fastest in all buckets, as a plan; arguments are those of `plan_reductions`.

    None: all have more variance than is allowed.
    """
    names = list(model.times_ns if schemes is None else schemes)
    allowed = math.inf if noise_share is None else noise_share * math.fsum(bucket.noise for bucket in statistics)
    rows = []
    for name in names:
        variance = math.fsum(scheme(name).mean_variance(bucket, model.workers) for bucket in statistics)
        if variance <= allowed * (1 + VARIANCE_SLACK):
            rows.append((model.predict(model.single(name))[-1].end_ns, variance, name))
    return model.single(min(rows)[2]) if rows else None


def is_as_fast(turns: Sequence[tuple[RecordedReductions, RecordedReductions]]) -> bool:
    """Whether the first plan's steps take no longer than the second's, in the median of records of both in turn.

    A mixture should be, beside its `fastest_scheme`: reductions of unlike schemes follow each other less smoothly than
    those of one, which no record of single schemes shows. On two processors mixtures took up to 16 % longer than
    predicted.
    """
    return statistics.median(own.iteration_ns / other.iteration_ns for own, other in turns) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    plan: Plan
    iteration_ns: int
    variance: float
