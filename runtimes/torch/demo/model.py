"""The model that the demo trains: a decoder-only transformer over bytes, loss included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.runtimes.torch.demo.sizes import GptConfig as GptConfig


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
