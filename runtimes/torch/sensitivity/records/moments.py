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

Give = Callable[[Tensor, Tensor | None], None]
"""Takes a largest magnitude, and the norm if it was asked for."""


class LateMoments:
    """Tensors that wait for each other."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Give, bool]] = []
        self._elements = 0

    def add(self, x: Tensor, give: Give, *, root: bool = True) -> None:
        """Have the largest magnitude of a tensor, and its norm if asked for, given at the latest by ``flush``."""
        if self._elements + x.numel() > _TOGETHER:
            self.flush()
        self._waiting.append((x, give, root))
        self._elements += x.numel()

    def flush(self) -> None:
        """Give what is not given yet."""
        alike = by_place(self._waiting, lambda one: one[0])
        self._waiting.clear()
        self._elements = 0
        for some in alike.values():
            rooted = [x for x, _, root in some if root]
            roots = iter(norms(rooted) if rooted else ())
            for (_, give, root), amax in zip(some, largest([x for x, *_ in some]), strict=True):
                give(amax, next(roots) if root else None)


def give_moments(late: LateMoments | None, x: Tensor, give: Give, *, root: bool) -> None:
    """Have moments given, at once unless there is somewhere to wait."""
    if late is None:
        give(torch.linalg.vector_norm(x, float("inf")), norm(x) if root else None)
    else:
        late.add(x, give, root=root)


def named(tensor: str, found: list[tuple[tuple[str, ...], Tensor]]) -> Give:
    """What puts moments of a tensor of this name to what was found."""

    def give(amax: Tensor, root: Tensor | None) -> None:
        found.append(((f"{tensor}.greatest",), amax.reshape(1)))
        if root is not None:
            found.append(((f"{tensor}.norm",), root.reshape(1)))

    return give
