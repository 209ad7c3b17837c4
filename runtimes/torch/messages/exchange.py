"""The exchange of halo rows between workers, in both directions of autograd, in the widths of a plan.

Forward, `start` packs and launches, `finish` waits and unpacks; what runs between them overlaps. Backward, the gradient
of `finish` packs and launches, that of `start` waits and adds. All ranks call the same exchanges in the same order.

Each part of the wire begins with one word of eight bytes: 0, or that the sender's rows are not finite. So every rank
learns it, and all stop with the same reason. On a card the host waits once for each exchange: for these words.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.kernels.messages import pack_rows, row_bytes, row_key, unpack_rows
from qsync_opt.runtimes.torch.messages.transfer import Transfer, transfer
from qsync_opt.runtimes.torch.support import intervals_ns, time_mark

EXACT = 32
"""Width of rows as they are."""
WORD_BYTES = 8
REMEMBERED = 9
"""Exchanges whose times are kept."""


@dataclass(slots=True)
class _Layout:
    """Where rows go on the wire: per peer and width, the rows (positions in a list of rows) and their bytes.

    ``words`` is where the first word of each peer is, in words; ``sources`` the sender's row of each of ``groups``,
    once it is known.
    """

    groups: list[list[tuple[int, Tensor]]]
    sizes: list[int]
    words: Tensor
    sources: list[Tensor] | None = None


@dataclass(slots=True)
class Direction:
    """One direction of an exchange: who sends how many rows, their widths, and what was traced.

    Widths are on the host, ``spread`` is on the rows' device.
    """

    name: str
    dim: int
    send_counts: list[int]
    receive_counts: list[int]
    send_bits: Tensor
    receive_bits: Tensor
    spread: Tensor
    """Squared range of each sent row, a moving average, shape (sends,)."""
    seen: bool = False
    hidden_ns: float = 0.0
    wait_ns: float = 0.0
    codec_ns: float = 0.0
    wire_bytes: int = 0
    hidden_history: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _layouts: tuple[_Layout, _Layout] | None = None

    def widths(self, send: Tensor, receive: Tensor) -> None:
        """Use other widths from now on."""
        self.send_bits, self.receive_bits, self._layouts = send, receive, None

    @property
    def usual_hidden_ns(self) -> float:
        """Nanoseconds of computation while messages fly: what three of four of the latest exchanges had at least.

        A plan fills this time; at the median, every other exchange would be waited for.
        """
        if len(self.hidden_history) < 2:
            return sum(self.hidden_history)
        return statistics.quantiles(self.hidden_history, n=4, method="inclusive")[0]

    def layouts(self, sampled: tuple[Tensor, Tensor] | None = None) -> tuple[_Layout, _Layout]:
        """What is sent and received; with ``sampled``, of which rows it is, only those."""
        if sampled is not None:
            return self._both(self.send_bits * sampled[0], self.receive_bits * sampled[1])
        if self._layouts is None:
            self._layouts = self._both(self.send_bits, self.receive_bits)
        return self._layouts

    def _both(self, send: Tensor, receive: Tensor) -> tuple[_Layout, _Layout]:
        device = self.spread.device
        return (
            _layout(send, self.send_counts, self.dim, device),
            _layout(receive, self.receive_counts, self.dim, device),
        )


def _layout(bits: Tensor, counts: list[int], dim: int, device: torch.device) -> _Layout:
    """Rows of the width 0 are not sent."""
    groups, sizes, start = [], [], 0
    for count in counts:
        mine = bits[start : start + count]
        rows = [(int(b), (start + torch.nonzero(mine == b).flatten()).to(device)) for b in torch.unique(mine) if b]
        groups.append(rows)
        size = WORD_BYTES + sum(index.numel() * row_bytes(dim, width) for width, index in rows)
        sizes.append(size + -size % WORD_BYTES)
        start += count
    words = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=device) // WORD_BYTES
    return _Layout(groups, sizes, words)


@dataclass(slots=True)
class _Flight:
    """An exchange under way."""

    work: Transfer
    wire: Tensor
    direction: Direction
    received: _Layout
    marks: tuple[Any, Any, Any]
    """When packing began, when it ended, and when messages were under way; see `time_mark`."""
    scale: float
    """What its rows are multiplied with; 1 unless they are a sample."""


@dataclass(slots=True)
class HaloExchange:
    """The exchange of one layer: rows to the neighbours forward, their gradients back.

    Attributes:
        send: Own rows that others need, by receiver, shape (sends,).
        halo: Number of rows received.
        group: Process group of its own, so that it does not mix with DDP's reductions.
        momentum: Weight of the past in the traced ranges.
        late: Whether training uses the rows and gradients of the step before, and zeros in the first.
        share: Of the rows that are sent in training, drawn anew in each step; what is sent counts 1 / share times.

    Source: PipeGCN (ICLR 2022) for late messages, BNS-GCN (MLSys 2022) for samples of the boundary.
    """

    forward: Direction
    backward: Direction
    send: Tensor
    halo: int
    group: Any
    seed: int
    backend: str = "auto"
    momentum: float = 0.8
    training: bool = True
    step: int = 0
    late: bool = False
    share: float = 1.0
    _flight: _Flight | None = None
    _back: _Flight | None = field(default=None)
    _sampled: tuple[Tensor, Tensor] | None = None
    _earlier: dict[str, _Flight] = field(default_factory=dict)

    def start(self, x: Tensor) -> Tensor:
        """Send the rows of ``x`` (own, dim) that others need; the result goes to `finish`."""
        token: Tensor = _Start.apply(x, self)  # type: ignore[no-untyped-call]
        return token

    def finish(self, token: Tensor) -> Tensor:
        """The halo's rows, shape (halo, dim)."""
        rows: Tensor = _Finish.apply(token, self)  # type: ignore[no-untyped-call]
        return rows

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Which rows go forward in this step, and which come; sender and receiver draw alike."""
        rank = dist.get_rank(self.group)
        name = int.from_bytes(self.forward.name.encode()[-8:], "little")

        def draws(counts: list[int], outward: bool) -> Tensor:
            pieces = []
            for peer, count in enumerate(counts):
                pair = (rank, peer) if outward else (peer, rank)
                generator = torch.Generator().manual_seed(row_key(self.seed, self.step, name, *pair))
                pieces.append(torch.rand(count, generator=generator) < self.share)
            return torch.cat(pieces)

        return draws(self.forward.send_counts, True), draws(self.forward.receive_counts, False)

    def launch(self, rows: Tensor, index: Tensor, direction: Direction) -> _Flight:
        """Pack ``rows[index]`` and send them."""
        began = time_mark(rows.device)
        is_forward = direction is self.forward
        if is_forward:
            self._sampled = self._draw() if self.share < 1 and self.training else None
        sampled = self._sampled if is_forward or self._sampled is None else self._sampled[::-1]
        sent, received = direction.layouts(sampled)
        bad = torch.zeros((), dtype=torch.bool, device=rows.device)
        if index.numel():
            gathered = rows.detach().index_select(0, index)
            # Two reductions take a third of the time of aminmax on a CPU.
            span = gathered.amax(1) - gathered.amin(1) if rows.shape[1] else gathered.sum(1)
            spread = span.double() ** 2
            bad = ~torch.isfinite(spread).all()
            if self.training:  # the first sample replaces the initial value
                past = self.momentum if direction.seen else 0.0
                traced = past * direction.spread + (1 - past) * spread
                direction.spread = torch.where(bad, direction.spread, traced)
        word = bad.to(torch.int64).view(1).view(torch.uint8)
        if sent.sources is None:
            sent.sources = [index[positions] for groups in sent.groups for _, positions in groups]
        sources = iter(sent.sources)
        pieces, key = [], (self.seed, dist.get_rank(self.group), self.step)
        name = int.from_bytes(direction.name.encode()[-8:], "little")
        for peer, (groups, size) in enumerate(zip(sent.groups, sent.sizes, strict=True)):
            used = WORD_BYTES
            pieces.append(word)
            for width, _ in groups:
                packed = pack_rows(
                    rows.detach(), next(sources), width, row_key(*key, name, peer, width), backend=self.backend
                ).reshape(-1)
                pieces.append(packed)
                used += packed.numel()
            if size > used:
                pieces.append(torch.zeros(size - used, dtype=torch.uint8, device=rows.device))
        buffer = torch.cat(pieces)
        wire = torch.empty(sum(received.sizes), dtype=torch.uint8, device=rows.device)
        direction.wire_bytes = buffer.numel()
        packed_at = time_mark(rows.device)
        try:
            work = transfer(wire, buffer, received.sizes, sent.sizes, self.group)
        except RuntimeError as failure:
            raise _lost(direction, failure) from failure
        scale = 1.0 if sampled is None else 1 / self.share
        return _Flight(work, wire, direction, received, (began, packed_at, time_mark(rows.device)), scale)

    def land(self, flight: _Flight, dim: int) -> Tensor:
        """Wait for rows and unpack them, by sender, shape (received, dim); late ones are those of the step before."""
        direction, device = flight.direction, flight.wire.device
        if self.late and self.training:
            earlier = self._earlier.get(direction.name)
            self._earlier[direction.name] = flight
            if earlier is None:
                return torch.zeros((sum(direction.receive_counts), dim), device=device)
            flight = earlier
        arrived = time_mark(device)
        try:
            flight.work.wait()
        except RuntimeError as failure:
            raise _lost(direction, failure) from failure
        landed = time_mark(device)
        received, is_whole = flight.received, flight.scale == 1
        out = (torch.empty if is_whole else torch.zeros)(sum(direction.receive_counts), dim, device=device)
        start = 0
        for groups, size in zip(received.groups, received.sizes, strict=True):
            at = start + WORD_BYTES
            for width, positions in groups:
                length = positions.numel() * row_bytes(dim, width)
                wire = flight.wire[at : at + length].view(positions.numel(), -1)
                unpack_rows(wire, positions, out, width, backend=self.backend)
                at += length
            start += size
        unpacked = time_mark(device)
        words = flight.wire.view(torch.int64)[received.words].tolist()  # a card has done all the above then
        pack_ns, _, direction.hidden_ns, direction.wait_ns, unpack_ns = intervals_ns(
            (*flight.marks, arrived, landed, unpacked)
        )
        direction.hidden_history.append(direction.hidden_ns)
        direction.codec_ns = pack_ns + unpack_ns
        if any(words):
            ranks = ", ".join(str(peer) for peer, word in enumerate(words) if word)
            raise ProblemError(
                f"exchange {direction.name!r}: rows of rank {ranks} hold NaN, infinity or a range that overflows; "
                "lower the learning rate or check the features"
            )
        direction.seen = direction.seen or self.training
        return out if is_whole else out * flight.scale

    def drain(self) -> None:
        """Wait for late messages that are still under way."""
        for flight in self._earlier.values():
            flight.work.wait()
        self._earlier.clear()


def _lost(direction: Direction, failure: Exception) -> NotReadyError:
    reason = " ".join(str(failure).split())
    return NotReadyError(f"exchange {direction.name!r} failed, another worker may have stopped: {reason}")


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HaloExchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, x.shape
        exchange._flight = exchange.launch(x, exchange.send, exchange.forward)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        exchange: HaloExchange = ctx.exchange
        flight, exchange._back = exchange._back, None
        if flight is None:
            raise NotReadyError(f"the gradient of exchange {exchange.backward.name!r} was not sent; call backward once")
        rows = exchange.land(flight, ctx.shape[1])
        # In fixed order: a row that several receive gets its gradients added rank by rank.
        return rows.new_zeros(ctx.shape).index_add_(0, exchange.send, rows), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: HaloExchange) -> Tensor:
        ctx.exchange = exchange
        flight, exchange._flight = exchange._flight, None
        assert flight is not None
        return exchange.land(flight, exchange.forward.dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        exchange: HaloExchange = ctx.exchange
        gradient = gradients[0].contiguous()
        everything = torch.arange(exchange.halo, device=gradient.device)
        exchange._back = exchange.launch(gradient, everything, exchange.backward)
        return gradient.new_zeros(()), None
