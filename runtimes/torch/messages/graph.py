"""A model of PyTorch Geometric that trains on one part of a graph, exchanging halo rows in planned widths."""

from __future__ import annotations

import hashlib
import itertools
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GATConv, GCNConv, MessagePassing, SAGEConv

from qsync_opt.errors import NotReadyError, ProblemError, UnsupportedError
from qsync_opt.kernels.messages import row_bytes
from qsync_opt.messages import (
    Exchange,
    Pair,
    Plan,
    Problem,
    all_to_all_round,
    by_bytes,
    evaluate,
    in_rounds,
    ring_rounds,
    uniform_plan,
    variance_factor,
)
from qsync_opt.runtimes.torch.ddp import companion_group, together
from qsync_opt.runtimes.torch.messages.exchange import EXACT, WORD_BYTES, Direction, HaloExchange
from qsync_opt.runtimes.torch.messages.links import Codec, probe_codec, probe_links
from qsync_opt.runtimes.torch.messages.partition import Part
from qsync_opt.runtimes.torch.messages.prediction import StepTimes, codec_by_worker
from qsync_opt.systems import solve

_LEAST_PROBE, _LEAST_ROWS = 1 << 10, 256
"""Bytes of the smallest message that is probed, and rows of the smallest packing."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """How messages are planned and sent.

    Attributes:
        menu: Widths to choose from.
        initial_bits: Width before the first plan.
        budget_bits: Exposed time that a plan may take: that of this uniform width, with its packing.
        replan_steps: Training steps between plans; 0 keeps the initial width or the given plan.
        seed: Of the rounding; ranks draw different streams from it.
        backend: Of the kernels; see `qsync_opt.kernels.messages.pack_rows`.
        links: ``"ring"``: each pair of workers has a link of its own, round by round; ``"all-to-all"``: all messages of
            an exchange go at once, and those of one worker share its port.
        late: Whether training uses the messages of the step before, which hides them behind a whole step but is
            biased; steps that follow `FullGraph.load_state_dict` begin without messages.
        share: Of the rows that are sent in training, drawn anew in each step; what is sent counts 1 / share times.
    """

    menu: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    initial_bits: int = 8
    budget_bits: int = 4
    replan_steps: int = 50
    seed: int = 0
    backend: str = "auto"
    links: str = "ring"
    late: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UnsupportedError(f"share is {self.share!r}, but it must be above 0 and at most 1")
        if self.links not in _ROUNDS:
            raise UnsupportedError(f"links is {self.links!r}, but allowed are {', '.join(_ROUNDS)}")


_TIMED_STEPS = 64
"""Latest steps of which times are kept: single ones differ by a tenth and more where workers share processors."""
_ROUNDS = {"ring": ring_rounds, "all-to-all": all_to_all_round}


@dataclass(slots=True)
class _Layer:
    """A convolution with its exchange and the subgraphs that it computes before and after the halo is there."""

    name: str
    module: MessagePassing
    kind: str
    exchange: HaloExchange | None = None


@dataclass(slots=True)
class _Subgraph:
    """Edges into some own nodes: the rows they need, their local numbers, and where the results are.

    ``degree`` is that of the rows in the whole graph.
    """

    rows: Tensor
    edge_index: Tensor
    targets: Tensor
    degree: Tensor

    def gcn_edges(self) -> tuple[Tensor, Tensor]:
        """Edges with one loop at each target, and their weights in a GCN."""
        source, target = self.edge_index[:, self.edge_index[0] != self.edge_index[1]]
        loops = self.targets
        weight = (self.degree[source] + 1).rsqrt() * (self.degree[target] + 1).rsqrt()
        edges = torch.cat([torch.stack([source, target]), torch.stack([loops, loops])], 1)
        return edges, torch.cat([weight, 1 / (self.degree[loops] + 1)])


def _kind(name: str, module: MessagePassing) -> str:
    if isinstance(module, GCNConv):
        if module.improved or not module.add_self_loops or not module.normalize or module.cached:
            raise UnsupportedError(f"layer {name!r}: only the default options of GCNConv are supported")
        return "gcn"
    if isinstance(module, SAGEConv) and getattr(module, "aggr", None) == "mean" and not module.project:
        return "mean"
    if isinstance(module, GATConv) and module.edge_dim is None and module.residual is False:
        return "attention"
    raise UnsupportedError(
        f"layer {name!r} is a {type(module).__name__} that full_graph does not support; allowed are GCNConv, SAGEConv "
        "with mean aggregation, and GATConv without edge features"
    )


class FullGraph:
    """A model on one part of a graph; made by `full_graph`.

    Calling it runs the model on the part's features and gives the output of its own nodes, shape (own, classes).
    ``plan`` is the plan in use, None before the first; ``problem`` the one that the last plan was made for in training.
    """

    def __init__(self, model: nn.Module, part: Part, plan: Plan | None, options: MessageOptions) -> None:
        if not dist.is_initialized():
            raise ProblemError("full_graph needs a process group: call torch.distributed.init_process_group first")
        self.model, self.part, self.options = model, part, options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.steps = 0
        self.rounds = _ROUNDS[options.links](self.world)
        self.sensitivities: dict[str, float] = {}
        self.layers = [
            _Layer(name, module, _kind(name, module))
            for name, module in model.named_modules()
            if isinstance(module, MessagePassing)
        ]
        self._pending_plan = plan
        self._agree()
        self.group: Any = companion_group()
        self.ddp = DistributedDataParallel(model) if any(p.requires_grad for p in model.parameters()) else model
        self.send_counts = self._counts()
        self.links: list[list[tuple[int, float]]] | None = None
        self.codec: list[Codec] | None = None
        self._step_s: deque[tuple[float, float]] = deque(maxlen=_TIMED_STEPS)
        self._began: float | None = None
        self._inner, self._outer = self._subgraphs()
        is_gcn = any(layer.kind == "gcn" for layer in self.layers)
        self._gcn_edges = [graph.gcn_edges() for graph in (self._inner, self._outer)] if is_gcn else []
        self._cache: dict[str, Tensor] = {}
        self._train_nodes = self._nodes_of(part.train_mask)
        self._solving: threading.Thread | None = None
        self._solved: list[Plan] = []
        self.plan = plan
        self.problem: Problem | None = None
        for layer in self.layers:
            layer.module.forward = self._forward_of(layer)

    def _agree(self) -> None:
        """Refuse unlike parts or models on every rank, with the same reason."""
        device = self.part.x.device
        facts = [self.part.digest, str(self.part.parts), str(self.options)]
        facts.append(str([(name, tuple(p.shape)) for name, p in self.model.named_parameters()]))
        facts.append(str([(layer.name, layer.kind) for layer in self.layers]))
        facts.append(_text_of(self._pending_plan))
        values = [int.from_bytes(hashlib.sha256(fact.encode()).digest()[:7], "little") for fact in facts]
        own = torch.tensor([self.part.rank, self.part.parts, *values], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone).cpu()
        names = ("partition", "number of parts", "options", "parameters", "layers", "plan")
        for column, name in enumerate(names, start=2):
            for rank in range(self.world):
                if table[rank, column] != table[0, column]:
                    raise ProblemError(f"ranks 0 and {rank} have another {name}; give all ranks the same")
        if table[:, 0].tolist() != list(range(self.world)) or int(table[0, 1]) != self.world:
            raise ProblemError(
                f"parts {table[:, 0].tolist()} of {int(table[0, 1])} are on {self.world} ranks; rank r needs part r "
                "of as many parts as there are ranks"
            )
        if not self.layers:
            raise UnsupportedError("the model has no convolution of PyTorch Geometric, so there is nothing to exchange")

    def _counts(self) -> list[list[int]]:
        own = self.part.send_counts.to(self.part.x.device)
        everyone = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(everyone, own, group=self.group)
        return [counts.tolist() for counts in everyone]

    def _subgraphs(self) -> tuple[_Subgraph, _Subgraph]:
        part = self.part
        source, target = part.edge_index
        result = []
        for lower, upper in ((0, part.central), (part.central, part.own)):
            chosen = (target >= lower) & (target < upper)
            targets = torch.arange(lower, upper, device=part.x.device)
            rows = torch.unique(torch.cat([source[chosen], targets]))
            edge_index = torch.searchsorted(rows, part.edge_index[:, chosen].contiguous())
            result.append(_Subgraph(rows, edge_index, torch.searchsorted(rows, targets), part.degree[rows]))
        return result[0], result[1]

    def _forward_of(self, layer: _Layer) -> Callable[..., Tensor]:
        def forward(x: Tensor, edge_index: Any = None, *args: Any, **kwargs: Any) -> Tensor:
            if args or any(value is not None for value in kwargs.values()):
                raise UnsupportedError(f"layer {layer.name!r} was called with more than x and edge_index; leave it out")
            if not isinstance(x, Tensor) or x.shape[0] != self.part.own:
                raise UnsupportedError(f"layer {layer.name!r} needs one row per own node, ({self.part.own}, dim)")
            exchange = layer.exchange = layer.exchange or self._exchange(layer, x.shape[1])
            if x is self.part.x:  # features do not change: exchanged once, exactly
                inner = self._convolve(layer, x, self._inner)
                if layer.name not in self._cache:
                    kept = exchange.forward.send_bits, exchange.forward.receive_bits
                    exchange.forward.widths(*(torch.full_like(bits, EXACT) for bits in kept))
                    exchange.training = False  # neither late nor sampled
                    self._cache[layer.name] = exchange.finish(exchange.start(x)).detach()
                    exchange.forward.widths(*kept)
                halo = self._cache[layer.name]
            else:
                exchange.training = self.model.training
                token = exchange.start(x)
                inner = self._convolve(layer, x, self._inner)
                halo = exchange.finish(token)
            outer = self._convolve(layer, torch.cat([x, halo]), self._outer)
            return torch.cat([inner, outer])

        return forward

    def _convolve(self, layer: _Layer, x: Tensor, graph: _Subgraph) -> Tensor:
        module, rows = layer.module, x.index_select(0, graph.rows)
        run = type(module).forward
        if layer.kind != "gcn":
            return run(module, rows, graph.edge_index).index_select(0, graph.targets)  # type: ignore[no-any-return]
        # Degrees of halo nodes are those of the whole graph, so the weights are given instead of computed.
        edges, weight = self._gcn_edges[graph is self._outer]
        normalize, module.normalize = module.normalize, False
        try:
            return run(module, rows, edges, weight).index_select(0, graph.targets)  # type: ignore[no-any-return]
        finally:
            module.normalize = normalize

    def _exchange(self, layer: _Layer, dim: int) -> HaloExchange:
        part, bits = self.part, self.options.initial_bits

        def direction(name: str, send: list[int], receive: list[int]) -> Direction:
            return Direction(
                name=f"{name} {layer.name}",
                dim=dim,
                send_counts=send,
                receive_counts=receive,
                send_bits=torch.full((sum(send),), bits),
                receive_bits=torch.full((sum(receive),), bits),
                spread=torch.ones(sum(send), dtype=torch.float64, device=part.x.device),
            )

        sends, halos = part.send_counts.tolist(), part.halo_counts.tolist()
        return HaloExchange(
            forward=direction("forward", sends, halos),
            backward=direction("backward", halos, sends),
            send=part.send,
            halo=part.halo.numel(),
            group=self.group,
            seed=self.options.seed,
            backend=self.options.backend,
            late=self.options.late,
            share=self.options.share,
        )

    def __call__(self) -> Tensor:
        """Run the model; in training mode a plan that is ready is put to use first."""
        if self.model.training:
            self._between_steps()
        output: Tensor = self.ddp(self.part.x, self.part.edge_index)
        return output

    def loss(self, output: Tensor, mask: Tensor | None = None, function: Any = nn.functional.cross_entropy) -> Tensor:
        """Mean loss over all masked nodes of all parts; DDP's mean of its gradients is the whole graph's gradient.

        Args:
            output: What the model gave, shape (own, classes).
            mask: Own nodes that count; by default the part's ``train_mask`` as it was when this was made. All ranks
                give one, or none does.
            function: Takes outputs, labels and ``reduction="sum"``.

        Returns:
            This rank's share of the loss times the number of ranks: the mean over ranks is the loss.
        """
        nodes, labels, count = self._train_nodes if mask is None else self._nodes_of(mask)
        if not count:
            raise ProblemError("the mask chooses no node of any part, so there is no loss")
        value: Tensor = function(output.index_select(0, nodes), labels, reduction="sum") * self.world / count
        return value + 0.0 * output.sum()  # a part without training nodes joins all exchanges

    def _nodes_of(self, mask: Tensor) -> tuple[Tensor, Tensor, int]:
        """Own nodes of a mask, their labels, and how many all parts have together."""
        if tuple(mask.shape) != (self.part.own,):
            raise ProblemError(f"the mask has the shape {tuple(mask.shape)}, but own nodes are ({self.part.own},)")
        nodes = mask.nonzero().flatten()
        total = torch.tensor([nodes.numel()], device=mask.device)
        dist.all_reduce(total, group=self.group)
        return nodes, self.part.y[nodes], int(total)

    @torch.no_grad()
    def accuracy(self, mask: Tensor) -> float:
        """Share of masked nodes of all parts that the model labels rightly, in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        try:
            right = (self().argmax(1) == self.part.y)[mask].sum()
        finally:
            self.model.train(was_training)
        both = torch.stack([right, mask.sum()])
        dist.all_reduce(both, group=self.group)
        return float(both[0]) / max(int(both[1]), 1)

    def close(self) -> None:
        """Give the model its own layers back."""
        if self._solving is not None:
            self._solving.join()
        for layer in self.layers:
            if layer.exchange is not None:
                layer.exchange.drain()
            vars(layer.module).pop("forward", None)

    # Plans

    def directions(self) -> list[Direction]:
        """The exchanges of every step, forward by layer, then backward; kept features are not among them."""
        used = [layer.exchange for layer in self.layers if layer.exchange and layer.name not in self._cache]
        return [each.forward for each in used] + [each.backward for each in used]

    def build_problem(self) -> Problem:
        """The problem of the traced ranges, measured links and measured packing, the same on every rank.

        All ranks must call it.
        """
        self.links = self.links or probe_links(self.group, self.part.x.device, self._probe_sizes())
        self.codec = self.codec or self._probe_codec()
        packing = [each.per_byte(self._widest()) for each in self.codec]
        factor = {str(width): variance_factor(width) for width in self.options.menu}
        exchanges = []
        for direction in self.directions():
            scores = self._gather_betas(direction)
            total = sum(float(beta.sum()) for row in scores for beta in row)
            # Rows and their gradients differ in size by orders of magnitude, and what a step does to the gradient is
            # a matter of what it is relative to the rows.
            weight = self.sensitivities.get(direction.name, 1 / total if total > 0 else 1.0)
            betas = [[weight * beta for beta in row] for row in scores]
            hidden = torch.tensor([direction.usual_hidden_ns], dtype=torch.float64, device=self.part.x.device)
            dist.all_reduce(hidden, dist.ReduceOp.MIN, group=self.group)
            rounds = []
            for pairs in self.rounds:
                group = []
                for i, j in pairs:
                    fixed, per_byte = self.links[i][j]
                    # Zero and step of a row are sent whatever its width is; exact rows have none, which is neglected.
                    fixed += round(per_byte * (WORD_BYTES + row_bytes(0, 1) * betas[i][j].size))
                    group.append(
                        Pair(
                            source=i, target=j, fixed_ns=fixed, ns_per_byte=per_byte, beta=betas[i][j],
                            pack_ns_per_byte=packing[i][0], unpack_ns_per_byte=packing[j][1],
                        )
                    )  # fmt: skip
                rounds.append(tuple(group))
            exchanges.append(
                Exchange(
                    name=direction.name,
                    dim=direction.dim,
                    rounds=tuple(rounds),
                    hidden_ns=int(hidden[0]),
                    ports=self.options.links == "all-to-all",
                )
            )
        free = Problem(
            name="full graph", time_limit_ns=None, variance_weight=1.0, time_weight=1.0, bits=factor,
            exchanges=tuple(exchanges),
        )  # fmt: skip
        budget = evaluate(free, uniform_plan(free, self.options.budget_bits)).exposed_ns
        return Problem(
            name="full graph", time_limit_ns=int(budget) + 1, variance_weight=1.0, time_weight=None, bits=factor,
            exchanges=tuple(exchanges),
        )  # fmt: skip

    def _widest(self) -> int:
        return max((each.dim for each in self.directions()), default=1)

    def _probe_sizes(self) -> list[int]:
        """Bytes from the fewest that a pair may send to the most."""
        counts = [count for row in self.send_counts for count in row if count]
        dims = [each.dim for each in self.directions()]
        sizes = [n * row_bytes(d, b) for n in counts for d in dims for b in self.options.menu] or [0]
        least = max(min(sizes), _LEAST_PROBE)
        return [int(size) for size in np.geomspace(least, max(max(sizes), 16 * least), 4)]

    def _probe_codec(self) -> list[Codec]:
        rows = max((max(sum(d.send_counts), sum(d.receive_counts)) for d in self.directions()), default=0)
        given = [] if self.plan is None else itertools.chain.from_iterable(self.plan.bits.values())
        present = {int(width) for group in given for chosen in group for width in np.unique(chosen)}
        widths = sorted({*self.options.menu, self.options.initial_bits, EXACT, *present})
        return probe_codec(
            self.group, self.part.x.device, widths, max(rows, _LEAST_ROWS), self._widest(), self.options.backend
        )

    def step_times(self, problem: Problem) -> StepTimes:
        """What the latest training steps took beside their exchanges, the same on every rank; all ranks must call it.

        Together with a problem of this job it predicts epochs under any plan (`predict_epoch`), the better the more
        widths steps are timed in (`use` changes them). Computation is what a step took beyond packing and what the
        problem says of exchanges in the widths of these steps: so it holds the time for which workers wait for each
        other because they are not equally fast.

        Args:
            problem: What `build_problem` gave, with the widths of these steps on its menu.

        Raises:
            NotReadyError: No step has been timed in the present widths.
        """
        if not self._step_s:
            raise NotReadyError("no step has been timed yet; train two steps in these widths before")
        present = self.plan or uniform_plan(problem, self.options.initial_bits)
        exposed_s = evaluate(problem, present).waiting_ns / 1e9
        device = self.part.x.device
        self.codec = self.codec or self._probe_codec()
        by_width = codec_by_worker(problem, present, self.codec).get(self.rank, 0.0)
        # Each step is as long as that of its slowest worker, which is not the same one in all steps.
        steps = torch.tensor([*self._step_s], dtype=torch.float64, device=device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self.group)
        step_s, codec_s = steps.quantile(0.5, dim=0).tolist()
        own_s = statistics.median(seconds for _, seconds in self._step_s)
        fixed_s = torch.tensor(max(own_s - by_width / 1e9, 0.0), dtype=torch.float64, device=device)
        dist.all_reduce(fixed_s, dist.ReduceOp.MAX, group=self.group)
        compute_s = max(step_s - codec_s - exposed_s, 0.0)
        return StepTimes(exposed_s, compute_s, float(fixed_s), tuple(self.codec))

    def _own_betas(self, direction: Direction) -> Tensor:
        """Scores of the messages that this rank sends."""
        layer = next(layer for layer in self.layers if direction.name.partition(" ")[2] == layer.name)
        forward = direction.name.startswith("forward")
        # Of attention, alpha is taken as that of a mean; a returned gradient enters its row with weight 1.
        alpha = self.part.out_alpha[0 if layer.kind == "gcn" else 1].double() if forward else 1.0
        return alpha * direction.spread * direction.dim / 6

    def _gather_betas(self, direction: Direction) -> list[list[np.ndarray[Any, Any]]]:
        """Scores of all messages by sender and receiver."""
        own, forward = self._own_betas(direction), direction.name.startswith("forward")
        counts = self.send_counts if forward else [list(column) for column in zip(*self.send_counts, strict=True)]
        longest = max(map(sum, counts), default=0)
        padded = torch.zeros(longest, dtype=torch.float64, device=own.device)
        padded[: own.numel()] = own
        everyone = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everyone, padded, group=self.group)
        return [
            [piece.cpu().numpy() for piece in torch.split(scores[: sum(row)], row)]
            for scores, row in zip(everyone, counts, strict=True)
        ]

    def measure_sensitivities(self, *, draws: int = 8) -> dict[str, float]:
        """Measure what the variance of each exchange does to the gradient, and weigh exchanges by it from now on.

        Each exchange in turn is sent in the widths of a plan, the others exactly; the squared change of the loss's
        gradient over the variance of the messages is its sensitivity. Widths matter: through a ReLU the change grows
        with the deviation and not with its square, and what few rows of large scores do is not what the others do. The
        plan is that of as many bytes as ``options.budget_bits`` everywhere, with what exchanges count so far (alike at
        first). Gradients, widths and random numbers stay; all ranks must call it, after a training step.

        Args:
            draws: Roundings to average over; a few rows that rounding moves across a kink weigh much.

        Returns:
            Exchange to the variance of the gradient per unit of the variance of its messages, the same on every rank.

        Raises:
            UnsupportedError: Messages are late, or samples.
        """
        if self.options.late or self.options.share < 1:
            raise UnsupportedError("sensitivities need all messages of the same step: leave late and share as they are")
        problem = self.build_problem()

        def planned_by_bytes() -> Plan | None:
            if self.rank:
                return None
            plan = solve(by_bytes(problem, self.options.budget_bits)).plan
            assert plan is not None, "the uniform width keeps the limit"
            return in_rounds(plan, problem)

        bits = self._widths(self._share_plan(problem, together(planned_by_bytes, self.group)))
        kept = [(w, w.send_bits, w.receive_bits, w.spread.clone()) for w in self.directions()]
        gradients = [parameter.grad for parameter in self.model.parameters()]
        device = self.part.x.device
        devices = [device] if device.type == "cuda" else []

        def send_exactly(way: Direction) -> None:
            way.widths(torch.full_like(way.send_bits, EXACT), torch.full_like(way.receive_bits, EXACT))

        def gradient(draw: int) -> Tensor:
            for layer in self.layers:
                if layer.exchange is not None:
                    layer.exchange.step = -1 - draw
            self.model.zero_grad(set_to_none=True)
            with torch.random.fork_rng(devices):
                torch.manual_seed(self.options.seed)  # the same dropout in every pass
                self.loss(self.ddp(self.part.x, self.part.edge_index)).backward()  # type: ignore[no-untyped-call]
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            return torch.cat(parts).double()

        result = {}
        try:
            for way, *_ in kept:
                send_exactly(way)
            exact = gradient(0)
            for way, *_ in kept:
                way.widths(*map(torch.cat, bits[way.name]))
                changes = [float((gradient(draw) - exact).square().sum()) for draw in range(draws)]
                variance = self._variance_of(way)
                send_exactly(way)
                result[way.name] = sum(changes) / draws / variance if variance else 0.0
        finally:
            for way, send, receive, spread in kept:
                way.widths(send, receive)
                way.spread = spread
            for parameter, before in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = before
            for layer in self.layers:
                if layer.exchange is not None:
                    layer.exchange.step = self.steps
        # Sums of the same numbers in another order may differ in the last bits between ranks.
        shared = torch.tensor(list(result.values()), dtype=torch.float64, device=device)
        dist.broadcast(shared, 0, group=self.group)
        self.sensitivities = dict(zip(result, shared.tolist(), strict=True))
        return dict(self.sensitivities)

    def _variance_of(self, direction: Direction) -> float:
        """Of all ranks' messages in their present widths."""
        widths, where = direction.send_bits.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        factor = torch.tensor([variance_factor(int(width)) for width in widths], dtype=torch.float64)[where]
        variance = (self._own_betas(direction) * factor.to(direction.spread.device)).sum().reshape(1)
        dist.all_reduce(variance, group=self.group)
        return float(variance)

    def use(self, plan: Plan) -> None:
        """Send in the widths of a plan from now on; every rank must do so at the same step.

        Raises:
            ProblemError: It is not a plan of these exchanges.
            NotReadyError: On the ranks that it fits, if it does not fit another.
        """
        bits = together(lambda: self._widths(plan), self.group)
        for direction in self.directions():
            direction.widths(*(torch.cat(side) for side in bits[direction.name]))
        self._step_s.clear()
        self._began = None
        self.plan = plan

    def _widths(self, plan: Plan) -> dict[str, list[list[Tensor]]]:
        """What this rank sends and receives under a plan: by exchange, the widths to each and from each rank."""
        bits: dict[str, list[list[Tensor]]] = {}
        for direction in self.directions():
            rounds = plan.bits.get(direction.name)
            if rounds is None:
                raise ProblemError(f"the plan lacks the exchange {direction.name!r}; it may be of another model")
            mine: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int64)] * self.world for _ in range(2)]
            for pairs, group in zip(self.rounds, rounds, strict=False):
                for (i, j), widths in zip(pairs, group, strict=False):
                    chosen = torch.from_numpy(widths.astype(np.int64))
                    if i == self.rank:
                        mine[0][j] = chosen
                    if j == self.rank:
                        mine[1][i] = chosen
            for counts, side in zip((direction.send_counts, direction.receive_counts), mine, strict=True):
                if [each.numel() for each in side] != counts:
                    raise ProblemError(
                        f"exchange {direction.name!r}: the plan has {[each.numel() for each in side]} widths by "
                        f"worker, but this partition needs {counts}; it is the plan of another partition"
                    )
            bits[direction.name] = mine
        return bits

    def _between_steps(self) -> None:
        """Use a plan that is ready on rank 0, or begin one; then count the step."""
        now, ways = time.perf_counter(), self.directions()
        if self._began is not None and self.steps > 1:  # the first exchanges features and compiles
            self._step_s.append((now - self._began, sum(way.codec_ns for way in ways) / 1e9))
        if self._pending_plan is not None and all(layer.exchange is not None for layer in self.layers):
            plan, self._pending_plan = self._pending_plan, None
            self.use(plan)
        every = self.options.replan_steps
        if every and self.steps and self.steps % every == 0 and self._solving is None:
            problem = self.build_problem()
            self._solving = threading.Thread(target=self._solve, args=(problem,), name="message widths", daemon=True)
            self.problem = problem
            if self.rank == 0:
                self._solving.start()
        elif self._solving is not None:
            self._exchange_plan(wait=False)
        self.steps += 1
        self._began = time.perf_counter()
        for layer in self.layers:
            if layer.exchange is not None:
                layer.exchange.step = self.steps

    def finish_planning(self) -> None:
        """Wait for the plan that is being solved, if any, and use it; all ranks must call it."""
        if self._solving is not None:
            self._exchange_plan(wait=True)

    def _solve(self, problem: Problem) -> None:
        try:
            solution = solve(problem)
            if solution.plan is not None:
                self._solved.append(solution.plan)
        except Exception:  # the old plan stays in use
            _LOGGER.exception("planning message widths failed; the widths stay as they are")

    def _exchange_plan(self, *, wait: bool) -> None:
        """Ranks learn from rank 0 whether the plan is there, and then its widths."""
        device, thread = self.part.x.device, self._solving
        state = torch.zeros(1, dtype=torch.int64, device=device)
        if self.rank == 0 and thread is not None:
            if wait:
                thread.join()
            state[0] = 0 if thread.is_alive() else 1 if self._solved else 2
        dist.broadcast(state, 0, group=self.group)
        if not int(state[0]):
            return
        self._solving = None
        if int(state[0]) == 1:
            assert self.problem is not None
            self.use(self._share_plan(self.problem, self._solved.pop() if self.rank == 0 else None))

    def _share_plan(self, problem: Problem, plan: Plan | None) -> Plan:
        """Rank 0's plan of a problem, on all ranks."""
        shapes = [pair.beta.size for e in problem.exchanges for pair in e.pairs]
        device = self.part.x.device
        widths = torch.zeros(sum(shapes), dtype=torch.uint8, device=device)
        if plan is not None:
            pieces = [pair for rounds in plan.bits.values() for group in rounds for pair in group]
            widths = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *pieces])).to(device)
        dist.broadcast(widths, 0, group=self.group)
        each = iter(torch.split(widths.cpu(), shapes))
        bits = {
            e.name: tuple(tuple(next(each).numpy() for _ in group) for group in e.rounds) for e in problem.exchanges
        }
        return Plan(bits=bits)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Steps, plan and traced ranges: what training goes on from with the same rounding. The model's is its own."""
        return {
            "steps": self.steps,
            "seed": self.options.seed,
            "plan": None if self.plan is None else self.plan.to_json(),
            "spread": {each.name: each.spread.to("cpu", copy=True) for each in self.directions()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            ProblemError: The state is of another seed or partition.
        """
        if state["seed"] != self.options.seed:
            raise ProblemError(f"the state's seed is {state['seed']}, but the options' is {self.options.seed}")
        if any(layer.exchange is None for layer in self.layers):  # widths of layers are known after one pass
            with torch.no_grad():
                was_training = self.model.training
                self.model.eval()
                self()
                self.model.train(was_training)
        for each in self.directions():
            spread = state["spread"].get(each.name)
            if spread is None or spread.shape != each.spread.shape:
                raise ProblemError(f"the state of exchange {each.name!r} is of another partition or model")
            each.spread, each.seen = spread.to(each.spread.device, copy=True), True
        self.steps = int(state["steps"])
        if state["plan"] is not None:
            self._pending_plan = None
            self.use(Plan.from_json(state["plan"]))


def _text_of(plan: Plan | None) -> str:
    """Names and widths of a plan, for comparison."""
    if plan is None:
        return "none"
    pairs = ((name, pair) for name, rounds in plan.bits.items() for group in rounds for pair in group)
    return ";".join(f"{name} {hashlib.sha256(pair.tobytes()).hexdigest()}" for name, pair in pairs)


def full_graph(
    model: nn.Module, part: Part, plan: Plan | None = None, *, options: MessageOptions | None = None
) -> FullGraph:
    """Let a model train on one part of a graph; every rank of the process group calls it with its part.

    Args:
        model: A module whose ``forward(x, edge_index)`` calls `GCNConv`, `SAGEConv` (mean) or `GATConv` layers of
            PyTorch Geometric. Its class, parameters and ``state_dict`` stay; `FullGraph.close` takes everything off.
        part: This rank's part, of as many parts as there are ranks.
        plan: Widths to send in; without it 8 bits, and plans made from traced ranges.
        options: Menu, budget, how often to plan, seed.

    Raises:
        ProblemError: Ranks have parts of unlike partitions, or unlike models; the same on every rank.
        UnsupportedError: A layer is of another kind.

    Source: AdaQP (MLSys 2023) for the overlap of central nodes with messages; ours otherwise.
    """
    return FullGraph(model, part, plan, options or MessageOptions())
