"""The page of a report: one HTML file that holds its own style, code and figures, and asks no network for anything.

Names in a problem are untrusted. Markup made here goes through `html.escape`; the figures travel as JSON in which no
``<`` is left; the page's code builds its elements from text only; and a content policy lets nothing run or load but
the style and the code of this package, known by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files

import qsync_opt
from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import write_text
from qsync_opt.report.contents import Report
from qsync_opt.report.markup import front_markup, memory_markup, summary_markup, timeline_markup
from qsync_opt.report.page import report_json

_SCRIPTS = ("base.js", "model.js", "table.js", "charts.js", "timeline.js", "main.js")
_STYLES = ("report.css", "parts.css")
_TOKEN = re.compile(r"\{\{(\w+)\}\}")


def report_html(report: Report, *, note: str = "") -> str:
    """Return the page of a report.

    Args:
        report: The report.
        note: Stands at the end, such as from which files and when the page was made.
    """
    style, script = _joined(_STYLES), _joined(_SCRIPTS)
    parts = {
        "policy": _policy(style, script),
        "version": escape(qsync_opt.__version__),
        "name": escape(report.problem.name),
        "style": style,
        "script": script,
        "summary": summary_markup(report),
        "front": front_markup(report),
        "timeline": timeline_markup(report),
        "memory": memory_markup(report),
        "footer": escape(f"Made by qsync-opt {qsync_opt.__version__}. {note}".strip()),
        "data": json_for_html(report_json(report)),
    }
    # One pass, so that a token inside of a part stays as it is.
    return _TOKEN.sub(lambda match: parts[match[1]], _resource("report.html"))


def write_report(report: Report, path: str | os.PathLike[str], *, note: str = "") -> int:
    """Write the page of a report, whole or not at all, and return its size in bytes.

    Raises:
        ProblemError: The file cannot be written.
    """
    text = report_html(report, note=note)
    write_text(path, text, error=ProblemError)
    return len(text.encode())


def json_for_html(data: object) -> str:
    """JSON that can stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _joined(names: Iterable[str]) -> str:
    return "\n".join(map(_resource, names))


@cache
def _resource(name: str) -> str:
    return (files("qsync_opt.report") / "page" / name).read_text(encoding="utf-8")
