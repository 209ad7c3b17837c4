"""What a model must do to be decoded, and causal models of transformers that do it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.decoding.cache import RaggedCache


class LanguageModel(Protocol):
    """A decoder-only model whose rows stand at positions of their own.

    Axis letters: B sequences, T tokens of each in this pass, V vocabulary.
    """

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        """An empty cache."""
        ...

    def logits(self, tokens_BT: Tensor, positions_BT: Tensor, cache: RaggedCache) -> Tensor:
        """Logits (B, T, V) of the tokens after these; their keys and values are written to the cache's slots.

        A token attends to all slots up to its own position, whatever wrote them.
        """
        ...


class TransformersModel:
    """A causal model of transformers (Llama, Qwen, Gemma 3 and others of their kind) as `LanguageModel`.

    Layers with a sliding window attend within it; the cache keeps all positions.

    Args:
        model: A causal model in evaluation mode.

    Raises:
        UnsupportedError: Its layers are of a kind that has no cache of keys and values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        config: Any = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise UnsupportedError(
                f"the model has layers of kind {', '.join(sorted(unknown))}; allowed are full_attention and "
                "sliding_attention"
            )
        self._window = int(config.sliding_window) if "sliding_attention" in kinds else None
        self._mixed = self._window is not None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def new_cache(self, rows: int, capacity: int) -> RaggedCache:
        """An empty cache on the model's device."""
        return RaggedCache(rows, capacity, self.device)

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor, positions_BT: Tensor, cache: RaggedCache) -> Tensor:
        """See `LanguageModel.logits`."""
        cache.begin(positions_BT)
        result = self.model(
            input_ids=tokens_BT,
            position_ids=positions_BT,
            attention_mask=self._masks(positions_BT, cache.capacity),
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = result.logits
        return logits

    def _masks(self, positions_BT: Tensor, capacity: int) -> Any:
        """What is added to attention scores, (B, 1, T, capacity), by kind of layer where there are two."""
        slots = torch.arange(capacity, device=positions_BT.device)
        distance = positions_BT[:, None, :, None] - slots
        dtype = next(self.model.parameters()).dtype
        lowest = torch.finfo(dtype).min

        def additive(hidden: Tensor) -> Tensor:
            return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, lowest)

        full = additive(distance < 0)
        if not self._mixed or self._window is None:
            return full
        return {"full_attention": full, "sliding_attention": additive((distance < 0) | (distance >= self._window))}
