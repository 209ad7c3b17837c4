"""Operators in 16 bits with gradients, computed in FP32 from 16-bit values: for devices without 16-bit units.

Operands, results and gradients are rounded to the 16-bit format as by the operator itself, and it is they that are
saved for the backward pass; only the sums are formed by FP32 instructions. What can be differentiated twice in torch
can be so here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.kernels.autograd.convolution_parts import convolve_parts, forward_parts, gradients, parts_of
from qsync_opt.kernels.matmul import matrix_product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of 16-bit tensors (.., K), (M, K), (M,)."""
    result: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """``a @ b + bias`` of 16-bit matrices (N, K) (K, M) or batches of them, rounded once."""
    result: Tensor = _Product.apply(a, b, bias)  # type: ignore[no-untyped-call]
    return result


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
    """A convolution of 16-bit tensors; geometry as ``torch.convolution`` takes it after the bias."""
    result: Tensor = _Convolution.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return result


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` of 16-bit tensors, dropout included."""
    if query.dim() == key.dim() == value.dim() == 3 and not others.get("enable_gqa"):
        # Torch has a fused kernel, which keeps no weights of attention, for four dimensions only.
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return attention(query, key, value, mask, dropout_p, is_causal, **others).squeeze(1)
    settings = {"dropout_p": dropout_p, "is_causal": is_causal, **others}
    if attn_mask is not None and attn_mask.is_floating_point() and attn_mask.requires_grad:
        function = functools.partial(F.scaled_dot_product_attention, **settings)
        return recomputed(function, (query, key, value, attn_mask), dropout_p > 0)
    function = functools.partial(F.scaled_dot_product_attention, attn_mask=_wide(attn_mask), **settings)
    plain = dropout_p == 0 and not others.get("enable_gqa") and query.dim() == 4 and key.shape[-1] == value.shape[-1]
    plain = plain and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if plain and attn_mask is None and query.shape[-1] == key.shape[-1] and min(query.numel(), key.numel()) > 0:
        scale = others.get("scale")
        result: Tensor = _Attention.apply(query, key, value, is_causal, scale)  # type: ignore[no-untyped-call]
        return result
    return recomputed(function, (query, key, value), dropout_p > 0)


def einsum(equation: str, operands: tuple[Tensor, ...]) -> Tensor:
    """``torch.einsum`` of 16-bit tensors."""
    if is_product_of_two(equation, len(operands)):
        result: Tensor = _Einsum.apply(equation.replace(" ", ""), *operands)  # type: ignore[no-untyped-call]
        return result
    return recomputed(functools.partial(torch.einsum, equation), operands)


def is_product_of_two(equation: str, operands: int) -> bool:
    """Whether both gradients of an einsum are einsums of the other operand: no index is repeated or in one term only.

    Sums of one operand alone, diagonals and ellipses are left out.
    """
    sides = equation.replace(" ", "").split("->")
    if operands != 2 or len(sides) != 2 or "." in equation:
        return False
    terms = [*sides[0].split(","), sides[1]]
    return all(
        len(set(term)) == len(term) and set(term) <= set().union(*(other for other in terms if other is not term))
        for term in terms
    )


def recomputed(function: Callable[..., Tensor], operands: tuple[Tensor, ...], draws: bool = False) -> Tensor:
    """``function`` of 16-bit operands in FP32; the backward pass computes it once more instead of saving more.

    ``draws`` says that the function uses torch's random numbers, which are then the same both times.
    """
    result: Tensor = _Recomputed.apply(function, draws, *operands)  # type: ignore[no-untyped-call]
    return result


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.is_floating_point() else x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), _wide(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        rows = grad.float().reshape(x.shape[:-1].numel(), weight.shape[0])
        if ctx.needs_input_grad[0]:
            grad_x = (rows @ weight.float()).to(grad.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ x.reshape(rows.shape[0], weight.shape[1]).float()).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0).to(grad.dtype)
        return grad_x, grad_weight, grad_bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        result = matrix_product(a.float(), b.float())
        return (result if bias is None else result.add_(bias)).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wide, wanted = grad.float(), ctx.needs_input_grad
        grad_a = matrix_product(wide, b.float().mT).to(grad.dtype) if wanted[0] else None
        grad_b = matrix_product(a.float().mT, wide).to(grad.dtype) if wanted[1] else None
        return grad_a, grad_b, wide.sum(list(range(grad.dim() - 1))).to(grad.dtype) if wanted[2] else None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.bias_sizes = geometry, None if bias is None else list(bias.shape)
        wide = weight.float(), _wide(bias)
        parts = forward_parts(x, weight, geometry)
        return convolve_parts(
            lambda part: torch.convolution(x[part].float(), *wide, *geometry), x.shape[0], parts, x.dtype
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        elements = 0 if torch.is_grad_enabled() else grad.numel() + x.numel()  # as a whole to be differentiated again
        results = gradients(
            lambda part: (grad[part].float(), x[part].float()),
            weight.float(),
            ctx.bias_sizes,
            ctx.geometry,
            list(ctx.needs_input_grad[:3]),
            x.shape[0],
            parts_of(x.shape[0], elements, weight),
            grad.dtype,
        )
        return (*(None if each is None else each.to(grad.dtype) for each in results), None)


_PART = 2**17
"""Elements of a tensor that are copied to FP32 at once: the copies of all of it would need more than an FP32 model."""


def _parts(x: Tensor) -> list[slice]:
    """Parts of a batch (B, ...) of at most `_PART` elements, or of one sample."""
    size = max(1, _PART // max(1, x[0].numel()))
    return [slice(start, start + size) for start in range(0, x.shape[0], size)]


class _Attention(torch.autograd.Function):
    """The fused attention of processors, which saves the result and one number per row, part by part of the batch."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        batch, heads, rows, _ = query.shape
        # Heads beside each other in memory, as torch's own operator leaves them.
        result = query.new_empty((batch, rows, heads, value.shape[-1])).transpose(1, 2)
        logarithms = []
        for part in _parts(query):
            wide = (x[part].float() for x in (query, key, value))
            wide_result, logarithm = run(*wide, 0.0, is_causal, scale=scale)
            result[part] = wide_result
            logarithms.append(logarithm)
        ctx.save_for_backward(query, key, value, result, *logarithms)
        ctx.is_causal, ctx.scale = is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, *logarithms = ctx.saved_tensors
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        whole = [torch.empty_like(x) for x in (query, key, value)]
        for part, logarithm in zip(_parts(query), logarithms, strict=True):
            wide = (x[part].float() for x in (grad, query, key, value, result))
            for each, own in zip(whole, run(*wide, logarithm, 0.0, ctx.is_causal, scale=ctx.scale), strict=True):
                each[part] = own
        return (*whole, None, None)


class _Einsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.equation = equation
        return torch.einsum(equation, a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        operands, result = ctx.equation.split("->")
        first, second = operands.split(",")
        wide, grad_a, grad_b = grad.float(), None, None
        if ctx.needs_input_grad[1]:
            grad_a = torch.einsum(f"{result},{second}->{first}", wide, b.float()).to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_b = torch.einsum(f"{result},{first}->{second}", wide, a.float()).to(grad.dtype)
        return None, grad_a, grad_b


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], draws: bool, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        ctx.function, ctx.state = function, torch.get_rng_state() if draws else None
        return function(*(operand.float() for operand in operands)).to(operands[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        if ctx.state is None:
            return (None, None, *_gradients(ctx.function, ctx.saved_tensors, grad, wanted))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            return (None, None, *_gradients(ctx.function, ctx.saved_tensors, grad, wanted))


def _gradients(
    function: Callable[..., Tensor], operands: tuple[Tensor, ...], grad: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Gradients of a function of FP32 tensors at 16-bit operands, in their type; as differentiable as they are."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        wide = [
            x.float() if again else x.float().requires_grad_(want) for x, want in zip(operands, wanted, strict=True)
        ]
        result = function(*wide)
        inputs = [x for x, want in zip(wide, wanted, strict=True) if want]
        gradients = iter(torch.autograd.grad(result, inputs, grad.float(), create_graph=again))
    return [next(gradients).to(grad.dtype) if want else None for want in wanted]
