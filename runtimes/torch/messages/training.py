"""Training of a node classifier on one part of a graph, with what its exchanges took."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from qsync_opt.errors import UnsupportedError
from qsync_opt.io import check_integer
from qsync_opt.messages import Plan, evaluate
from qsync_opt.runtimes.torch.ddp import gather_json, message_device
from qsync_opt.runtimes.torch.messages.graph import MessageOptions, full_graph
from qsync_opt.runtimes.torch.messages.partition import Part

MODELS: Mapping[str, Any] = {"gcn": GCNConv, "sage": SAGEConv, "gat": GATConv}
_WARM_UP = 3
"""Epochs that are not timed: the first exchanges features and compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """A node classifier and how it trains.

    Attributes:
        model: Kind of its convolutions: ``"gcn"``, ``"sage"`` (mean) or ``"gat"``.
        layers: Number of convolutions.
        hidden: Width between them.
        dropout: Share of the inputs of each layer that is dropped.
        epochs: Steps over the whole graph.
        rate: Learning rate of Adam.
        seed: Of weights and dropout; the rounding's is that of ``messages``.
        weigh_layers: Whether to measure, early in training, what the variance of each exchange does to the gradient.
        messages: How messages are planned and sent.
    """

    model: str = "gcn"
    layers: int = 3
    hidden: int = 64
    dropout: float = 0.0
    epochs: int = 60
    rate: float = 0.01
    seed: int = 0
    weigh_layers: bool = False
    messages: MessageOptions = field(default_factory=MessageOptions)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UnsupportedError(f"model is {self.model!r}, but allowed are {', '.join(MODELS)}")
        for name in ("layers", "hidden", "epochs"):
            check_integer(getattr(self, name), name, minimum=1)


class NodeClassifier(nn.Module):
    """Convolutions with ReLU and dropout between them."""

    def __init__(self, options: TrainingOptions, dim: int, classes: int) -> None:
        super().__init__()
        widths = [dim, *[options.hidden] * (options.layers - 1), classes]
        kind = MODELS[options.model]
        self.layers = nn.ModuleList(kind(*pair) for pair in itertools.pairwise(widths))
        self.dropout = options.dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Class scores of the nodes."""
        for k, layer in enumerate(self.layers):
            if k:
                x = nn.functional.dropout(torch.relu(x), self.dropout, self.training)
            x = layer(x, edge_index)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training run took and reached; times are medians over epochs of the slower worker.

    Attributes:
        losses: Of every epoch, over all training nodes.
        test_accuracy: At the end; ``val_accuracy`` likewise.
        epoch_s: Seconds of an epoch.
        exchange_s: Seconds of an epoch from launching messages until they were there, summed over exchanges.
        exposed_s: Seconds of an epoch for which training waited for messages.
        exposed_s_by_exchange: Those of each exchange, by its name in the problem.
        codec_s: Seconds of an epoch for packing and unpacking.
        message_bytes: Sent by all workers in an epoch.
        widths: Width in bits to the share of messages that have it at the end.
        predicted_exposed_s: What the plan in use at the end says; None without a plan of this job.
    """

    losses: tuple[float, ...]
    test_accuracy: float
    val_accuracy: float
    epoch_s: float
    exchange_s: float
    exposed_s: float
    exposed_s_by_exchange: Mapping[str, float]
    codec_s: float
    message_bytes: int
    widths: Mapping[int, float]
    predicted_exposed_s: float | None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON data."""
        return asdict(self) | {"widths": {str(width): share for width, share in self.widths.items()}}


def train(
    part: Part,
    options: TrainingOptions,
    plan: Plan | None = None,
    *,
    on_epoch: Callable[[int], None] = lambda epoch: None,
    with_problem: bool = False,
) -> tuple[Trained, dict[str, Any] | None]:
    """Train a classifier on this rank's part; every rank of the process group calls it.

    Args:
        part: This rank's part.
        options: Model, steps and messages.
        plan: Widths to send in; without it those of ``options.messages``.
        on_epoch: Called with the number of finished epochs.
        with_problem: Whether to build, at the end, the problem of the traced ranges and measured links.

    Returns:
        What was measured, the same on every rank, and the problem's file data, None unless wanted.

    Raises:
        ProblemError: As `full_graph`, or rows hold NaN.
        NotReadyError: Another worker stopped.
    """
    torch.manual_seed(options.seed)
    classes = torch.tensor([int(part.y.max()) + 1 if part.own else 1], device=part.x.device)
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    model = NodeClassifier(options, part.x.shape[1], int(classes)).to(part.x.device)
    full = full_graph(model, part, plan, options=options.messages)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    losses, rows = [], []
    for epoch in range(options.epochs):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = full.loss(full())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        seconds = time.perf_counter() - began
        ways = full.directions()
        waited, coded = sum(w.wait_ns for w in ways), sum(w.codec_ns for w in ways)
        sums = [seconds, (sum(w.hidden_ns for w in ways) + waited) / 1e9, waited / 1e9, coded / 1e9]
        rows.append(sums + [w.wait_ns / 1e9 for w in ways])
        if epoch == _WARM_UP and options.weigh_layers:
            full.measure_sensitivities()
        on_epoch(epoch + 1)
    full.finish_planning()
    total = torch.stack(losses) / full.world
    dist.all_reduce(total)
    times = torch.tensor(rows[min(_WARM_UP, options.epochs - 1) :], dtype=torch.float64, device=message_device())
    dist.all_reduce(times, dist.ReduceOp.MAX)
    epoch_s, exchange_s, exposed_s, codec_s, *waits_s = (statistics.median(column) for column in times.T.tolist())
    own = {"bytes": sum(w.wire_bytes for w in full.directions()), "widths": _counts(full.directions())}
    everyone = gather_json(own)
    counts: dict[int, int] = {}
    for each in everyone:
        for width, count in each["widths"].items():
            counts[int(width)] = counts.get(int(width), 0) + count
    problem = full.build_problem() if with_problem else full.problem
    predicted = None if problem is None or full.plan is None else evaluate(problem, full.plan).waiting_ns / 1e9
    trained = Trained(
        losses=tuple(total.tolist()),
        test_accuracy=full.accuracy(part.test_mask),
        val_accuracy=full.accuracy(part.val_mask),
        epoch_s=epoch_s,
        exchange_s=exchange_s,
        exposed_s=exposed_s,
        exposed_s_by_exchange={w.name: wait_s for w, wait_s in zip(full.directions(), waits_s, strict=True)},
        codec_s=codec_s,
        message_bytes=sum(each["bytes"] for each in everyone),
        widths={width: count / max(sum(counts.values()), 1) for width, count in sorted(counts.items())},
        predicted_exposed_s=predicted,
    )
    full.close()
    return trained, problem.to_json() if with_problem and problem is not None else None


def _counts(directions: list[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for direction in directions:
        for width, count in zip(*map(Tensor.tolist, direction.send_bits.unique(return_counts=True)), strict=True):
            counts[str(width)] = counts.get(str(width), 0) + count
    return counts
