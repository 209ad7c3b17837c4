"""A block in which nothing may draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawsError(Exception):
    """An operator was about to draw random numbers."""


class WithoutRandomness(TorchDispatchMode):
    """Raises `DrawsError` before an operator inside draws random numbers, so that no stream of them moves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise DrawsError(str(func))
        return func(*args, **(kwargs or {}))
