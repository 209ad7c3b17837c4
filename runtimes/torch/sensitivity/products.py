"""The operands of intercepted calls, and the normal form of a product of two tensors.

A bilinear operator f has the trilinear form T(a, b, c) = <f(a, b), c>, in which ``a`` and ``b`` have the shapes of the
operands and ``c`` that of the result. Where one of the three is all ones, T is an inner product of two smaller tensors:
the reductions of a form by contraction (``c`` is 1), by row (``b`` is 1) and by column (``a`` is 1).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import CONVOLUTIONS, PRODUCTS, ConvolutionCall, convolution_call, product_call
from qsync_opt.numerics import Granularity
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.support import tensors_in
from qsync_opt.sensitivity import ProductSizes


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """The tensor with one dimension as two: the part, and the index in it."""
    return x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :])


def _every(length: int, limit: int, elements: int) -> slice:
    """Indices for a sample of about ``limit`` elements."""
    return slice(None, None, max(1, min(length, elements // max(limit, 1))))


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """``first`` (P, N, K) times ``second`` (P, K, M); ``result`` brings the operator's result into the form (P, N, M).

    Reductions are sums over one dimension.
    """

    first: Tensor
    second: Tensor
    sizes: ProductSizes
    result: Callable[[Tensor], Tensor]

    def sample(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th row of each product."""
        rows = _every(self.first.shape[1], limit, self.first.numel())
        return self.first[:, rows], rows

    def sample_second(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th row of a weight; of a batch of products all."""
        weight = self.second.shape[0] == 1
        rows = _every(self.second.shape[1] // 8 if weight else 1, limit, self.second.numel())
        return self.second[:, rows], rows


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

    @property
    def pointwise(self) -> bool:
        """Whether every result sees one position: then windows are slices, and nothing has to be convolved."""
        return self.second.shape[2:].numel() == 1 and not self._transposed and not any(self.geometry[1])

    def _centers(self) -> tuple[slice, ...]:
        return (slice(None), slice(None), *(slice(None, None, step) for step in self.geometry[0]))

    def _backward(self, result: Tensor, first: Tensor, weight: Tensor, *, operand: int) -> Tensor:
        """Gradient with respect to one operand (0 or 1), of which only the shape matters."""
        mask = [operand == 0, operand == 1, False]
        backward = torch.ops.aten.convolution_backward
        gradients: tuple[Tensor, ...] = backward(result, first, weight, None, *self.geometry, mask)
        return gradients[operand]

    def _split_groups(self, b: Tensor) -> Tensor:
        """The first dimension of a weight, or of a stack of weights, as two: groups, and channels of a group."""
        return _split(b, b.dim() - self.second.dim(), self._groups)

    def by_input_channel(self, b: Tensor) -> Tensor:
        """Sums over the output channels of each group, for one weight or a stack of weights.

        The counterpart of `first_by_contraction`: T(a, b, 1) = <``first_by_contraction(a)``, this of ``b``>.
        """
        dims = self.second.dim()
        if self._transposed:
            return b.sum(1 - dims, keepdim=True)
        return self._split_groups(b).sum(-dims)

    def by_output_channel(self, b: Tensor) -> Tensor:
        """Sums over the input channels of each group, for one weight or a stack of weights."""
        dims = self.second.dim()
        if self._transposed:
            return self._split_groups(b).sum(-dims)
        return b.sum(1 - dims, keepdim=True)

    def first_by_contraction(self, a: Tensor) -> Tensor:
        """For each input channel and kernel position, the sum of the elements that this weight multiplies."""
        weight = self.second.shape
        shape = (weight[0], 1, *weight[2:]) if self._transposed else (self._groups, *weight[1:])
        if self.pointwise:
            return a[self._centers()].sum((0, *range(2, a.dim()))).view(shape)
        x = a.sum(0, keepdim=True)
        result = _ones((1, self._groups, *self.result_places), a.dtype, a.device)
        return self._backward(result, x, a.new_empty(shape), operand=1)

    def first_by_row(self, a: Tensor) -> Tensor:
        """Sums over the window of each output position, per sample and group."""
        merged = self.merge_groups(a)
        return (
            merged[self._centers()]
            if self.pointwise
            else torch.convolution(merged, self._ones(a), None, *self.geometry)
        )

    def _ones(self, like: Tensor) -> Tensor:
        return _ones((self._groups, 1, *self.second.shape[2:]), like.dtype, like.device)

    def rows_by_position(self, q: Tensor) -> Tensor:
        """Sums over the output positions whose windows hold each input position: (B, groups, ...) of ``first``.

        The adjoint of ``first_by_row``: T(a, 1, c) = <sums of a over channels, this of ``merge_groups(c)``>.
        """
        shape = (q.shape[0], self._groups, *self.first.shape[2:])
        if not self.pointwise:
            return self._backward(q, q.new_empty(shape), self._ones(q), operand=0)
        if q.shape == shape:
            return q
        result = q.new_zeros(shape)
        result[self._centers()] = q
        return result

    def contraction_by_position(self, vector: Tensor) -> Tensor:
        """Sums over the weights that multiply each input element: (1, C, ...) of ``first``, the same for all samples.

        The adjoint of ``first_by_contraction``: T(a, b, 1) = <a, this of ``by_input_channel(b)``>. One place
        stands for all where they are alike.
        """
        shape = self.first.shape[1:]
        if self.pointwise and all(step == 1 for step in self.geometry[0]):
            return vector.view(1, shape[0], *(1,) * (len(shape) - 1))
        result = _ones((1, self._groups, *self.result_places), vector.dtype, vector.device)
        return self._backward(result, vector.new_empty((1, *shape)), vector, operand=0)

    def merge_groups(self, x: Tensor) -> Tensor:
        """Sums over the channels of each group, (B, C, ...) to (B, groups, ...): of a result its reduction by row."""
        return _split(x, 1, self._groups).sum(2)

    def columns_by_position(self, weights: Tensor) -> Tensor:
        """Sums over those weights that reach each output position from inside the input, from ``by_output_channel``."""
        if self.pointwise:  # the same at every position
            return weights.reshape(1, -1, *(1,) * (weights.dim() - 2))
        return torch.convolution(self.inside, weights, None, *self.geometry)

    def columns_of_weight(self, c: Tensor) -> Tensor:
        """Sums over the results that a weight reaches: T(1, b, c) = <``by_output_channel(b)``, this of c>.

        The adjoint of ``columns_by_position``, of sums over samples.
        """
        shape = self.second.shape
        reduced = (self._groups, shape[1], *shape[2:]) if self._transposed else (shape[0], 1, *shape[2:])
        if self.pointwise:
            return c.sum((0, *range(2, c.dim()))).view(reduced)
        return self._backward(c.sum(0, keepdim=True), self.inside, c.new_empty(reduced), operand=1)

    def result(self, z: Tensor) -> Tensor:
        """The operator's result with a batch dimension."""
        return z if self.batched else z.unsqueeze(0)

    def sample_second(self, limit: int) -> tuple[Tensor, slice]:
        """Every s-th input channel; all of them with groups, or transposed."""
        plain = self._groups == 1 and not self._transposed
        rows = _every(self.second.shape[1] // 8 if plain else 1, limit, self.second.numel())
        return self.second[:, rows], rows

    def slice_dims(self, operand: str, granularity: Granularity) -> tuple[int, ...]:
        """Rows of ``first`` are samples; channels of ``second`` are output channels, its rows input channels."""
        dims = tuple(range(self.first.dim()))
        if granularity is Granularity.TENSOR:
            return dims
        kept = int(granularity is Granularity.CHANNEL)
        if operand == "second" and not self._transposed:
            kept = 1 - kept
        return tuple(d for d in dims if d != kept)


ProductForm = MatrixForm | ConvolutionForm

BILINEAR = PRODUCTS | CONVOLUTIONS | {"einsum"}
ADJUSTABLE = BILINEAR | {"embedding", "scaled_dot_product_attention"}


def is_adjustable(call: OperatorCall) -> bool:
    """Whether a call could run in several precisions: of an adjustable kind, on real operands, an einsum on two."""
    if call.op_type not in ADJUSTABLE:
        return False
    tensors = tensors_in((call.args, call.kwargs))
    return not any(x.is_complex() for x in tensors) and (call.op_type != "einsum" or len(tensors) == 2)


# Position and keyword names of the operands in a call, first then second (attention: also third).
_SLOTS: dict[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "linear": ((0, ("input",)), (1, ("weight",))),
    "matmul": ((0, ("input", "self")), (1, ("other",))),
    "mm": ((0, ("input", "self")), (1, ("mat2", "other"))),
    "bmm": ((0, ("input", "self")), (1, ("mat2", "other"))),
    "addmm": ((1, ("mat1",)), (2, ("mat2",))),
    "baddbmm": ((1, ("batch1",)), (2, ("batch2",))),
    "scaled_dot_product_attention": ((0, ("query",)), (1, ("key",)), (2, ("value",))),
    **{name: ((0, ("input",)), (1, ("weight",))) for name in CONVOLUTIONS},
}


class Slot(NamedTuple):
    """An operand, its position or keyword in a call, and its index in a list that stands there."""

    place: int | str
    tensor: Tensor
    inner: int | None = None


def operand_slots(
    name: str, op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Slot, ...]:
    """The operands of a call in the order of the product.

    Raises:
        UnsupportedError: An einsum that is not a product of two tensors, or an operand that is missing.
    """
    if op_type == "einsum":
        return _einsum_slots(name, args)
    if op_type == "embedding":
        weight, position = (args[0], 0) if function is torch.embedding else (_argument(args, kwargs, 1, "weight"), 1)
        return (Slot(position if len(args) > position else "weight", weight),)
    slots = []
    for position, names in _SLOTS[op_type]:
        key = next((key for key in names if key in kwargs), None)
        if len(args) > position:
            slots.append(Slot(position, args[position]))
        elif key is not None:
            slots.append(Slot(key, kwargs[key]))
        else:
            raise UnsupportedError(f"operator {name!r} was called without its argument {names[0]!r}")
    return tuple(reversed(slots)) if function is torch.Tensor.__rmatmul__ else tuple(slots)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, key: str) -> Any:
    return args[position] if len(args) > position else kwargs[key]


def bounded_lookup(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an embedding without ``max_norm``, once the rows that are read are scaled down in the table.

    The embedding itself writes into its table when it runs, which is after its operands are measured and replaced.
    """
    if function is torch.embedding or (limit := _optional(args, kwargs, 3, "max_norm")) is None:
        return args, dict(kwargs)
    table, indices = _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 0, "input")
    norm_type = _optional(args, kwargs, 4, "norm_type")
    with torch.no_grad():
        torch.embedding_renorm_(table.detach(), indices.contiguous(), limit, 2.0 if norm_type is None else norm_type)
    args = (*args[:3], None, *args[4:]) if len(args) > 3 else args
    return args, {key: value for key, value in kwargs.items() if key != "max_norm"}


def _optional(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, key: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(key)


def dense_lookup(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a `bounded_lookup` that gives its table a dense gradient, which can be differentiated again."""
    args, kwargs = bounded_lookup(function, args, kwargs)
    place = 4 if function is torch.embedding else 6
    args = (*args[:place], False, *args[place + 1 :]) if len(args) > place else args
    return args, {key: value for key, value in kwargs.items() if key != "sparse"}


_BATCH_NORM = inspect.signature(F.batch_norm)


def batch_norm_arguments(call: OperatorCall) -> dict[str, Any] | None:
    """The arguments of a call of ``torch.nn.functional.batch_norm``; None if it is another one."""
    if call.function is not F.batch_norm:
        return None
    bound = _BATCH_NORM.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _einsum_slots(name: str, args: tuple[Any, ...]) -> tuple[Slot, ...]:
    nested = len(args) == 2 and isinstance(args[1], list | tuple)
    operands = args[1] if nested else args[1:]
    if not isinstance(args[0], str) or len(operands) != 2:
        raise UnsupportedError(
            f"operator {name!r}: einsum of {len(operands)} tensors: statistics exist for an equation with exactly two; "
            "write it as products of two, or give the operator the role 'fixed'"
        )
    return tuple(Slot(1, operand, inner=i) if nested else Slot(1 + i, operand) for i, operand in enumerate(operands))


def replace_operands(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], slots: Sequence[Slot], tensors: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with its operands replaced."""
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot, tensor in zip(slots, tensors, strict=True):
        if isinstance(slot.place, str):
            new_kwargs[slot.place] = tensor
        elif slot.inner is not None:
            nested = list(new_args[slot.place])
            nested[slot.inner] = tensor
            new_args[slot.place] = nested
        else:
            new_args[slot.place] = tensor
    return tuple(new_args), new_kwargs


def separate(output: Tensor) -> Tensor:
    """A result with memory of its own: a view's hooks (``einsum`` returns one) see nothing once it is written into."""
    return output.clone() if output._is_view() else output


class Product(NamedTuple):
    """A bilinear call in its form, and the constant factor in front of the product."""

    form: ProductForm
    factor: float


def product_of(op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Product:
    """The form of a bilinear call.

    Args:
        op_type: One of ``BILINEAR``.
        function: The torch function that was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if op_type == "einsum":
        operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
        return Product(_einsum_form(args[0], operands[0], operands[1]), 1.0)
    if op_type in CONVOLUTIONS:
        call = convolution_call(op_type, args, kwargs)
        batched = call.restore(torch.empty((1, 2))).dim() == 2
        one = _one(call.x.dtype, call.x.device).expand(_argument(args, kwargs, 0, "input").shape)
        inside = convolution_call(op_type, (one, *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}).x
        return Product(_convolution_form(call, batched=batched, inside=inside[:1, : call.groups]), 1.0)
    call_ = product_call(op_type, function, args, kwargs)
    a, b = (x if x.dim() == 3 else x.unsqueeze(0) for x in (call_.a, call_.b))
    sizes = ProductSizes(products=a.shape[0], rows=a.shape[1], contraction=a.shape[2], columns=b.shape[2])
    shape = (sizes.products, sizes.rows, sizes.columns)
    return Product(MatrixForm(a, b, sizes, lambda z: z.reshape(shape)), float(call_.alpha))


@functools.lru_cache(maxsize=16)
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def _convolution_form(call: ConvolutionCall, *, batched: bool, inside: Tensor) -> ConvolutionForm:
    extents, kernel, groups = call.x.shape[2:], call.weight.shape[2:], call.groups
    steps = zip(extents, kernel, call.stride, call.padding, call.dilation, call.output_padding, strict=True)
    if call.transposed:
        places = [(size - 1) * s - 2 * p + d * (k - 1) + e + 1 for size, k, s, p, d, e in steps]
    else:
        places = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d, _ in steps]
    sides = call.weight.shape[0] // groups, call.weight.shape[1] * kernel.numel()
    sizes = ProductSizes(
        products=groups,
        rows=call.x.shape[0] * torch.Size(extents if call.transposed else places).numel(),
        contraction=sides[0 if call.transposed else 1],
        columns=sides[1 if call.transposed else 0],
    )
    return ConvolutionForm(call.x, call.weight, sizes, call.geometry, batched, inside, tuple(places))


def _letters(equation: str, first: Tensor, second: Tensor) -> tuple[str, str, str]:
    """The subscripts of both operands and the result, with unused capitals in place of an ellipsis."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    subscripts = left.split(",")
    fresh = [letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation]
    depth = [x.dim() - (len(s) - 3) if "..." in s else 0 for s, x in zip(subscripts, (first, second), strict=True)]
    dots = "".join(reversed(fresh[: max(depth)]))
    spelled = [s.replace("...", dots[len(dots) - d :] if d else "") for s, d in zip(subscripts, depth, strict=True)]
    if arrow:
        right = right.replace("...", dots)
    else:
        together = "".join(subscripts).replace(".", "")
        right = dots + "".join(sorted(letter for letter in set(together) if together.count(letter) == 1))
    return spelled[0], spelled[1], right


def _einsum_form(equation: str, first: Tensor, second: Tensor) -> MatrixForm:
    left, right, out = _letters(equation, first, second)
    size: dict[str, int] = {}
    for letters, tensor in ((left, first), (right, second)):
        for letter, length in zip(letters, tensor.shape, strict=True):
            size[letter] = max(size.get(letter, 1), length)
    batch = "".join(letter for letter in out if letter in left and letter in right)
    rows = "".join(letter for letter in out if letter in left and letter not in right)
    columns = "".join(letter for letter in out if letter in right and letter not in left)
    # A letter that is summed but stands in one operand only is a contraction in which the other operand repeats.
    summed = "".join(letter for letter in size if letter not in out)

    def arranged(tensor: Tensor, letters: str, groups: tuple[str, ...]) -> Tensor:
        unique = "".join(dict.fromkeys(letters))
        order = [letter for letter in "".join(groups) if letter in unique]
        moved = torch.einsum(f"{letters}->{''.join(order)}", tensor)
        for position, letter in enumerate("".join(groups)):
            if letter not in unique:
                moved = moved.unsqueeze(position)
        full = moved.expand([size[letter] for letter in "".join(groups)])
        return full.reshape([torch.Size([size[letter] for letter in group]).numel() for group in groups])

    a = arranged(first, left, (batch, rows, summed))
    b = arranged(second, right, (batch, summed, columns))
    sizes = ProductSizes(products=a.shape[0], rows=a.shape[1], contraction=a.shape[2], columns=b.shape[2])
    return MatrixForm(a, b, sizes, lambda z: arranged(z, out, (batch, rows, columns)))
