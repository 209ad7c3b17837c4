"""The page of a serving plan: stages, bits, both phases, and what was measured beside what was predicted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape

from qsync_opt.costs import estimate_lines
from qsync_opt.errors import ProblemError
from qsync_opt.io import format_gap, format_memory, format_time, write_text
from qsync_opt.report.markup import card, level_bar, table
from qsync_opt.report.plain_page import Section, plain_page
from qsync_opt.serving import Prediction, ServingMeasurement, ServingPlan, StagePrediction


def serving_report_html(result: ServingPlan, *, measured: ServingMeasurement | None = None, note: str = "") -> str:
    """The page of a serving plan, with what was measured of it if that is given.

    Raises:
        ProblemError: There is no plan.
    """
    if result.plan is None:
        raise ProblemError(f"there is no plan to report: {result.reason}")
    prediction = result.predict()
    stages = "".join(_stage(result, stage, k, measured) for k, stage in enumerate(prediction.stages))
    sections = [
        Section(
            "stages",
            "Stages",
            f'<div class="cards">{stages}</div>',
            "Devices in the order in which a token passes them. Times are of one micro-batch, with the message to the "
            "next stage.",
        ),
        Section("phases", "Phases", _phases(result, prediction, measured)),
        Section("bits", "Bits by layer", _bits(result)),
    ]
    return plain_page("serving plan", result.problem.name, _summary(result, prediction), sections, note)


def write_serving_report(
    result: ServingPlan,
    path: str | os.PathLike[str],
    *,
    measured: ServingMeasurement | None = None,
    note: str = "",
) -> int:
    """Write the page of a serving plan, whole or not at all, and return its size in bytes.

    Raises:
        ProblemError: There is no plan, or the file cannot be written.
    """
    text = serving_report_html(result, measured=measured, note=note)
    write_text(path, text, error=ProblemError)
    return len(text.encode())


def _summary(result: ServingPlan, prediction: Prediction) -> str:
    solution, problem = result.solution, result.problem
    gap = solution.gap
    proof = "" if gap is None else f" No plan is more than {format_gap(gap)} faster."
    if solution.termination == "optimal":
        proof = " No plan is faster."
    used = [stage.device for stage in prediction.stages]
    idle = [device.name for device in problem.devices if device.name not in used]
    notes = [f"{line[0].upper()}{line[1:]}." for line in estimate_lines(problem.extras)]
    notes += [f"Left out: {', '.join(idle)}; with a stage there the batch would take no less time."] if idle else []
    limit = problem.harm_limit
    harm = f"Harm {prediction.harm:.4g}" + ("." if limit is None else f" of at most {limit:.4g}.")
    text = (
        f'<p class="verdict good"><strong>{_count(len(used), "stage")} serve the batch in '
        f"{escape(format_time(prediction.evaluation.total_ns))}.</strong>{escape(proof)}</p>"
    )
    return text + '<ul class="note">' + "".join(f"<li>{escape(line)}</li>" for line in [harm, *notes]) + "</ul>"


def _stage(result: ServingPlan, stage: StagePrediction, number: int, measured: ServingMeasurement | None) -> str:
    memory = next(d.memory_kib for d in result.devices if d.name == stage.device)
    sentences = [f"{stage.groups[0]} to {stage.groups[-1]}: {_listed(stage.schemes.items())}."]
    if measured is not None and stage.device in measured.memory_kib:
        actual = measured.memory_kib[stage.device]
        sentences.append(f"Measured: {format_memory(actual)}, {_against(actual, stage.memory_kib)}.")
    return card(
        f"{number + 1}. {stage.device}",
        [
            ("Prefill", format_time(round(stage.prefill_s * 1e9))),
            ("Decode", format_time(round(stage.decode_s * 1e9))),
            ("Memory", f"{format_memory(stage.memory_kib)} of {format_memory(memory)}"),
        ],
        level_bar(stage.memory_kib, memory),
        sentences,
    )


def _phases(result: ServingPlan, prediction: Prediction, measured: ServingMeasurement | None) -> str:
    assert result.plan is not None
    option = result.problem.microbatches[result.plan.microbatch]
    rows = []
    for name, parts, seconds, rate, actual in (
        ("Prefill", option.prefill, prediction.prefill_s, prediction.prefill_tokens_per_s,
         measured and measured.prefill_tokens_per_s),
        ("Decode", option.decode, prediction.decode_s, prediction.decode_tokens_per_s,
         measured and measured.decode_tokens_per_s),
    ):  # fmt: skip
        expected = "-" if rate is None else f"{rate:.4g} tokens/s"
        row = [name, str(parts), format_time(round(seconds * 1e9)), expected]
        if measured is not None:
            row.append("-" if not actual or rate is None else f"{actual:.4g} tokens/s, {_against(actual, rate)}")
        rows.append(row)
    header = ["Phase", "Micro-batches", "Time", "Predicted", *(["Measured"] if measured is not None else [])]
    return table("Both phases of the batch", header, rows)


def _bits(result: ServingPlan) -> str:
    assert result.plan is not None
    layers: dict[str, dict[str, str]] = {}
    for group, scheme in result.plan.schemes.items():
        layer, _, kind = group.partition(".")
        layers.setdefault(layer, {})[kind] = scheme
    where = {group: stage.device for stage in result.plan.stages for group in stage.groups}
    rows = [
        [layer, *(f"{kinds.get(kind, '-')} on {where.get(f'{layer}.{kind}', '-')}" for kind in ("attn", "mlp"))]
        for layer, kinds in layers.items()
    ]
    return table("Scheme and device of each layer", ["Layer", "Attention", "MLP"], rows)


def _against(actual: float, predicted: float) -> str:
    change = actual / predicted - 1
    return f"{abs(change):.1%} {'more' if change > 0 else 'less'} than predicted"


def _listed(counts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{_count(count, 'group')} in {scheme}" for scheme, count in counts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
