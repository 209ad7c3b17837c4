"""The summary of a report in words: how near each limit, what was gained, how good the plan is known to be."""

from __future__ import annotations

import math
from collections.abc import Callable

from qsync_opt.io.quantities import format_gap, format_memory, format_sensitivity, format_time
from qsync_opt.report.contents import LOWEST, Report
from qsync_opt.training.evaluation import DeviceEvaluation, Evaluation
from qsync_opt.training.explanation import broken_limits
from qsync_opt.training.solution import PROOF_GAP, TerminationStatus, relative_gap

_CLAIM_AGREES = 1e-6
"""Largest relative difference between the objective that a plan file notes and the evaluated one."""
_LEAST_SHARE, _SMALL_SHARE = 0.001, 0.1
"""Shares below the first are not written out; below the second they get a decimal."""
_MANY = 3
"""Above this many times, a factor is given instead of a percentage."""
_LARGEST = 3
"""Operators that are named as the largest users of memory."""


def verdict(report: Report) -> str:
    """Whether the plan keeps its limits, in one sentence."""
    evaluation = report.evaluation
    if evaluation.feasible:
        return "The plan keeps every limit."
    broken = broken_limits(report.problem, tuple(evaluation.devices.values()), evaluation.iteration_ns)
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
    chosen = [e.precision for e in report.explanations[device] if e.role == "adjustable"]
    counts = [(chosen.count(name), name) for name in report.problem.formats]
    parts = [f"{count} in {name}" for count, name in counts if count]
    return f"Of {len(chosen)} adjustable operators run {_listed(parts)}." if parts else "It has no adjustable operator."


def gain_words(report: Report, device: str) -> list[str]:
    """What the plan gains on a device against the highest precision everywhere and the lowest everywhere."""
    by_label = {row.label: row.evaluation for row in report.uniform}
    highest = list(report.problem.formats)[-1]
    return [
        _against(report, device, f"{highest} everywhere", by_label[highest]),
        _against(report, device, "the lowest precision everywhere", by_label[LOWEST]),
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
    if here > _MANY * there:
        return f"{here / there:.3g} times the {what}"
    return f"{_share(abs(here - there) / there)} {'less' if here < there else 'more'} {what}"


def proof_words(report: Report) -> str:
    """How far the plan can be from the best one, and who says so."""
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
    """Says so if the report's own search found a better plan within the same limits."""
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
        found = report.evaluation.devices[name]
        if device.iteration_ns is not None:
            alone_ns = found.backward_end_ns + report.problem.optimizer_ns
            sentences.append(_compared(f"{name} alone", device.iteration_ns, alone_ns, format_time))
        if device.peak_memory_bytes is not None:
            kib = device.peak_memory_bytes / 1024
            sentences.append(_compared(f"Peak memory of {name}", kib, found.memory_kib, format_memory))
    return sentences


def peak_words(report: Report, device: DeviceEvaluation) -> list[str]:
    """What a device's memory is made of and where its peak is, as far as the problem tells."""
    curve = report.memory[device.name]
    if curve is None:
        table = report.problem.device(device.name).operators
        costs = sorted(
            ((table[time.name][time.precision].memory_kib, time.name) for time in device.operators), reverse=True
        )
        most = [f"{name} ({format_memory(kib)})" for kib, name in costs[:_LARGEST] if kib]
        return [
            "Only totals per operator are known: this problem does not say which part of them is there when. The "
            "drawing adds them up in model order, with the cast buffers of each operator's inputs.",
            f"Most is taken by {_listed(most)}." if most else "No operator takes any.",
        ]
    parts = curve.breakdown
    constant = (
        ("parameters", parts.parameters_bytes),
        ("optimizer state", parts.optimizer_bytes),
        ("all-reduce buckets", parts.buckets_bytes),
    )
    always = [f"{name} ({_bytes(size)})" for name, size in constant if size]
    held = max(curve.held_bytes)
    return [
        f"Throughout the iteration stay {_listed(always)}." if always else "Nothing stays throughout the iteration.",
        f"Activations and cast buffers grow to {_bytes(held)} until the forward pass ends, and go as backward runs.",
        f"On top, gradients ({_bytes(parts.gradients_bytes)}) and passing buffers ({_bytes(parts.transient_bytes)}) "
        f"are counted as one allowance that covers their worst moment, at {curve.peak_operator}; it is drawn "
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
