"""Quantizers: how values become fewer bits, whether the result is unbiased, and the variance that costs.

Planners compare quantizers by these three figures alone; the kernels that carry one out belong to a runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from qsync_opt.numerics.formats import number_format
from qsync_opt.numerics.rounding import Granularity, Rounding, closed_form_variance, noise_kind


class Quantizer(Protocol):
    """What a planner must know of a quantizer; another package registers one as ``qsync_opt.quantizers``."""

    @property
    def bits(self) -> int:
        """Bits of one quantized element, scales aside."""

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the value itself."""

    def variance(self, mean_square: float, mean_square_amax: Mapping[str, float]) -> float:
        """Mean squared error per element, in squared units of the tensor.

        Args:
            mean_square: Mean square of the elements.
            mean_square_amax: By granularity, the mean over slices of the squared largest magnitude.
        """


@dataclass(frozen=True, slots=True)
class FormatQuantizer:
    """Rounding to a number format, with one scale per ``granularity`` where the format needs scales.

    Raises:
        UnsupportedError: No such format.

    Source:
        `closed_form_variance`.
    """

    format_name: str
    rounding: Rounding = Rounding.STOCHASTIC
    granularity: Granularity = Granularity.TENSOR

    def __post_init__(self) -> None:
        number_format(self.format_name)

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return number_format(self.format_name).bits

    @property
    def unbiased(self) -> bool:
        """True for stochastic rounding."""
        return self.rounding is Rounding.STOCHASTIC

    def variance(self, mean_square: float, mean_square_amax: Mapping[str, float]) -> float:
        """Mean squared error per element; see `Quantizer.variance`."""
        kind = noise_kind(self.format_name, self.granularity)
        return closed_form_variance(kind, self.rounding, mean_square=mean_square, mean_square_amax=mean_square_amax)


int8 = functools.partial(FormatQuantizer, "INT8")
fp8 = functools.partial(FormatQuantizer, "FP8")
bf16 = functools.partial(FormatQuantizer, "BF16")
fp16 = functools.partial(FormatQuantizer, "FP16")
