"""The parts of a report's page that are words and figures: plain HTML, readable without running any code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from qsync_opt.costs.estimates import estimate_lines
from qsync_opt.io.quantities import format_memory, format_sensitivity, format_time
from qsync_opt.report import words
from qsync_opt.report.contents import LOWEST, Report
from qsync_opt.report.fronts import NO_FRONT
from qsync_opt.training.evaluation import DeviceEvaluation

SLOTS = ("INT8", "FP8", "BF16", "FP16", "TF32", "FP32")
"""Formats that have a colour of their own (class ``p0`` and so on), others share the next three."""
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
    notes = [text for text in (*estimates, words.better_words(report), *words.measured_words(report)) if text]
    return "\n".join(
        [
            f'<p class="verdict {state}"><strong>{_text(words.verdict(report))}</strong> '
            f"{_text(words.proof_words(report))}</p>",
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
    return _card(
        "Whole iteration",
        [
            ("Iteration time", format_time(evaluation.iteration_ns)),
            ("Sensitivity", format_sensitivity(evaluation.objective)),
        ],
        _meter(evaluation.iteration_ns, evaluation.latency_limit_ns),
        [
            words.time_words(report),
            "Sensitivity is the variance that low precision adds to the gradient; the plan keeps its sum small.",
        ],
    )


def _device_card(report: Report, device: DeviceEvaluation) -> str:
    count = report.problem.device(device.name).count
    workers = f"{count} worker{'s' if count > 1 else ''}"
    return _card(
        f"{device.name} · {workers}",
        [
            ("Memory per worker", format_memory(device.memory_kib)),
            ("Sensitivity", format_sensitivity(device.sensitivity)),
        ],
        _meter(device.memory_kib, device.memory_limit_kib) + _mix(report, device.name),
        [
            words.memory_words(report, device),
            words.mix_words(report, device.name),
            *words.gain_words(report, device.name),
        ],
    )


def _card(title: str, figures: Iterable[tuple[str, str]], drawing: str, sentences: Iterable[str]) -> str:
    rows = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in figures)
    text = "".join(f"<p>{_text(sentence)}</p>" for sentence in sentences)
    return f'<article class="card"><h3><bdi>{_text(title)}</bdi></h3><dl>{rows}</dl>{drawing}{text}</article>'


def _meter(value: float, limit: float) -> str:
    """A bar of what is used of a limit; the words beside it say the same."""
    share = value / limit if limit else 1.0
    width = min(1000.0, 1000.0 * share)
    state = "over" if share > 1 else "used"
    return (
        '<svg class="meter" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" width="1000" height="10"/><rect class="{state}" width="{width:.1f}" height="10"/></svg>'
    )


def _mix(report: Report, device: str) -> str:
    """A bar of the precisions of the adjustable operators, with a legend that counts them."""
    formats = list(report.problem.formats)
    chosen = [e.precision for e in report.explanations[device] if e.role == "adjustable"]
    counts = [(name, chosen.count(name)) for name in formats if name in chosen]
    bars, chips, start = [], [], 0.0
    for name, count in counts:
        width = 1000.0 * count / len(chosen)
        kind = f"p{slot(formats, name)}"
        bars.append(f'<rect class="{kind}" x="{start:.1f}" width="{width:.1f}" height="10"/>')
        chips.append(f'<li><span class="chip {kind}">{_text(name)}</span> {count}</li>')
        start += width
    return (
        '<svg class="meter" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">'
        f'{"".join(bars)}</svg><ul class="legend" aria-label="Adjustable operators by precision">{"".join(chips)}</ul>'
    )


def _uniform_table(report: Report) -> str:
    devices = list(report.evaluation.devices)
    header = ["Plan", "Sensitivity", "Iteration time", *(f"Memory {name}" for name in devices), "Limits"]
    rows = [("This plan", report.evaluation)]
    for row in report.uniform:
        label = "Lowest everywhere" if row.label == LOWEST else f"{row.label} everywhere"
        rows.append((label, row.evaluation))
    body = [
        [
            label,
            format_sensitivity(found.objective),
            format_time(found.iteration_ns),
            *(format_memory(kib) for kib in found.memory_kib.values()),
            "kept" if found.feasible else "broken",
        ]
        for label, found in rows
    ]
    return table("This plan and plans of one precision", header, body)


def table(caption: str, header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A plain table; the first column names the rows."""
    head = "".join(f'<th scope="col"{_number(i)}>{_text(cell)}</th>' for i, cell in enumerate(header))
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


def _number(column: int) -> str:
    return ' class="number"' if column else ""


def front_markup(report: Report) -> str:
    """What the fronts are and how sure they are."""
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
        casts_ns = sum(
            cast.duration_ns for time in device.operators for cast in (*time.forward_casts, *time.backward_casts)
        )
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
        "worker computes.</p>" + table("Where the time of one iteration goes", header, body)
    )


def memory_markup(report: Report) -> str:
    """For each device its memory in words, and the place of its drawing."""
    parts = []
    for number, device in enumerate(report.evaluation.devices.values()):
        sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in words.peak_words(report, device))
        parts.append(
            f'<h3><bdi>{_text(device.name)}</bdi></h3>{sentences}<div class="chart" id="memory-{number}"></div>'
        )
    return "\n".join(parts)


def _text(value: str) -> str:
    """Text as markup; a number and its unit stay on one line."""
    return escape(_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", value), quote=True)
