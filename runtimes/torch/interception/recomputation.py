"""Matches recomputed calls to the original ones: activation checkpointing runs modules again in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Counts = dict[tuple[str, str], int]
"""Operators met in a pass, by module path and kind."""

PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_free: Any = torch.UntypedStorage._free_weak_ref
_KEPT_PASSES = 8
_NO_COUNTS: Counts = {}


class CallMemory:
    """The calls of every module in the last passes, each with the storage of its input.

    A checkpointed module gets the same input again, which was saved for that. The call that is repeated is the last one
    with this input that was not repeated yet, also if other passes ran in between (another view of a contrastive loss,
    an evaluation). If no input matches, because memory was moved or the checkpointed function hands its modules new
    tensors, the pass of the last repetition continues, and calls are repeated in reverse order.

    Addresses would not do: new tensors often reuse the freed memory of another call's input. A weak reference releases
    the memory with the last tensor, and no later storage equals it while it exists. (Torch's ``StorageWeakRef`` does
    the same, but takes more host time in every module.)
    """

    def __init__(self, *, shared_modules: bool) -> None:
        """Start empty; ``shared_modules``: modules have several paths, so that a first call may have counts above 0."""
        self._shared_modules = shared_modules
        self._last = -1  # pass of the last repetition
        # Oldest first; each: pass, counts, weak reference to the input's storage or 0, offset of the input in it,
        # whether it was recomputed, whether it was outermost.
        self._calls: dict[str, list[list[Any]]] = {}

    def __del__(self, free: Any = _free) -> None:  # an argument: globals may be gone when Python ends
        for calls in self._calls.values():
            for call in calls:
                if call[2]:
                    free(call[2])

    def remember(self, path: str, pass_index: int, counts: Counts, x: Any, outermost: bool = False) -> None:
        """Note that a module begins to run, with its first positional argument ``x`` and the counts before it."""
        calls = self._calls.get(path)
        if calls is None:
            calls = self._calls[path] = []
        while calls and calls[0][0] <= pass_index - _KEPT_PASSES:
            old = calls.pop(0)[2]
            if old:
                _free(old)
        again = self._shared_modules or (calls and calls[-1][0] == pass_index)
        storage = _storage(x)
        place = (0, 0) if storage is None else (storage._weak_ref(), x.storage_offset())
        calls.append([pass_index, counts.copy() if again else _NO_COUNTS, *place, False, outermost])

    def recall(self, path: str, x: Any) -> tuple[int, Counts, bool] | None:
        """Pass index, counts before, and whether it was outermost, of the call that is repeated; None if unknown."""
        calls = self._calls.get(path)
        if not calls:
            return None
        waiting = [call for call in calls if not call[4]]
        if not waiting:  # a second backward pass through the same graph
            waiting = [call for call in calls if call[0] == calls[-1][0]]
            for call in waiting:
                call[4] = False
        storage = _storage(x)
        place = None if storage is None else [storage._cdata, x.storage_offset()]
        same = [call for call in waiting if call[2:4] == place]
        likely = same or [c for c in waiting if c[0] == self._last] or waiting
        likely[-1][4] = True
        self._last, counts = likely[-1][:2]
        return self._last, counts.copy(), likely[-1][5]


def _storage(x: Any) -> Any:
    """Storage of a tensor, None if it has none to identify it by."""
    if type(x) not in PLAIN_TENSORS:
        return None
    try:
        return x.untyped_storage()
    except RuntimeError:  # a sparse tensor, or inside a transform of torch.func
        return None
