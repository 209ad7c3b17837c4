"""Settings of the demo; importing this does not load torch."""

from __future__ import annotations

from dataclasses import dataclass

TRAINER = "trainer"
INFERENCE = "inference"
WORKERS = (TRAINER, INFERENCE)
"""Device type of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Sizes of the model: entries of the vocabulary, tokens of a sequence, width, attention heads, blocks."""

    vocabulary: int = 256
    context: int = 128
    width: int = 256
    heads: int = 4
    layers: int = 4


DEMO_MODEL = GptConfig(context=64, width=128, heads=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Sizes of the demo; by default, three runs train visibly in less than a minute with one core per worker.

    ``batch`` is per worker; ``memory_share`` places the memory budget of the inference device between what its most
    frugal plan needs (0) and what FP32 needs (1).
    """

    steps: int = 80
    batch: int = 8
    learning_rate: float = 1e-3
    seed: int = 0
    memory_share: float = 0.2
    model: GptConfig = DEMO_MODEL
