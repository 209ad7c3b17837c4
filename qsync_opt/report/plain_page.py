"""A page of sections in one self-contained HTML file that runs no script: reports of systems beside training."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

import qsync_opt
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
<title>{name} – {kind}</title>
<style>{style}</style>
</head>
<body>
<main class="wide">
<section id="summary" aria-labelledby="title">
<p class="eyebrow">{eyebrow}</p>
<h1 id="title"><bdi>{name}</bdi></h1>
{summary}
</section>
{sections}
</main>
<footer class="wide"><p>{footer}</p></footer>
</body>
</html>
"""


class Section(NamedTuple):
    """A part of a page: its anchor, its title, and its content and the lines before it as HTML."""

    name: str
    title: str
    body: str
    lead: str = ""

    def markup(self) -> str:
        """The section as HTML."""
        lead = f'<p class="lead">{self.lead}</p>\n' if self.lead else ""
        return (
            f'<section id="{self.name}" aria-labelledby="{self.name}-title">\n'
            f'<h2 id="{self.name}-title">{self.title}</h2>\n{lead}{self.body}\n</section>'
        )


def plain_page(kind: str, name: str, summary: str, sections: Iterable[Section], note: str) -> str:
    """The page of what ``name`` says, such as a ``"serving plan"``, which ends with ``note``.

    ``summary`` is HTML; ``name`` and ``note`` are text.
    """
    style = styles()
    return _PAGE.format(
        hash=content_hash(style),
        version=escape(qsync_opt.__version__),
        name=escape(name),
        kind=kind,
        eyebrow=kind.capitalize(),
        style=style,
        summary=summary,
        sections="\n".join(section.markup() for section in sections),
        footer=escape(f"Made by qsync-opt {qsync_opt.__version__}. {note}".strip()),
    )
