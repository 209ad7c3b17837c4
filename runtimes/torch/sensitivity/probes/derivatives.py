"""Convolutions, linear layers and batch normalizations whose backward pass is differentiated again in few kernels.

PyTorch computes the second derivative of a batch normalization with 85 element-wise operations and sums, and that of a
convolution with convolutions of new shapes, for which a card's library first has to choose algorithms. Here both use
the kernels of the step itself, with the same results.

A weight's derivative has two parts, from its uses in the forward and in the backward pass. The second is known first,
and PyTorch would hold it for every weight until the first is. Its factors are held instead where they are smaller.

With ``s = <v, gx> + <p, gw> + <q, gb>`` for the gradients of a product ``x w + b`` that meets ``g``:
``ds/dg = v w + x p + q``, ``ds/dx = g p`` and ``ds/dw = g v``, each in the shape of what it is the derivative by.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.kernels import CONVOLUTIONS, convolution_call
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.errors import attention_call
from qsync_opt.runtimes.torch.sensitivity.products import batch_norm_arguments


@dataclass(frozen=True)
class _AttentionForm:
    """``mask`` selects the keys (bool) or is added to the scores; None selects all."""

    scale: float
    mask: Tensor | None
    causal: bool

    def probabilities(self, q: Tensor, k: Tensor, leading: torch.Size) -> Tensor:
        """The probabilities for operands as batches of matrices; ``leading`` are the batch dimensions of the call."""
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
        probabilities: Tensor = torch.ops.aten._safe_softmax(scores, -1)  # zeros in rows without keys
        return probabilities


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [x.reshape(-1, *x.shape[-2:]) for x in tensors]


def _through_softmax(g: Tensor, p: Tensor) -> Tensor:
    """``p (g - sum(p g))`` by row."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data(g, p, -1, p.dtype)
    return gradient


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
        # The gradient of the probabilities; the softmax removes the sums of its rows.
        u = (by_p - mean).mul_(w).addcmul_(by_p, along, value=-1).baddbmm_(g, c.mT)
        del w, by_p
        u = _through_softmax(u, p).mul_(form.scale)
        by_scores *= form.scale
        by_q = torch.bmm(u, k).baddbmm_(by_scores, b)
        by_k = torch.bmm(u.mT, q).baddbmm_(by_scores.mT, a)
        gradients = (x.view(shape) for x, shape in zip((by_g, by_q, by_k, by_v), shapes, strict=True))
        return (*gradients, None)


def attention_twice(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Run ``scaled_dot_product_attention``; None for dropout, grouped heads and masks that are trained.

    Args:
        args: Its positional arguments; operands are (..., length, width), all with the same leading dimensions.
        kwargs: Its keyword arguments.

    Returns:
        The result, (..., length of the query, width of the value), which can be differentiated twice.

    Source:
        Ours.
    """
    call = attention_call(args, kwargs)
    q, k, v, mask = call.query, call.key, call.value, call.mask
    alike = q.dim() > 2 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dtype is k.dtype is v.dtype
    if not alike or call.dropout or call.grouped or min(q.numel(), k.numel(), v.numel()) == 0:
        return None
    if mask is not None:
        mask_fits = mask.dim() <= q.dim() and mask.dtype in (torch.bool, q.dtype) and not mask.requires_grad
        if not mask_fits or call.is_causal:
            return None
    form = _AttentionForm(call.scale, mask, call.is_causal)
    output: Tensor = _Attention.apply(q, k, v, form)  # type: ignore[no-untyped-call]
    return output


_LINEAR = inspect.signature(lambda input, weight, bias=None: None)
_ALL = (True, True, True)


class _Linear:
    """``x w^T + b``, with samples and any number of dimensions in front."""

    places = 0
    """Dimensions after those of samples and channels."""

    def run(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients of the operands that need one."""
        second = g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1]) if needs[1] else None
        return g @ w if needs[0] else None, second

    def to_bias(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)


@dataclass(frozen=True)
class _Convolution:
    """``torch.convolution`` of a batch; ``geometry`` is what it takes after the bias."""

    geometry: tuple[Any, ...]
    places: int

    def run(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.convolution(x, w, b, *self.geometry)

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
        """The gradients of the operands that need one."""
        if not any(needs[:2]):
            return None, None
        mask = [*needs[:2], False]
        first, second, _ = torch.ops.aten.convolution_backward(g, x, w, None, *self.geometry, mask)
        return first, second

    def to_bias(self, g: Tensor) -> Tensor:
        return g.sum((0, *range(2, g.dim())))


_Form = _Linear | _Convolution


@dataclass(slots=True)
class DeferredDerivative:
    """Factors of the derivative with respect to a weight: ``g`` and ``v`` of each pass.

    Attributes:
        form: The operator.
        defer: Whether the derivative may be deferred.
        trained: Which operands the first differentiation is to reach.
    """

    form: _Form
    defer: bool
    trained: Sequence[bool]
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    weight: Tensor | None = None

    def pop(self) -> Tensor | None:
        """Compute the derivative, None without factors, and release its factors."""
        derivative: Tensor | None = None
        for g, v in self.pairs:
            assert self.weight is not None
            part = self.form.gradients(g, v, self.weight, (False, True))[1]
            derivative = part if derivative is None else derivative.add_(part)
        self.pairs.clear()
        self.weight = None
        return derivative


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, pending: DeferredDerivative) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.pending, ctx.bias_ends = pending, b is None or b.is_leaf
        return pending.form.run(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        pending: DeferredDerivative = ctx.pending
        needs = ctx.needs_input_grad
        if g is None:
            return None, pending.pop(), None, None
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            first = (*(a and b for a, b in zip(needs, pending.trained, strict=False)), needs[2])
            return (*_ProductGradient.apply(g, x, w, pending, first), None)  # type: ignore[no-untyped-call]
        gx, gw = pending.form.gradients(g, x, w, needs)
        deferred = pending.pop()
        if deferred is not None:
            gw = deferred if gw is None else gw.add_(deferred)
        # The derivative with respect to a parameter that is a bias is not used.
        return gx, gw, pending.form.to_bias(g) if needs[2] and not ctx.bias_ends else None, None


class _ProductGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, pending: DeferredDerivative, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, w)
        ctx.pending, form = pending, pending.form
        gx, gw = form.gradients(g, x, w, needs)
        return gx, gw, form.to_bias(g) if needs[2] else None

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, p: Tensor | None, q: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, w = ctx.saved_tensors
        pending: DeferredDerivative = ctx.pending
        form, needs = pending.form, ctx.needs_input_grad
        by_g = by_x = by_w = None
        if needs[0]:
            if p is not None:
                by_g = form.run(x, p, q)
            if v is not None:
                through = form.run(v, w, q if p is None else None)
                by_g = through if by_g is None else by_g.add_(through)
            if v is None and p is None and q is not None:
                by_g = q.view(-1, *(1,) * form.places).expand_as(g)
        if needs[1] and p is not None:
            by_x = form.gradients(g, x, p, (True, False))[0]
        if needs[2] and v is not None:
            if pending.defer and g.numel() + v.numel() < w.numel():
                pending.pairs.append((g, v))
                pending.weight = w
            else:
                by_w = form.gradients(g, v, w, (False, True))[1]
        return by_g, by_x, by_w, None, None


def product_twice(
    op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, defer: bool, trained: Sequence[bool]
) -> tuple[Tensor, DeferredDerivative] | None:
    """Run a linear layer or a convolution; None if the call is of another kind.

    Args:
        op_type: Kind of the operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        defer: Whether its weight's derivative may be deferred, until ``DeferredDerivative.pop``.
        trained: Which of its operands the first differentiation is to reach.

    Returns:
        Its result, and the derivative with respect to its weight that may be deferred in a second differentiation.
    """
    form: _Form
    restore: Callable[[Tensor], Tensor]
    if op_type == "linear":
        arguments = _LINEAR.bind(*args, **kwargs).arguments
        x, w, b = arguments["input"], arguments["weight"], arguments.get("bias")
        if w.dim() != 2 or x.dim() < 2:
            return None
        form, restore = _Linear(), lambda output: output
    elif op_type in CONVOLUTIONS:
        call = convolution_call(op_type, args, kwargs)
        x, w, b, restore = call.x, call.weight, call.bias, call.restore
        form = _Convolution(call.geometry, x.dim() - 2)
    else:
        return None
    pending = DeferredDerivative(form, defer, trained)
    output: Tensor = _Product.apply(x, w, b, pending)  # type: ignore[no-untyped-call]
    return restore(output), pending


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, momentum: float, eps: float
    ) -> Tensor:
        results: tuple[Tensor, ...] = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        ctx.save_for_backward(x, weight, *results[1:])
        ctx.eps, ctx.ends = eps, weight.is_leaf and bias.is_leaf
        return results[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradients = _BatchNormGradient.apply(g, x, weight, mean, invstd, ctx.eps)  # type: ignore[no-untyped-call]
        else:
            gradients = _gradients(g, x, weight, mean, invstd, ctx.eps, (True, not ctx.ends, not ctx.ends))
        return (*gradients, None, None, None, None)


class _BatchNormGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, eps: float
    ) -> tuple[Tensor | None, ...]:
        gradients = _gradients(g, x, weight, mean, invstd, eps, _ALL)
        ctx.save_for_backward(g, x, weight, mean, invstd, gradients[1], gradients[2])
        ctx.eps = eps
        return gradients

    @staticmethod
    def backward(ctx: Any, v: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives of ``<v, gx> + <p, gw> + <q, gb>``.

        P is the projection that removes the mean and the part along the normalized x, x_; r is the inverse deviation.
        ``gx = w r P g``, and P is symmetric, so that ``by g = w r P v + p x_ + q``. ``by x_ = p g - w r (e g + b v)/n``
        for the sums e of v x_ and b of g x_, and the derivative of r with respect to x is ``-r^2 x_ / n``.
        """
        g, x, weight, mean, invstd, along, total = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        shape = (1, -1, *(1,) * (x.dim() - 2))
        by_g, e, c = _gradients(v, x, weight, mean, invstd, ctx.eps, _ALL)
        assert by_g is not None
        assert e is not None
        assert c is not None
        projected = (v * g).sum((0, *range(2, x.dim())))
        common = torch.addcmul(total * c, along, e)
        projected = projected.sub_(common, alpha=1 / n)  # <v, P g> of each channel
        scale = weight * invstd
        through_x = g * torch.addcmul(p, scale, e, value=-1 / n).view(shape)
        through_x.addcmul_(v, (scale * along).view(shape), value=-1 / n)
        by_x = _gradients(through_x, x, None, mean, invstd, ctx.eps, (True, False, False))[0]
        assert by_x is not None
        slope = (scale * projected).mul_(invstd).mul_(invstd)
        by_x.addcmul_(x, slope.view(shape), value=-1 / n).add_((slope * mean).view(shape), alpha=1 / n)
        tilt = p * invstd
        by_g.addcmul_(x, tilt.view(shape)).add_(torch.addcmul(q, tilt, mean, value=-1).view(shape))
        by_weight = None if weight.is_leaf else projected * invstd
        return by_g, by_x, by_weight, None, None, None


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float, mask: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward(
        g, x, weight, None, None, mean, invstd, True, eps, list(mask)
    )
    return gradients


def batch_norm_twice(call: OperatorCall) -> Tensor | None:
    """Run a batch normalization in training mode; None if the call is another one."""
    arguments = batch_norm_arguments(call)
    if arguments is None:
        return None
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    plain = arguments["training"] and x.requires_grad and x.dim() > 1 and math.prod(x.shape) > x.shape[1]
    if not plain or any(t is None or t.dtype is not x.dtype for t in (weight, bias)):
        return None
    output: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, arguments["running_mean"], arguments["running_var"], arguments["momentum"], arguments["eps"]
    )
    return output


_BAG = inspect.signature(F.embedding_bag)


def embedding_bag_twice(call: OperatorCall) -> Tensor | None:
    """Run sums or means of looked-up rows by operations which can be differentiated again.

    None if the call is another one.
    """
    if call.function is not F.embedding_bag:
        return None
    bound = _BAG.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    indices, table, offsets = given["input"], given["weight"], given["offsets"]
    if given["mode"] == "max" or given["scale_grad_by_freq"]:
        return None
    if given["max_norm"] is not None:
        with torch.no_grad():
            torch.embedding_renorm_(table.detach(), indices.contiguous(), given["max_norm"], given["norm_type"])
    if offsets is None:
        bags, count = (
            torch.arange(len(indices), device=indices.device).repeat_interleave(indices.shape[1]),
            len(indices),
        )
    else:
        count = len(offsets) - bool(given["include_last_offset"])
        positions = torch.arange(indices.numel(), device=indices.device)
        bags = torch.searchsorted(offsets[:count].contiguous(), positions, right=True) - 1
    rows = indices.reshape(-1)
    weights = given["per_sample_weights"]
    weights = table.new_ones(len(rows)) if weights is None else weights.reshape(-1)
    if given["padding_idx"] is not None:
        weights = weights * (rows != given["padding_idx"] % table.shape[0])
    if given["mode"] == "mean":
        weights = weights / table.new_zeros(count).index_add_(0, bags, weights).clamp_(min=1)[bags]
    sums: Tensor = table.new_zeros(count, table.shape[1]).index_add(0, bags, table[rows] * weights[:, None])
    return sums


def leaves_before(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The leaves of the autograd graph that gradients depend on.

    Behind a function that can be differentiated only once, taps would silently get no derivative.

    Raises:
        RuntimeError: A gradient came through a function marked as differentiable once.
    """
    leaves = []
    nodes = [gradient.grad_fn for gradient in gradients if gradient is not None]
    visited: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function is marked with once_differentiable")
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves
