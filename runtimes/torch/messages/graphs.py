"""Graphs as files, and a graph drawn from a stochastic block model."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer

MASKS = ("train_mask", "val_mask", "test_mask")
_KEYS = ("edge_index", "x", "y", *MASKS)


def save_graph(data: Any, path: str | os.PathLike[str]) -> None:
    """Write a graph as safetensors, whole or not at all.

    Args:
        data: ``torch_geometric.data.Data`` or anything with ``edge_index`` and ``x`` and, optionally, ``y`` and masks.
        path: File to write.
    """
    from safetensors.torch import save

    from qsync_opt.io import write_bytes

    tensors = {key: getattr(data, key, None) for key in _KEYS}
    write_bytes(path, save({key: value.contiguous() for key, value in tensors.items() if value is not None}))


def load_graph(path: str | os.PathLike[str]) -> Any:
    """Read a graph: safetensors with ``edge_index`` (2, edges), ``x`` (nodes, dim) and, optionally, ``y`` and masks.

    Returns:
        ``torch_geometric.data.Data``.

    Raises:
        ProblemError: The file is missing or damaged, or lacks edges or features.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from torch_geometric.data import Data

    try:
        tensors = load_file(os.fspath(path))
    except (OSError, SafetensorError, ValueError) as failure:
        raise ProblemError(f"{os.fspath(path)}: not a readable graph in safetensors ({failure})") from failure
    missing = [key for key in ("edge_index", "x") if key not in tensors]
    if missing:
        raise ProblemError(
            f"{os.fspath(path)} holds {', '.join(sorted(tensors)) or 'nothing'}, but a graph needs "
            f"{' and '.join(missing)}"
        )
    return Data(**{key: value for key, value in tensors.items() if key in _KEYS})


def block_graph(
    nodes: int, *, blocks: int = 4, degree: int = 10, mixing: float = 0.2, dim: int = 32, noise: float = 2.0,
    seed: int = 0,
) -> Any:  # fmt: skip
    """An undirected graph of a stochastic block model, with the block as label and noisy features of it.

    Args:
        nodes: Number of nodes.
        blocks: Number of blocks, of about equal sizes; nodes of a block have neighbouring numbers.
        degree: Mean number of neighbours.
        mixing: Share of edges whose other end is drawn from all nodes.
        dim: Features of a node: its block's random direction plus Gaussian noise.
        noise: Standard deviation of the noise; the direction's entries have 1.
        seed: Of all draws.

    Returns:
        ``torch_geometric.data.Data`` with masks for 50 % of the nodes to train, 25 % to validate and 25 % to test.

    Source: Holland, Laskey and Leinhardt, "Stochastic blockmodels" (1983), with numbers of edges instead of chances.
    """
    from torch_geometric.data import Data

    check_integer(nodes, "nodes", minimum=1)
    generator = torch.Generator().manual_seed(seed)

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    y = torch.arange(nodes) * blocks // nodes
    starts = torch.searchsorted(y, torch.arange(blocks + 1))
    edges = nodes * degree // 2
    source = (uniform(edges) * nodes).long()
    sizes = torch.diff(starts)[y[source]]
    near = starts[y[source]] + (uniform(edges) * sizes).long()
    target = torch.where(uniform(edges) < mixing, (uniform(edges) * nodes).long(), near)
    half = torch.stack([source, target])[:, source != target]
    centres = torch.randn(blocks, dim, generator=generator)
    x = centres[y] + noise * torch.randn(nodes, dim, generator=generator)
    draw = uniform(nodes)
    return Data(
        edge_index=torch.unique(torch.cat([half, half.flip(0)], 1), dim=1), x=x, y=y,
        train_mask=draw < 0.5, val_mask=(draw >= 0.5) & (draw < 0.75), test_mask=draw >= 0.75,
    )  # fmt: skip
