"""Networks that the laws of learned costs are compared with: set transformers, and a perceptron for utilisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from learned_costs_features import FeatureRows
from numpy.typing import NDArray
from torch import Tensor, nn

from qsync_opt.costs.learned import CostRecord, DeviceVector, LeafKind, Program
from qsync_opt.numerics import FORMATS

EPOCHS = 25
BATCH = 256
_KINDS, _FORMATS = list(LeafKind), sorted(FORMATS)
_QUANTILES = torch.tensor([0.05, 0.5, 0.95])


def _leaf_rows(program: Program, device: DeviceVector) -> list[list[float]]:
    rows = []
    for leaf in program.leaves:
        computed = 1e9 * leaf.flops / device.peak(leaf.number_format) if leaf.flops else 0.0
        moved = device.moved_ns(leaf.num_bytes)
        sizes = (leaf.batch, leaf.rows, leaf.columns, leaf.depth)
        rows.append(
            [
                *(float(leaf.kind is kind) for kind in _KINDS),
                *(float(leaf.number_format == name) for name in _FORMATS),
                math.log(computed / device.launch_ns + 1e-3),
                math.log(moved / device.launch_ns + 1e-3),
                math.log(leaf.num_bytes / device.cache_bytes + 1e-3),
                *(math.log(size) for size in sizes),
                *(math.log2(math.gcd(size, 64)) for size in sizes[1:]),
            ]
        )
    return rows


def tensors(record: CostRecord, families: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, FeatureRows]:
    """Leaves (N, L, E), their mask (N, L), the features of whole programs (N, F), and the rows."""
    rows = FeatureRows(record, families)
    leaves = [_leaf_rows(program, device) for program, device, _ in record.programs()]
    longest = max(map(len, leaves))
    matrix = np.zeros((len(leaves), longest, len(leaves[0][0])), np.float32)
    mask = np.ones((len(leaves), longest), bool)
    for i, of_program in enumerate(leaves):
        matrix[i, : len(of_program)], mask[i, : len(of_program)] = of_program, False
    return torch.from_numpy(matrix), torch.from_numpy(mask), torch.from_numpy(rows.matrix.astype(np.float32)), rows


class SetTransformer(nn.Module):
    """Three layers over leaves without positions, attention pooling, the program's and device's features added."""

    def __init__(self, entries: int, features: int, outputs: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.leaf = nn.Linear(entries, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.weight = nn.Linear(width, 1)
        self.program = nn.Sequential(nn.Linear(features, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, outputs))

    def forward(self, leaves: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        """Return (batch, outputs)."""
        x = self.encoder(self.leaf(leaves), src_key_padding_mask=mask)
        scores = self.weight(x).squeeze(-1).masked_fill(mask, -math.inf).softmax(-1)
        return self.head((scores.unsqueeze(-1) * x).sum(1) + self.program(features))


class Utilisation(nn.Module):
    """A perceptron that predicts which share of the roofline's rates a program reaches."""

    def __init__(self, features: int, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, leaves: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        """Return log(time / reference) of a utilisation between 0 and 1, (batch, 1)."""
        return nn.functional.softplus(self.layers(features)) - 0.5


def predicted_ns(kind: str, train: CostRecord, test: CostRecord, seed: int = 0) -> tuple[NDArray[np.float64], NDArray]:
    """Fit a network and predict: times (N,) and, of the quantile network, logarithms of low and high (2, N).

    ``kind`` is ``set`` (quantile heads), ``paper`` (one head for the mean of the logarithm, as the paper's network with
    its defects mended: any number of leaves, the device's rates per format, errors of the logarithm), ``utilisation``.
    """
    torch.manual_seed(seed)
    families = sorted({program.family for program, _, _ in train.programs()})
    leaves, mask, features, rows = tensors(train, families)
    spread = features.std(0).clamp_min(1e-3)
    center = features.mean(0)
    leaf_center, leaf_spread = leaves[~mask].mean(0), leaves[~mask].std(0).clamp_min(1e-2)
    target = torch.from_numpy(rows.target.astype(np.float32))
    outputs = 3 if kind == "set" else 1
    model: nn.Module = (
        Utilisation(features.shape[1])
        if kind == "utilisation"
        else SetTransformer(leaves.shape[2], features.shape[1], outputs)
    )

    def inputs(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (a - leaf_center) / leaf_spread, b, ((c - center) / spread).clamp(-6, 6)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    steps = EPOCHS * -(-len(target) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    data = inputs(leaves, mask, features)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(target)).split(BATCH):
            error = target[batch, None] - model(*(part[batch] for part in data))
            if outputs == 3:
                loss = torch.maximum(_QUANTILES * error, (_QUANTILES - 1) * error).mean()
            else:
                loss = nn.functional.huber_loss(error, torch.zeros_like(error), delta=0.3)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    leaves, mask, features, rows = tensors(test, families)
    with torch.no_grad():
        logs = torch.cat(
            [
                model(*inputs(*part))
                for part in zip(leaves.split(2048), mask.split(2048), features.split(2048), strict=True)
            ]
        )
    logs = np.sort(logs.numpy().astype(np.float64), axis=1)
    middle = logs[:, outputs // 2]
    return rows.reference * np.exp(middle), logs[:, [0, -1]].T
