"""From recorded steps to costs of cases: means over everything that was the same, with the residual beside them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from qsync_opt.costs import CostFit, DeviceIdentity
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import number_format
from qsync_opt.steps.cases import StepFlow, arrival, delivered, width
from qsync_opt.steps.costs import SIZES, Case, CaseCost, RecordedCourses, StepCheck, StepCosts
from qsync_opt.steps.courses import Block, Course, changes_of, course_of, mean_course, owner_of, scaled_course
from qsync_opt.steps.memory import Kept, Lifetimes
from qsync_opt.steps.queues import NEVER, Work, launched
from qsync_opt.steps.sample import KeptTensors, StepSample
from qsync_opt.steps.trace import BACKWARD, BEGIN, FORWARD, PHASES, Span, StepSpans

_TIMES = ("forward", "backward")


def scaled_costs(graph: OpGraph, costs: StepCosts, available: Mapping[str, Sequence[str]]) -> StepCosts:
    """Step costs in which every adjustable operator has each of its precisions, scaled where it was not recorded.

    Args:
        graph: The model.
        costs: Observed.
        available: Precisions of every adjustable operator; one that no operator was recorded in stays away, because
            nothing tells what it costs.

    Source: ours.
    """
    flow = StepFlow(graph, costs.half_format)
    table = _by_operator(costs)
    added: dict[Case, CaseCost] = {}
    kinds: dict[str, str] = {flow.signature(i): operator.op_type for i, operator in enumerate(graph)}
    for i, operator in enumerate(graph):
        if operator.role is not Role.ADJUSTABLE:
            continue
        signature = flow.signature(i)
        recorded = table.get(signature, {})
        for precision in available.get(operator.name, ()):
            if precision in recorded or not recorded:
                continue
            rank, wide = number_format(precision).rank, width(arrival(precision))
            source = min(recorded, key=lambda p: (width(arrival(p)) != wide, abs(number_format(p).rank - rank)))
            pairs = _pairs(table, kinds, operator.op_type, source, precision)
            if pairs:
                case, cost = _scaled(operator, signature, source, precision, recorded[source], pairs, costs.half_format)
                added[case] = cost
    return replace(costs, cases={**costs.cases, **added}) if added else costs


def scaled_operators(graph: OpGraph, costs: StepCosts) -> dict[tuple[str, str], tuple[str, ...]]:
    """(Precision, precision that it was scaled from) to the operators concerned, in the order of the graph."""
    flow = StepFlow(graph, costs.half_format)
    marked: dict[str, dict[str, str]] = {}
    for case, cost in costs.cases.items():
        if cost.scaled_from:
            marked.setdefault(case.signature, {})[case.precision] = cost.scaled_from
    found: dict[tuple[str, str], list[str]] = {}
    for i, operator in enumerate(graph):
        for precision, source in marked.get(flow.signature(i), {}).items():
            found.setdefault((precision, source), []).append(operator.name)
    return {pair: tuple(names) for pair, names in found.items()}


def _by_operator(costs: StepCosts) -> dict[str, dict[str, tuple[Case, CaseCost]]]:
    """Signature to precision to the case that was met most often."""
    table: dict[str, dict[str, tuple[Case, CaseCost]]] = {}
    for case, cost in costs.cases.items():
        if case.precision and not cost.scaled_from:
            entry = table.setdefault(case.signature, {})
            if case.precision not in entry or entry[case.precision][1].samples < cost.samples:
                entry[case.precision] = (case, cost)
    return table


def _pairs(
    table: Mapping[str, Mapping[str, tuple[Case, CaseCost]]],
    kinds: Mapping[str, str],
    kind: str,
    source: str,
    target: str,
) -> list[tuple[CaseCost, CaseCost]]:
    """Costs of operators that were recorded in both precisions: of the same kind if there are any, else all."""

    def both(signatures: Iterable[str]) -> Iterator[tuple[CaseCost, CaseCost]]:
        for signature in signatures:
            entry = table[signature]
            if source in entry and target in entry:
                yield entry[source][1], entry[target][1]

    return list(both(s for s in table if kinds.get(s) == kind)) or list(both(table))


def _scaled(
    operator: Operator,
    signature: str,
    source: str,
    precision: str,
    known: tuple[Case, CaseCost],
    pairs: Sequence[tuple[CaseCost, CaseCost]],
    half_format: str,
) -> tuple[Case, CaseCost]:
    case, cost = known
    wanted = arrival(precision)
    inputs = tuple(wanted if name else "" for name in case.inputs) if wanted else case.inputs
    changes: dict[str, object] = {
        name: _scaled_work(getattr(cost, name), [(getattr(a, name), getattr(b, name)) for a, b in pairs])
        for name in _TIMES
    }
    alike = width(arrival(source)) == width(wanted)
    for name in ("kernel_ns",) if alike else (*SIZES, "kernel_ns"):  # equal widths take equal memory
        before, after = (sum(abs(getattr(pair[k], name)) for pair in pairs) for k in (0, 1))
        changes[name] = round(getattr(cost, name) * after / before) if before else getattr(cost, name)
    if cost.course and not alike:
        before, after = (sum(abs(entry[2]) for pair in pairs for entry in pair[k].course) for k in (0, 1))
        changes["course"] = scaled_course(cost.course, after / before if before else 1.0)
    changed = replace(
        cost,
        output=delivered(operator, precision, inputs, half_format),
        samples=0,
        scaled_from=source,
        **changes,  # type: ignore[arg-type]
    )
    return Case(signature, precision, inputs), changed


def _scaled_work(work: Work, pairs: Sequence[tuple[Work, Work]]) -> Work:
    host, device = (_ratio([(a[k], b[k]) for a, b in pairs]) for k in (0, 1))
    lag = work.lag if work.lag == NEVER else round(work.lag * (device if work.device else host))
    return Work(round(work.host * host), round(work.device * device), lag)


def _ratio(pairs: Sequence[tuple[int, int]]) -> float:
    before, after = (sum(pair[k] for pair in pairs) for k in (0, 1))
    return after / before if before and after else 1.0


_EMPTY = Span()
_SHORT_WAIT = 0.05
"""Share of a traced phase that launches may wait without putting its scale in doubt by more than that."""
_DEVICE_BOUND = 1.3
"""A step that takes this many times what the host needs is paced by the device."""
_PACE = 1.1
"""Kernels do not run slower, or faster, by more than this: what is further off has another reason and scales none."""
PHASE_LABELS = ("forward", "forward|end", "backward", "backward|end", "optimizer", "zero_grad")
_SOME = ("copies", "clip")
"""Phases that some steps have."""


@dataclass(slots=True)
class _Sums:
    """Running sums of one case."""

    output: str
    saves: Kept
    count: int = 0
    forward: list[Work] = field(default_factory=list)
    backward: list[Work] = field(default_factory=list)
    result: int = 0
    nets: list[tuple[int, int]] = field(default_factory=list)
    peaks: list[tuple[int, int]] = field(default_factory=list)
    kernels: int = 0
    courses: list[dict[tuple[int, int], int]] = field(default_factory=list)


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
        half_format: 16-bit format that 8-bit operators deliver.
        casts: Device time of casts, for cases that were not met.
        cast_host_ns: Host time of one.
        paces: By plan, what kernels of steps that follow one another take, over what they took while traced
            (`kernel_paces`); others take as long.

    Raises:
        ProblemError: No sample, or some compiled and some not.

    Source: ours. A profiler slows the host down; so what it saw there is scaled, per plan and phase, to what the same
        phase took untraced.
    """
    if not samples:
        raise ProblemError("no recorded step to fit costs to; record at least one plan")
    if len({sample.graphs > 0 for sample in samples}) > 1:
        raise ProblemError("some of the recorded steps were compiled and some not; fit costs to each kind by itself")
    flow = StepFlow(graph, half_format)
    roots, held = _merged(samples)
    lifetimes = Lifetimes(graph, roots, held)
    sums: dict[Case, _Sums] = {}
    scales = _host_scales(samples)
    gaps = _device_gaps(samples)
    met = {phase for sample in samples for phase, _ in sample.spans.spans}
    labels = (*PHASE_LABELS, *(label for label in _SOME if label in met))
    phases: dict[str, list[Work]] = {label: [] for label in labels}
    phase_peaks: dict[str, int] = dict.fromkeys(labels, 0)
    outside: list[list[Block]] = []
    order = [operator.name for operator in graph]
    courses: list[RecordedCourses] = []
    for sample in samples:
        formats = sample_formats(sample, flow, half_format)
        kept = [
            Kept(seen.inputs, seen.output)
            for seen in (sample.kept.get(operator.name, KeptTensors()) for operator in graph)
        ]
        sizes = [sample.kept.get(operator.name, KeptTensors()).result_bytes for operator in graph]
        releases = lifetimes.releases(kept)
        owned: dict[str, list[Block]] = {}
        for block in sample.blocks:
            owned.setdefault(owner_of(block, order), []).append(block)
        outside.append(owned.get("", []))
        cases: list[Case] = []
        own_courses: list[Course] = []
        scale, gap, pace = scales[sample.name], gaps[sample.name], (paces or {}).get(sample.name, 1.0)
        for i, operator in enumerate(graph):
            case = flow.case(i, sample.precisions.get(operator.name, "FP32"), formats)
            cases.append(case)
            entry = sums.setdefault(case, _Sums(output=formats[i], saves=kept[i]))
            forward, backward = (sample.spans.spans.get((p, operator.name), _EMPTY) for p in (FORWARD, BACKWARD))
            entry.count += 1
            entry.forward.append(_work(forward, sample.spans, scale[FORWARD], gap, pace))
            entry.backward.append(_work(backward, sample.spans, scale[BACKWARD], gap, pace))
            entry.kernels += forward.device_ns + backward.device_ns
            entry.result += sizes[i]
            changes = [sample.memory.spans.get((p, operator.name), _EMPTY).changes for p in (FORWARD, BACKWARD)]
            freed = [sum(sizes[r] for r in found.get(i, ())) for found in (releases.forward, releases.backward)]
            entry.nets.append((sum(changes[0]) + freed[0], sum(changes[1]) + freed[1]))
            entry.peaks.append((_peak(changes[0]), _peak(changes[1])))
            if sample.blocks:
                course = course_of(owned.get(operator.name, ()), i, len(graph))
                entry.courses.append(course)
                own_courses.append(mean_course([course]))
        if sample.blocks:
            courses.append(RecordedCourses(tuple(cases), tuple(own_courses)))
        for label in labels:
            phase, _, end = label.partition("|")
            key = (phase, "|end" if end else BEGIN)
            span = sample.spans.spans.get(key, _EMPTY)
            phases[label].append(_work(span, sample.spans, scale[phase], gap, pace))
            sizes_bytes = sample.memory.spans.get(key, _EMPTY).changes
            phase_peaks[label] = max(phase_peaks[label], sum(sizes_bytes) if sample.graphs else _peak(sizes_bytes))
    return StepCosts(
        device=device,
        model=graph.name,
        fingerprint=graph.fingerprint(),
        half_format=half_format,
        cases={case: _mean_cost(entry) for case, entry in sums.items()},
        phases={label: _mean(works) for label, works in phases.items()},
        phase_peaks=phase_peaks,
        roots=roots,
        held=held,
        resident_bytes=max(sample.resident_bytes for sample in samples),
        casts=dict(casts or {}),
        cast_host_ns=cast_host_ns,
        resting_share=_resting_share(samples),
        waits=all(sample.spans.waits for sample in samples),
        graphs=max(sample.graphs for sample in samples),
        outside=_outside(outside, len(graph)),
        courses=tuple(courses),
    )


def _outside(blocks: Sequence[Sequence[Block]], count: int) -> tuple[tuple[int, int], ...]:
    """Mean changes of what belongs to no operator, by moment."""
    found: dict[int, int] = {}
    for moment, num_bytes in changes_of(itertools.chain(*blocks), count):
        found[moment] = found.get(moment, 0) + num_bytes
    return tuple((moment, round(total / len(blocks))) for moment, total in sorted(found.items()) if total)


def _resting_share(samples: Sequence[StepSample]) -> float:
    """What a plan of FP32 alone takes of the host when it stands aside; it never takes more."""
    shares = [sample.resting_ns / sum(sample.host_ns.values()) for sample in samples if sample.resting_ns]
    return min(1.0, statistics.fmean(shares)) if shares else 1.0


def checked(costs: StepCosts, predicted: Mapping[str, tuple[int, int]], samples: Sequence[StepSample]) -> StepCosts:
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


def sample_formats(sample: StepSample, flow: StepFlow, half_format: str) -> list[str]:
    """Format of every result of a recorded step; operators that were not met follow the rules."""
    formats: list[str] = []
    for i, operator in enumerate(flow.graph):
        seen = sample.outputs.get(operator.name)
        if seen is None:
            precision = sample.precisions.get(operator.name, "FP32")
            seen = delivered(operator, precision, [formats[source] for source in flow.inputs[i]], half_format)
        formats.append(seen)
    return formats


def _merged(samples: Sequence[StepSample]) -> tuple[dict[str, str], dict[str, str]]:
    """Roots and holders over all samples; where plans differ, the longer life counts."""
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

    Where launches waited for room in the device's queue for long, the untraced step has waited too, and the scale that
    the phase has under other plans is taken. A short wait (a kernel that is loaded, a buffer of the profiler) changes
    the scale by no more than its own share.
    """
    scales: dict[str, dict[str, float | None]] = {}
    for sample in samples:
        scales[sample.name] = {}
        for phase in PHASES:
            spans = [span for (p, _), span in sample.spans.spans.items() if p == phase]
            traced = sum(span.host_ns for span in spans)
            waited = sum(span.blocked_ns for span in spans)
            measured = sample.host_ns.get(phase, 0.0)
            known = traced > 0 and waited <= _SHORT_WAIT * (traced + waited)
            scales[sample.name][phase] = measured / traced if known else None
    usual = {phase: _usual([by_phase[phase] for by_phase in scales.values()]) for phase in PHASES}
    any_phase = _usual(list(usual.values())) or 1.0
    return {
        name: {phase: scale or usual[phase] or any_phase for phase, scale in by_phase.items()}
        for name, by_phase in scales.items()
    }


def _paced_by_device(sample: StepSample) -> bool:
    return sample.iteration_ns > _DEVICE_BOUND * sum(sample.host_ns.values())


def kernel_paces(samples: Sequence[StepSample], predicted: Mapping[str, int]) -> dict[str, float]:
    """What kernels take in steps that follow one another, over what they took in a traced one, by plan.

    A card that has been busy for a second runs slower than one that has rested, because it keeps to a power limit. So
    where the device paced the untraced steps of a plan, its kernels are scaled such that they come out.

    Args:
        samples: Recorded steps.
        predicted: Their time by costs fitted without paces.

    Source: ours.
    """
    found = {}
    for sample in samples:
        kernels = _kernel_ns(sample)
        if kernels and _paced_by_device(sample):
            pace = 1 + (sample.iteration_ns - predicted[sample.name]) / kernels
            if 1 / _PACE <= pace <= _PACE:
                found[sample.name] = pace
    return found


def _kernel_ns(sample: StepSample) -> int:
    return sum(span.device_ns for span in sample.spans.spans.values())


def _usual(scales: Sequence[float | None]) -> float | None:
    known = [scale for scale in scales if scale]
    return statistics.median(known) if known else None


def _device_gaps(samples: Sequence[StepSample]) -> dict[str, float]:
    """What passes on the device from one kernel to the next when both were launched in time, by plan.

    A profiler makes it longer. Where the device paced the untraced steps, it is what those took beyond their kernels;
    elsewhere the median of such plans, or what the profiler saw if there are none.
    """
    known = {}
    for sample in samples:
        count = sum(len(span.kernels) for span in sample.spans.spans.values())
        if count and _paced_by_device(sample):
            gap = (sample.iteration_ns - _kernel_ns(sample)) / count
            known[sample.name] = min(max(0.0, gap), sample.spans.gap_ns)
    usual = statistics.median(known.values()) if known else None
    return {sample.name: known.get(sample.name, sample.spans.gap_ns if usual is None else usual) for sample in samples}


def _work(span: Span, step: StepSpans, scale: float, gap_ns: float, pace: float) -> Work:
    kernels = [
        (round(offset * scale + step.latency_ns * scale), round(pace * duration + gap_ns))
        for offset, duration, _ in span.kernels
    ]
    return launched(round(span.host_ns * scale), kernels)


def _mean(works: Sequence[Work]) -> Work:
    lags = [work.lag for work in works if work.lag != NEVER]
    return Work(
        round(statistics.fmean(work.host for work in works)),
        round(statistics.fmean(work.device for work in works)),
        round(statistics.fmean(lags)) if lags else NEVER,
    )


def _mean_cost(entry: _Sums) -> CaseCost:
    forward_net, backward_net = (round(statistics.fmean(column)) for column in zip(*entry.nets, strict=True))
    forward_peak, backward_peak = (max(column) for column in zip(*entry.peaks, strict=True))
    return CaseCost(
        output=entry.output,
        samples=entry.count,
        forward=_mean(entry.forward),
        backward=_mean(entry.backward),
        saves_inputs=entry.saves.inputs,
        saves_output=entry.saves.output,
        result_bytes=round(entry.result / entry.count),
        forward_net_bytes=forward_net,
        backward_net_bytes=backward_net,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        kernel_ns=round(entry.kernels / entry.count),
        course=mean_course(entry.courses),
    )


def _peak(changes: Sequence[int]) -> int:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most
