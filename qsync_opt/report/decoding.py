"""The page of a speculation plan: what each regime does and why, and what every choice would be worth there.

One self-contained HTML file that runs no script.
"""

from __future__ import annotations

import os
from html import escape

import qsync_opt
from qsync_opt.decoding import Choice, Plan, Problem, Regime, evaluate, expected_tokens, explain
from qsync_opt.errors import ProblemError
from qsync_opt.io import format_time, write_text
from qsync_opt.report.markup import card, level_bar, table
from qsync_opt.report.page import content_hash, styles

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{hash}'; img-src data:; \
base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="qsync-opt {version}">
<link rel="icon" href="data:,">
<title>{name} – speculation plan</title>
<style>{style}</style>
</head>
<body>
<main class="wide">
<section id="summary" aria-labelledby="title">
<p class="eyebrow">Speculation plan</p>
<h1 id="title"><bdi>{name}</bdi></h1>
{summary}
</section>
<section id="regimes" aria-labelledby="regimes-title">
<h2 id="regimes-title">Regimes</h2>
<p class="lead">A regime is a batch and a context. A bar shows the time per token beside that of plain decoding.</p>
{regimes}
</section>
<section id="choices" aria-labelledby="choices-title">
<h2 id="choices-title">All choices</h2>
<p class="lead">Speed-up over plain decoding, at the lower limit, the estimate and the upper limit of what is \
accepted. The plan goes by the value called {confidence}.</p>
{choices}
</section>
</main>
<footer class="wide"><p>{footer}</p></footer>
</body>
</html>
"""


def decoding_report_html(problem: Problem, plan: Plan, *, note: str = "") -> str:
    """The page of a speculation plan.

    Raises:
        ProblemError: The plan does not belong to the problem.
    """
    evaluation, reasons, style = evaluate(problem, plan), explain(problem, plan), styles()
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
    return _PAGE.format(
        hash=content_hash(style),
        version=escape(qsync_opt.__version__),
        name=escape(problem.name),
        style=style,
        summary=f'<p class="verdict good"><strong>{speculating} of {len(problem.regimes)} regimes speculate.</strong>'
        f"{escape(gain)}</p>",
        regimes=f'<div class="cards">{"".join(cards)}</div>',
        choices=table(
            "Speed-up of every choice",
            ["Regime", "Draft", "Length", "Draft / pass", "Judging / pass", "Accepted", "Speed-up"],
            [_row(regime, choice) for regime in problem.regimes for choice in regime.choices],
        ),
        confidence=escape(problem.confidence),
        footer=escape(f"Made by qsync-opt {qsync_opt.__version__}. {note}".strip()),
    )


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
