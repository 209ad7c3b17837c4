"""A cache of keys and values whose rows have lengths of their own.

Slot j of a row holds position j. Writing at a position overwrites it: verification writes over what drafts wrote, and
a row is cut by lowering its length. Slots from the length on are never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import NotReadyError


class RaggedCache:
    """Keys and values of all layers; memory for ``capacity`` positions of each sequence is taken at once.

    Args:
        rows: Sequences.
        capacity: Positions of each.
        device: Where the lengths live.

    Attributes:
        lengths_B: Positions of each row that hold tokens, int64.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions_BT = torch.zeros((rows, 0), dtype=torch.int64, device=device)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def begin(self, positions_BT: Tensor) -> None:
        """Name the positions that the next `update` of each layer writes.

        Raises:
            NotReadyError: A position is beyond the capacity.
        """
        if positions_BT.numel() and int(positions_BT.max()) >= self.capacity:
            raise NotReadyError(
                f"the cache is full: position {int(positions_BT.max())} is wanted and there are {self.capacity}; ask "
                "for fewer tokens or make a larger cache"
            )
        self._positions_BT = positions_BT

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write a layer's keys and values (B, heads, T, size) and return those of all slots, as transformers asks."""
        for store, new in ((self._keys, keys), (self._values, values)):
            if layer_idx not in store:
                store[layer_idx] = new.new_zeros((new.shape[0], new.shape[1], self.capacity, new.shape[3]))
            slots = self._positions_BT[:, None, :, None].expand_as(new)
            store[layer_idx].scatter_(2, slots, new)
        return self._keys[layer_idx], self._values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots of each row; what transformers sizes masks by."""
        return self.capacity

    def cut(self, lengths_B: Tensor) -> None:
        """Set the length of each row; longer ones lose their last positions."""
        self.lengths_B = lengths_B

    def select(self, rows: Tensor) -> None:
        """Keep some rows only, such as those of sequences that have not ended."""
        self.lengths_B = self.lengths_B[rows]
        for store in (self._keys, self._values):
            for layer in store:
                store[layer] = store[layer][rows]

    def contents(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values (heads, length, size) of one row, layer by layer."""
        length = int(self.lengths_B[row])
        return [(self._keys[i][row, :, :length], self._values[i][row, :, :length]) for i in sorted(self._keys)]
