"""Which two tensors does a torch call multiply, and in which form? From an intercepted call to a ProductForm."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.arguments import CONVOLUTIONS, PRODUCTS, ConvolutionCall, convolution_call, product_call
from qsync_opt.runtimes.torch.sensitivity.product_forms import ConvolutionForm, MatrixForm, ProductForm
from qsync_opt.sensitivity.statistics import ProductSizes

BILINEAR = PRODUCTS | CONVOLUTIONS | {"einsum"}
ADJUSTABLE = BILINEAR | {"embedding", "scaled_dot_product_attention"}

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
    """Where an operand stands in a call: position or keyword, and position in a list that stands there."""

    place: int | str
    tensor: Tensor
    inner: int | None = None


def operand_slots(
    name: str, op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Slot, ...]:
    """The operands of a call, first operand of the product first.

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


def dense_lookup(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an embedding whose table gets a dense gradient: a sparse one cannot be differentiated again."""
    place = 4 if function is torch.embedding else 6
    args = (*args[:place], False, *args[place + 1 :]) if len(args) > place else args
    return args, {key: value for key, value in kwargs.items() if key != "sparse"}


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
    """The arguments of a call with other tensors in the operands' places."""
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
    kernel = call.weight.shape[2:].numel()
    if call.transposed:
        _, padding, dilation, _, extra, _ = call.geometry
        places = [
            (size - 1) * s - 2 * p + d * (k - 1) + e + 1
            for size, p, d, k, s, e in zip(
                call.x.shape[2:], padding, dilation, call.weight.shape[2:], call.stride, extra, strict=True
            )
        ]
        sizes = ProductSizes(
            products=call.groups,
            rows=call.x.shape[0] * call.x.shape[2:].numel(),
            contraction=call.weight.shape[0] // call.groups,
            columns=call.weight.shape[1] * kernel,
        )
    else:
        places = [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(
                call.x.shape[2:], call.padding, call.dilation, call.weight.shape[2:], call.stride, strict=True
            )
        ]
        sizes = ProductSizes(
            products=call.groups,
            rows=call.x.shape[0] * torch.Size(places).numel(),
            contraction=call.weight.shape[1] * kernel,
            columns=call.weight.shape[0] // call.groups,
        )
    return ConvolutionForm(call.x, call.weight, sizes, call.geometry, batched, inside, tuple(places))


def _letters(equation: str, first: Tensor, second: Tensor) -> tuple[str, str, str]:
    """The subscripts of both operands and the result, with the ellipsis spelled out in capitals that nobody uses."""
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
