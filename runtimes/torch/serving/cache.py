"""Keys and values of one layer in pages: in the computing type, or 8-bit codes with a scale per position and head.

Codes stand in halves, of which a draft may read the first alone: `qsync_opt.kernels.paged_attention.in_halves`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.paged_attention import from_halves, put_into_pages
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
        put_into_pages(self.codes, self.scales, slots_N, keys, values)

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
            both = from_halves(halves, upper=high_halves).to(self.dtype) * gather(self.scales, 1).to(self.dtype)
        return both[0], both[1]
