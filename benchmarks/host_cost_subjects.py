"""What `host_cost` runs: chains of equal small operators, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 24
"""Operators of a chain."""


class Chain(nn.Module):
    """One after another: modules, or a function of the activation and a weight."""

    def __init__(
        self, make: Callable[[], nn.Module] | None, function: Callable[[Tensor, Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)  # so that a plan has something to do, and what follows gets its type
        self.parts = nn.ModuleList([] if make is None else [make() for _ in range(LENGTH)])
        self.function = function
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        if self.function is not None:
            for _ in range(LENGTH):
                x = self.function(x, self.weight)
        return x


def _attention(x: Tensor, weight: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def _lookup(index: Tensor) -> nn.Module:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.tables = nn.ModuleList(nn.Embedding(16, 16) for _ in range(LENGTH))

        def forward(self, x: Tensor) -> Tensor:
            return sum((table(index) for table in self.tables), self.first(x))

    return Lookup()


OPERATORS: dict[str, Callable[[torch.device], tuple[nn.Module, Tensor]]] = {
    "linear": lambda device: (Chain(lambda: nn.Linear(16, 16), None), torch.randn(16, 16, device=device)),
    "matmul of an activation and a weight": lambda device: (
        Chain(None, torch.matmul),
        torch.randn(16, 16, device=device),
    ),
    "batched matmul": lambda device: (
        Chain(None, lambda x, _: torch.matmul(x, x)),
        torch.randn(4, 16, 16, device=device) / 16,
    ),
    "scaled_dot_product_attention": lambda device: (Chain(None, _attention), torch.randn(1, 2, 16, 16, device=device)),
    "conv2d": lambda device: (
        Chain(lambda: nn.Conv2d(16, 16, 3, padding=1), None),
        torch.randn(2, 16, 8, 16, device=device),
    ),
    "embedding (and an addition)": lambda device: (
        _lookup(torch.zeros(16, dtype=torch.long, device=device)),
        torch.randn(16, 16, device=device),
    ),
    "layer_norm": lambda device: (Chain(lambda: nn.LayerNorm(16), None), torch.randn(16, 16, device=device)),
    "softmax": lambda device: (Chain(None, lambda x, _: F.softmax(x, -1)), torch.randn(16, 16, device=device)),
    "dropout": lambda device: (Chain(nn.Dropout, None), torch.randn(16, 16, device=device)),
    "gelu": lambda device: (Chain(nn.GELU, None), torch.randn(16, 16, device=device)),
    "add": lambda device: (Chain(None, torch.add), torch.randn(16, 16, device=device)),
}


def _gpt(batch: int, length: int, *, tiny: bool) -> tuple[nn.Module, Mapping[str, Tensor]]:
    from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

    width, vocabulary = (16, 64) if tiny else (768, 50304)
    config = GptConfig(vocabulary=vocabulary, width=width, heads=width // 64 or 2, layers=12, context=length)
    tokens = torch.randint(0, vocabulary, (batch, length))
    return Gpt(config), {"tokens_BS": tokens, "targets_BS": tokens}


def _bert(batch: int, length: int, *, tiny: bool) -> tuple[nn.Module, Mapping[str, Tensor]]:
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64} if tiny else {}
    config = transformers.BertConfig(**sizes)
    tokens = torch.randint(5, config.vocab_size, (batch, length))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    return transformers.BertForMaskedLM(config), inputs


MODELS: dict[str, tuple[Callable[..., tuple[nn.Module, Mapping[str, Tensor]]], tuple[int, int]]] = {
    "bert-base": (_bert, (16, 128)),
    "gpt-124m": (_gpt, (8, 1024)),
}
