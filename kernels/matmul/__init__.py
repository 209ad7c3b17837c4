"""Matrix products of 8-bit codes: with scales, bias and activation fused, or exact in INT32.

`scaled_mm` takes the tile that is tuned for the shape and the card; `integer` has the products of CPUs.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.matmul import half, integer, scaled, tiles, tuning
    from qsync_opt.kernels.matmul.half import (
        half_matmul,
        has_half_attention,
        has_half_units,
        matrix_product,
        product_dtype,
    )
    from qsync_opt.kernels.matmul.integer import (
        code_sums,
        convolution_sums,
        exact_convolution,
        has_native_product,
        has_onednn_convolution,
        has_onednn_linear,
        int8_bmm,
        int8_mm,
    )
    from qsync_opt.kernels.matmul.scaled import scaled_mm, scaled_mm_amax, scaled_mm_aux, scaled_mm_unchecked
    from qsync_opt.kernels.matmul.tiles import (
        TABLES,
        Choice,
        ProductKind,
        activate,
        choice_of,
        kind_of,
        read_choices,
        write_choices,
    )
    from qsync_opt.kernels.matmul.tuning import operand_sets
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "TABLES", "Choice", "ProductKind", "activate", "choice_of", "code_sums", "convolution_sums", "exact_convolution",
    "half", "half_matmul", "has_half_attention", "has_half_units", "has_native_product", "has_onednn_convolution",
    "has_onednn_linear", "int8_bmm", "int8_mm", "integer", "kind_of", "matrix_product", "operand_sets",
    "product_dtype", "read_choices", "scaled", "scaled_mm", "scaled_mm_amax", "scaled_mm_aux", "scaled_mm_unchecked",
    "tiles", "tuning", "write_choices",
]  # fmt: skip
