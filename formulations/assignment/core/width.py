"""How widely is a core searched? As its pass asks, more widely where it is short, and first of all where it is easy.

Source: ours; the numbers are from the solvers' benchmark.
"""

from qsync_opt.formulations.assignment.core.core import Core

_STATES, _NARROW = 6000, 64
"""States of a whole core search that pay at this width, and in proportion: short cores are searched more widely."""
_MOST_EXTENDED = 1_000_000
"""A short core is not searched so widely that a step makes more states than this, which are kept in memory."""
_EASY_NODES, _EASY_MERGED, _EASY_WIDTH = 40, 16, 8192
"""Cores of one row, or so few nodes before or after merging, are closed by a search of this width before a solver."""


def search_width(asked: int, core: Core, merged: Core, *, whole: bool) -> int:
    """Most states that a search of a core keeps at a step; 0: it is left to a solver.

    Args:
        asked: What the pass asks for; 0 where it asks for a solver.
        core: What is open.
        merged: The same, condensed as it is searched.
        whole: Nothing that is open was left out of it.
    """
    if not asked:
        few = len(core.nodes) <= _EASY_NODES or (whole and len(merged.nodes) <= _EASY_MERGED)
        return _EASY_WIDTH if len(core.excess_R) <= 1 or few else 0
    labels = max((len(node.labels_A) for node in merged.nodes), default=1)
    return max(asked, min(_STATES * asked // _NARROW // max(len(merged.nodes), 1), _MOST_EXTENDED // labels))
