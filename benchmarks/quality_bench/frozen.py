"""Which part of a plan's noise comes through rectifiers? The same plan with the masks of a pass without noise.

With its masks frozen a rectifier hands on ``relu(z)`` of the noisy ``z``, but multiplies its gradient by what the
exact ``z`` passes: nothing flips, and what is left is smooth in the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
    """Masks of the rectifiers of one pass, kept by ``record`` and put into the passes of later blocks.

    Sees ``torch.relu`` alone; a block is one pass, for every block the rectifiers are counted from the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._masks: list[Tensor] = []
        self._place: int | None = None

    def record(self, function: Callable[[], Any]) -> None:
        """Keep the masks of what runs now."""
        self._masks, self._place = [], None
        with self:
            function()

    def run(self, function: Callable[[], Any]) -> Any:
        """Run with the masks that were kept."""
        self._place = 0
        with self:
            return function()

    def __bool__(self) -> bool:
        return bool(self._masks)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.relu:
            return func(*args, **(kwargs or {}))
        z: Tensor = args[0]
        if self._place is None:
            self._masks.append(z > 0)
            return func(z)
        mask = self._masks[self._place]
        self._place += 1
        return FrozenRectifier.apply(z, mask)  # type: ignore[no-untyped-call]
