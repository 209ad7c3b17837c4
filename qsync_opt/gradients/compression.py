"""Schemes of compressed all-reduce as data: their codes, what they move, and the variance that they add.

Every scheme is unbiased and cannot overflow for the number of workers that it is asked for. The kernels that encode
belong to `qsync_opt.kernels`, the transports to a runtime; both are reached by ``code`` and ``transport``.

Legend: n workers, d elements, M the largest magnitude of a block, s the number of levels from 0 to M, ``step = M / s``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from qsync_opt.errors import UnsupportedError
from qsync_opt.io import check_fields, near_match
from qsync_opt.numerics import number_format
from qsync_opt.registry import Kind, create, entries

BLOCK = 256
"""Elements that share a scale: 0.8 % of the bytes of 8-bit codes for scales of 16 bits."""


class Transport(enum.StrEnum):
    """How codes become a sum on every worker."""

    PLAIN = "plain"
    """An all-reduce of the gradients themselves."""
    SUM = "sum"
    """A MAX all-reduce of the scales, then an all-reduce that sums integer codes."""
    TWO_SHOT = "two-shot"
    """All-to-all of codes, a local sum in FP32, rounded again without bias, and an all-gather."""


class Code(enum.StrEnum):
    """What one element becomes."""

    FLOAT = "float"
    """A floating-point format without scales."""
    INTEGER = "integer"
    """A multiple of the block's step."""
    SCALED_FLOAT = "scaled float"
    """E4M3, the block's largest magnitude at 448."""
    EXPONENT = "exponent"
    """A sign and a power of two: the paper's exponential levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums over the elements of one bucket, in squared units of the gradient.

    ``square`` is the sum of ``x**2``, ``block_square`` of ``M**2`` and ``block_absolute`` of ``M |x|``, with M the
    largest magnitude of the element's block of `BLOCK`; ``bucket_square`` and ``bucket_absolute`` are the same with the
    largest magnitude of the bucket.
    """

    square: float
    block_square: float
    block_absolute: float
    bucket_square: float
    bucket_absolute: float

    def __post_init__(self) -> None:
        check_fields(self, "moments")

    def scaled(self, factor: float) -> Moments:
        """Every sum times ``factor``."""
        return Moments(
            square=self.square * factor,
            block_square=self.block_square * factor,
            block_absolute=self.block_absolute * factor,
            bucket_square=self.bucket_square * factor,
            bucket_absolute=self.bucket_absolute * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStatistics:
    """What the variance of a scheme depends on: moments of the workers' gradients, and of their mean.

    ``local`` is the mean over workers, with largest magnitudes over all of them. ``noise`` is the variance of the
    averaged gradient as batches differ, summed over its elements: what compression has to be compared with.
    """

    elements: int
    local: Moments
    mean: Moments
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "statistics of a bucket")


class GradientScheme(Protocol):
    """What planning and running must know of a scheme.

    Another package registers one in the entry-point group ``qsync_opt.quantizers.gradients``.
    """

    @property
    def name(self) -> str:
        """Name in plans."""

    @property
    def bits(self) -> int:
        """Bits of one element on the wire, scales aside."""

    @property
    def block(self) -> int | None:
        """Elements that share a scale; None: there is no scale, or one of the whole bucket."""

    @property
    def unbiased(self) -> bool:
        """Whether the expected result is the mean itself."""

    @property
    def transport(self) -> Transport:
        """How codes become a sum."""

    def supports(self, workers: int) -> bool:
        """Whether sums of so many workers cannot overflow."""

    def wire_bytes(self, elements: int, workers: int) -> int:
        """Bytes that each worker sends for one bucket."""

    def mean_variance(self, statistics: BucketStatistics, workers: int) -> float:
        """A bound of the variance of the averaged gradient, summed over its elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme of this package.

    ``width`` is the bits of one code and ``lanes`` how many of them travel in one integer of the all-reduce: 1 for
    native 8-bit sums, more for lanes of INT32. ``block`` is None where there is no scale, or one of the bucket.

    Source: `sum` and `two-shot` as in the literature on quantized all-reduce, with block scales; "linear" and
        "exponential" are those of Global-QSGD (Xin et al.); the packing into lanes and the bounds are ours.
    """

    name: str
    code: Code
    transport: Transport
    width: int
    lanes: int = 1
    block: int | None = None
    unbiased: bool = True

    @property
    def bits(self) -> int:
        """Bits of one element on the wire, scales aside; lanes may leave some of 32 unused."""
        return self.width if self.lanes == 1 else -(-32 // self.lanes)

    @property
    def scaled(self) -> bool:
        """Whether codes need scales."""
        return self.code is not Code.FLOAT

    def levels(self, workers: int) -> int:
        """The largest magnitude s of a code, such that no sum of ``workers`` codes overflows.

        Raises:
            UnsupportedError: So many workers leave no level.
        """
        if self.transport is not Transport.SUM:
            return (1 << (self.width - 1)) - 1
        most = (1 << (self.width - 1)) - 1 if self.lanes == 1 else (1 << self.width) - 1
        levels = most // (workers if self.lanes == 1 else 2 * workers)
        if levels < 1:
            raise UnsupportedError(
                f"scheme {self.name!r} cannot sum the codes of {workers} workers in {self.width} bits; take a wider "
                "one, or a two-shot scheme"
            )
        return levels

    def supports(self, workers: int) -> bool:
        """Whether so many workers leave at least one level."""
        try:
            self.levels(workers)
        except UnsupportedError:
            return False
        return True

    def code_bytes(self, elements: int) -> int:
        """Bytes of the codes of one bucket."""
        if self.lanes == 1:
            return elements * self.width // 8
        return 4 * -(-elements // (4 * self.lanes)) * 4  # lanes begin at multiples of four elements

    def scale_bytes(self, elements: int) -> int:
        """Bytes of the scales of one bucket: BF16 where they are reduced, FP32 where each worker has its own."""
        if not self.scaled:
            return 0
        scales = 1 if self.block is None else -(-elements // self.block)
        return scales * (2 if self.transport is Transport.SUM else 4)

    def wire_bytes(self, elements: int, workers: int) -> int:
        """Bytes that each worker sends: 2 (n - 1) / n of codes and scales, as in a ring or all-to-all."""
        payload = self.code_bytes(elements) + self.scale_bytes(elements)
        return -(-2 * (workers - 1) * payload // workers)

    def mean_variance(self, statistics: BucketStatistics, workers: int) -> float:
        """A bound of the variance of the averaged gradient, in squared units of the gradient.

        Rounding to multiples of ``step`` has variance ``step**2 f (1 - f)``, which is at most ``step**2 / 4`` and at
        most ``step |x|``; independent errors of n workers average to 1/n of one.

        Raises:
            UnsupportedError: The scheme has no level for so many workers.
        """
        local = self._rounding(statistics.local, self.levels(workers)) / workers
        if self.code is Code.EXPONENT:
            return self._exponent_tree(statistics.local.square, local * workers, workers)
        if workers == 1:
            return 0.0  # nothing is reduced
        again = self._rounding(statistics.mean, self.levels(workers)) if self.transport is Transport.TWO_SHOT else 0.0
        # What is rounded again holds the errors of the first rounding too, at most twice its block's magnitude.
        return local + again * (1.0 if self.code is Code.FLOAT else (1.0 + 1.0 / self.levels(workers)) ** 2)

    def _rounding(self, moments: Moments, levels: int) -> float:
        """Variance of rounding one tensor once."""
        if self.code is Code.FLOAT:
            if self.width == 32:
                return 0.0
            return moments.square * 4.0 ** -number_format(self.name).mantissa_bits / 4
        squares, absolutes = moments.block_square, moments.block_absolute
        if self.block is None:
            squares, absolutes = moments.bucket_square, moments.bucket_absolute
        if self.code is Code.SCALED_FLOAT:  # a step of x / 8 at most, or of 2**-9 of 448 units near zero
            return moments.square / 256 + squares * (2.0**-9 / 448) ** 2 / 4
        if self.code is Code.EXPONENT:  # between a power of two and the next, or below the least
            return moments.square / 8 + absolutes * 2.0**-LEAST_EXPONENT
        # A block's scale is rounded up to BF16 where it is reduced: by 2**-7 at most.
        slack = 1 + 2.0**-7 if self.transport is Transport.SUM else 1.0
        return min(squares * (slack / levels) ** 2 / 4, absolutes * slack / levels)

    def _exponent_tree(self, square: float, encoded: float, workers: int) -> float:
        """A pairwise reduction adds at most 1/8 of the squared partial sum; of m workers that is m times their sum."""
        variance, size = workers * encoded, 1
        while size < workers:
            size *= 2
            variance = 9 / 8 * variance + min(size, workers) * workers * square / 8
        return variance / workers**2 if workers > 1 else 0.0

    def variance(self, mean_square: float, mean_square_amax: Mapping[str, float]) -> float:
        """Mean squared error per element of rounding once, as `qsync_opt.numerics.Quantizer` has it.

        ``mean_square_amax`` needs ``"tensor"``, the squared largest magnitude; a block's is not above it.
        """
        largest = mean_square_amax["tensor"] if self.scaled else 0.0
        absolute = math.sqrt(mean_square * largest)
        moments = Moments(
            square=mean_square,
            block_square=largest,
            block_absolute=absolute,
            bucket_square=largest,
            bucket_absolute=absolute,
        )
        return self._rounding(moments, self.levels(1))


LEAST_EXPONENT = 100
"""Codes of exponents reach down to 2**-100 of the largest magnitude."""


def fp32() -> Scheme:
    """The plain all-reduce."""
    return Scheme(name="FP32", code=Code.FLOAT, transport=Transport.PLAIN, width=32)


def bf16() -> Scheme:
    """BF16 by stochastic rounding, two-shot: sums in FP32, where an all-reduce of BF16 would round with bias."""
    return Scheme(name="BF16", code=Code.FLOAT, transport=Transport.TWO_SHOT, width=16)


def sum8() -> Scheme:
    """Native sums of INT8."""
    return Scheme(name="sum8", code=Code.INTEGER, transport=Transport.SUM, width=8, block=BLOCK)


def _lanes(name: str, width: int, lanes: int) -> Scheme:
    return Scheme(name=name, code=Code.INTEGER, transport=Transport.SUM, width=width, lanes=lanes, block=BLOCK)


def sum16() -> Scheme:
    """Two lanes of 16 bits in INT32."""
    return _lanes("sum16", 16, 2)


def sum10() -> Scheme:
    """Three lanes of 10 bits in INT32."""
    return _lanes("sum10", 10, 3)


def packed8() -> Scheme:
    """Four lanes of 8 bits in INT32, for links whose library sums INT32 faster than INT8."""
    return _lanes("packed8", 8, 4)


def sum6() -> Scheme:
    """Five lanes of 6 bits in INT32."""
    return _lanes("sum6", 6, 5)


def sum4() -> Scheme:
    """Eight lanes of 4 bits in INT32; at most seven workers."""
    return _lanes("sum4", 4, 8)


def two8() -> Scheme:
    """Two-shot INT8."""
    return Scheme(name="two8", code=Code.INTEGER, transport=Transport.TWO_SHOT, width=8, block=BLOCK)


def two_fp8() -> Scheme:
    """Two-shot FP8 (E4M3)."""
    return Scheme(name="two-fp8", code=Code.SCALED_FLOAT, transport=Transport.TWO_SHOT, width=8, block=BLOCK)


def linear() -> Scheme:
    """The paper's linear levels: one scale of the bucket, native sums of INT8."""
    return Scheme(name="linear", code=Code.INTEGER, transport=Transport.SUM, width=8)


def exponential() -> Scheme:
    """The paper's exponential levels: one scale of the bucket, exponents added at random without bias."""
    return Scheme(name="exponential", code=Code.EXPONENT, transport=Transport.TWO_SHOT, width=8)


def schemes() -> Mapping[str, GradientScheme]:
    """Every registered scheme by name."""
    return MappingProxyType({name: scheme(name) for name in entries(Kind.QUANTIZER, "gradients")})


def scheme(name: Any) -> GradientScheme:
    """The registered scheme of that name, or ``name`` itself if it is one.

    Raises:
        UnsupportedError: No such scheme; the text lists those that exist.
    """
    known = entries(Kind.QUANTIZER, "gradients")
    if isinstance(name, str) and name not in known:
        raise UnsupportedError(f"unknown scheme {name!r}{near_match(name, known)}; allowed are {', '.join(known)}")
    chosen: GradientScheme = create(Kind.QUANTIZER, name, "gradients")
    return chosen
