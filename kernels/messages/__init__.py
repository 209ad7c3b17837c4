"""Rows of embeddings as messages of 1 to 8, 16 or 32 bits: gather, range, unbiased rounding and packing, and back.

The compiled loops and CUDA kernels equal the plain PyTorch implementation bit for bit.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.messages.rows import PACKED, UNIT, WIDTHS, pack_rows, row_bytes, row_key, unpack_rows
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["PACKED", "UNIT", "WIDTHS", "pack_rows", "row_bytes", "row_key", "unpack_rows"]
