"""Three small models of unlike kinds, whose operators and whole steps check what was learned from random shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

Built = tuple[nn.Module, tuple[Any, ...]]


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.two = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's result, (batch, width, height / stride, width / stride)."""
        y = torch.relu(self.norm_1(self.one(x)))
        return torch.relu(self.norm_2(self.two(y)) + self.shortcut(x))


class _Classified(nn.Module):
    """A network with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of ``labels`` (batch,)."""
        return nn.functional.cross_entropy(self.network(x), labels)


def _residual(scale: int) -> Built:
    width = 16 * scale
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1), _Block(width, width, 1), _Block(width, 2 * width, 2),
        _Block(2 * width, 4 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 100),
    )  # fmt: skip
    return _Classified(network), (torch.randn(8 * scale, 3, 32, 32), torch.randint(100, (8 * scale,)))


def _perceptron(scale: int) -> Built:
    widths = [192 * scale, 512 * scale, 384 * scale, 512 * scale, 128 * scale]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]
    network = nn.Sequential(*layers, nn.Linear(widths[-1], 10))
    return _Classified(network), (torch.randn(256 * scale, widths[0]), torch.randint(10, (256 * scale,)))


def _gpt(scale: int) -> Built:
    config = GptConfig(vocabulary=512, context=96 * scale, width=192 * scale, heads=3 * scale, layers=2)
    tokens = torch.randint(512, (4 * scale, 96 * scale))
    return Gpt(config), (tokens, tokens)


MODELS: dict[str, Callable[[int], Built]] = {"residual": _residual, "perceptron": _perceptron, "gpt": _gpt}
"""Name to what builds the model and a batch; the argument scales its sizes (1 on a cpu, 8 on a card)."""
