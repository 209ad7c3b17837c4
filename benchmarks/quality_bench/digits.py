"""Real data of which a CPU sees enough to converge: handwritten digits, for a convolutional network and a ViT.

The 1,797 images of 8 x 8 of scikit-learn (from the UCI Machine Learning Repository), every fifth held out. All models
return the mean loss in training and in evaluation; `logits` are for the share of right answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from subjects import Batch, Subject, adamw, sgd
from torch import Tensor, nn

SIZE, CLASSES = 8, 10


@functools.cache
def images(held_out: bool) -> Batch:
    """Images (N, 1, 8, 8), scaled to about unit variance, and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) - 5) / 6
    y = torch.tensor(data.target)
    chosen = (torch.arange(len(y)) % 5 == 0) == held_out
    return x[chosen], y[chosen]


def batch(seed: int, rows: int) -> Batch:
    """A training batch: the same for the same seed."""
    x, y = images(False)
    chosen = torch.randint(0, len(y), (rows,), generator=torch.Generator().manual_seed(seed + 1000))
    return x[chosen], y[chosen]


class Classifier(nn.Module):
    """What ends in a class."""

    def logits(self, x: Tensor) -> Tensor:
        """(B, classes)."""
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss."""
        return F.cross_entropy(self.logits(x), y)


class Cnn(Classifier):
    """Convolutions with batch normalization, rectifiers, shortcuts and max-pooling.

    ``stages`` are numbers of convolutions at 8 x 8, 4 x 4 and 2 x 2; all but the first have as many multiplications at
    8 x 8 as at 4 x 4, where there are twice as many channels.
    """

    def __init__(self, width: int, stages: tuple[int, int, int] = (2, 2, 1)) -> None:
        super().__init__()
        outputs = [width] * stages[0] + [2 * width] * (stages[1] + stages[2])
        sizes = list(zip([1, *outputs], outputs, strict=False))
        self.pooled = (stages[0] - 1, stages[0] + stages[1] - 1)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1, bias=False) for i, o in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o in sizes)
        self.hidden, self.head = nn.Linear(2 * width * 4, 2 * width), nn.Linear(2 * width, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        """(B, classes)."""
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            branch = torch.relu(norm(conv(x)))
            x = x + branch if branch.shape == x.shape else branch
            if number in self.pooled:
                x = F.max_pool2d(x, 2)
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class Block(nn.Module):
    """Attention and MLP of a ViT, behind layer normalizations."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, tokens, width) of the same."""
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(Classifier):
    """A transformer over the 16 patches of 2 x 2."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def logits(self, x: Tensor) -> Tensor:
        """(B, classes)."""
        x = self.patches(F.unfold(x, 2, stride=2).transpose(1, 2)) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def digits(name: str, make: Callable[[], Classifier], *, rows: int, adam: bool, rate: float, words: str) -> Subject:
    """A subject on the digits."""
    size = sum(p.numel() for p in make().parameters())
    return Subject(
        name=name,
        make=make,
        batch=lambda seed: batch(seed, rows),
        held_out=lambda _: [images(True)],
        optimizer=(adamw if adam else sgd)(rate),
        what=f"{words}, {size / 1e3:.0f} thousand parameters, 1,437 handwritten digits of 8 x 8 (360 held out), "
        f"{rows} a step",
    )
