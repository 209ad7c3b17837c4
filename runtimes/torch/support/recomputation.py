"""Steps of models whose activations are checkpointed, in forms that hooks and second derivatives can follow.

Reentrant checkpointing runs a part without autograd first, so that hooks there see no gradient, and refuses
``torch.autograd.grad``. Recomputation repeats calls that were watched already. Both forms of ``torch.utils.checkpoint``
look their implementation up in that module when they are called, wherever they were imported to; other packages'
checkpointing is left as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

_REENTRANT, _NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def without_reentrance() -> Iterator[None]:
    """Checkpoint what is checkpointed reentrantly by saved-tensor hooks instead: the same numbers and memory."""

    def saved(function: Callable[..., Any], preserve: bool, args: Sequence[Any]) -> Any:
        return checkpointing.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    with _replaced(_REENTRANT, _function(saved)):
        yield


@contextlib.contextmanager
def without_recomputation() -> Iterator[None]:
    """Keep the activations of what is checkpointed: the same numbers, with the memory of a plain step."""

    def kept(function: Callable[..., Any], preserve: bool, args: Sequence[Any]) -> Any:
        return function(*args)

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with _replaced(_REENTRANT, _function(kept)), _replaced(_NON_REENTRANT, nothing):
        yield


def _function(run: Callable[[Callable[..., Any], bool, Sequence[Any]], Any]) -> type:
    """In place of ``CheckpointFunction``; without a gradient to pass on, parameters inside get none either."""

    class Run:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            differentiated = any(isinstance(x, Tensor) and x.requires_grad for x in args)
            with torch.set_grad_enabled(differentiated and torch.is_grad_enabled()):
                return run(function, preserve, args)

    return Run


@contextlib.contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    before = getattr(checkpointing, name, None)
    if before is None:  # another version of torch: what cannot be followed is refused as before
        yield
        return
    setattr(checkpointing, name, value)
    try:
        yield
    finally:
        setattr(checkpointing, name, before)
