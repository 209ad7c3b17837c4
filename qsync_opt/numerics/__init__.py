"""Number formats and the error of rounding to them.

Formats have widths, ranges and an order of precision; rounding errors have closed-form variances.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.numerics.formats import (
        BACKWARD,
        CAST_FORMATS,
        FORMATS,
        GRADIENT_KINDS,
        LARGEST,
        SCALED_FORMATS,
        WIDE_FP8,
        WIDE_FP8_LARGEST,
        WIDE_FP8_MANTISSA_BITS,
        WIDE_FP8_SMALLEST_EXPONENT,
        FormatQuantizer,
        Granularity,
        PrecisionFormats,
        Quantizer,
        Rounding,
        border_format,
        check_precisions,
        closed_form_variance,
        closest_precision,
        fixed_point_variance,
        floating_point_variance,
        formats_for,
        is_eight_bit,
        noise_kind,
        noise_kinds,
        number_format,
        smallest_exponent,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "BACKWARD", "CAST_FORMATS", "FORMATS", "GRADIENT_KINDS", "LARGEST", "SCALED_FORMATS", "WIDE_FP8",
    "WIDE_FP8_LARGEST", "WIDE_FP8_MANTISSA_BITS", "WIDE_FP8_SMALLEST_EXPONENT", "FormatQuantizer", "Granularity",
    "PrecisionFormats", "Quantizer", "Rounding", "border_format", "check_precisions", "closed_form_variance",
    "closest_precision", "fixed_point_variance", "floating_point_variance", "formats_for", "is_eight_bit", "noise_kind",
    "noise_kinds", "number_format", "smallest_exponent",
]  # fmt: skip
