"""Products with weights of 4 or 8 bits in groups, and activations as they are or rounded: W4A16, W8A16, W4A8.

`pack` rounds a weight once, its inputs rotated first if asked; `linear` multiplies by it on CPUs and cards, from the
same buffer at any activation precision.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.weight_only.host import UNIT
    from qsync_opt.kernels.weight_only.layout import (
        TILE,
        PackedWeight,
        codes_of,
        hadamard,
        pack,
        pack_codes,
        pack_parts,
        rotated_inputs,
    )
    from qsync_opt.kernels.weight_only.operators import explain, gated_linear, linear, unpack
    from qsync_opt.kernels.weight_only.rotation import rotate, rotate_and_round
    from qsync_opt.kernels.weight_only.rounding import ACTIVATIONS, EIGHT_BITS, WIDE, RoundedRows
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACTIVATIONS", "EIGHT_BITS", "TILE", "UNIT", "WIDE", "PackedWeight", "RoundedRows", "codes_of", "explain",
    "gated_linear", "hadamard", "linear", "pack", "pack_codes", "pack_parts", "rotate", "rotate_and_round",
    "rotated_inputs", "unpack",
]  # fmt: skip
