"""Largest magnitudes and norms of gradients, computed for many at once.

Only for tensors that nothing writes into while they are queued. What autograd hands to a hook is such a tensor: it adds
to a gradient in place only where nobody else refers to its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, largest, norm, norms

_TOGETHER = 1 << 21
"""Elements in the queue at most."""

Receiver = Callable[[Tensor, Tensor | None], None]
"""Takes a largest magnitude, and the norm if it was requested."""


class MomentQueue:
    """Tensors whose moments are still to be computed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Receiver, bool]] = []
        self._elements = 0

    def add(self, x: Tensor, receive: Receiver, *, root: bool = True) -> None:
        """Pass the largest magnitude of a tensor, and its norm with ``root``, to a receiver by the next ``flush``."""
        if self._elements + x.numel() > _TOGETHER:
            self.flush()
        self._waiting.append((x, receive, root))
        self._elements += x.numel()

    def flush(self) -> None:
        """Compute the moments of all queued tensors."""
        alike = by_place(self._waiting, lambda one: one[0])
        self._waiting.clear()
        self._elements = 0
        for some in alike.values():
            rooted = [x for x, _, root in some if root]
            roots = iter(norms(rooted) if rooted else ())
            for (_, receive, root), amax in zip(some, largest([x for x, *_ in some]), strict=True):
                receive(amax, next(roots) if root else None)


def add_moments(queue: MomentQueue | None, x: Tensor, receive: Receiver, *, root: bool) -> None:
    """Pass moments of a tensor to a receiver: at once without a queue."""
    if queue is None:
        receive(torch.linalg.vector_norm(x, float("inf")), norm(x) if root else None)
    else:
        queue.add(x, receive, root=root)


def moment_receiver(tensor: str, numbers: list[tuple[tuple[str, ...], Tensor]]) -> Receiver:
    """A receiver that appends the moments of the named tensor to numbers."""

    def receive(amax: Tensor, root: Tensor | None) -> None:
        numbers.append(((f"{tensor}.greatest",), amax.reshape(1)))
        if root is not None:
            numbers.append(((f"{tensor}.norm",), root.reshape(1)))

    return receive
