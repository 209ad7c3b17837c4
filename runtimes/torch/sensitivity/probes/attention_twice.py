"""Attention whose backward pass is differentiated again, and that keeps no probabilities meanwhile.

torch keeps six tensors of the size of the scores (heads times length squared) per call until the second derivative is
made: probabilities, their gradients and what these are derived by. Here only operands and the result's gradient are
kept; probabilities are computed again in each pass, which are two of its few kernels.

With ``S = scale q k^T``, ``P = softmax(S)`` and ``o = P v`` that meets ``g``: ``dP = g v^T``,
``dS = P (dP - sum(P dP))``, and the gradients are ``scale dS k``, ``scale dS^T q`` and ``P^T g``. For the sum of their
products with ``a``, ``b`` and ``c``, ``W = scale (a k^T + q b^T)`` is the derivative by dS, ``T = P (W - sum(P W))``
that by dP, and ``U = W (dP - sum(P dP)) - sum(P W) dP + g c^T`` that by P.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class _AttentionForm:
    """``mask`` tells what is seen (bool) or is added to the scores; None is all."""

    scale: float
    mask: Tensor | None
    causal: bool

    def probabilities(self, q: Tensor, k: Tensor, leading: torch.Size) -> Tensor:
        """Of operands as batches of matrices; ``leading`` are the dimensions that the batch has in the call."""
        if self.causal:
            hidden = torch.full((q.shape[1], k.shape[1]), float("-inf"), dtype=q.dtype, device=q.device).triu_(1)
            return torch.baddbmm(hidden, q, k.mT, alpha=self.scale).softmax(-1)
        scores = torch.bmm(q, k.mT).mul_(self.scale)
        if self.mask is None:
            return scores.softmax(-1)
        whole = scores.view(*leading, *scores.shape[1:])
        if self.mask.dtype is torch.bool:
            whole.masked_fill_(~self.mask, float("-inf"))
        else:
            whole += self.mask
        found: Tensor = torch.ops.aten._safe_softmax(scores, -1)  # rows that see nothing have zeros
        return found


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [x.reshape(-1, *x.shape[-2:]) for x in tensors]


def _through_softmax(g: Tensor, p: Tensor) -> Tensor:
    """``p (g - sum(p g))`` by row."""
    found: Tensor = torch.ops.aten._softmax_backward_data(g, p, -1, p.dtype)
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: _AttentionForm) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.form = form
        flat_q, flat_k, flat_v = _flat(q, k, v)
        return torch.bmm(form.probabilities(flat_q, flat_k, q.shape[:-2]), flat_v).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*_AttentionGradient.apply(g, *ctx.saved_tensors, ctx.form), None)  # type: ignore[no-untyped-call]


class _AttentionGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, q: Tensor, k: Tensor, v: Tensor, form: _AttentionForm) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, q, k, v)
        ctx.form = form
        flat_g, flat_q, flat_k, flat_v = _flat(g, q, k, v)
        p = form.probabilities(flat_q, flat_k, q.shape[:-2])
        by_v = torch.bmm(p.mT, flat_g)
        by_scores = _through_softmax(torch.bmm(flat_g, flat_v.mT), p).mul_(form.scale)
        by_q, by_k = torch.bmm(by_scores, flat_k), torch.bmm(by_scores.mT, flat_q)
        return by_q.view(q.shape), by_k.view(k.shape), by_v.view(v.shape)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor | None, ...]:
        shapes = [x.shape for x in ctx.saved_tensors]
        form: _AttentionForm = ctx.form
        leading = shapes[1][:-2]
        g, q, k, v, a, b, c = _flat(*ctx.saved_tensors, a, b, c)
        p = form.probabilities(q, k, leading)
        w = torch.bmm(a, k.mT).baddbmm_(q, b.mT, beta=form.scale, alpha=form.scale)
        t = _through_softmax(w, p)
        by_g = torch.bmm(t, v).baddbmm_(p, c)
        by_v = torch.bmm(t.mT, g)
        along = torch.linalg.vecdot(p, w).unsqueeze(-1)
        del t
        by_p = torch.bmm(g, v.mT)
        by_scores = _through_softmax(by_p, p)
        mean = torch.linalg.vecdot(p, by_p).unsqueeze(-1)
        # U; the sums of rows do not reach the scores.
        u = (by_p - mean).mul_(w).addcmul_(by_p, along, value=-1).baddbmm_(g, c.mT)
        del w, by_p
        u = _through_softmax(u, p).mul_(form.scale)
        by_scores *= form.scale
        by_q = torch.bmm(u, k).baddbmm_(by_scores, b)
        by_k = torch.bmm(u.mT, q).baddbmm_(by_scores.mT, a)
        found = (x.view(shape) for x, shape in zip((by_g, by_q, by_k, by_v), shapes, strict=True))
        return (*found, None)


def attention_twice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Run ``scaled_dot_product_attention``; None for dropout, grouped heads and masks that are trained.

    Args:
        args: Its positional arguments; operands are (..., length, width), all with the same leading dimensions.
        kwargs: Its keyword arguments.

    Returns:
        (..., length of the query, width of the value), to be differentiated twice.

    Source:
        Ours.
    """
    given: dict[str, Any] = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    alike = q.dim() > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dtype is k.dtype is v.dtype
    if not alike or given.get("dropout_p") or given.get("enable_gqa") or min(q.numel(), k.numel(), v.numel()) == 0:
        return None
    if isinstance(mask, Tensor):
        mask_fits = mask.dim() <= q.dim() and mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad
        if not mask_fits or given.get("is_causal"):
            return None
    scale = given.get("scale")
    form = _AttentionForm(q.shape[-1] ** -0.5 if scale is None else float(scale), mask, bool(given.get("is_causal")))
    found: Tensor = _Attention.apply(q, k, v, form)  # type: ignore[no-untyped-call]
    return found
