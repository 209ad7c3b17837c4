"""Docstrings end a line with two colons before an indented block, as plain text does; a page needs only one."""

from __future__ import annotations

import re
from typing import Any

import griffe

_BEFORE_A_BLOCK = re.compile(r"::[ ]*\n(?=\s*\n[ \t]+)")


class BlockMarkers(griffe.Extension):
    """Replaces ``::`` before an indented block by ``:``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = _BEFORE_A_BLOCK.sub(":\n", obj.docstring.value).replace(" :\n", ":\n")
