"""Partitions of a graph: what one worker needs of it.

A worker owns nodes, first the *central* ones, which no other worker's node has an edge to, then the *marginal* ones.
Sources of edges into its nodes that others own are its *halo*, ordered by owner.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsync_opt.errors import NotInstalledError, ProblemError
from qsync_opt.io import check_integer

FORMAT = "qsync-messages-part/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One worker's part of a graph.

    Attributes:
        rank: Its worker.
        parts: Number of workers.
        digest: Of the whole partition: parts fit together only if it is the same.
        nodes: Global numbers of own nodes, central ones first, shape (own,).
        central: How many of them are central.
        halo: Global numbers of halo nodes by owner, shape (halo,).
        halo_counts: How many each worker owns, shape (parts,).
        send: Own rows to send, by receiver, in the order of the receiver's halo.
        send_counts: How many each worker receives, shape (parts,).
        edge_index: Edges into own nodes, local numbers (halo nodes come after own ones), shape (2, edges).
        degree: In-degrees in the whole graph without self-loops, of own and halo nodes.
        out_alpha: Of each sent row, by kind of layer ("gcn", "mean"), the sum of alpha^2 over its edges to the
            receiver, shape (2, sends).
        x: Features of own nodes, shape (own, dim).
        y: Labels of own nodes.
        train_mask: Which own nodes train; ``val_mask`` and ``test_mask`` likewise.
    """

    rank: int
    parts: int
    digest: str
    central: int
    nodes: Tensor
    halo: Tensor
    halo_counts: Tensor
    send: Tensor
    send_counts: Tensor
    edge_index: Tensor
    degree: Tensor
    out_alpha: Tensor
    x: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor

    @property
    def own(self) -> int:
        """Number of own nodes."""
        return self.nodes.numel()

    def to(self, device: torch.device | str) -> Part:
        """The same part on a device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name not in _PLAIN})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part as safetensors, whole or not at all."""
        from safetensors.torch import save

        from qsync_opt.io import write_bytes

        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self) if f.name not in _PLAIN}
        facts = {"format": FORMAT, **{key: getattr(self, key) for key in _PLAIN}}
        write_bytes(path, save(tensors, {"part": json.dumps(facts)}))


_PLAIN = ("rank", "parts", "digest", "central")


def load_part(path: str | os.PathLike[str]) -> Part:
    """Read a part.

    Raises:
        ProblemError: The file is missing, damaged or no part.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "pt") as file:
            facts = json.loads((file.metadata() or {}).get("part", "{}"))
            if facts.pop("format", None) != FORMAT:
                raise ProblemError(f"{os.fspath(path)} is no part of a graph; write one: qsync-opt messages partition")
            return Part(**facts, **{key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, TypeError, ValueError) as failure:
        raise ProblemError(f"{os.fspath(path)}: not a readable part of a graph ({failure})") from failure


def partition_graph(data: Any, parts: int, *, assignment: Sequence[int] | Tensor | None = None) -> list[Part]:
    """Split a graph into parts of about equally many nodes with few edges between them.

    Args:
        data: ``torch_geometric.data.Data`` or anything with ``edge_index`` (2, edges), ``x`` (nodes, dim) and,
            optionally, ``y``, ``train_mask``, ``val_mask`` and ``test_mask``. Directed graphs stay directed.
        parts: Number of workers.
        assignment: The part of each node; by default METIS chooses.

    Returns:
        One part per worker. A part may be empty.

    Raises:
        ProblemError: An edge names a node that is not there, or sizes do not fit.
        NotInstalledError: pymetis is missing and no assignment is given.

    Source: METIS (Karypis and Kumar, 1998) by pymetis; the order of rows is AdaQP's (MLSys 2023).
    """
    check_integer(parts, "parts", minimum=1)
    x, edges = data.x.to(torch.float32), data.edge_index.to(torch.int64)
    count = x.shape[0]
    if edges.dim() != 2 or edges.shape[0] != 2:
        raise ProblemError(f"edge_index has the shape {tuple(edges.shape)}, but it must be (2, edges)")
    if edges.numel() and not (int(edges.min()) >= 0 and int(edges.max()) < count):
        raise ProblemError(f"edge_index names node {int(edges.max())}, but x has rows for {count} nodes")
    owner = _metis(edges, count, parts) if assignment is None else torch.as_tensor(assignment, dtype=torch.int64)
    if owner.shape != (count,) or (count and not (int(owner.min()) >= 0 and int(owner.max()) < parts)):
        raise ProblemError(f"assignment must have one part from 0 to {parts - 1} for each of the {count} nodes")
    digest = hashlib.sha256()
    for each in (owner, edges):
        digest.update(each.contiguous().numpy().tobytes())
    source, target = edges
    remote = owner[source] != owner[target]
    marginal = torch.zeros(count, dtype=torch.bool)
    marginal[target[remote]] = True
    plain = source != target
    degree = torch.zeros(count).index_add_(0, target[plain], torch.ones(int(plain.sum())))
    in_degree = torch.zeros(count).index_add_(0, target, torch.ones(target.numel()))
    gcn = 1 / ((degree[source] + 1) * (degree[target] + 1))
    mean = 1 / in_degree[target] ** 2
    masks = {
        name: torch.zeros(count, dtype=torch.bool) if (mask := getattr(data, name, None)) is None else mask.bool()
        for name in ("train_mask", "val_mask", "test_mask")
    }
    y = getattr(data, "y", None)
    y = torch.zeros(count, dtype=torch.int64) if y is None else y
    place = torch.zeros(count, dtype=torch.int64)
    own_nodes, halos = [], []
    for rank in range(parts):
        mine = torch.nonzero(owner == rank).flatten()
        mine = torch.cat([mine[~marginal[mine]], mine[marginal[mine]]])
        place[mine] = torch.arange(mine.numel())
        own_nodes.append(mine)
        halo = torch.unique(source[remote & (owner[target] == rank)])
        halos.append(halo[torch.argsort(owner[halo], stable=True)])
    result = []
    for rank, (mine, halo) in enumerate(zip(own_nodes, halos, strict=True)):
        local = place.clone()
        local[halo] = mine.numel() + torch.arange(halo.numel())
        inward = owner[target] == rank
        sends = [h[owner[h] == rank] for h in halos]
        alphas = []
        for receiver, rows in enumerate(sends):
            chosen = remote & (owner[source] == rank) & (owner[target] == receiver)
            sums = torch.zeros(2, count).index_add_(1, source[chosen], torch.stack([gcn[chosen], mean[chosen]]))
            alphas.append(sums[:, rows])
        both = torch.cat([mine, halo])
        result.append(
            Part(
                rank=rank,
                parts=parts,
                digest=digest.hexdigest(),
                central=int((~marginal[mine]).sum()),
                nodes=mine,
                halo=halo,
                halo_counts=torch.bincount(owner[halo], minlength=parts),
                send=place[torch.cat(sends)],
                send_counts=torch.tensor([rows.numel() for rows in sends]),
                edge_index=torch.stack([local[source[inward]], place[target[inward]]]),
                degree=degree[both],
                out_alpha=torch.cat(alphas, 1),
                x=x[mine],
                y=y[mine],
                **{name: mask[mine] for name, mask in masks.items()},
            )
        )
    return result


def _metis(edges: Tensor, count: int, parts: int) -> Tensor:
    if parts == 1 or count == 0:
        return torch.zeros(count, dtype=torch.int64)
    try:
        import pymetis
    except ModuleNotFoundError as missing:
        raise NotInstalledError(
            "partition_graph needs pymetis: pip install 'qsync-opt[messages]', or give an assignment"
        ) from missing
    both = torch.cat([edges, edges.flip(0)], 1)
    both = torch.unique(both[:, both[0] != both[1]], dim=1).numpy()  # sorted by source
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(both[0], minlength=count), out=starts[1:])
    _, owner = pymetis.part_graph(parts, pymetis.CSRAdjacency(starts, both[1]))
    return torch.as_tensor(np.asarray(owner), dtype=torch.int64)
