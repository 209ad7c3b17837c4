"""Formulas as MathML, made while the site is built, so that a page needs no script and no network to show them."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def with_mathml(page: str) -> str:
    """Return a page's HTML with every LaTeX formula as MathML; the LaTeX stays as the formula's annotation."""
    page = _INLINE.sub(lambda found: _mathml(found[1], "inline"), page)
    return _BLOCK.sub(lambda found: f'<div class="formula" tabindex="0">{_mathml(found[1], "block")}</div>', page)


def _mathml(escaped: str, display: str) -> str:
    latex = html.unescape(escaped).strip()
    return convert(latex, display=display).replace("<math ", f'<math aria-label="{html.escape(latex)}" ', 1)
