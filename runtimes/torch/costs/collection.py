"""Collection of measured times of operators into a record, inside a time budget."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
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
from qsync_opt.runtimes.torch.support import Stopwatch, make_stopwatch

REPEATS = 5
"""Runs per round of measuring."""
AGAIN = 0.15
"""Share of the time budget that is kept for measuring outliers again."""
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
    progress: Report | None = None,
) -> CostRecord:
    """Measure operators of captured models and of random shapes in every precision of a device.

    Medians of repeated rounds are taken as in profiles. Times that stand out among operators of their kind are measured
    again, and the lower time is kept. The result depends on the machine, but the order of operators only on ``seed``.

    Args:
        device: ``cpu`` or a CUDA device; set the number of threads before.
        budget_s: Seconds after which measuring ends; a running measurement is finished.
        name: Of the device, for a partition of a card or a number of threads.
        seed: Of the random shapes.
        limits: Largest operators of the sweep.
        scale: Of the captured models' sizes; 1 on a cpu, 8 on a card.
        progress: Called with (seconds spent, budget, what is measured).

    Raises:
        UnsupportedError: The device is neither cpu nor cuda, or is not there.
        ProblemError: The budget is not above zero, or not even 40 times fit into it.
    """
    device = backend.known_device(device)
    check_number(budget_s, "time budget in seconds")
    start = time.monotonic()
    vector = probe_device(device, name)
    stopwatch = make_stopwatch(device)
    options = replace(KernelOptions(), half_format=backend.half_format(device))
    limits = limits or LIMITS[device.type]
    chosen = backend.explain(device)
    jobs = _jobs(device, stopwatch, options, chosen, limits, scale or (8 if device.type == "cuda" else 1), seed)
    measured: list[tuple[_Job, Phase, float]] = []
    failures = 0
    for job in jobs:
        spent = time.monotonic() - start
        if spent >= budget_s * (1 - AGAIN):
            break
        if progress is not None:
            progress(int(spent), int(budget_s), f"{job.workload.kind} {job.precision}")
        try:
            measured += [(job, phase, ns) for phase, ns in job.measure().items() if ns > 0]
        except (RuntimeError, NotImplementedError, QSyncError):
            failures += 1  # an operator that this device's kernels refuse (a shape, a format); the note counts them
    record = _record(vector, options.half_format, measured, failures)
    return _measured_again(record, measured, start + budget_s, failures)


def _measured_again(
    record: CostRecord, measured: list[tuple[_Job, Phase, float]], deadline: float, failures: int
) -> CostRecord:
    """The record with its outliers measured again, as long as there is time, the worst first."""
    values = [ns for _, _, ns in measured]
    spreads = [0.0] * len(values)
    count = 0
    for i in outliers(record):
        if time.monotonic() >= deadline:
            break
        job, phase, _ = measured[i]
        try:
            again = job.measure().get(phase, 0.0)
        except (RuntimeError, NotImplementedError, QSyncError):
            continue
        count += 1
        if again > 0:
            low, high = sorted((values[i], again))
            values[i], spreads[i] = low, high / low - 1
    pairs = [(job, phase, ns) for (job, phase, _), ns in zip(measured, values, strict=True)]
    result = _record(record.devices[0], record.half_formats[0], pairs, failures)
    samples = tuple(replace(s, spread=round(x, 4)) for s, x in zip(result.samples, spreads, strict=True))
    vector = with_observed_rates(result.devices[0], ((p, s.ns) for p, _, s in result.programs()))
    note = f"{result.note}; {count} outliers measured again"
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
        if round(ns) > 0
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
