"""The sentences and tables of a report's page, as plain HTML that needs no script."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape

from qsync_opt.costs import estimate_lines
from qsync_opt.io import format_gap, format_memory, format_sensitivity, format_time
from qsync_opt.model import Role
from qsync_opt.report.contents import LOWEST, NO_FRONT, Report
from qsync_opt.training import (
    PROOF_GAP,
    SCHEMES_KEY,
    DeviceEvaluation,
    Evaluation,
    TerminationStatus,
    broken_limits,
    relative_gap,
)

_CLAIM_AGREES = 1e-6
"""Largest relative difference between the objective that a plan file notes and the evaluated one."""
_LEAST_SHARE, _SMALL_SHARE = 0.001, 0.1
"""Shares below the first are not written as numbers; below the second they get a decimal."""
_LARGEST_PERCENTAGE = 3
"""Above this ratio, a factor is written instead of a percentage."""
_LARGEST_USERS = 3
"""Number of operators that are named as the largest users of memory."""
SLOTS = ("INT8", "FP8", "BF16", "FP16", "TF32", "FP32")
"""Formats with a colour of their own (class ``p0`` and so on); others share the next three."""
_SHARED_SLOTS = 3
_UNIT = re.compile(r"(\d) (%|[nµm]?s\b|[KMGT]iB\b)")


def slot(formats: Sequence[str], name: str) -> int:
    """Number of the colour of a format."""
    if name in SLOTS:
        return SLOTS.index(name)
    foreign = [other for other in formats if other not in SLOTS]
    return len(SLOTS) + foreign.index(name) % _SHARED_SLOTS


def summary_markup(report: Report) -> str:
    """Verdict, key figures, a card per device, and the plan beside uniform ones."""
    evaluation = report.evaluation
    state = "good" if evaluation.feasible else "bad"
    estimates = [f"{line[0].upper()}{line[1:]}." for line in estimate_lines(report.problem.extras)]
    notes = [text for text in (*estimates, better_words(report), *measured_words(report)) if text]
    return "\n".join(
        [
            f'<p class="verdict {state}"><strong>{_text(verdict(report))}</strong> {_text(proof_words(report))}</p>',
            f'<ul class="note">{"".join(f"<li>{_text(text)}</li>" for text in notes)}</ul>' if notes else "",
            '<h2 class="hidden">Limits and gains</h2>',
            '<div class="cards">',
            _iteration_card(report),
            *(_device_card(report, device) for device in evaluation.devices.values()),
            "</div>",
            "<h2>Beside uniform precisions</h2>",
            _uniform_table(report),
        ]
    )


def _iteration_card(report: Report) -> str:
    evaluation = report.evaluation
    return card(
        "Whole iteration",
        [
            ("Iteration time", format_time(evaluation.iteration_ns)),
            ("Sensitivity", format_sensitivity(evaluation.objective)),
        ],
        level_bar(evaluation.iteration_ns, evaluation.latency_limit_ns),
        [
            time_words(report),
            "Sensitivity is the variance that low precision adds to the gradient; the plan keeps its sum small.",
        ],
    )


def _device_card(report: Report, device: DeviceEvaluation) -> str:
    count = report.problem.device(device.name).count
    workers = f"{count} worker{'s' if count > 1 else ''}"
    return card(
        f"{device.name} · {workers}",
        [
            ("Memory per worker", format_memory(device.memory_kib)),
            ("Sensitivity", format_sensitivity(device.sensitivity)),
        ],
        level_bar(device.memory_kib, device.memory_limit_kib) + _mix_bar(report, device.name),
        [
            memory_words(report, device),
            mix_words(report, device.name),
            *gain_words(report, device.name),
        ],
    )


def card(title: str, figures: Iterable[tuple[str, str]], drawing: str, sentences: Iterable[str]) -> str:
    """A box with a title, named figures, a drawing (markup) and sentences."""
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures)
    text = "".join(f"<p>{_text(sentence)}</p>" for sentence in sentences)
    return f'<article class="card"><h3><bdi>{_text(title)}</bdi></h3><dl>{rows}</dl>{drawing}{text}</article>'


def level_bar(value: float, limit: float) -> str:
    """A bar of what is used of a limit; the words beside it say the same."""
    share = value / limit if limit else 1.0
    width = min(1000.0, 1000.0 * share)
    state = "over" if share > 1 else "used"
    return _bar(
        f'<rect class="track" width="1000" height="10"/><rect class="{state}" width="{width:.1f}" height="10"/>'
    )


def _mix_bar(report: Report, device: str) -> str:
    counts, formats = _mix(report, device), list(report.problem.formats)
    bars, chips, start = "", "", 0.0
    for name, count in counts.items():
        width = 1000.0 * count / sum(counts.values())
        kind = f"p{slot(formats, name)}"
        bars += f'<rect class="{kind}" x="{start:.1f}" width="{width:.1f}" height="10"/>'
        chips += f'<li><span class="chip {kind}">{_text(name)}</span> {count}</li>'
        start += width
    return f'{_bar(bars)}<ul class="legend" aria-label="Adjustable operators by precision">{chips}</ul>'


def _bar(rectangles: str) -> str:
    shape = 'class="meter" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true"'
    return f"<svg {shape}>{rectangles}</svg>"


def _uniform_table(report: Report) -> str:
    devices = list(report.evaluation.devices)
    header = ["Plan", "Sensitivity", "Iteration time", *(f"Memory {name}" for name in devices), "Limits"]
    rows = [("This plan", report.evaluation)]
    rows += [(f"{'Lowest' if label == LOWEST else label} everywhere", other) for label, other in report.uniform.items()]
    body = [
        [
            label,
            format_sensitivity(evaluation.objective),
            format_time(evaluation.iteration_ns),
            *map(format_memory, evaluation.memory_kib.values()),
            "kept" if evaluation.feasible else "broken",
        ]
        for label, evaluation in rows
    ]
    return table("This plan and plans of one precision", header, body)


def table(caption: str, header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A plain table; the first column names the rows."""
    first, *others = (_text(cell) for cell in header)
    head = f'<th scope="col">{first}</th>' + "".join(f'<th scope="col" class="number">{name}</th>' for name in others)
    rows = "".join(
        f'<tr><th scope="row"><bdi>{_text(row[0])}</bdi></th>'
        + "".join(f'<td class="number">{_text(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in body
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table>'
        f'<caption class="hidden">{_text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def front_markup(report: Report) -> str:
    """How the fronts were computed and what is proved of them."""
    if report.fronts is None:
        return f'<p class="lead">No front was computed (<code>--front {NO_FRONT}</code>).</p>'
    sure = (
        "every point is proved best to the solver's accuracy"
        if report.fronts.method == "exact"
        else "each point is near the best, and the thin line below it is a bound that no plan is under"
    )
    return (
        '<p class="lead">The least sensitivity found for each limit, everything else as in the problem '
        f"(method {_text(report.fronts.method)}: {sure}).</p>"
    )


def timeline_markup(report: Report) -> str:
    """Where the time goes on each device, as a table."""
    evaluation, problem = report.evaluation, report.problem
    header = ["Device", "Forward", "Backward", "Casts", "Optimizer", "Waiting", "Communication", "Hidden of it"]
    body = []
    for device in evaluation.devices.values():
        casts_ns = sum(time.forward_casts_ns + time.backward_casts_ns for time in device.operators)
        forward_ns = sum(time.forward_ns for time in device.operators)
        backward_ns = sum(time.backward_ns for time in device.operators)
        waiting_ns = evaluation.iteration_ns - problem.optimizer_ns - device.backward_end_ns
        spans = zip(evaluation.bucket_start_ns, problem.communication.allreduce_ns, strict=True)
        hidden_ns = sum(max(0, min(start + span, device.backward_end_ns) - start) for start, span in spans)
        body.append(
            [
                device.name,
                *map(format_time, (forward_ns, backward_ns, casts_ns, problem.optimizer_ns, waiting_ns)),
                format_time(sum(problem.communication.allreduce_ns)),
                format_time(hidden_ns),
            ]
        )
    return (
        '<p class="lead">One predicted iteration, laid out from the costs in the problem: one compute and one '
        "communication stream per worker, and one worker for all of its type. Hidden communication runs while the "
        "worker computes.</p>" + table("Where the time of one iteration goes", header, body) + _schemes_markup(report)
    )


def _schemes_markup(report: Report) -> str:
    """The buckets of compressed gradients, as a table; nothing where gradients are not compressed."""
    evaluation, problem = report.evaluation, report.problem
    schemes = problem.extras.get(SCHEMES_KEY)
    if not schemes:
        return ""
    spans = zip(schemes, evaluation.bucket_start_ns, problem.communication.allreduce_ns, strict=True)
    body = [
        [f"b{k}", str(name), format_time(start), format_time(span), format_time(start + span)]
        for k, (name, start, span) in enumerate(spans)
    ]
    header = ["Bucket", "Scheme", "Begins", "Takes", "Ends"]
    if report.reductions:
        header += ["Begins, measured", "Takes, measured", "Ends, measured"]
        for row, each in zip(body, report.reductions, strict=True):
            row += [format_time(each.start_ns), format_time(each.time_ns), format_time(each.end_ns)]
    return table("Schemes of the gradient buckets", header, body)


def memory_markup(report: Report) -> str:
    """For each device its memory in words, and the place of its chart."""
    parts = []
    for number, device in enumerate(report.evaluation.devices.values()):
        sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in peak_words(report, device))
        parts.append(
            f'<h3><bdi>{_text(device.name)}</bdi></h3>{sentences}<div class="chart" id="memory-{number}"></div>'
        )
    return "\n".join(parts)


def _text(value: str) -> str:
    """Text as markup; a number and its unit stay on one line."""
    return escape(_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", value), quote=True)


def verdict(report: Report) -> str:
    """Whether the plan keeps its limits, in one sentence."""
    evaluation = report.evaluation
    if evaluation.feasible:
        return "The plan keeps every limit."
    broken = broken_limits(report.problem, evaluation.devices.values(), evaluation.iteration_ns)
    return f"The plan is not feasible: it breaks {' and '.join(limit.text for limit in broken)}."


def time_words(report: Report) -> str:
    """Iteration time, its limit and what is left, in one sentence."""
    used, limit = report.evaluation.iteration_ns, report.evaluation.latency_limit_ns
    text = f"One iteration takes {format_time(used)} of the {format_time(limit)} allowed"
    return f"{text}: {_left(limit - used, limit, format_time)}."


def memory_words(report: Report, device: DeviceEvaluation) -> str:
    """A device's memory, its limit and what is left, in one sentence."""
    used, limit = device.memory_kib, device.memory_limit_kib
    text = f"It needs {format_memory(used)} of {format_memory(limit)}"
    return f"{text}: {_left(limit - used, limit, format_memory)}."


def _left(margin: float, limit: float, form: Callable[[float], str]) -> str:
    share = f" ({_share(abs(margin) / limit)})" if limit else ""
    return f"{form(abs(margin))}{share} {'are left' if margin >= 0 else 'too much'}"


def _share(value: float) -> str:
    """A part of a whole as a percentage that never rounds to nothing or to all."""
    if 0 < value < _LEAST_SHARE:
        return f"less than {100 * _LEAST_SHARE:g} %"
    if 1 - _LEAST_SHARE < value < 1:
        return f"more than {100 * (1 - _LEAST_SHARE):g} %"
    return f"{100 * value:.1f} %" if value < _SMALL_SHARE else f"{100 * value:.0f} %"


def mix_words(report: Report, device: str) -> str:
    """How many adjustable operators run in which precision, from the lowest up."""
    counts = _mix(report, device)
    if not counts:
        return "It has no adjustable operator."
    parts = [f"{count} in {name}" for name, count in counts.items()]
    return f"Of {sum(counts.values())} adjustable operators run {_listed(parts)}."


def _mix(report: Report, device: str) -> dict[str, int]:
    counts = Counter(e.precision for e in report.explanations[device] if e.role is Role.ADJUSTABLE)
    return {name: counts[name] for name in report.problem.formats if name in counts}


def gain_words(report: Report, device: str) -> list[str]:
    """What the plan gains on a device against the highest precision everywhere and the lowest everywhere."""
    highest = list(report.problem.formats)[-1]
    return [
        _against(report, device, f"{highest} everywhere", report.uniform[highest]),
        _against(report, device, "the lowest precision everywhere", report.uniform[LOWEST]),
    ]


def _against(report: Report, device: str, label: str, other: Evaluation) -> str:
    here, there = report.evaluation.devices[device], other.devices[device]
    changes = [
        _changed(here.backward_end_ns, there.backward_end_ns, "computing time"),
        _changed(here.memory_kib, there.memory_kib, "memory"),
        _changed(here.sensitivity, there.sensitivity, "sensitivity"),
    ]
    text = f"Against {label}: {_listed([c for c in changes if c]) or 'the same'}"
    return text + (". That plan keeps every limit." if other.feasible else "; that plan breaks a limit.")


def _changed(here: float, there: float, what: str) -> str:
    if here == there:
        return f"the same {what}"
    if there == 0:
        return f"{what} {format_sensitivity(here)} instead of 0"
    if here > _LARGEST_PERCENTAGE * there:
        return f"{here / there:.3g} times the {what}"
    return f"{_share(abs(here - there) / there)} {'less' if here < there else 'more'} {what}"


def proof_words(report: Report) -> str:
    """The distance of the plan from the best one at most, with the source of the bound."""
    objective = report.evaluation.objective
    if not report.evaluation.feasible:
        return "A plan that breaks limits has no distance from the best one."
    if report.fronts is not None and report.fronts.best.bound is not None:
        return _distance(
            objective, report.fronts.best.bound, f"bound computed for this report by {report.fronts.method}"
        )
    claim = report.plan.solution or {}
    bound, claimed = _as_number(claim.get("bound")), _as_number(claim.get("objective"))
    if bound is None or claimed is None:
        return "How far it is from the best plan is not known: the plan file has no bound, and none was computed."
    if not math.isclose(claimed, objective, rel_tol=_CLAIM_AGREES, abs_tol=1e-12):
        return (
            f"The plan file claims a sensitivity of {format_sensitivity(claimed)}, which is not what it evaluates to; "
            "its bound is not used."
        )
    return _distance(objective, bound, f"bound as the plan file has it, method {claim.get('method')!r}; not checked")


def _distance(objective: float, bound: float, source: str) -> str:
    gap = relative_gap(objective, bound)
    assert gap is not None
    if gap <= PROOF_GAP:
        return f"Proved optimal: no plan within the limits has a lower sensitivity ({source})."
    return f"At most {format_gap(gap)} above the best possible sensitivity ({source})."


def better_words(report: Report) -> str | None:
    """A sentence if the report's own search has a better plan within the same limits."""
    best = report.fronts.best if report.fronts is not None else None
    if best is None:
        return None
    if best.objective is None:
        if best.termination is TerminationStatus.INFEASIBLE:
            return f"No plan keeps the limits: {best.reason}."
        return f"The search by {best.method} found no plan within the limits."
    objective = report.evaluation.objective
    if best.objective < objective * (1 - PROOF_GAP) or not report.evaluation.feasible:
        return (
            f"{best.method} finds a plan within the limits with sensitivity {format_sensitivity(best.objective)} "
            f"(this one: {format_sensitivity(objective)})."
        )
    return None


def measured_words(report: Report) -> list[str]:
    """Predicted beside measured, one sentence each."""
    measured = report.measured
    if measured is None:
        return []
    sentences = [f"Measured: {measured.source}."]
    if measured.iteration_ns is not None:
        sentences.append(_compared("The iteration", measured.iteration_ns, report.evaluation.iteration_ns, format_time))
    for name, device in measured.devices.items():
        predicted = report.evaluation.devices[name]
        if device.iteration_ns is not None:
            alone_ns = predicted.backward_end_ns + report.problem.optimizer_ns
            sentences.append(_compared(f"{name} alone", device.iteration_ns, alone_ns, format_time))
        if device.peak_memory_bytes is not None:
            kib = device.peak_memory_bytes / 1024
            sentences.append(_compared(f"Peak memory of {name}", kib, predicted.memory_kib, format_memory))
    return sentences


def peak_words(report: Report, device: DeviceEvaluation) -> list[str]:
    """What a device's memory is made of and where its peak is, as far as the problem says."""
    timeline = report.memory[device.name]
    if timeline is None:
        table = report.problem.device(device.name).operators
        costs = sorted(
            ((table[time.name][time.precision].memory_kib, time.name) for time in device.operators), reverse=True
        )
        most = [f"{name} ({format_memory(kib)})" for kib, name in costs[:_LARGEST_USERS] if kib]
        return [
            "Only totals per operator are known: this problem does not say which part of them is there when. The "
            "drawing adds them up in model order, with the cast buffers of each operator's inputs.",
            f"Most is taken by {_listed(most)}." if most else "No operator takes any.",
        ]
    parts = timeline.breakdown
    constant = (
        ("parameters", parts.parameters_bytes),
        ("optimizer state", parts.optimizer_bytes),
        ("all-reduce buckets", parts.buckets_bytes),
    )
    always = [f"{name} ({_bytes(size)})" for name, size in constant if size]
    return [
        f"Throughout the iteration stay {_listed(always)}." if always else "Nothing stays throughout the iteration.",
        f"Activations and cast buffers grow to {_bytes(max(timeline.live_bytes))} until the forward pass ends, "
        "and go as backward runs.",
        f"On top, gradients ({_bytes(parts.gradients_bytes)}) and passing buffers ({_bytes(parts.transient_bytes)}) "
        f"are counted as one allowance that covers their worst moment, at {timeline.peak_operator}; it is drawn "
        "throughout, so the highest point is the memory that is held against the limit.",
    ]


def _bytes(value: int) -> str:
    return format_memory(value / 1024)


def _compared(what: str, measured: float, predicted: float, form: Callable[[float], str]) -> str:
    error = 100 * (predicted / measured - 1)
    return f"{what}: measured {form(measured)}, predicted {form(predicted)} ({error:+.1f} %)."


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}" if parts else ""


def _as_number(value: object) -> float | None:
    """A number that a plan file claims, or None: claims are not checked when a plan is read."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
