"""How noise travels through a bilinear operator: which sums of one operand meet which sums of the other.

Every product, convolution, einsum and lookup is ``z = sum over k of x * w``. Independent noise of variance ``a`` on the
elements of ``x`` gives the output a total variance ``sum of a * w**2`` over all scalar multiplications, and the same
sum with other letters gives the gradients' variances: with T(a, b, c) the sum over all scalar multiplications of
``a(x's element) * b(w's element) * c(z's element)``,

    output:          T(noise of x, w**2, 1)       T(x**2, noise of w, 1)
    gradient of w:   T(noise of x, 1, g**2)       T(x**2, 1, noise of g)
    gradient of x:   T(1, noise of w, g**2)       T(1, w**2, noise of g)

Each T with a 1 in it is an inner product of two small vectors, so nothing as large as an im2col matrix is ever built.

Axis letters: P independent products, N rows, K contraction, M columns; for convolutions B samples, C channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qsync_opt.numerics.rounding import Granularity
from qsync_opt.sensitivity.statistics import ProductSizes


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """One dimension as two: which part, and where in it."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


class ProductForm(Protocol):
    """Reductions of tensors shaped like the operands and the result; see the module's text for T."""

    @property
    def first(self) -> Tensor:
        """First operand in its normal form."""

    @property
    def second(self) -> Tensor:
        """Second operand in its normal form."""

    @property
    def sizes(self) -> ProductSizes:
        """Sizes of the products."""

    def first_by_contraction(self, a: Tensor) -> Tensor:
        """Vector A with T(a, b, 1) = <A(a), B(b)>."""

    def second_by_contraction(self, b: Tensor) -> Tensor:
        """Vector B with T(a, b, 1) = <A(a), B(b)>."""

    def first_by_row(self, a: Tensor) -> Tensor:
        """Vector R with T(a, 1, c) = <R(a), Q(c)>."""

    def result_by_row(self, c: Tensor) -> Tensor:
        """Vector Q with T(a, 1, c) = <R(a), Q(c)>."""

    def second_by_column(self, b: Tensor) -> Tensor:
        """Vector D with T(1, b, c) = <D(b), E(c)>."""

    def result_by_column(self, c: Tensor) -> Tensor:
        """Vector E with T(1, b, c) = <D(b), E(c)>."""

    def result(self, z: Tensor) -> Tensor:
        """A tensor shaped like the operator's result, in the layout that the reductions want."""

    def sample_second(self, limit: int) -> tuple[Tensor, slice]:
        """Evenly spaced rows (contraction indices) of the second operand with about ``limit`` elements, and which."""

    def sampled_contraction(self, vector: Tensor, rows: slice) -> Tensor:
        """The entries of ``first_by_contraction`` that belong to sampled rows of the second operand."""

    def slice_dims(self, operand: str, granularity: Granularity) -> tuple[int, ...]:
        """Dimensions of ``first`` or ``second`` that share one scale."""


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """``first`` (P, N, K) times ``second`` (P, K, M)."""

    first: Tensor
    second: Tensor
    sizes: ProductSizes
    arrange: Callable[[Tensor], Tensor]

    def first_by_contraction(self, a: Tensor) -> Tensor:
        """Sums over rows, (P, K)."""
        return a.sum(1)

    def second_by_contraction(self, b: Tensor) -> Tensor:
        """Sums over columns, (P, K)."""
        return b.sum(2)

    def first_by_row(self, a: Tensor) -> Tensor:
        """Sums over the contraction, (P, N)."""
        return a.sum(2)

    def result_by_row(self, c: Tensor) -> Tensor:
        """Sums over columns, (P, N)."""
        return c.sum(2)

    def second_by_column(self, b: Tensor) -> Tensor:
        """Sums over the contraction, (P, M)."""
        return b.sum(1)

    def result_by_column(self, c: Tensor) -> Tensor:
        """Sums over rows, (P, M)."""
        return c.sum(1)

    def result(self, z: Tensor) -> Tensor:
        """The result as (P, N, M)."""
        return self.arrange(z)

    def sample(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th row of each product."""
        step = max(1, min(self.first.shape[1], self.first.numel() // max(limit, 1)))
        rows = slice(None, None, step)
        return self.first[:, rows], rows

    def sampled_rows(self, vector: Tensor, rows: slice) -> Tensor:
        """Entries (P, rows)."""
        return vector[:, rows]

    def sample_second(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th row of a weight; of a batch of products all."""
        step = 1
        if self.second.shape[0] == 1:
            step = max(1, min(self.second.shape[1] // 8, self.second.numel() // max(limit, 1)))
        rows = slice(None, None, step)
        return self.second[:, rows], rows

    def sampled_contraction(self, vector: Tensor, rows: slice) -> Tensor:
        """Entries (P, rows)."""
        return vector[:, rows]

    def slice_dims(self, operand: str, granularity: Granularity) -> tuple[int, ...]:
        """Rows of ``first`` run along K, its channels along N; channels of ``second`` along K, its rows along M."""
        if granularity is Granularity.TENSOR:
            return (0, 1, 2)
        along_first = {Granularity.ROW: (2,), Granularity.CHANNEL: (1,)}
        along_second = {Granularity.ROW: (2,), Granularity.CHANNEL: (1,)}
        return (along_first if operand == "first" else along_second)[granularity]


@functools.lru_cache(maxsize=64)
def _ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class ConvolutionForm:
    """A convolution, transposed or not, of a batched ``first``; ``geometry`` is what torch.convolution takes last.

    ``inside`` is 1 where ``first`` holds the input and 0 where it was padded beforehand, (1, groups, ...);
    ``result_places`` is the result's extent beyond samples and channels.
    """

    first: Tensor
    second: Tensor
    sizes: ProductSizes
    geometry: tuple[Any, ...]
    batched: bool
    inside: Tensor
    result_places: tuple[int, ...]

    @property
    def _transposed(self) -> bool:
        return bool(self.geometry[3])

    @property
    def _groups(self) -> int:
        return self.sizes.products

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, *self.geometry)

    @property
    def pointwise(self) -> bool:
        """Whether every result sees one position: then windows are slices, and nothing has to be convolved."""
        return self.second.shape[2:].numel() == 1 and not self._transposed and not any(self.geometry[1])

    def _seen(self) -> tuple[slice, ...]:
        """Of a pointwise convolution: which positions have a result."""
        return (slice(None), slice(None), *(slice(None, None, step) for step in self.geometry[0]))

    def _adjoint(self, result: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        """What each element of ``first`` (only its shape matters) is multiplied by, summed over its results."""
        found: Tensor = torch.ops.aten.convolution_backward(
            result, first, weight, None, *self.geometry, [True, False, False]
        )[0]
        return found

    def _merge_groups(self, x: Tensor) -> Tensor:
        """Sums over the channels of each group: (B, C, ...) to (B, groups, ...)."""
        return _split(x, 1, self._groups).sum(2)

    def _groups_of(self, b: Tensor, place: int) -> Tensor:
        """A dimension, counted from the back, as two: which group, and where in it."""
        place += b.dim()
        return _split(b, place, self._groups)

    def by_input_channel(self, b: Tensor) -> Tensor:
        """Sums over the output channels of each group, one weight per input channel of a group and kernel position.

        Dimensions may stand before those of the weight.
        """
        dims = self.second.dim()
        if self._transposed:
            return b.sum(1 - dims, keepdim=True)
        return self._groups_of(b, -dims).sum(-dims)

    def by_output_channel(self, b: Tensor) -> Tensor:
        """Sums over the input channels of each group; dimensions may stand before those of the weight."""
        dims = self.second.dim()
        if self._transposed:
            return self._groups_of(b, -dims).sum(-dims)
        return b.sum(1 - dims, keepdim=True)

    def _contraction_shape(self) -> tuple[int, ...]:
        shape = self.second.shape
        return (shape[0], 1, *shape[2:]) if self._transposed else (self._groups, *shape[1:])

    def first_by_contraction(self, a: Tensor) -> Tensor:
        """For each input channel and kernel position, the sum of the elements that this weight multiplies."""
        shape = self._contraction_shape()
        if self.pointwise:
            return a[self._seen()].sum((0, *range(2, a.dim()))).view(shape)
        x = a.sum(0, keepdim=True)
        result = _ones((1, self._groups, *self.result_places), a.dtype, a.device)
        return self._weights_reached(result, x, a.new_empty(shape))

    def _weights_reached(self, result: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        """What each element of a weight (only its shape matters) is multiplied by, summed over its results."""
        found: Tensor = torch.ops.aten.convolution_backward(
            result, first, weight, None, *self.geometry, [False, True, False]
        )[1]
        return found

    def second_by_contraction(self, b: Tensor) -> Tensor:
        """Sums over output channels, per input channel and kernel position."""
        return self.by_input_channel(b)

    def first_by_row(self, a: Tensor) -> Tensor:
        """Sums over the window of each output position, per sample and group."""
        merged = self._merge_groups(a)
        return merged[self._seen()] if self.pointwise else self._convolve(merged, self._ones(a))

    def _ones(self, like: Tensor) -> Tensor:
        return _ones((self._groups, 1, *self.second.shape[2:]), like.dtype, like.device)

    def rows_by_position(self, q: Tensor) -> Tensor:
        """Sums over the output positions whose windows hold each input position: (B, groups, ...) of ``first``.

        The adjoint of ``first_by_row``: T(a, 1, c) = <sums of a over channels, this of ``result_by_row(c)``>.
        """
        shape = (q.shape[0], self._groups, *self.first.shape[2:])
        if not self.pointwise:
            return self._adjoint(q, q.new_empty(shape), self._ones(q))
        if q.shape == shape:
            return q
        found = q.new_zeros(shape)
        found[self._seen()] = q
        return found

    def contraction_by_position(self, vector: Tensor) -> Tensor:
        """Sums over the weights that multiply each input element: (1, C, ...) of ``first``, the same for all samples.

        The adjoint of ``first_by_contraction``: T(a, b, 1) = <a, this of ``second_by_contraction(b)``>. One place
        stands for all where they are alike.
        """
        shape = self.first.shape[1:]
        if self.pointwise and all(step == 1 for step in self.geometry[0]):
            return vector.view(1, shape[0], *(1,) * (len(shape) - 1))
        result = _ones((1, self._groups, *self.result_places), vector.dtype, vector.device)
        return self._adjoint(result, vector.new_empty((1, *shape)), vector)

    def result_by_row(self, c: Tensor) -> Tensor:
        """Sums over output channels, per sample, group and position."""
        return self._merge_groups(c)

    def second_by_column(self, b: Tensor) -> Tensor:
        """Sums over those weights that reach each output position from inside the input."""
        return self.columns_by_position(self.by_output_channel(b))

    def columns_by_position(self, found: Tensor) -> Tensor:
        """The same from the weights' sums ``by_output_channel``."""
        if self.pointwise:  # the same at every position
            return found.reshape(1, -1, *(1,) * (found.dim() - 2))
        return self._convolve(self.inside, found)

    def columns_of_weight(self, c: Tensor) -> Tensor:
        """Sums over the results that a weight reaches: T(1, b, c) = <``by_output_channel(b)``, this of c>.

        The adjoint of ``columns_by_position``, of sums over samples.
        """
        shape = self.second.shape
        found = (self._groups, shape[1], *shape[2:]) if self._transposed else (shape[0], 1, *shape[2:])
        if self.pointwise:
            return c.sum((0, *range(2, c.dim()))).view(found)
        return self._weights_reached(c.sum(0, keepdim=True), self.inside, c.new_empty(found))

    def result_by_column(self, c: Tensor) -> Tensor:
        """Sums over samples."""
        return c.sum(0, keepdim=True)

    def result(self, z: Tensor) -> Tensor:
        """The result with its batch dimension."""
        return z if self.batched else z.unsqueeze(0)

    def sample_second(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th input channel; all of them with groups, or transposed."""
        step = 1
        if self._groups == 1 and not self._transposed:
            step = max(1, min(self.second.shape[1] // 8, self.second.numel() // max(limit, 1)))
        rows = slice(None, None, step)
        return self.second[:, rows], rows

    def sampled_contraction(self, vector: Tensor, rows: slice) -> Tensor:
        """Entries of the sampled input channels."""
        return vector[:, rows]

    def slice_dims(self, operand: str, granularity: Granularity) -> tuple[int, ...]:
        """Rows of ``first`` are samples; channels of ``second`` are output channels, its rows input channels."""
        dims = tuple(range(self.first.dim()))
        if granularity is Granularity.TENSOR:
            return dims
        kept = int(granularity is Granularity.CHANNEL)
        if operand == "second" and not self._transposed:
            kept = 1 - kept
        return tuple(d for d in dims if d != kept)
