"""What the demo trains: a decoder-only transformer over bytes, and the text that every Python has.

The text is the sources of Python's own standard library.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.demo.settings import GptConfig

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this block, shape (batch, sequence, width)."""
        batch, sequence, width = x_BSH.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_1(x_BSH)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSH = x_BSH + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        x_BSH = x_BSH + self.down(F.gelu(self.up(self.norm_2(x_BSH))))
        return x_BSH


class Gpt(nn.Module):
    """Predicts the next byte; ``forward`` returns the mean cross-entropy in nats per byte."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting ``targets_BS`` from ``tokens_BS`` (both int64, batch x sequence)."""
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.tokens(tokens_BS) + self.positions(positions)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSV = self.head(self.norm(x_BSH))
        loss: torch.Tensor = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
        return loss


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
