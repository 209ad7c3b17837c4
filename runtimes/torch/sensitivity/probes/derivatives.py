"""Convolutions, linear layers and batch normalizations whose backward pass is differentiated again in few kernels.

torch makes the second derivative of a batch normalization of 85 element-wise operations and sums, and that of a
convolution of convolutions of other shapes than the step's, each of which a card's library first has to prepare for.
Here both are made of the kernels of the step itself. What they compute is the same.

A weight's derivative has two parts: from where the forward pass reads it, and from where the backward pass does. The
second comes first, and torch would hold it for every weight until the first comes. What it is a product of is held
instead where that is smaller, and both parts are made together.

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

from qsync_opt.kernels.arguments import CONVOLUTIONS, convolution_call
from qsync_opt.runtimes.torch.interception.operator_calls import OperatorCall

_BATCH_NORM = inspect.signature(F.batch_norm)
_LINEAR = inspect.signature(lambda input, weight, bias=None: None)
_AXES = (True, True, True)


class _Linear:
    """``x w^T + b``; samples first, then any number of dimensions."""

    def run(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.linear(x, w, b)

    def to_first(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return g @ w

    def to_second(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    def to_both(self, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return self.to_first(g, x, w), self.to_second(g, x, w)

    def to_bias(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)


@dataclass(frozen=True)
class _Convolution:
    """``torch.convolution`` of a batch; ``geometry`` is what it takes after the bias."""

    geometry: tuple[Any, ...]

    def run(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return torch.convolution(x, w, b, *self.geometry)

    def to_first(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return self._backward(g, x, w, [True, False, False])[0]

    def to_second(self, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return self._backward(g, x, w, [False, True, False])[1]

    def to_both(self, g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        found = self._backward(g, x, w, [True, True, False])
        return found[0], found[1]

    def to_bias(self, g: Tensor) -> Tensor:
        return g.sum((0, *range(2, g.dim())))

    def _backward(self, g: Tensor, x: Tensor, w: Tensor, mask: list[bool]) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(g, x, w, None, *self.geometry, mask)
        return found


_Form = _Linear | _Convolution


def _operand_gradients(
    form: _Form, g: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Those of the two operands that are needed; both together in one call."""
    if needs[0] and needs[1]:
        return form.to_both(g, x, w)
    return form.to_first(g, x, w) if needs[0] else None, form.to_second(g, x, w) if needs[1] else None


@dataclass(slots=True)
class Delayed:
    """Of one call, what the derivative by its weight will be a product of: ``g`` and ``v`` of each pass.

    Attributes:
        form: Of the call.
        wait: Whether that may be.
        trained: Which operands the first differentiation is to reach.
    """

    form: _Form
    wait: bool
    trained: Sequence[bool]
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    weight: Tensor | None = None

    def taken(self) -> Tensor | None:
        """That derivative, which is no longer held; None if there is none."""
        found: Tensor | None = None
        for g, v in self.pairs:
            assert self.weight is not None
            part = self.form.to_second(g, v, self.weight)
            found = part if found is None else found.add_(part)
        self.pairs.clear()
        self.weight = None
        return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, delayed: Delayed) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.delayed, ctx.bias_ends = delayed, b is None or b.is_leaf
        return delayed.form.run(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        delayed: Delayed = ctx.delayed
        needs = ctx.needs_input_grad
        if g is None:
            return None, delayed.taken(), None, None
        x, w = ctx.saved_tensors
        if torch.is_grad_enabled():
            first = (*(a and b for a, b in zip(needs, delayed.trained, strict=False)), needs[2])
            return (*_ProductGradient.apply(g, x, w, delayed, first), None)  # type: ignore[no-untyped-call]
        gx, gw = _operand_gradients(delayed.form, g, x, w, needs)
        late = delayed.taken()
        if late is not None:
            gw = late if gw is None else gw.add_(late)
        # Nobody asks how a bias that is a parameter matters.
        return gx, gw, delayed.form.to_bias(g) if needs[2] and not ctx.bias_ends else None, None


class _ProductGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, w: Tensor, delayed: Delayed, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, w)
        ctx.delayed, form = delayed, delayed.form
        gx, gw = _operand_gradients(form, g, x, w, needs)
        return gx, gw, form.to_bias(g) if needs[2] else None

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, p: Tensor | None, q: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, w = ctx.saved_tensors
        delayed: Delayed = ctx.delayed
        form, needs = delayed.form, ctx.needs_input_grad
        by_g = by_x = by_w = None
        if needs[0]:
            if p is not None:
                by_g = form.run(x, p, q)
            if v is not None:
                through = form.run(v, w, q if p is None else None)
                by_g = through if by_g is None else by_g.add_(through)
            if v is None and p is None and q is not None:
                by_g = q.view(-1, *(1,) * (0 if isinstance(form, _Linear) else g.dim() - 2)).expand_as(g)
        if needs[1] and p is not None:
            by_x = form.to_first(g, x, p)
        if needs[2] and v is not None:
            if delayed.wait and g.numel() + v.numel() < w.numel():
                delayed.pairs.append((g, v))
                delayed.weight = w
            else:
                by_w = form.to_second(g, v, w)
        return by_g, by_x, by_w, None, None


def product_twice(
    op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, wait: bool, trained: Sequence[bool]
) -> tuple[Tensor, Delayed] | None:
    """Run a linear layer or a convolution; None if the call is of another kind.

    Args:
        op_type: Kind of the operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        wait: Whether its weight's derivative may come late, or not before ``Delayed.taken`` is asked.
        trained: Which of its operands the first differentiation is to reach.

    Returns:
        Its result, and what of the derivative by its weight may be waiting after a second differentiation.
    """
    form: _Form
    restore: Callable[[Tensor], Tensor]
    if op_type == "linear":
        given = _LINEAR.bind(*args, **kwargs).arguments
        x, w, b = given["input"], given["weight"], given.get("bias")
        if w.dim() != 2 or x.dim() < 2:
            return None
        form, restore = _Linear(), _same
    elif op_type in CONVOLUTIONS:
        call = convolution_call(op_type, args, kwargs)
        x, w, b, restore = call.x, call.weight, call.bias, call.restore
        form = _Convolution(call.geometry)
    else:
        return None
    delayed = Delayed(form, wait, trained)
    output: Tensor = _Product.apply(x, w, b, delayed)  # type: ignore[no-untyped-call]
    return restore(output), delayed


def _same(x: Tensor) -> Tensor:
    return x


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, momentum: float, eps: float
    ) -> Tensor:
        found: tuple[Tensor, ...] = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        ctx.save_for_backward(x, weight, *found[1:])
        ctx.eps, ctx.ends = eps, weight.is_leaf and bias.is_leaf
        return found[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _BatchNormGradient.apply(g, x, weight, mean, invstd, ctx.eps)  # type: ignore[no-untyped-call]
        else:
            found = _gradients(g, x, weight, mean, invstd, ctx.eps, (True, not ctx.ends, not ctx.ends))
        return (*found, None, None, None, None)


class _BatchNormGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, eps: float
    ) -> tuple[Tensor | None, ...]:
        found = _gradients(g, x, weight, mean, invstd, eps, _AXES)
        ctx.save_for_backward(g, x, weight, mean, invstd, found[1], found[2])
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, v: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives of ``<v, gx> + <p, gw> + <q, gb>``.

        With P what takes the mean and the part along the normalized x from a tensor, r the inverse deviation:
        ``gx = w r P g``, and P is symmetric, so that ``by g = w r P v + p x_ + q``. ``by x_ = p g - w r (e g + b v)/n``
        for the sums e of v x_ and b of g x_, and r depends on x by ``-r^2 x_ / n``.
        """
        g, x, weight, mean, invstd, along, total = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        shape = (1, -1, *(1,) * (x.dim() - 2))
        by_g, e, c = _gradients(v, x, weight, mean, invstd, ctx.eps, _AXES)
        assert by_g is not None
        assert e is not None
        assert c is not None
        met = (v * g).sum((0, *range(2, x.dim())))
        common = torch.addcmul(total * c, along, e)
        met = met.sub_(common, alpha=1 / n)  # <v, P g> of each channel
        scale = weight * invstd
        wanted = g * torch.addcmul(p, scale, e, value=-1 / n).view(shape)
        wanted.addcmul_(v, (scale * along).view(shape), value=-1 / n)
        by_x = _gradients(wanted, x, None, mean, invstd, ctx.eps, (True, False, False))[0]
        assert by_x is not None
        slope = (scale * met).mul_(invstd).mul_(invstd)
        by_x.addcmul_(x, slope.view(shape), value=-1 / n).add_((slope * mean).view(shape), alpha=1 / n)
        tilt = p * invstd
        by_g.addcmul_(x, tilt.view(shape)).add_(torch.addcmul(q, tilt, mean, value=-1).view(shape))
        by_weight = None if weight.is_leaf else met * invstd
        return by_g, by_x, by_weight, None, None, None


def _gradients(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, eps: float, mask: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = torch.ops.aten.native_batch_norm_backward(
        g, x, weight, None, None, mean, invstd, True, eps, list(mask)
    )
    return found


def batch_norm_twice(call: OperatorCall) -> Tensor | None:
    """Run a batch normalization of a training step; None if the call is another one."""
    if call.function is not F.batch_norm:
        return None
    bound = _BATCH_NORM.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    x, weight, bias = given["input"], given["weight"], given["bias"]
    plain = given["training"] and x.requires_grad and x.dim() > 1 and math.prod(x.shape) > x.shape[1]
    if not plain or any(t is None or t.dtype is not x.dtype for t in (weight, bias)):
        return None
    found: Tensor = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, given["running_mean"], given["running_var"], given["momentum"], given["eps"]
    )
    return found


def leaves_before(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The leaves of the autograd graph that gradients depend on.

    Autograd would raise only if the derivative had to pass where a function can be differentiated once; taps before it
    would silently get none.

    Raises:
        RuntimeError: A gradient came through a function marked as differentiable once.
    """
    leaves = []
    nodes = [gradient.grad_fn for gradient in gradients if gradient is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::Error":
            raise RuntimeError("a function is marked with once_differentiable")
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
        nodes.extend(following for following, _ in node.next_functions)
    return leaves
