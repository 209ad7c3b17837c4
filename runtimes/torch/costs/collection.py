"""Collection of measured times of operators into a record, inside a time budget."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from qsync_opt.costs.learned import CostRecord, DeviceVector, Phase, Sample, Workload, outliers, with_observed_rates
from qsync_opt.errors import QSyncError
from qsync_opt.io import Report, check_number
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import Role, TensorSpec, base_kind
from qsync_opt.numerics import number_format
from qsync_opt.runtimes.timing import Rounds, cast_pairs
from qsync_opt.runtimes.torch.costs.models import MODELS
from qsync_opt.runtimes.torch.costs.probes import probe_device
from qsync_opt.runtimes.torch.costs.workloads import LIMITS, Candidate, Limits, captured, sweep
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.profiling import OperatorBench, time_cast, time_gradient_sum
from qsync_opt.runtimes.torch.support import Stopwatch, make_stopwatch, partition

REPEATS = 5
"""Runs per round of measuring."""
AGAIN = 0.2
"""Share of the time budget that is kept for measuring again."""
DISTURBED = 0.08
"""How much longer than at best a fixed piece of work takes where a stretch of measurements is disturbed."""
NOTHING = 0.25
"""Share of the time of a call without work below which nothing ran at all: a gradient that is handed on, say."""
_CHECK_EVERY = 20
"""Operators between two runs of the fixed piece of work."""
_CASTS_EVERY = 12
"""After so many operators of the sweep, casts and sums of one size are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A measurement that can be repeated: it returns one time per phase."""

    workload: Workload
    precision: str
    model: str
    measure: Callable[[], dict[Phase, float]]
    source: str = ""
    kernel: str = ""


def collect(
    device: torch.device | str = "cpu",
    *,
    budget_s: float = 240.0,
    name: str | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    scale: int | None = None,
    multiprocessors: int | None = None,
    progress: Report | None = None,
) -> CostRecord:
    """Measure operators of captured models and of random shapes in every precision of a device.

    Medians of repeated rounds are taken as in profiles. A fixed piece of work between them tells when something else
    slowed the device down: what was measured then, and times that stand out among operators of their kind, are measured
    again, and the lower time is kept. The result depends on the machine, but the order of operators only on ``seed``.

    Args:
        device: ``cpu`` or a CUDA device; set the number of threads before.
        budget_s: Seconds after which measuring ends; a running measurement is finished.
        name: Of the device, for a partition of a card or a number of threads.
        seed: Of the random shapes.
        limits: Largest operators of the sweep.
        scale: Of the captured models' sizes; 1 on a cpu, 8 on a card.
        multiprocessors: Of a card, on how many to measure: a partition, which is a device of its own; None: all.
        progress: Called with (seconds spent, budget, what is measured).

    Raises:
        UnsupportedError: The device is neither cpu nor cuda, or is not there.
        ProblemError: The budget is not above zero, or not even 40 times fit into it.
    """
    device = backend.known_device(device)
    check_number(budget_s, "time budget in seconds")
    with partition(device, multiprocessors):
        start = time.monotonic()
        vector = probe_device(device, name, multiprocessors)
        stopwatch = make_stopwatch(device)
        options = replace(KernelOptions(), half_format=backend.half_format(device))
        limits = limits or LIMITS[device.type]
        chosen = backend.explain(device)
        jobs = _jobs(device, stopwatch, options, chosen, limits, scale or (8 if device.type == "cuda" else 1), seed)
        check = _fixed_work(device, stopwatch)
        measured: list[tuple[_Job, Phase, float]] = []
        nothing_ns = NOTHING * vector.launch_ns
        levels: list[tuple[int, float]] = [(0, check())]
        failures = 0
        for number, job in enumerate(jobs):
            spent = time.monotonic() - start
            if spent >= budget_s * (1 - AGAIN):
                break
            if progress is not None:
                progress(int(spent), int(budget_s), f"{job.workload.kind} {job.precision}")
            try:
                measured += [(job, phase, ns) for phase, ns in job.measure().items() if ns > nothing_ns]
            except (RuntimeError, QSyncError):
                failures += 1  # an operator that this device's kernels refuse (a shape, a format); the note counts them
            if (number + 1) % _CHECK_EVERY == 0:
                levels.append((len(measured), check()))
        levels.append((len(measured), check()))
        record = _record(vector, options.half_format, measured, failures)
        doubtful = [*disturbed(levels), *outliers(record)]
        return _measured_again(record, measured, doubtful, start + budget_s, failures)


def _fixed_work(device: torch.device, stopwatch: Stopwatch) -> Callable[[], float]:
    """A function that times a small product and a copy, in nanoseconds."""
    a, b = torch.ones(256, 256, device=device), torch.ones(2**18, device=device)

    def check() -> float:
        times = []
        for _ in range(REPEATS):
            stopwatch.settle(flush=False)
            times.append(stopwatch.time(lambda: (a @ a, b + b))[1].device_ns)
        return statistics.median(times)

    return check


def disturbed(levels: Sequence[tuple[int, float]]) -> list[int]:
    """Places of measurements near a run of the fixed work that took too long, those of the longest first.

    ``levels`` are the number of measurements before each run, and its time in nanoseconds.
    """
    least = min(ns for _, ns in levels)
    stretches = [
        (max(before_ns, after_ns), first, last)
        for (first, before_ns), (last, after_ns) in itertools.pairwise(levels)
        if max(before_ns, after_ns) > (1 + DISTURBED) * least
    ]
    return [i for _, first, last in sorted(stretches, reverse=True) for i in range(first, last)]


def _measured_again(
    record: CostRecord,
    measured: list[tuple[_Job, Phase, float]],
    doubtful: Sequence[int],
    deadline: float,
    failures: int,
) -> CostRecord:
    """The record with its doubtful samples measured again, in this order, as long as there is time."""
    values = [ns for _, _, ns in measured]
    spreads = [0.0] * len(values)
    places: dict[int, list[int]] = {}
    for i, (job, _, _) in enumerate(measured):
        places.setdefault(id(job), []).append(i)
    done: set[int] = set()
    for i in doubtful:
        if time.monotonic() >= deadline:
            break
        job = measured[i][0]
        if id(job) in done:
            continue
        done.add(id(job))
        try:
            again = job.measure()
        except (RuntimeError, QSyncError):
            continue
        for k in places[id(job)]:
            if (ns := again.get(measured[k][1], 0.0)) > NOTHING * record.devices[0].launch_ns:
                low, high = sorted((values[k], ns))
                values[k], spreads[k] = low, high / low - 1
    pairs = [(job, phase, ns) for (job, phase, _), ns in zip(measured, values, strict=True)]
    result = _record(record.devices[0], record.half_formats[0], pairs, failures)
    samples = tuple(replace(s, spread=round(x, 4)) for s, x in zip(result.samples, spreads, strict=True))
    vector = with_observed_rates(result.devices[0], ((p, s.ns) for p, _, s in result.programs()))
    note = f"{result.note}; {len(done)} of {len(places)} operators measured again, {len(doubtful)} times were doubtful"
    return replace(result, samples=samples, devices=(vector,), note=note)


def _record(
    vector: DeviceVector, half_format: str, measured: list[tuple[_Job, Phase, float]], failures: int
) -> CostRecord:
    places: dict[Workload, int] = {}
    samples = tuple(
        Sample(
            device=0,
            workload=places.setdefault(job.workload, len(places)),
            precision=job.precision,
            phase=phase,
            ns=round(ns),
            model=job.model,
            source=job.source,
            kernel=job.kernel,
        )
        for job, phase, ns in measured
    )
    note = f"{vector.name}: medians of {REPEATS} runs in rounds that agree, torch {torch.__version__}"
    if failures:
        note += f", {failures} operators refused by their kernels"
    return CostRecord(
        devices=(vector,), half_formats=(half_format,), workloads=tuple(places), samples=samples, note=note
    )


def _jobs(
    device: torch.device,
    stopwatch: Stopwatch,
    options: KernelOptions,
    chosen: dict[str, str],
    limits: Limits,
    scale: int,
    seed: int,
) -> Iterator[_Job]:
    """Operators of the captured models in a mixed order, then the sweep without end."""
    # Whether the backward pass is in 8 bits too changes which products run, not how long each takes.
    formats = {p: own for p, own in device_formats(device).items() if not number_format(p).eight_bit_backward}
    outputs = tuple(dict.fromkeys(borders.output for borders in formats.values()))

    def of_operator(candidate: Candidate) -> Iterator[_Job]:
        work = candidate.workload
        precisions: tuple[str, ...] = ("FP32",)
        if work.role is Role.ADJUSTABLE:
            precisions = tuple(p for p in formats if ops.supports(work.kind, p, device))
        elif work.role is Role.DEPENDENT:
            precisions = outputs
        for precision in precisions:
            yield _Job(
                workload=work,
                precision=precision,
                model=candidate.model,
                measure=_operator_measurement(candidate, precision, device, options, stopwatch),
                kernel=_kernel(work.kind, precision, chosen),
            )

    def of_edges(elements: int) -> Iterator[_Job]:
        spec = TensorSpec(shape=(elements // 64, 64), dtype="float32")
        work = Workload(kind="edge", role=Role.DEPENDENT, inputs=(spec,), outputs=(spec,))

        def cast(a: str, b: str) -> dict[Phase, float]:
            return {Phase.CAST: time_cast(a, b, spec, device, options, stopwatch, REPEATS, Rounds())}

        def add(name: str) -> dict[Phase, float]:
            return {Phase.SUM: time_gradient_sum(name, spec, device, stopwatch, REPEATS, Rounds())}

        for a, b in cast_pairs(formats):
            if {a, b} != {"FP32", "TF32"}:
                yield _Job(workload=work, precision=b, source=a, model="edges", measure=functools.partial(cast, a, b))
        for name in outputs:
            yield _Job(workload=work, precision=name, model="edges", measure=functools.partial(add, name))

    rng = random.Random(seed)
    candidates = [c for name, build in MODELS.items() for c in captured(name, *build(scale))]
    rng.shuffle(candidates)
    for candidate in candidates:
        yield from of_operator(candidate)
    for number, candidate in zip(itertools.count(), sweep(limits, seed), strict=False):
        yield from of_operator(candidate)
        if number % _CASTS_EVERY == 0:
            yield from of_edges(64 * max(1, round(limits.elements ** rng.uniform(0.4, 1.0) / 64)))


def _operator_measurement(
    candidate: Candidate, precision: str, device: torch.device, options: KernelOptions, stopwatch: Stopwatch
) -> Callable[[], dict[Phase, float]]:
    def measure() -> dict[Phase, float]:
        bench = OperatorBench(candidate.operator, candidate.call, precision, device, options)
        cost = bench.measure(stopwatch, REPEATS)
        return {Phase.FORWARD: float(cost.forward_ns), Phase.BACKWARD: float(cost.backward_ns)}

    return measure


def _kernel(kind: str, precision: str, chosen: dict[str, str]) -> str:
    """Which kernel of ours runs an 8-bit operator; empty for the framework's own."""
    if precision == "FP8":
        return chosen.get("fp8", "")
    if precision != "INT8":
        return ""
    if base_kind(kind).startswith("conv"):
        return chosen["convolution"]
    return chosen["batched"] if kind in ("bmm", "baddbmm", "matmul") else chosen["linear"]
