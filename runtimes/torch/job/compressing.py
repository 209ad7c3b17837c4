"""The compression of a job's gradients: sampled, timed on its links, planned on rank 0, and the same on all ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from qsync_opt import solve
from qsync_opt.errors import ProblemError
from qsync_opt.gradients import (
    BucketStatistics,
    Computation,
    GradientCosts,
    Plan,
    Problem,
    RecordedReductions,
    SchemeTimes,
    build_problem,
    evaluate,
    fastest_scheme,
    fit_reductions,
    is_as_fast,
    plan_reductions,
    scheme,
    uniform_plan,
)
from qsync_opt.io import format_time
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.gradients import (
    GradientCompression,
    bucket_statistics,
    compress_gradients,
    measure_schemes,
)
from qsync_opt.runtimes.torch.job.measuring import Job
from qsync_opt.runtimes.torch.job.plan import JobPlan
from qsync_opt.runtimes.torch.job.steps import parameters_put_back
from qsync_opt.runtimes.torch.support import model_unchanged
from qsync_opt.training import evaluate as evaluate_precisions
from qsync_opt.training import gradient_buckets

MENU = ("FP32", "BF16", "two8", "sum8", "packed8", "sum16")
"""Schemes that a job's buckets choose from; the paper's own and those of very few bits are for other uses."""
_SIZES = (1 << 10, 1 << 16, 1 << 20)
_REPEATS = 3
_SETTLING, _RECORDED = 2, 2
"""Steps after which DDP's buckets are settled, and steps of a record."""
_TURNS = 3
"""Records of a mixture and of the fastest scheme, in turn."""


def with_compression(job: Job, plan: JobPlan) -> JobPlan:
    """The plan with schemes for the buckets of ``DistributedDataParallel``; every rank must call it.

    The iteration is made as short as it can be while the schemes' variance stays within a share
    (`PlanningOptions.noise_share`) of the noise that the workers' batches give the averaged gradient anyway. Buckets
    are those of DDP's default sizes.

    Steps under the plan of precisions are recorded with each scheme, the iteration is predicted from them, and a
    mixture must gain more than such predictions err (`plan_reductions`), and then be no slower than the fastest scheme
    in steps of both in turn (`is_as_fast`). Where DDP cannot take such steps, and where passes are captured, schemes
    are timed alone, and buckets are ready when the evaluation of the precisions says so.

    Raises:
        NotReadyError: Another rank failed, and the text repeats its error.
    """
    _, workers = world()
    if workers == 1:
        return replace(plan, compression_note="one worker has nothing to compress")
    buckets: list[list[str]] = broadcast_json(together(lambda: _buckets(plan)))
    gradients, every = together(lambda: _gradients(job, buckets))
    statistics = [bucket_statistics(gradient) for gradient in gradients]
    elements = [bucket.elements for bucket in statistics]
    sizes = sorted({*_SIZES, max(elements, default=0), min(elements, default=0)} - {0})
    times = measure_schemes(MENU, sizes, repeats=_REPEATS, device=job.example.device)
    if not elements:
        return replace(plan, compression_note="the model has no gradients to reduce")
    recordable = all(gather_json(every and not plan.captured))
    with _in_training(job, plan) if recordable else contextlib.nullcontext() as training:
        records = [] if training is None else training.records()
        if records and list(records[0].elements) != elements:
            records = []  # DDP groups its buckets in another way than was foreseen
        computation = training.computation() if training is not None and records else None
        sent = broadcast_json(together(lambda: _solved(job, plan, statistics, times, records, computation)))
        plans, notes = [Plan.from_json(each) for each in sent["plans"]], sent["notes"]
        chosen, note = plans[0], notes[0]
        if training is not None and len(plans) > 1:
            turns = [(training.recorded(chosen), training.recorded(plans[1])) for _ in range(_TURNS)]
            if not broadcast_json(is_as_fast(turns)):
                chosen, note = plans[1], f"{notes[1]}; a mixture that was predicted to be faster was not"
        if training is not None and records:
            plain = [each.iteration_ns for each in records if each.steps[0][0].scheme == "FP32"]
            measured = training.recorded(chosen).iteration_ns, round(median(plain))
            note += f"; {_both(*measured, sent['tail_ns'])} were measured"
    costs = None
    if plan.model is not None:
        by_bucket = {name: tuple(ns) for name, ns in sent["bucket_times_ns"].items()}
        costs = GradientCosts(statistics=tuple(statistics), times=times, bucket_times_ns=by_bucket)
    return replace(plan, compression=chosen, compression_note=broadcast_json(note), gradient_costs=costs)


class _Training:
    """Steps of the job with compressed gradients, which change nothing."""

    def __init__(self, job: Job, model: DistributedDataParallel, compression: GradientCompression) -> None:
        self._example, self._compression = replace(job.example, model=model), compression

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._example.run()
            self._example.model.zero_grad(set_to_none=False)

    def recorded(self, plan: Plan | str) -> RecordedReductions:
        """Some steps under a plan."""
        self._compression.use(plan)
        self._run(1)
        with self._compression.recording():
            self._run(1 + _RECORDED)
        return self._compression.recorded()

    def computation(self) -> Computation:
        """Steps without reductions."""
        return self._compression.computation(lambda: self._run(1), _RECORDED, self._example.device)

    def records(self) -> list[RecordedReductions]:
        """Steps under every scheme, twice, so that a busy moment shows as an error of predictions."""
        self._run(_SETTLING)
        names = [name for name in MENU if scheme(name).supports(self._compression.workers)]
        return [self.recorded(name) for name in (*names, *names)]


@contextlib.contextmanager
def _in_training(job: Job, plan: JobPlan) -> Iterator[_Training]:
    """The job in ``DistributedDataParallel`` under its plan of precisions, within the block."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(parameters_put_back(job.model))
        stack.enter_context(model_unchanged(job.model))
        if plan.worthwhile:
            together(lambda: stack.enter_context(under_plan(job.model, plan, kernels=job.options.kernels)))
        model = DistributedDataParallel(job.model)
        compression = compress_gradients(model, "FP32")
        try:
            yield _Training(job, model, compression)
        finally:
            compression.close()
            del model, compression
            gc.collect()


def _buckets(plan: JobPlan) -> list[list[str]] | None:
    """Names of the parameters of each bucket, on rank 0."""
    if plan.model is None:
        return None
    return [list(bucket.parameters) for bucket in gradient_buckets(plan.model.graph)]


def _gradients(job: Job, buckets: Sequence[Sequence[str]]) -> tuple[list[Tensor], bool]:
    """This worker's gradient of its batch, flat for each bucket, and whether every parameter has one."""
    named = dict(job.model.named_parameters())
    with model_unchanged(job.model):
        job.example.run()
        every = all(parameter.grad is not None for parameter in named.values() if parameter.requires_grad)
        return [
            torch.cat(
                [
                    torch.zeros(named[name].numel(), device=named[name].device)
                    if (gradient := named[name].grad) is None
                    else gradient.detach().flatten().float()
                    for name in names
                ]
            )
            for names in buckets
        ], every


def _both(compressed_ns: int, plain_ns: int, tail_ns: int) -> str:
    return f"{format_time(compressed_ns + tail_ns)} and {format_time(plain_ns + tail_ns)} without compression"


def _solved(
    job: Job,
    plan: JobPlan,
    statistics: Sequence[BucketStatistics],
    times: SchemeTimes,
    records: Sequence[RecordedReductions],
    computation: Computation | None,
) -> dict[str, object] | None:
    """The plan, the fastest scheme where that is another, what is said of them, and times, on rank 0.

    Times are the optimizer's, and those recorded of buckets by scheme.
    """
    if plan.model is None or plan.problem is None:
        return None
    tail_ns, error = plan.problem.optimizer_ns, ""
    bucket_times_ns: Mapping[str, Sequence[int]] = {}
    if records:
        model = fit_reductions(records, computation)
        bucket_times_ns = model.times_ns
        plans = [plan_reductions(model, statistics, noise_share=job.options.noise_share)]
        single = fastest_scheme(model, statistics, noise_share=job.options.noise_share)
        plans += [] if single is None or single == plans[0] else [single]
        predicted = [model.predict(each)[-1].end_ns for each in (*plans, model.single("FP32"))]
        error = f" (such predictions err by {model.error:.0%})"
    else:
        chosen, predicted = _solved_apart(job, plan, statistics, times)
        plans, predicted = [chosen], [each - tail_ns for each in predicted]
    return {
        "plans": [each.to_json() for each in plans],
        "notes": [
            f"{_counted(each)}: iterations of {_both(ns, predicted[-1], tail_ns)} are predicted{error}"
            for each, ns in zip(plans, predicted, strict=False)
        ],
        "tail_ns": tail_ns,
        "bucket_times_ns": {name: [*ns] for name, ns in bucket_times_ns.items()},
    }


def _counted(plan: Plan) -> str:
    """In how many buckets which scheme is."""
    names = list(plan.schemes.values())
    counts = ", ".join(f"{name} in {names.count(name)}" for name in dict.fromkeys(names))
    return f"{counts} of {len(names)} buckets"


def _solved_apart(
    job: Job, plan: JobPlan, statistics: Sequence[BucketStatistics], times: SchemeTimes
) -> tuple[Plan, list[int]]:
    """The plan by schemes that were timed alone, and its predicted iteration beside that without compression."""
    problem = _problem(job, plan, statistics, times)
    solution = solve(problem)
    if solution.plan is None or solution.evaluation is None:
        raise ProblemError(f"there is no compression of this job's gradients: {solution.reason}")
    chosen = solution.plan
    plain = uniform_plan("FP32", chosen.elements or (), times.workers)
    return chosen, [solution.evaluation.iteration_ns, evaluate(problem, plain).iteration_ns]


def _problem(job: Job, plan: JobPlan, statistics: Sequence[BucketStatistics], times: SchemeTimes) -> Problem:
    """When the slowest device type has each bucket ready under the plan of precisions, and what the schemes cost."""
    assert plan.model is not None
    assert plan.problem is not None
    evaluation = evaluate_precisions(plan.problem, plan.plan)
    ready_ns = [0] * len(statistics)
    operators = [bucket.operator for bucket in gradient_buckets(plan.model.graph)]
    for device in evaluation.devices.values():
        clock, done = device.forward_end_ns, {}
        for operator in reversed(device.operators):
            clock += operator.backward_total_ns
            done[operator.name] = clock
        ready_ns = [max(ready, done[name]) for ready, name in zip(ready_ns, operators, strict=True)]
    return build_problem(
        statistics,
        times,
        ready_ns,
        max(device.backward_end_ns for device in evaluation.devices.values()),
        name=plan.problem.name,
        tail_ns=plan.problem.optimizer_ns,
        noise_share=job.options.noise_share,
    )
