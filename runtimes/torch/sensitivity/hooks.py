"""Interceptions and gradient hooks that last for a block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from qsync_opt.runtimes.torch.interception import Handler, Interception


@contextlib.contextmanager
def intercepted(model: nn.Module, handler: Handler, kinds: tuple[str, ...]) -> Iterator[Interception]:
    """Pass the operators of a model, and those of further kinds, to a handler within the block."""
    interception = Interception(model, handler, kinds=kinds)
    try:
        yield interception
    finally:
        interception.remove()


@contextlib.contextmanager
def gradient_hooks(parameters: Sequence[Tensor], hook: Callable[[int, Tensor], Tensor | None]) -> Iterator[None]:
    """Pass the index and the gradient of every parameter to a hook within the block."""
    handles = [p.register_hook(functools.partial(hook, i)) for i, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
