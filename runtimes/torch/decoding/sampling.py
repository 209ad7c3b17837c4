"""From logits to the distribution that tokens are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen: the most likely one at ``temperature`` 0, else drawn.

    Attributes:
        temperature: Logits are divided by it.
        top_k: Only so many of the most likely tokens are drawn from; None: all.
        top_p: Only the most likely tokens that together reach this probability; 1: all.

    Raises:
        UnsupportedError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UnsupportedError(f"temperature is {self.temperature!r}, but it must be finite and at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UnsupportedError(f"top_k is {self.top_k!r}, but it must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise UnsupportedError(f"top_p is {self.top_p!r}, but it must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution over the last dimension, in FP32 or wider; of greedy sampling, all on the most likely."""
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float32)
        scaled = (logits if logits.dtype is torch.float64 else logits.float()) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, -1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = scaled.softmax(-1).sort(-1, descending=True)
            dropped = ordered.cumsum(-1) - ordered >= self.top_p
            scaled = scaled.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        return scaled.softmax(-1)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One index of the last dimension by its (unnormalized) probabilities, of any leading shape."""
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])
