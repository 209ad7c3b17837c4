"""Max-pooling as two contestants per window: the largest element, to which the gradient goes, and the next.

Where noise makes the next the larger one, all of the window's gradient goes to another place: the derivative jumps, as
that of a rectifier does at zero. A third element overtakes both so much more rarely that it is left out.

A pool that reads what a rectifier hands on ranks what the rectifier read, ``max(relu(z)) = relu(max(z))``: windows in
which nothing is positive have no largest element otherwise, and the one that noise opens is the one nearest to zero.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_POOLS: dict[str, Any] = {
    "max_pool1d": F.max_pool1d_with_indices,
    "max_pool2d": F.max_pool2d_with_indices,
    "max_pool3d": F.max_pool3d_with_indices,
}
MAX_POOLS = tuple(_POOLS)
_SIGNATURE = inspect.signature(
    lambda input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False: None
)


class Window(NamedTuple):
    """How a pool was called: the arguments of torch's functions, one number per dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool


class Contest(NamedTuple):
    """Both contestants of every window.

    Attributes:
        first: Index into the flattened spatial dimensions, (leading, windows), leading dimensions as one.
        second: Likewise; the same as ``first`` where that is alone.
        gap: By how much the first is larger, likewise; infinite where it is alone.
        shape: Of the pool's result.
    """

    first: Tensor
    second: Tensor
    gap: Tensor
    shape: tuple[int, ...]

    def gap_in(self, x: Tensor) -> Tensor:
        """By how much the first is larger in another tensor of the same shape; may be negative."""
        rows = x.detach().reshape(len(self.first), -1)
        return rows.gather(1, self.first) - rows.gather(1, self.second)


class LastRectified:
    """What the last rectifier read, for a pool that reads what it handed on."""

    def __init__(self) -> None:
        self._pair: tuple[Tensor, Tensor] | None = None

    def keep(self, result: Tensor, z: Tensor) -> None:
        """A rectifier has run; ``z`` must not be written into any more."""
        self._pair = result, z.detach()

    def ranks(self, x: Tensor) -> Tensor:
        """What a pool of ``x`` ranks its elements by."""
        return self._pair[1] if self._pair is not None and self._pair[0] is x else x

    def forget(self) -> None:
        """Keep no tensor."""
        self._pair = None


def pool_call(op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Window] | None:
    """Input and window of a call of one of ``MAX_POOLS``; None if it also asks for indices."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    if named["return_indices"]:
        return None
    dims = int(op_type[-2])
    stride = named["stride"]
    if stride is None or (isinstance(stride, Sequence) and not stride):
        stride = named["kernel_size"]
    window = Window(
        kernel=_each(named["kernel_size"], dims),
        stride=_each(stride, dims),
        padding=_each(named["padding"], dims),
        dilation=_each(named["dilation"], dims),
        ceil=bool(named["ceil_mode"]),
    )
    return named["input"], window


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, Sequence):
        return tuple(value) * dims if len(value) == 1 else tuple(value)
    return (value,) * dims


@torch.no_grad()
def contest(x: Tensor, window: Window) -> Contest:
    """The two largest elements of every window of ``x`` (leading, spatial); of equal ones torch's own choice is first.

    Args:
        x: With any number of leading dimensions.
        window: Of the pool.
    """
    dims = len(window.kernel)
    spatial = x.shape[-dims:]
    lead, x = x.shape[:-dims], x.detach().reshape(-1, 1, *spatial)
    found, first = _POOLS[f"max_pool{dims}d"](
        x, list(window.kernel), list(window.stride), list(window.padding), list(window.dilation), window.ceil, True
    )
    sizes = found.shape[-dims:]
    edges, reach = [], []
    for size, out, kernel, stride, padding, dilation in zip(spatial, sizes, *window[:4], strict=True):
        needed = (out - 1) * stride + dilation * (kernel - 1) + 1
        edges.append((padding, max(0, needed - size - padding)))
        reach.append(stride * (out - 1) + 1)
    flat = [edge for pair in reversed(edges) for edge in pair]
    padded = F.pad(x, flat, value=-math.inf)
    places = F.pad(torch.arange(math.prod(spatial), device=x.device).view(1, 1, *spatial), flat, value=-1)
    rival, second = torch.full_like(found, -math.inf), first.clone()
    for tap in itertools.product(*(range(kernel) for kernel in window.kernel)):
        slices = [
            slice(t * dilation, t * dilation + length, stride)
            for t, dilation, length, stride in zip(tap, window.dilation, reach, window.stride, strict=True)
        ]
        picked: tuple[Any, ...] = (..., *slices)
        value, place = padded[picked], places[picked]
        better = (value > rival) & (place != first)
        rival, second = torch.where(better, value, rival), torch.where(better, place, second)
    return Contest(first.flatten(1), second.flatten(1), (found - rival).flatten(1), (*lead, *sizes))


class SwitchedPool(torch.autograd.Function):
    """A pool whose gradient goes to the second contestant by a share that can be differentiated by.

    The share has the shape of ``contest.gap`` and is 0; the result has that shape, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The largest elements; ``x`` is (leading, elements)."""
        ctx.save_for_backward(share, first, second)
        ctx.elements = x.shape[1]
        return x.gather(1, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """To both, by the share."""
        share, first, second = ctx.saved_tensors
        found = grad.new_zeros((len(grad), ctx.elements))
        moved = grad * share
        return found.scatter_add(1, first, grad - moved).scatter_add(1, second, moved), None, None, None
