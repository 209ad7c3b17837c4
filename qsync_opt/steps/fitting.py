"""Recorded training steps, and the fit of costs to them: means over equal cases, with the residuals of the fit."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsync_opt.costs import CostFit, DeviceIdentity
from qsync_opt.errors import ProblemError
from qsync_opt.model import OpGraph
from qsync_opt.steps.cases import StepFlow
from qsync_opt.steps.costs import PHASE_LABELS, Case, CaseCost, RecordedTimelines, StepCheck, StepCosts
from qsync_opt.steps.memory import Lifetimes
from qsync_opt.steps.memory_timeline import Block, changes_of, mean_timeline, owner_of, timeline_of
from qsync_opt.steps.queues import NEVER, Work, launched
from qsync_opt.steps.trace import BACKWARD, BEGIN, CLIP, COPIES, END, FORWARD, PHASES, Span, StepSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """Tensors that an operator keeps for the backward pass, and the lifetime of its result.

    Attributes:
        inputs: Positions of inputs whose storage is kept as it arrives.
        output: Whether the result is kept.
        result_bytes: Storage of the result; 0 if it lives in another's.
        root: Operator in whose storage the result lives.
        held_until: Operator during or after which the program released the result; "" if it held it beyond the forward
            pass.
    """

    inputs: tuple[int, ...] = ()
    output: bool = False
    result_bytes: int = 0
    root: str = ""
    held_until: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """A step of one worker under one plan.

    Attributes:
        name: Of the plan.
        precisions: Of the adjustable operators.
        outputs: Format of each operator's result; operators without one, or not observed, are missing.
        spans: Times, from a step that was traced without its memory.
        memory: Changes of memory in the same spans, from another step.
        kept: By observed operator.
        host_ns: By phase, median time on the host of untraced steps.
        iteration_ns: Median time of untraced steps that follow one another without waiting.
        resident_bytes: In use between two steps.
        peak_bytes: Most memory in use during an untraced step.
        latencies_ns: Of untraced steps that each began on an idle device.
        host_unit_ns: Time on the host of a small fixed piece of work, around the untraced steps; 0 if not measured.
        resting_ns: Time on the host of a step in which the runtime stands aside for a plan of FP32 alone, as it does in
            training; 0 for other plans, and where the device takes far longer than the host. ``iteration_ns`` is then
            of such a step too; everything else is of the plan executed like others, because plans that contain FP32
            besides other precisions are.
        host_rounds_ns: Time on the host of a whole step, in each round of the measurement of ``host_ns``.
        graphs: Compiled graphs per pass, 0 if the model was not compiled. For a compiled one, ``kept`` is empty, and
            changes of memory are those up to the peak of the passes.
        blocks: Memory of a compiled step with its lifetimes.
    """

    name: str
    precisions: Mapping[str, str]
    outputs: Mapping[str, str]
    spans: StepSpans
    memory: StepSpans
    kept: Mapping[str, KeptTensors]
    host_ns: Mapping[str, float]
    iteration_ns: float
    resident_bytes: int
    peak_bytes: int
    latencies_ns: tuple[float, ...] = ()
    host_unit_ns: float = 0.0
    resting_ns: float = 0.0
    host_rounds_ns: tuple[float, ...] = ()
    graphs: int = 0
    blocks: tuple[Block, ...] = ()


_EMPTY = Span()
_SHORT_WAIT = 0.05
"""Share of a traced phase that launches may wait: it changes the phase's scale by no more than that."""
_DEVICE_BOUND = 1.3
"""A step that takes this many times the host's time is paced by the device."""
_PACE = 1.1
"""Largest factor by which kernels run slower or faster; anything beyond has another cause and scales none."""


_Conversion = Callable[[str, Span], Work]
"""Of a traced span of a phase to work in untraced steps."""


def _conversion(host_scales: Mapping[str, float], latency_ns: float, gap_ns: float, pace: float) -> _Conversion:
    """From untraced over traced time on the host by phase, traced latency of a launch, gap, and pace of kernels."""

    def work(phase: str, span: Span) -> Work:
        scale = host_scales[phase]
        kernels = [
            (round(offset * scale + latency_ns * scale), round(pace * duration + gap_ns))
            for offset, duration, _ in span.kernels
        ]
        return launched(round(span.host_ns * scale), kernels)

    return work


def fit_step_costs(
    graph: OpGraph,
    samples: Sequence[StepSample],
    device: DeviceIdentity,
    *,
    half_format: str,
    casts: Mapping[str, CostFit] | None = None,
    cast_host_ns: int = 0,
    paces: Mapping[str, float] | None = None,
) -> StepCosts:
    """Fit the costs of cases to recorded steps.

    Args:
        graph: The model.
        samples: Recorded steps under some plans.
        device: Where they were recorded.
        half_format: 16-bit format of the results of 8-bit operators.
        casts: Device time of casts, for cases that were not observed.
        cast_host_ns: Host time of one.
        paces: By plan, the time of kernels in steps that follow one another over their traced time (`kernel_paces`);
            1 if missing.

    Raises:
        ProblemError: No sample, or some compiled and some not.

    Source: ours. A profiler slows the host down; traced times on the host are therefore scaled, per plan and phase, to
        the untraced time of the same phase.
    """
    if not samples:
        raise ProblemError("no recorded step to fit costs to; record at least one plan")
    if len({sample.graphs > 0 for sample in samples}) > 1:
        raise ProblemError("some of the recorded steps were compiled and some not; fit costs to each kind by itself")
    flow = StepFlow(graph, half_format)
    roots, held = _merged(samples)
    lifetimes = Lifetimes(graph, roots, held)
    order = [operator.name for operator in graph]
    scales, gaps = _host_scales(samples), _device_gaps(samples)
    recorded = {phase for sample in samples for phase, _ in sample.spans.spans}
    labels = (*PHASE_LABELS, *(label for label in (COPIES, CLIP) if label in recorded))
    phases: dict[str, list[Work]] = {label: [] for label in labels}
    phase_peaks: dict[str, int] = dict.fromkeys(labels, 0)
    observations: dict[Case, list[CaseCost]] = {}
    outside: list[Sequence[Block]] = []
    timelines: list[RecordedTimelines] = []
    for sample in samples:
        pace = (paces or {}).get(sample.name, 1.0)
        work = _conversion(scales[sample.name], sample.spans.latency_ns, gaps[sample.name], pace)
        owned: dict[str, list[Block]] = {}
        for block in sample.blocks:
            owned.setdefault(owner_of(block, order), []).append(block)
        outside.append(owned.get("", ()))
        cases, formats = _cases(sample, flow)
        observed = _observed(sample, graph, lifetimes, work, formats, owned)
        for case, observation in zip(cases, observed, strict=True):
            observations.setdefault(case, []).append(observation)
        if sample.blocks:
            timelines.append(RecordedTimelines(tuple(cases), tuple(cost.timeline for cost in observed)))
        for label in labels:
            phase, _, end = label.partition("|")
            key = (phase, END if end else BEGIN)
            phases[label].append(work(phase, sample.spans.spans.get(key, _EMPTY)))
            changes = sample.memory.spans.get(key, _EMPTY).changes
            phase_peaks[label] = max(phase_peaks[label], sum(changes) if sample.graphs else _peak(changes))
    return StepCosts(
        device=device,
        model=graph.name,
        fingerprint=graph.fingerprint(),
        half_format=half_format,
        cases={case: _mean_cost(entries) for case, entries in observations.items()},
        phases={label: _mean_work(works) for label, works in phases.items()},
        phase_peaks=phase_peaks,
        roots=roots,
        held=held,
        resident_bytes=max(sample.resident_bytes for sample in samples),
        casts=dict(casts or {}),
        cast_host_ns=cast_host_ns,
        resting_share=_resting_share(samples),
        waits=all(sample.spans.waits for sample in samples),
        graphs=max(sample.graphs for sample in samples),
        outside=_mean_outside(outside, len(graph)),
        timelines=tuple(timelines),
    )


def with_residuals(
    costs: StepCosts, predicted: Mapping[str, tuple[int, int]], samples: Sequence[StepSample]
) -> StepCosts:
    """Costs with their residuals: ``predicted`` has (iteration time, peak bytes) per recorded plan."""
    checks = tuple(
        StepCheck(
            plan=sample.name,
            predicted_ns=predicted[sample.name][0],
            measured_ns=round(sample.iteration_ns),
            predicted_bytes=predicted[sample.name][1],
            measured_bytes=sample.peak_bytes,
        )
        for sample in samples
    )
    return replace(costs, checks=checks)


def kernel_paces(samples: Sequence[StepSample], predicted: Mapping[str, int]) -> dict[str, float]:
    """Time of kernels in steps that follow one another, over their time in a traced step, by plan.

    A card that has been busy for a second runs slower than a rested one, because it keeps to a power limit. Where the
    device paced the untraced steps of a plan, its kernels are scaled to agree with them.

    ``predicted`` is the time of every plan by costs fitted without paces.

    Source: ours.
    """
    paces = {}
    for sample in samples:
        kernels = _kernel_ns(sample)
        if kernels and _is_paced_by_device(sample):
            pace = 1 + (sample.iteration_ns - predicted[sample.name]) / kernels
            if 1 / _PACE <= pace <= _PACE:
                paces[sample.name] = pace
    return paces


def _observed(
    sample: StepSample,
    graph: OpGraph,
    lifetimes: Lifetimes,
    work: _Conversion,
    formats: Sequence[str],
    owned: Mapping[str, Sequence[Block]],
) -> list[CaseCost]:
    """Costs of all operators in one recorded step, in order."""
    tensors = [sample.kept.get(operator.name, KeptTensors()) for operator in graph]
    releases = lifetimes.releases([(one.inputs, one.output) for one in tensors])
    observed = []
    for i, operator in enumerate(graph):
        forward, backward = (sample.spans.spans.get((p, operator.name), _EMPTY) for p in (FORWARD, BACKWARD))
        changes = [sample.memory.spans.get((p, operator.name), _EMPTY).changes for p in (FORWARD, BACKWARD)]
        freed = [sum(tensors[r].result_bytes for r in by_position.get(i, ())) for by_position in releases]
        observed.append(
            CaseCost(
                output=formats[i],
                samples=1,
                forward=work(FORWARD, forward),
                backward=work(BACKWARD, backward),
                saves_inputs=tensors[i].inputs,
                saves_output=tensors[i].output,
                result_bytes=tensors[i].result_bytes,
                forward_net_bytes=sum(changes[0]) + freed[0],
                backward_net_bytes=sum(changes[1]) + freed[1],
                forward_peak_bytes=_peak(changes[0]),
                backward_peak_bytes=_peak(changes[1]),
                kernel_ns=forward.device_ns + backward.device_ns,
                timeline=timeline_of(owned.get(operator.name, ()), i, len(graph)),
            )
        )
    return observed


def _cases(sample: StepSample, flow: StepFlow) -> tuple[list[Case], list[str]]:
    """Case and format of every result of a recorded step; operators that were not observed follow the rules."""
    cases: list[Case] = []
    formats: list[str] = []
    for i, operator in enumerate(flow.graph):
        cases.append(flow.case(i, sample.precisions.get(operator.name, "FP32"), formats))
        output = sample.outputs.get(operator.name)
        formats.append(flow.output(i, cases[i]) if output is None else output)
    return cases, formats


def _merged(samples: Sequence[StepSample]) -> tuple[dict[str, str], dict[str, str]]:
    """Roots and holders over all samples; where plans differ, the longer lifetime counts."""
    roots: dict[str, str] = {}
    held: dict[str, str] = {}
    for sample in samples:
        order = {name: i for i, name in enumerate(sample.kept)}
        for name, kept in sample.kept.items():
            if kept.root != name:
                roots.setdefault(name, kept.root)
            before = held.get(name)
            if before is None or kept.held_until == "" or (before and order[kept.held_until] > order[before]):
                held[name] = kept.held_until
    return roots, held


def _host_scales(samples: Sequence[StepSample]) -> dict[str, dict[str, float]]:
    """Untraced over traced time on the host, by plan and phase.

    Where launches waited long for room in the device's queue, the untraced step has waited too, and the phase takes the
    scale that it has under other plans. A short wait (a kernel that is loaded, a buffer of the profiler) changes the
    scale by no more than its own share.
    """
    scales: dict[str, dict[str, float | None]] = {}
    for sample in samples:
        scales[sample.name] = {}
        for phase in PHASES:
            spans = [span for (p, _), span in sample.spans.spans.items() if p == phase]
            traced = sum(span.host_ns for span in spans)
            waited = sum(span.blocked_ns for span in spans)
            is_known = traced > 0 and waited <= _SHORT_WAIT * (traced + waited)
            scales[sample.name][phase] = sample.host_ns.get(phase, 0.0) / traced if is_known else None
    usual = {phase: _median([by_phase[phase] for by_phase in scales.values()]) for phase in PHASES}
    any_phase = _median(list(usual.values())) or 1.0
    return {
        name: {phase: scale or usual[phase] or any_phase for phase, scale in by_phase.items()}
        for name, by_phase in scales.items()
    }


def _device_gaps(samples: Sequence[StepSample]) -> dict[str, float]:
    """Time on the device from one kernel to the next when both were launched in time, by plan.

    A profiler lengthens it. Where the device paced the untraced steps, it is their time beyond that of their kernels;
    elsewhere the median of such plans, or the traced value if there are none.
    """
    gaps = {}
    for sample in samples:
        count = sum(len(span.kernels) for span in sample.spans.spans.values())
        if count and _is_paced_by_device(sample):
            gap = (sample.iteration_ns - _kernel_ns(sample)) / count
            gaps[sample.name] = min(max(0.0, gap), sample.spans.gap_ns)
    usual = statistics.median(gaps.values()) if gaps else None
    return {sample.name: gaps.get(sample.name, sample.spans.gap_ns if usual is None else usual) for sample in samples}


def _is_paced_by_device(sample: StepSample) -> bool:
    return sample.iteration_ns > _DEVICE_BOUND * sum(sample.host_ns.values())


def _kernel_ns(sample: StepSample) -> int:
    return sum(span.device_ns for span in sample.spans.spans.values())


def _resting_share(samples: Sequence[StepSample]) -> float:
    """Share of the host's time that a plan of FP32 alone takes when the runtime stands aside; at most 1."""
    shares = [sample.resting_ns / sum(sample.host_ns.values()) for sample in samples if sample.resting_ns]
    return min(1.0, statistics.fmean(shares)) if shares else 1.0


def _median(scales: Sequence[float | None]) -> float | None:
    positive = [scale for scale in scales if scale]
    return statistics.median(positive) if positive else None


def _mean_cost(entries: Sequence[CaseCost]) -> CaseCost:
    def of_all(summary: Callable[[Iterator[int]], float], *names: str) -> dict[str, Any]:
        return {name: round(summary(getattr(entry, name) for entry in entries)) for name in names}

    return replace(
        entries[0],
        samples=len(entries),
        forward=_mean_work([entry.forward for entry in entries]),
        backward=_mean_work([entry.backward for entry in entries]),
        **of_all(statistics.fmean, "result_bytes", "forward_net_bytes", "backward_net_bytes", "kernel_ns"),
        **of_all(max, "forward_peak_bytes", "backward_peak_bytes"),
        timeline=mean_timeline([entry.timeline for entry in entries]),
    )


def _mean_work(works: Sequence[Work]) -> Work:
    lags = [work.lag for work in works if work.lag != NEVER]
    return Work(
        round(statistics.fmean(work.host for work in works)),
        round(statistics.fmean(work.device for work in works)),
        round(statistics.fmean(lags)) if lags else NEVER,
    )


def _mean_outside(blocks: Sequence[Sequence[Block]], count: int) -> tuple[tuple[int, int], ...]:
    changes: Counter[int] = Counter()
    for moment, num_bytes in changes_of(itertools.chain(*blocks), count):
        changes[moment] += num_bytes
    return tuple((moment, round(total / len(blocks))) for moment, total in sorted(changes.items()) if total)


def _peak(changes: Sequence[int]) -> int:
    return max(itertools.accumulate(changes, initial=0))
