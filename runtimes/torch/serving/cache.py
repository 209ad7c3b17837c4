"""Keys and values of one layer in pages, in the computing type or in 8 bits with a scale per position and head.

Of 8-bit codes the upper four bits stand together and the lower four behind them: byte j of the first half of a head
has the upper bits of the numbers j and j + size / 2, byte j of the second half their lower bits. A draft that reads the
first half alone has 4-bit keys and values, at half the bytes and in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.serving.steps import PAGE

KV_BITS = (8, 16, 32)


class PagedCache:
    """Pages of keys and values of one layer.

    Args:
        pages: Number of pages, page 0 included.
        heads: Heads of keys and values.
        size: Numbers in a head.
        dtype: Computing type; also the type that is kept, unless ``bits`` is 8.
        bits: 8: codes with a scale per position and head, rounded to nearest; None: as ``dtype``.
        device: Where the pages are.

    Source: paged caches of vLLM (SOSP 2023); the layout, heads before pages, is ours: a gathered sequence is then
    contiguous by head.
    """

    def __init__(
        self, pages: int, heads: int, size: int, *, dtype: torch.dtype, bits: int | None, device: torch.device
    ) -> None:
        if bits is not None and bits not in KV_BITS:
            raise UnsupportedError(f"KV bits are {bits!r}, but allowed are {', '.join(map(str, KV_BITS))}")
        kept = {None: dtype, 8: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[bits]
        if dtype is torch.float16 and bits == 16:
            kept = dtype
        self.dtype = dtype
        self.codes = torch.zeros((2, heads, pages * PAGE, size), dtype=kept, device=device)
        self.scales = torch.zeros((2, heads, pages * PAGE, 1), device=device) if bits == 8 else None

    @property
    def bytes(self) -> int:
        """Memory of all pages."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def write(self, slots_N: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values (N, heads, size) at slots."""
        for which, new in enumerate((keys, values)):
            new = new.transpose(0, 1)
            if self.scales is not None:
                wide = new.float()
                scale = wide.abs().amax(-1, keepdim=True).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
                self.scales[which].index_copy_(1, slots_N, scale)
                new = _in_halves((wide / scale).round_().to(torch.int8))
            self.codes[which].index_copy_(1, slots_N, new.to(self.codes.dtype))

    def wipe(self, pages: Sequence[int]) -> None:
        """Set pages to zero: what is masked still is multiplied by zero, which leaves NaN as it is."""
        for pool in (self.codes, self.scales):
            if pool is not None:
                pool.view(2, pool.shape[1], -1, PAGE * pool.shape[3])[:, :, list(pages)] = 0

    def read(self, table_SP: torch.Tensor, *, high_halves: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (heads, S, P * PAGE, size) of the pages of each sequence, in the computing type.

        Args:
            table_SP: Pages of each sequence.
            high_halves: Of codes of 8 bits take the upper four, and the middle of what the lower ones may add.
        """
        sequences, pages = table_SP.shape
        _, heads, slots, size = self.codes.shape

        def gather(pool: torch.Tensor, first: int) -> torch.Tensor:
            paged = pool.view(2, heads, slots // PAGE, PAGE, pool.shape[3])[..., :first]
            # Indexing by a tensor takes four times as long on a CPU.
            return paged.index_select(2, table_SP.reshape(-1)).view(2, heads, sequences, pages * PAGE, first)

        if self.scales is None:
            both = gather(self.codes, size).to(self.dtype)
        else:
            halves = gather(self.codes, size // 2 if high_halves else size)
            codes = (_upper(halves) if high_halves else _whole(halves)).to(self.dtype)
            both = (codes + _MIDDLE if high_halves else codes) * gather(self.scales, 1).to(self.dtype)
        return both[0], both[1]


_MIDDLE = 7.5
"""Mean of the numbers that four bits can be."""


def _in_halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes (..., size), int8, with upper and lower bits apart, uint8."""
    first, second = codes.view(torch.uint8).chunk(2, -1)
    return torch.cat([(first & 0xF0) | (second >> 4), (first << 4) | (second & 0x0F)], -1)


def _whole(halves: torch.Tensor) -> torch.Tensor:
    """The codes of both halves."""
    upper, lower = halves.chunk(2, -1)
    return torch.cat([(upper & 0xF0) | (lower >> 4), (upper << 4) | (lower & 0x0F)], -1).view(torch.int8)


def _upper(upper: torch.Tensor) -> torch.Tensor:
    """The codes of the first half, their lower bits 0."""
    return torch.cat([upper & 0xF0, upper << 4], -1).view(torch.int8)
