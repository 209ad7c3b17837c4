"""The page of a speculation plan: what each regime does and why, and what every choice would be worth there."""

from __future__ import annotations

import os
from html import escape

from qsync_opt.decoding import Choice, Plan, Problem, Regime, evaluate, expected_tokens, explain
from qsync_opt.errors import ProblemError
from qsync_opt.io import format_time, write_text
from qsync_opt.report.markup import card, level_bar, table
from qsync_opt.report.plain_page import Section, plain_page


def decoding_report_html(problem: Problem, plan: Plan, *, note: str = "") -> str:
    """The page of a speculation plan.

    Raises:
        ProblemError: The plan does not belong to the problem.
    """
    evaluation, reasons = evaluate(problem, plan), explain(problem, plan)
    speculating = sum(regime.draft is not None for regime in evaluation.regimes.values())
    plain_ns = sum(regime.weight * regime.plain_ns for regime in problem.regimes)
    gain = f" By weight, decoding is {plain_ns / evaluation.objective:.3f}x as fast as plain." if speculating else ""
    cards = []
    for name, regime in evaluation.regimes.items():
        title = "plain decoding" if regime.draft is None else f"{regime.length} x {regime.draft}"
        figures = [
            ("Does", title),
            ("Time per token", format_time(round(regime.time_per_token_ns))),
            ("Tokens per cycle", f"{regime.tokens_per_cycle:.3g}"),
        ]
        cards.append(card(name, figures, level_bar(regime.time_per_token_ns, regime.plain_ns), [f"{reasons[name]}."]))
    summary = (
        f'<p class="verdict good"><strong>{speculating} of {len(problem.regimes)} regimes speculate.</strong>'
        f"{escape(gain)}</p>"
    )
    choices = table(
        "Speed-up of every choice",
        ["Regime", "Draft", "Length", "Draft / pass", "Judging / pass", "Accepted", "Speed-up"],
        [_row(regime, choice) for regime in problem.regimes for choice in regime.choices],
    )
    sections = [
        Section(
            "regimes",
            "Regimes",
            f'<div class="cards">{"".join(cards)}</div>',
            "A regime is a batch and a context. A bar shows the time per token beside that of plain decoding.",
        ),
        Section(
            "choices",
            "All choices",
            choices,
            "Speed-up over plain decoding, at the lower limit, the estimate and the upper limit of what is accepted. "
            f"The plan goes by the value called {escape(problem.confidence)}.",
        ),
    ]
    return plain_page("speculation plan", problem.name, summary, sections, note)


def write_decoding_report(problem: Problem, plan: Plan, path: str | os.PathLike[str], *, note: str = "") -> int:
    """Write the page of a speculation plan, whole or not at all, and return its size in bytes.

    Raises:
        ProblemError: The plan does not belong to the problem, or the file cannot be written.
    """
    text = decoding_report_html(problem, plan, note=note)
    write_text(path, text, error=ProblemError)
    return len(text.encode())


def _row(regime: Regime, choice: Choice) -> list[str]:
    def ratio(value_ns: float, over_ns: float) -> str:
        return f"{value_ns / over_ns:.3f}" if over_ns else "-"

    values = [
        value for value in (choice.acceptance.low, choice.acceptance.mid, choice.acceptance.high) if value is not None
    ]
    speedups = [ratio(regime.plain_ns * expected_tokens(value, choice.length), choice.cycle_ns) for value in values]
    return [
        regime.name,
        choice.draft,
        str(choice.length),
        ratio(choice.draft_ns, regime.plain_ns),
        ratio(choice.verify_ns, regime.plain_ns),
        " - ".join(f"{value:.3f}" for value in values),
        " - ".join(speedups),
    ]
