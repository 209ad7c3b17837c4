"""How noise on a loss's input changes its gradient, with little memory: a loss over a vocabulary has a large input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.runtimes.torch.interception.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.random_signs import RandomSigns
from qsync_opt.runtimes.torch.sensitivity.reductions import square_sum

_CHUNK = 1 << 21
"""Elements of a loss's input that are differentiated twice together, where its rows are independent."""
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def loss_curvature(call: OperatorCall, x: Tensor) -> Tensor:
    """Relative energy of the change: |H|^2 mean(x^2) / |g|^2, per unit of noise-to-signal ratio.

    The squared norm of the second derivative H is estimated with one vector of random signs from its own generator.

    Args:
        call: Of the loss.
        x: Its first floating input, FP32, cut off from autograd.

    Returns:
        One number, FP64, on the device of ``x``; 0 for a linear loss.
    """
    random = RandomSigns(0)
    totals = torch.zeros(2, dtype=torch.float64, device=x.device)
    for function, part in _parts(call, x):
        found = _norms(function, part, random)
        if found is not None:
            totals += found
    mean_square = square_sum(x) / x.numel()
    return totals[0] * mean_square / totals[1].clamp(min=torch.finfo(torch.float64).tiny)


def _norms(function: Callable[[Tensor], Tensor], x: Tensor, random: RandomSigns) -> Tensor | None:
    """Squared norms of H times signs, and of the gradient; None if the function is linear."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    if not gradient.requires_grad:
        return None
    # Where the gradient depends on parameters alone, the function is linear in its input.
    changes: tuple[Tensor | None, ...] = torch.autograd.grad(gradient, x, random.like(x.detach()), allow_unused=True)
    if changes[0] is None:
        return None
    return torch.stack([square_sum(t.detach()) for t in (changes[0], gradient)])


def _parts(call: OperatorCall, x: Tensor) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """The loss as a function of parts of its input.

    A large cross-entropy is taken some rows at a time and summed instead of averaged: the factor between the two is the
    same in H and in the gradient, so that it does not matter to their ratio.
    """
    given = dict(zip(_CROSS_ENTROPY, call.args, strict=False)) | dict(call.kwargs)
    target = given.get("target")
    plain = call.function is F.cross_entropy and given.get("size_average") is None and given.get("reduce") is None
    if not plain or not isinstance(target, Tensor) or x.dim() != 2 or x.numel() <= _CHUNK or len(target) != len(x):
        entering = next(value for value in (*call.args, *call.kwargs.values()) if _same(value, x))
        yield functools.partial(_whole, call, entering), x
        return
    rows = max(1, _CHUNK // x.shape[1])
    options = {key: given[key] for key in ("weight", "ignore_index", "label_smoothing") if key in given}
    for some, wanted in zip(torch.split(x, rows), torch.split(target, rows), strict=True):
        yield functools.partial(F.cross_entropy, target=wanted, reduction="sum", **options), some


def _same(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == x.shape


def _whole(call: OperatorCall, entering: Tensor, x: Tensor) -> Tensor:
    args = tuple(x if value is entering else value for value in call.args)
    kwargs = {key: x if value is entering else value for key, value in call.kwargs.items()}
    loss: Tensor = call.function(*args, **kwargs)
    return loss
