"""How much does the gradient scatter from batch to batch? The noise that training has anyway.

With G_b the gradient of batch b and n batches, ``(sum |G_b|^2 - |sum G_b|^2 / n) / (n - 1)`` is an unbiased estimate of
the variance of one batch's gradient, summed over all parameters. ``|G_b|^2`` is taken where autograd hands a gradient
over to its parameter, and the sum is what ``.grad`` accumulates anyway: no second copy of any gradient is kept. The
first batch's is still in ``.grad`` when a second one begins; one batch alone says nothing and is not looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from qsync_opt.runtimes.torch.sensitivity.reductions import square_sum
from qsync_opt.sensitivity.statistics import GradientNoise


def _square_sum(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return square_sum(values.detach())


class GradientScatter:
    """Within its block, gradients accumulate in ``.grad`` and the squared norm of each batch's is added up."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._squares: dict[torch.device, Tensor] = {}
        self._batches = 0
        self._last: dict[int, Tensor] = {}

    def __enter__(self) -> GradientScatter:
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _add(self, gradient: Tensor) -> None:
        self._count(_square_sum(gradient))

    def _count(self, found: Tensor) -> None:
        known = self._squares.get(found.device)
        self._squares[found.device] = found if known is None else known + found

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Count the backward pass within the block as one batch."""
        if self._batches == 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._add(parameter.grad)
        watched = self._parameters if self._batches else []
        self._last.clear()

        def hooked(index: int) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                self._last[index] = found = _square_sum(gradient)
                self._count(found)

            return hook

        handles = [p.register_hook(hooked(i)) for i, p in enumerate(watched)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._batches += 1

    def roots(self) -> dict[int, Tensor]:
        """Root mean squares of the last batch's gradients, by the number of the trained parameter."""
        squares = self._last
        if self._batches == 1:
            squares = {i: _square_sum(p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        return {i: (square.double() / self._parameters[i].numel()).sqrt() for i, square in squares.items()}

    def forget(self) -> None:
        """Keep no gradient: nothing follows that it could be compared with."""
        for parameter in self._parameters:
            parameter.grad = None

    def noise(self) -> GradientNoise | None:
        """What was found; None after fewer than two batches."""
        if self._batches < 2:
            return None
        squares = sum(value.item() for value in self._squares.values())
        whole = [_square_sum(p.grad) for p in self._parameters if p.grad is not None]
        of_sum = sum(value.item() for value in whole)
        # Cancellation may leave a hair below zero where all batches are alike.
        variance = max(0.0, (squares - of_sum / self._batches) / (self._batches - 1))
        return GradientNoise(mean_square_norm=squares / self._batches, variance=variance)
