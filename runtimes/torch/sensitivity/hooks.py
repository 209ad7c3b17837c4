"""Gradient hooks that last for a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor


@contextlib.contextmanager
def gradient_hooks(parameters: Sequence[Tensor], hook: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Pass the index and the gradient of every parameter to a hook within the block."""
    handles = [p.register_hook(functools.partial(hook, i)) for i, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
