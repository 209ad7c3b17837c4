"""Which part of a plan's noise comes through rectifiers and max-pools? The same plan with their places kept.

With its masks frozen a rectifier hands on ``relu(z)`` of the noisy ``z``, but multiplies its gradient by what the
exact ``z`` passes; a frozen max-pool reads where the largest element is without noise. Nothing flips then, and what is
left is smooth in the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsync_opt.runtimes.torch.interception import functions_named
from qsync_opt.runtimes.torch.sensitivity.probes import Contest, LastRectified, Window, contest, pool_call

_POOLS = functions_named("max_pool2d")


class FrozenRectifier(torch.autograd.Function):
    """A rectifier whose gradient is multiplied by a mask of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor) -> Tensor:
        """Rectify."""
        ctx.save_for_backward(mask)
        return z.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the mask alone."""
        (mask,) = ctx.saved_tensors
        return grad * mask, None


class Masks(TorchFunctionMode):
    """Masks of the rectifiers, and places of the max-pools, of one pass: kept by ``record``, put into later blocks.

    Sees ``torch.relu`` and ``max_pool2d`` alone; a block is one pass, for every block both are counted from the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []
        self._place: int | None = None
        self._last = LastRectified()

    def record(self, function: Callable[[], Any]) -> None:
        """Keep the masks of what runs now."""
        self._kept, self._place = [], None
        with self:
            function()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run with the masks that were kept."""
        self._place = 0
        with self:
            return function()

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _POOLS:
            return self._pool(args, kwargs or {})
        if func is not torch.relu:
            return func(*args, **(kwargs or {}))
        z: Tensor = args[0]
        mask = self._known(lambda: z > 0)
        result: Tensor = FrozenRectifier.apply(z, mask)  # type: ignore[no-untyped-call]
        self._last.keep(result, z)
        return result

    def _known(self, found: Callable[[], Any]) -> Any:
        """What is kept of the next operator; while recording, what is found now."""
        if self._place is None:
            self._kept.append(found())
            return self._kept[-1]
        self._place += 1
        return self._kept[self._place - 1]

    def _pool(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        x, window = cast("tuple[Tensor, Window]", pool_call("max_pool2d", args, kwargs))
        known: Contest = self._known(lambda: contest(self._last.ranks(x), window))
        return x.reshape(len(known.first), -1).gather(1, known.first).view(known.shape)
