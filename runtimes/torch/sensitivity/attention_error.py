"""What computing scaled dot-product attention in a 16-bit format costs, measured on the real operands.

Attention is no product: its noise passes through a softmax. So it is computed twice, in FP32 and as a fused kernel
of the format computes it (operands, probabilities, gradients and results rounded to nearest; scores, softmax and sums
in FP32), and the squared differences of output and gradients are added up, a few batch elements at a time.

Axis letters: H query heads, N queries, S keys, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.numerics.rounding import LARGEST
from qsync_opt.sensitivity.statistics import ProductSizes

_MEASURED = ("BF16", "FP16", "TF32")
_SCORES = 1 << 22
"""Scores that are held at once, unless those of one batch element are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments of one call, dropout left out: its mask is noise of the model's own."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    repeats: int
    """Query heads per key head (1 without grouped-query attention)."""

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
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key = given["query"], given["key"]
    scale = given.get("scale")
    grouped = bool(given.get("enable_gqa", False))
    return AttentionCall(
        query=query,
        key=key,
        value=given["value"],
        mask=given.get("attn_mask"),
        is_causal=bool(given.get("is_causal", False)),
        scale=float(scale) if scale is not None else float(query.shape[-1]) ** -0.5,
        repeats=query.shape[-3] // key.shape[-3] if grouped else 1,
    )


class _Results(NamedTuple):
    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


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
) -> _Results:
    """Attention and its gradients for some batch elements, rounded as a fused kernel of the format rounds."""
    rounded = _ROUND[name]
    delivered = _ROUND["FP32"] if name == "TF32" else rounded  # TF32 results are FP32 tensors
    q, k, v, g = (rounded(x) for x in (q, k, v, g))
    k_H, v_H = (x.repeat_interleave(call.repeats, -3) if call.repeats > 1 else x for x in (k, v))
    scores = (q @ k_H.mT) * call.scale
    if bias is not None:
        scores = scores + bias
    # A row that may attend to nothing has no probabilities; torch delivers zeros for it.
    probabilities = torch.softmax(scores, -1)
    if bias is not None:
        probabilities = probabilities.masked_fill(torch.isneginf(bias).all(-1, keepdim=True), 0.0)
    kept = rounded(probabilities)
    output = kept @ v_H
    inner = g @ v_H.mT
    # Fused kernels take the row sums from the result as they delivered it.
    output = delivered(output)
    score_gradient = rounded(probabilities * (inner - (g * output).sum(-1, keepdim=True)))
    query = score_gradient @ k_H * call.scale
    key, value = score_gradient.mT @ q * call.scale, kept.mT @ g
    if call.repeats > 1:
        key, value = (_sum_repeats(x, call.repeats) for x in (key, value))
    return _Results(*(delivered(x) for x in (output, query, key, value)))


def _bias(call: AttentionCall) -> Tensor | None:
    """What is added to the scores: the mask, or the causal mask, as FP32."""
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
        FP64; infinite where an operand exceeds the format's range. The host waits for nothing.

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
