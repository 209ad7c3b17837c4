"""Attention of the newest tokens of sequences over keys and values in pages, without gathering them first."""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.paged_attention.codes import from_halves, in_halves, put_into_pages, to_codes
    from qsync_opt.kernels.paged_attention.operators import PAGE, UNIT, explain, paged_attention
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["PAGE", "UNIT", "explain", "from_halves", "in_halves", "paged_attention", "put_into_pages", "to_codes"]
