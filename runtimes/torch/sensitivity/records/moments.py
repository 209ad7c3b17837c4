"""Largest magnitudes and norms of gradients, many at once.

Only of tensors that nothing writes into while they wait: what autograd hands to a hook is such a tensor, as it adds to
a gradient in place only where nobody else refers to its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, largest, norm, norms

_TOGETHER = 1 << 21
"""Elements that wait at most."""

Receiver = Callable[[Tensor, Tensor | None], None]
"""Takes a largest magnitude, and the norm if it was asked for."""


class MomentQueue:
    """Tensors that wait for each other."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Receiver, bool]] = []
        self._elements = 0

    def add(self, x: Tensor, receive: Receiver, *, root: bool = True) -> None:
        """Have the largest magnitude of a tensor, and its norm if asked for, given at the latest by ``flush``."""
        if self._elements + x.numel() > _TOGETHER:
            self.flush()
        self._waiting.append((x, receive, root))
        self._elements += x.numel()

    def flush(self) -> None:
        """Give what is not given yet."""
        alike = by_place(self._waiting, lambda one: one[0])
        self._waiting.clear()
        self._elements = 0
        for some in alike.values():
            rooted = [x for x, _, root in some if root]
            roots = iter(norms(rooted) if rooted else ())
            for (_, receive, root), amax in zip(some, largest([x for x, *_ in some]), strict=True):
                receive(amax, next(roots) if root else None)


def add_moments(queue: MomentQueue | None, x: Tensor, receive: Receiver, *, root: bool) -> None:
    """Have moments given, at once unless there is somewhere to wait."""
    if queue is None:
        receive(torch.linalg.vector_norm(x, float("inf")), norm(x) if root else None)
    else:
        queue.add(x, receive, root=root)


def moment_receiver(tensor: str, numbers: list[tuple[tuple[str, ...], Tensor]]) -> Receiver:
    """What puts moments of a tensor of this name to what was found."""

    def receive(amax: Tensor, root: Tensor | None) -> None:
        numbers.append(((f"{tensor}.greatest",), amax.reshape(1)))
        if root is not None:
            numbers.append(((f"{tensor}.norm",), root.reshape(1)))

    return receive
