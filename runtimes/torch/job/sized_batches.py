"""Batches of other sizes for trying them out, made of the one that a job is planned with, and how large they should be.

Only times are taken with them: samples are left out or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from qsync_opt.runtimes.torch.support.iteration import TrainingExample


def batch_size(example: TrainingExample) -> int | None:
    """Samples of a batch: the first dimension that all its tensors share; None if they do not share one."""
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    return int(sizes.pop()) if len(sizes) == 1 else None


def sized(example: TrainingExample, count: int) -> TrainingExample:
    """The same with ``count`` samples, the first ones, repeated where there are too few."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] == count:
            return leaf
        chosen = leaf.detach()[torch.arange(count, device=leaf.device) % leaf.shape[0]]
        return chosen.requires_grad_(leaf.requires_grad)

    return replace(example, args=tree_map(rows, example.args), kwargs=tree_map(rows, dict(example.kwargs)))


def split(speeds: Mapping[str, float], workers: Mapping[str, int], total: int) -> dict[str, int]:
    """Samples of one worker of every device type, for which all take as long; at least one.

    Args:
        speeds: Samples per second of one worker.
        workers: How many there are of every type.
        total: Samples of all workers together, which is met as nearly as whole numbers per type allow.
    """
    pace = sum(speeds[name] * workers[name] for name in speeds)
    return {name: max(1, round(total * speeds[name] / pace)) for name in speeds}
