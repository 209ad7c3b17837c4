"""Real text that every Python has: the sources of its own standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch

from qsync_opt.errors import NotReadyError

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


def standard_library_text(*, max_bytes: int = 8 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text and held-out text, each a one-dimensional uint8 tensor.

    One file in ten, chosen by a checksum of its path below the library's folder, is held out, so that the split is the
    same wherever the same Python version is installed.

    Raises:
        NotReadyError: The standard library's sources are not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        part = held_out if zlib.crc32(relative.as_posix().encode()) % 10 == 0 else train
        part += path.read_bytes()
        if len(train) >= max_bytes:
            break
    if len(train) < 100_000 or len(held_out) < 10_000:
        raise NotReadyError(
            f"found only {len(train) + len(held_out)} bytes of Python sources under {root}: the demo trains on the "
            "standard library's .py files; install them (some distributions package them separately)"
        )
    return (torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8))


class Batches:
    """Random windows of a text, the same sequence for the same seed."""

    def __init__(self, text: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._offsets = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and the bytes that follow them, both int64 of shape (batch, context)."""
        limit = len(self._text) - len(self._offsets)
        starts = torch.randint(0, limit, (self._batch, 1), generator=self._generator)
        window = self._text[starts + self._offsets].long()
        return window[:, :-1], window[:, 1:]
