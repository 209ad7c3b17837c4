"""Sizes of the model that the demo trains. Apart from the model, so that reading them does not load torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model: entries of the vocabulary, tokens of a sequence, width, attention heads, blocks."""

    vocabulary: int = 256
    context: int = 128
    width: int = 256
    heads: int = 4
    layers: int = 4
