"""Normal forms of torch calls: products and convolutions, however their arguments are written.

Products become matrices (N, K) (K, M) or batches (B, N, K) (B, K, M) with an optional bias; convolutions become the
arguments of ``torch.convolution``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCall:
    """``alpha * (a @ b) + beta * addend``, reshaped by ``restore``.

    ``a`` is (N, K) with ``b`` (K, M), or (B, N, K) with (B, K, M). ``bias`` (M,) is added to the product before
    ``restore``, ``addend`` after it.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    restore: Callable[[Tensor], Tensor]
    addend: Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0

    def finish(self, product: Tensor) -> Tensor:
        """Result of the torch call from the product of the normal form."""
        result = self.restore(product)
        if self.alpha != 1:
            result = result * self.alpha
        if self.addend is not None:
            addend = self.addend.to(result.dtype)
            result = result + (addend if self.beta == 1 else addend * self.beta)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCall:
    """Arguments of ``torch.convolution`` for a batched input; ``restore`` removes an added batch dimension."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    restore: Callable[[Tensor], Tensor]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The arguments of ``torch.convolution`` after the bias."""
        return (self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups)


def _same(x: Tensor) -> Tensor:
    return x


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> ProductCall:
    lead, columns = input.shape[:-1], weight.shape[0]
    if weight.dim() != 2:
        raise UnsupportedError(f"linear with a weight of {weight.dim()} dimensions: only two are supported here")
    return ProductCall(
        a=input.reshape(math.prod(lead), input.shape[-1]),
        b=weight.t(),
        bias=bias,
        restore=_same if len(lead) == 1 else lambda y: y.view(*lead, columns),
    )


def _mm(input: Tensor, mat2: Tensor) -> ProductCall:
    return ProductCall(a=input, b=mat2, bias=None, restore=_same)


def _matmul(input: Tensor, other: Tensor) -> ProductCall:
    vector_a, vector_b = input.dim() == 1, other.dim() == 1
    a = input.unsqueeze(0) if vector_a else input
    b = other.unsqueeze(1) if vector_b else other
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    shape = (*lead, *(() if vector_a else (a.shape[-2],)), *(() if vector_b else (b.shape[-1],)))
    if b.dim() == 2:
        a = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    else:
        a = a.expand(*lead, *a.shape[-2:]).reshape(math.prod(lead), *a.shape[-2:])
        b = b.expand(*lead, *b.shape[-2:]).reshape(math.prod(lead), *b.shape[-2:])
    return ProductCall(a=a, b=b, bias=None, restore=lambda y: y.reshape(shape))


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> ProductCall:
    if alpha == 1 and beta == 1 and input.dim() == 1 and input.shape[0] == mat2.shape[1]:
        return ProductCall(a=mat1, b=mat2, bias=input, restore=_same)
    return ProductCall(a=mat1, b=mat2, bias=None, restore=_same, addend=input, alpha=alpha, beta=beta)


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> ProductCall:
    return ProductCall(a=batch1, b=batch2, bias=None, restore=_same, addend=input, alpha=alpha, beta=beta)


_PRODUCTS: dict[str, Callable[..., ProductCall]] = {
    "linear": _linear,
    "mm": _mm,
    "bmm": _mm,
    "matmul": _matmul,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
}
PRODUCTS = frozenset(_PRODUCTS)
CONVOLUTIONS = frozenset(f"conv{t}{d}d" for t in ("", "_transpose") for d in (1, 2, 3))


def product_call(op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ProductCall:
    """Normal form of a matrix product.

    Raises:
        UnsupportedError: The call writes into ``out=``.
    """
    if kwargs.get("out") is not None:
        raise UnsupportedError(f"{op_type} with out=: a plan needs operators that return a new tensor")
    if function is torch.Tensor.__rmatmul__:
        args = (args[1], args[0])
    renamed = {{"self": "input"}.get(key, key): value for key, value in kwargs.items() if key != "out"}
    if op_type in ("mm", "bmm"):
        renamed = {{"other": "mat2"}.get(key, key): value for key, value in renamed.items()}
    return _PRODUCTS[op_type](*args, **renamed)


def _tuple(value: int | tuple[int, ...] | list[int], dims: int) -> tuple[int, ...]:
    sizes = (value,) * dims if isinstance(value, int) else tuple(value)
    return sizes * dims if len(sizes) == 1 else sizes


def _explicit_padding(
    x: Tensor, padding: Any, weight: Tensor, dilation: tuple[int, ...], dims: int
) -> tuple[Tensor, Any]:
    if padding == "valid":
        return x, (0,) * dims
    if padding != "same":
        return x, padding
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if all(total % 2 == 0 for total in totals):
        return x, tuple(total // 2 for total in totals)
    edges = [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)]
    return torch.nn.functional.pad(x, edges), (0,) * dims


_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def convolution_call(op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ConvolutionCall:
    """Normal form of a convolution, transposed or not, of one to three dimensions."""
    dims, transposed = int(op_type[-2]), "transpose" in op_type
    names = _TRANSPOSED if transposed else _FORWARD
    values = {**_DEFAULTS, **dict(zip(names[: len(args)], args, strict=True)), **kwargs}
    input = values.pop("input")
    x = input.unsqueeze(0) if input.dim() == dims + 1 else input
    values["dilation"] = _tuple(values["dilation"], dims)
    if not transposed:
        x, values["padding"] = _explicit_padding(x, values["padding"], values["weight"], values["dilation"], dims)
    for name in ("stride", "padding", "output_padding"):
        values[name] = _tuple(values[name], dims)
    restore = _same if input.dim() == dims + 2 else lambda y: y.squeeze(0)
    return ConvolutionCall(x=x, transposed=transposed, restore=restore, **values)
