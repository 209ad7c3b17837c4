"""The expected squared error of each element of a tensor under rounding to a format, without random numbers.

An element at position ``f`` between two grid points a step ``s`` apart errs by ``f * (1 - f) * s**2`` in expectation
under stochastic rounding and by ``min(f, 1 - f)**2 * s**2`` under rounding to nearest. No distribution is assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from qsync_opt.kernels.autograd import fp32_mode
from qsync_opt.numerics import (
    LARGEST,
    WIDE_FP8,
    WIDE_FP8_LARGEST,
    WIDE_FP8_MANTISSA_BITS,
    WIDE_FP8_SMALLEST_EXPONENT,
    Granularity,
    number_format,
    smallest_exponent,
)
from qsync_opt.runtimes.torch.sensitivity.products import ConvolutionForm, MatrixForm, ProductForm
from qsync_opt.runtimes.torch.sensitivity.reductions import norm, norms
from qsync_opt.sensitivity import ProductSizes

NEAREST_FORMATS = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""Formats that operands and gradients are cast to, rounding to nearest."""
_CHUNK = 1 << 22
"""Elements of a gradient, at most, that are processed at a time."""


def _rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if scale == 1.0:
        return x.to(dtype)
    return (x * scale).to(dtype).to(x.dtype).mul_(1.0 / scale)


def weight_gradient_errors(form: ProductForm, g: Tensor, loss_scale: float) -> dict[str, Tensor]:
    """Error of the second operand's gradient per format, before that gradient is itself rounded.

    Args:
        form: The form of the product, with operands in FP32.
        g: Gradient of the result, in the layout of the form, without the constant factor of the product.
        loss_scale: Factor of gradients while they are rounded.

    Returns:
        Root of the squared error by format, on the device; not finite where a format cannot hold the operands.

    Source:
        Ours.
    """
    with fp32_mode("matmul", "tf32"), fp32_mode("conv", "tf32"):  # errors need no more than three digits
        if isinstance(form, MatrixForm):
            errors = _matrix_errors(form, g, loss_scale)
        else:
            errors = iter(norms(list(_convolution_errors(form, g, loss_scale))))
        return dict(zip(NEAREST_FORMATS, errors, strict=True))


def _matrix_errors(form: MatrixForm, g: Tensor, loss_scale: float) -> Iterator[Tensor]:
    for dtype in NEAREST_FORMATS.values():
        error_x = form.first.to(dtype) - form.first
        norms = []
        for part in torch.split(g, max(1, _CHUNK * g.shape[2] // max(1, g.numel())), 2):
            low = _rounded(part, dtype, loss_scale).to(part.dtype)
            error = torch.bmm(error_x.mT, low)
            error.baddbmm_(form.first.mT, low.sub_(part))
            norms.append(norm(error))
        yield norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _convolution_errors(form: ConvolutionForm, g: Tensor, loss_scale: float) -> Iterator[Tensor]:
    def weight(x: Tensor, g: Tensor) -> Tensor:
        gradient: Tensor = torch.ops.aten.convolution_backward(
            g, x, form.second, None, *form.geometry, [False, True, False]
        )[1]
        return gradient

    for dtype in NEAREST_FORMATS.values():
        low = _rounded(g, dtype, loss_scale).to(g.dtype)
        error = weight(form.first.to(dtype) - form.first, low)
        yield error.add_(weight(form.first, low.sub_(g)))


_MEASURED = ("BF16", "FP16", "TF32")
_SCORES = 1 << 22
"""Scores computed at a time, at most, unless those of one batch element are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    dropout: float
    grouped: bool

    @property
    def repeats(self) -> int:
        """Query heads per key head (1 without grouped-query attention)."""
        return self.query.shape[-3] // self.key.shape[-3] if self.grouped else 1

    def sizes(self) -> tuple[ProductSizes, ProductSizes]:
        """Query times keys, and probabilities times values."""
        products = self.query.shape[:-2].numel()
        rows, features = self.query.shape[-2:]
        keys, out = self.value.shape[-2:]
        return (
            ProductSizes(products=products, rows=rows, contraction=features, columns=keys),
            ProductSizes(products=products, rows=rows, contraction=keys, columns=out),
        )


def attention_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionCall:
    """Normal form of a call of ``torch.nn.functional.scaled_dot_product_attention``."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    query, scale = arguments["query"], arguments.get("scale")
    return AttentionCall(
        query=query,
        key=arguments["key"],
        value=arguments["value"],
        mask=arguments.get("attn_mask"),
        is_causal=bool(arguments.get("is_causal", False)),
        scale=float(scale) if scale is not None else float(query.shape[-1]) ** -0.5,
        dropout=float(arguments.get("dropout_p", 0.0)),
        grouped=bool(arguments.get("enable_gqa", False)),
    )


def _round_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


_ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "FP32": lambda x: x,
    "BF16": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "FP16": lambda x: x.to(torch.float16).to(torch.float32),
    "TF32": _round_tf32,
}


def _sum_repeats(x: Tensor, repeats: int) -> Tensor:
    """(..., repeats * heads, S, D) to (..., heads, S, D): the query heads of one key head stand together."""
    return x.reshape(*x.shape[:-3], -1, repeats, *x.shape[-2:]).sum(-3)


def _compute(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, g: Tensor, name: str
) -> tuple[Tensor, ...]:
    """Output and gradients of attention for some batch elements, rounded as in a fused kernel of the format."""
    rounded = _ROUND[name]
    delivered = _ROUND["FP32"] if name == "TF32" else rounded  # TF32 results are FP32 tensors
    q, k, v, g = (rounded(x) for x in (q, k, v, g))
    k_H, v_H = (x.repeat_interleave(call.repeats, -3) if call.repeats > 1 else x for x in (k, v))
    scores = (q @ k_H.mT) * call.scale
    if bias is not None:
        scores = scores + bias
    # A row without keys has no probabilities; torch returns zeros for it.
    probabilities = torch.softmax(scores, -1)
    if bias is not None:
        probabilities = probabilities.masked_fill(torch.isneginf(bias).all(-1, keepdim=True), 0.0)
    kept = rounded(probabilities)
    output = kept @ v_H
    inner = g @ v_H.mT
    # Fused kernels compute the row sums from their rounded result.
    output = delivered(output)
    score_gradient = rounded(probabilities * (inner - (g * output).sum(-1, keepdim=True)))
    query = score_gradient @ k_H * call.scale
    key, value = score_gradient.mT @ q * call.scale, kept.mT @ g
    if call.repeats > 1:
        key, value = (_sum_repeats(x, call.repeats) for x in (key, value))
    return tuple(delivered(x) for x in (output, query, key, value))


def _bias(call: AttentionCall) -> Tensor | None:
    """The mask, or the causal mask, as an FP32 term of the scores."""
    rows, keys = call.query.shape[-2], call.key.shape[-2]
    if call.is_causal:
        allowed = torch.ones(rows, keys, dtype=torch.bool, device=call.query.device).tril()
    elif call.mask is None:
        return None
    elif call.mask.dtype is not torch.bool:
        return call.mask.to(torch.float32)
    else:
        allowed = call.mask
    return torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, float("-inf"))


def attention_errors(call: AttentionCall, grad: Tensor) -> dict[str, Tensor]:
    """Squared errors of attention per format.

    Args:
        call: The operands, FP32, (..., H, N, D).
        grad: Gradient of the loss with respect to the output, FP32, (..., H, N, D).

    Returns:
        For BF16, FP16 and TF32: a tensor of four sums, over output, query gradient, key gradient and value gradient,
        FP64; infinite where an operand exceeds the format's range. Does not synchronize.

    Source:
        Ours.
    """
    lead = call.query.shape[:-3]
    bias = _bias(call)
    if bias is not None and bias.dim() > 2:
        bias = bias.expand(*lead, *bias.shape[-3:]).reshape(-1, *bias.shape[-3:])
    operands = [x.reshape(-1, *x.shape[-3:]) for x in (call.query, call.key, call.value, grad)]
    largest = torch.stack([torch.linalg.vector_norm(x, float("inf")) for x in operands]).max()
    totals = {name: torch.zeros(4, dtype=torch.float64, device=grad.device) for name in _MEASURED}
    batch, heads, rows, _ = operands[0].shape
    count = max(1, _SCORES // (heads * rows * operands[1].shape[-2]))
    for start in range(0, batch, count):
        some = slice(start, start + count)
        q, k, v, g = (x[some] for x in operands)
        mask = bias[some] if bias is not None and bias.dim() > 2 else bias
        exact = _compute(call, q, k, v, mask, g, "FP32")
        for name, total in totals.items():
            noisy = _compute(call, q, k, v, mask, g, name)
            total += torch.stack([(a - b).square().sum(dtype=torch.float64) for a, b in zip(noisy, exact, strict=True)])
    return {
        name: torch.where(largest <= LARGEST[name], total, torch.inf) if name in LARGEST else total
        for name, total in totals.items()
    }


# A slice whose largest magnitude is below this many times the largest code uses the smallest normal FP32 scale.
_SMALLEST_UNIT = 2.0**-126 * 512
_LARGEST_EXPONENT = 127


_Name = TypeVar("_Name")
_Result = TypeVar("_Result")


_STACKED_AT_ONCE = 4
"""Dimensions from which a card stacks tensors one by one."""
_EXPONENT_BITS = 0x7F800000
"""Mask of an FP32 number that leaves the largest power of two not above its magnitude."""


class _Stack(NamedTuple):
    """A stack of kinds, as tensors that broadcast against a stack of tensors.

    ``slices`` has the granularity of each kind's scales (None without scale), ``largest`` the number that the largest
    magnitude is scaled to, ``bits`` two to the minus mantissa bits, ``lower`` and ``upper`` the range of powers of
    two in which the step follows the number.
    """

    slices: tuple[Granularity | None, ...]
    one: Tensor
    largest: Tensor
    bits: Tensor
    lower: Tensor
    upper: Tensor


def _grid(format_name: str) -> tuple[float, float, float]:
    if format_name != WIDE_FP8 and number_format(format_name).is_integer:
        return 1.0, 1.0, 1.0
    wide = format_name == WIDE_FP8
    bits = WIDE_FP8_MANTISSA_BITS if wide else number_format(format_name).mantissa_bits
    lower = WIDE_FP8_SMALLEST_EXPONENT if wide else smallest_exponent(format_name)
    # Steps that are subnormal themselves would be squared to zero anyway.
    return 2.0**-bits, 2.0 ** max(lower, bits - 126), 2.0**_LARGEST_EXPONENT


@functools.lru_cache(maxsize=64)
def _stack(kinds: tuple[str, ...], dims: int, device: torch.device) -> _Stack:
    slices: list[Granularity | None] = []
    largest, grids = [], []
    for kind in kinds:
        name, _, granularity = kind.partition("/")
        slices.append(Granularity(granularity) if granularity else None)
        largest.append(WIDE_FP8_LARGEST if name == WIDE_FP8 else LARGEST[name] if granularity else 1.0)
        grids.append(_grid(name))
    columns = torch.tensor([largest, *zip(*grids, strict=True)], dtype=torch.float32)
    columns = columns.view(4, -1, *(1,) * dims).to(device)
    return _Stack(tuple(slices), torch.ones((1,) * dims, device=device), *columns)


@functools.lru_cache(maxsize=64)
def _places(slices: tuple[Granularity | None, ...], amaxes: tuple[Granularity, ...], device: torch.device) -> Tensor:
    """Index of each kind's unit among 1 and the largest magnitudes in their order."""
    return torch.tensor([0 if g is None else 1 + amaxes.index(g) for g in slices]).to(device)


def _broadcast(dims: int, *tensors: Tensor) -> Tensor:
    """A stack of tensors, broadcast to at least ``dims`` dimensions."""
    if any(x.dim() == dims for x in tensors):  # faster than broadcasting shapes in Python
        return torch.stack(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    shape = torch.broadcast_shapes((1,) * dims, *(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    return torch.stack([x.expand(shape) for x in tensors])


def rounding_errors(x: Tensor, kinds: tuple[str, ...], amaxes: Mapping[Granularity, Tensor]) -> Tensor:
    """Expected squared errors of several noise kinds, in few kernels.

    Args:
        x: FP32, any shape, finite.
        kinds: Noise kinds (``BF16``, ``INT8/row``, ...).
        amaxes: Largest magnitude per slice and granularity, for the kinds with scales; broadcasting against ``x``.

    Returns:
        Errors of shape (2, kinds, *shape of x), stochastic, then nearest, subnormal ranges included.

    Source:
        Ours.
    """
    stack = _stack(kinds, x.dim(), x.device)
    units: Tensor | None = None
    values = x
    if any(stack.slices):
        # The unit of x before scaling to the largest number of the format: 1, or a largest magnitude.
        amax = [stack.one if g is None else amaxes[g] for g in stack.slices]
        if x.dim() < _STACKED_AT_ONCE:
            units = _broadcast(x.dim(), *amax)
        else:
            units = _broadcast(x.dim(), stack.one, *amaxes.values())[_places(stack.slices, tuple(amaxes), x.device)]
        units.clamp_(min=_SMALLEST_UNIT)
        values = (x / units).mul_(stack.largest)
    binade = torch.bitwise_and(values.view(torch.int32), _EXPONENT_BITS).view(torch.float32)
    step = torch.clamp(binade, stack.lower, stack.upper).mul_(stack.bits)
    del binade
    below = torch.remainder(values, step)  # from the grid point below, up to the step
    del values
    above = step.sub_(below)
    errors = below.new_empty((2, *below.shape))
    torch.mul(below, above, out=errors[0])
    torch.minimum(below, above, out=errors[1]).square_()
    return errors if units is None else errors.mul_(units.div_(stack.largest).square_())


class ErrorRequest(NamedTuple):
    """Arguments of `rounding_errors` that a computation yields to `run_batched`."""

    x: Tensor
    kinds: tuple[str, ...]
    amaxes: Mapping[Granularity, Tensor]


def _joint_errors(requests: Sequence[ErrorRequest]) -> Sequence[Tensor]:
    if len(requests) == 1:
        return [rounding_errors(*requests[0])]
    kinds, sizes = requests[0].kinds, [request.x.numel() for request in requests]
    whole = torch.cat([request.x.reshape(-1) for request in requests])
    amaxes = {granularity: torch.empty_like(whole) for granularity in requests[0].amaxes}
    for granularity, place in amaxes.items():
        for request, part in zip(requests, torch.split(place, sizes), strict=True):
            part.view(request.x.shape).copy_(request.amaxes[granularity])
    errors = torch.split(rounding_errors(whole, kinds, amaxes), sizes, 2)
    return [part.view(2, len(kinds), *x.shape) for part, (x, *_) in zip(errors, requests, strict=True)]


def run_batched(
    groups: Iterable[tuple[_Name, Generator[ErrorRequest, Tensor, _Result]]], limit: int
) -> Iterator[tuple[_Name, _Result]]:
    """Run computations that each request errors once, and compute the errors of several at once.

    Args:
        groups: Names and computations; all request errors of the same kinds.
        limit: Errors at most that are computed together, unless one request is larger.

    Yields:
        Name and result of each computation.
    """
    waiting: list[tuple[_Name, Generator[ErrorRequest, Tensor, _Result], ErrorRequest]] = []

    def run_waiting() -> Iterator[tuple[_Name, _Result]]:
        batch = waiting.copy()
        waiting.clear()
        results = _joint_errors([request for *_, request in batch])
        for (name, steps, _), errors in zip(batch, results, strict=True):
            try:
                steps.send(errors)
            except StopIteration as done:
                yield name, done.value

    errors = 0
    for name, steps in groups:
        request = next(steps)
        number = request.x.numel() * len(request.kinds)
        if waiting and (errors + number > limit or request.x.device != waiting[0][2].x.device):
            yield from run_waiting()
            errors = 0
        waiting.append((name, steps, request))
        errors += number
    if waiting:
        yield from run_waiting()


def fixed_point_errors(x: Tensor, amaxes: Sequence[Tensor]) -> Tensor:
    """Expected squared error of each element in INT8 under stochastic rounding, for several scalings.

    Args:
        x: FP32, any shape, finite.
        amaxes: Largest magnitude per slice, broadcasting against ``x``, one tensor for each scaling.

    Returns:
        Shape (scalings, *shape of x): the stochastic `rounding_errors` for INT8, in half of the kernels.

    Source:
        Ours.
    """
    step = _broadcast(x.dim(), *amaxes).clamp_(min=_SMALLEST_UNIT).div_(LARGEST["INT8"])
    fraction = (x / step).frac_().abs_()
    return torch.addcmul(fraction, fraction, fraction, value=-1).mul_(step.square_())
