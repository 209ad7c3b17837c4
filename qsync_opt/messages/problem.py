"""The message-width problem: scores of the messages of every exchange, link costs, and the limit or the weights.

Times are nanoseconds. A `Problem` validates itself, whether it comes from a file or from code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    Optimum,
    check_fields,
    check_number,
    freeze,
)

FORMAT = "qsync-messages/1"
_OWN_KEYS = ("x-variance-limit", "x-hidden-ns", "x-ports", "x-pack-ns-per-byte", "x-unpack-ns-per-byte")
"""Extension keys of the format that have a meaning here."""
WIDEST = 64
"""Largest width in bits that a menu may offer."""

Betas = npt.NDArray[np.float64]


def variance_factor(bits: int) -> float:
    """Variance per unit of beta of a message in ``bits`` bits.

    beta is (sum of alpha^2) D (max - min)^2 / 6 of a row of D numbers. Integer widths up to 8 have
    1 / (2^bits - 1)^2. 16 is BF16 with stochastic rounding: 2^-14 bounds it where no entry's magnitude exceeds the
    row's range (a spacing of at most 2^-7 of the entry). 32 is exact.

    Source: AdaQP (MLSys 2023), theorem 1, for integers; BF16 is ours.
    """
    if bits in (16, 32):
        return 2.0**-14 if bits == 16 else 0.0
    if not 1 <= bits <= 8:
        raise ProblemError(f"width is {bits!r} bits, but widths with a known variance are 1 to 8, 16 and 32")
    return float((2**bits - 1) ** -2.0)


def _read_beta(data: Any, place: str) -> Betas:
    if not isinstance(data, list):
        raise ProblemError(f"{place} is {data!r}, but it must be a list of numbers, one per message")
    for index, value in enumerate(data):
        if type(value) is not float:
            check_number(value, f"{place}, message {index}")
    return np.array(data, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The messages from worker ``source`` to ``target`` in one round, and what their link costs.

    ``beta`` has one score per message (variance per unit of the factor of its width), shape (messages,). The sender
    takes ``pack_ns_per_byte`` to pack each byte, the receiver ``unpack_ns_per_byte`` to unpack it.
    """

    source: Annotated[int, Json(key="from")]
    target: Annotated[int, Json(key="to")]
    fixed_ns: int
    ns_per_byte: float
    beta: Annotated[Betas, Json(read=_read_beta, write=lambda beta: beta.tolist())]
    pack_ns_per_byte: Annotated[float, Json(key="x-pack-ns-per-byte", omitted=True)] = 0.0
    unpack_ns_per_byte: Annotated[float, Json(key="x-unpack-ns-per-byte", omitted=True)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, f"pair {self.source!r} to {self.target!r}")
        beta = np.array(self.beta, dtype=np.float64)
        if beta.ndim != 1:
            raise ProblemError(f"{self.label}: beta has the shape {beta.shape}, but it must be (messages,)")
        bad = np.flatnonzero(~(beta >= 0) | np.isinf(beta))
        if bad.size:
            raise ProblemError(
                f"{self.label}: beta of message {bad[0]} is {float(beta[bad[0]])!r}, but it must be a finite number "
                "of at least 0; a row of embeddings or gradients may hold NaN"
            )
        beta.flags.writeable = False
        object.__setattr__(self, "beta", beta)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pair):
            return NotImplemented
        costs = ("source", "target", "fixed_ns", "ns_per_byte", "pack_ns_per_byte", "unpack_ns_per_byte")
        return all(getattr(self, key) == getattr(other, key) for key in costs) and np.array_equal(self.beta, other.beta)

    __hash__ = None  # type: ignore[assignment]

    @property
    def label(self) -> str:
        """Name in errors."""
        return f"pair {self.source} to {self.target}"

    def time_ns(self, dim: int, bits: int) -> float:
        """Nanoseconds of the pair's messages of ``dim`` numbers that have ``bits`` bits per number in all."""
        return self.fixed_ns + self.ns_per_byte * (dim * bits / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of rows of ``dim`` numbers, such as the forward pass of one layer.

    Rounds follow each other; a round takes as long as its slowest pair. What exceeds ``hidden_ns``, the computation
    that does not wait for the exchange, is exposed. So is packing and unpacking, before and after that computation, as
    long as the slowest worker takes for all that it sends and receives (`codec_ns`).

    With ``ports`` the pairs of a round go at once, as in NCCL's all-to-all, and those of one sender or one receiver
    share its port: a port takes the longest fixed time of its pairs plus the sum of their times per byte, and the round
    as long as its slowest port. `all_to_all_round` gives the pairs of such a round.
    """

    name: Name
    dim: Annotated[int, Json(minimum=1)]
    rounds: tuple[tuple[Pair, ...], ...]
    hidden_ns: Annotated[int, Json(key="x-hidden-ns", omitted=True)] = 0
    ports: Annotated[bool, Json(key="x-ports", omitted=True)] = False

    def __post_init__(self) -> None:
        check_fields(self, f"exchange {self.name!r}")
        object.__setattr__(self, "rounds", tuple(map(tuple, self.rounds)))

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs of all rounds, in order."""
        return tuple(pair for group in self.rounds for pair in group)

    def members(self, group: tuple[Pair, ...]) -> tuple[tuple[int, ...], ...]:
        """Positions of the pairs of a round that share what decides its time: one each, or those of a port."""
        if not self.ports:
            return tuple((position,) for position in range(len(group)))
        ports: dict[tuple[str, int], list[int]] = {}
        for position, pair in enumerate(group):
            ports.setdefault(("out", pair.source), []).append(position)
            ports.setdefault(("in", pair.target), []).append(position)
        return tuple(map(tuple, ports.values()))

    def codec(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Of each worker that packs or unpacks: positions among `pairs`, and nanoseconds per byte of each."""
        workers: dict[int, dict[int, float]] = {}
        for position, pair in enumerate(self.pairs):
            for worker, per_byte in ((pair.source, pair.pack_ns_per_byte), (pair.target, pair.unpack_ns_per_byte)):
                if per_byte:
                    own = workers.setdefault(worker, {})
                    own[position] = own.get(position, 0.0) + per_byte
        return tuple(tuple(own.items()) for own in workers.values())

    def codec_ns(self, bits: Sequence[int]) -> float:
        """Nanoseconds of packing and unpacking of the slowest worker.

        ``bits`` are those per number in all of each of `pairs`.
        """
        workers = (math.fsum(per_byte * (self.dim * bits[k] / 8) for k, per_byte in own) for own in self.codec())
        return max(workers, default=0.0)

    def round_ns(self, group: tuple[Pair, ...], bits: Sequence[int]) -> float:
        """Nanoseconds of a round whose pairs' messages have so many bits per number in all."""
        slowest = 0.0
        for positions in self.members(group):
            fixed = max(group[position].fixed_ns for position in positions)
            rest = sum(group[k].time_ns(self.dim, bits[k]) - group[k].fixed_ns for k in positions)
            slowest = max(slowest, fixed + rest)
        return slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Document):
    """Messages whose widths are to be chosen.

    Exactly one of three is set. ``time_limit_ns``: the least variance of which the exposed time keeps the limit (0:
    all exchanges hidden). ``time_weight``: the least ``variance_weight`` x variance + ``time_weight`` x exposed time.
    ``variance_limit``: the least exposed time of which the variance keeps the limit. ``bits`` maps widths to variance
    factors (`variance_factor`).

    Raises:
        ProblemError: A rule of the format is broken; the text names the place.

    Source: the file format "qsync-messages/1" of this package, with ``x-variance-limit``, ``x-hidden-ns`` of exchanges
        and ``x-pack-ns-per-byte`` of pairs; the problem is AdaQP's (MLSys 2023) with overlap and packing in the
        objective.
    """

    FORMAT: ClassVar = FORMAT
    KIND: ClassVar = "problem"
    DIGEST: ClassVar = False

    name: Name
    time_limit_ns: int | None
    variance_weight: float
    time_weight: float | None
    bits: Mapping[str, float]
    exchanges: tuple[Exchange, ...]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    variance_limit: Annotated[float | None, Json(key="x-variance-limit", omitted=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        object.__setattr__(self, "exchanges", tuple(self.exchanges))
        freeze(self, "bits", "extras")
        goals = {key: getattr(self, key) for key in ("time_limit_ns", "time_weight", "variance_limit")}
        chosen = [key for key, value in goals.items() if value is not None]
        if len(chosen) != 1:
            raise ProblemError(
                f"problem {self.name!r} sets {' and '.join(chosen) or 'no goal'}; set exactly one of "
                f"{', '.join(goals)} and leave the others null"
            )
        if not self.bits:
            raise ProblemError("bits is empty, but a menu needs at least one width")
        for width in self.bits:
            if not width.isascii() or not width.isdigit() or str(int(width)) != width or not 1 <= int(width) <= WIDEST:
                raise ProblemError(f"bits names the width {width!r}, but widths are whole numbers from 1 to {WIDEST}")
        seen: set[str] = set()
        for exchange in self.exchanges:
            if exchange.name in seen:
                raise ProblemError(f"exchange {exchange.name!r} is named twice; names must be unique")
            seen.add(exchange.name)
        if not self.exchanges:
            raise ProblemError(f"problem {self.name!r} has no exchanges; there is nothing to plan")
        worst = max(self.bits.values()) * sum(float(p.beta.sum()) for e in self.exchanges for p in e.pairs)
        slowest = sum(p.time_ns(e.dim, WIDEST * p.beta.size) for e in self.exchanges for p in e.pairs)
        slowest += sum(e.codec_ns([WIDEST * p.beta.size for p in e.pairs]) for e in self.exchanges)
        if not math.isfinite(worst) or not math.isfinite(slowest):
            raise ProblemError("scores or times add up to infinity; scale all scores by one factor or check units")

    @property
    def menu(self) -> dict[int, float]:
        """Width in bits to variance factor, narrow widths first."""
        return dict(sorted((int(width), factor) for width, factor in self.bits.items()))

    @property
    def num_messages(self) -> int:
        """Messages of all exchanges."""
        return sum(pair.beta.size for exchange in self.exchanges for pair in exchange.pairs)

    def goal(self, variance: float, time_ns: float) -> float:
        """The objective at a variance and an exposed time."""
        if self.time_weight is not None:
            return self.variance_weight * variance + self.time_weight * time_ns
        return variance if self.variance_limit is None else time_ns

    @classmethod
    def reads_extra(cls, path: tuple[str, ...]) -> bool:
        """Limits and hidden times stand under extension keys."""
        return path[-1] in _OWN_KEYS


def ring_rounds(workers: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The (sender, receiver) pairs of each round of a ring all-to-all.

    Source: AdaQP (MLSys 2023), section 3.
    """
    return tuple(tuple((i, (i + step) % workers) for i in range(workers)) for step in range(1, workers))


def all_to_all_round(workers: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The (sender, receiver) pairs of an all-to-all whose messages all go at once: one round, in ring order."""
    return (tuple(pair for group in ring_rounds(workers) for pair in group),) if workers > 1 else ()


def by_bytes(problem: Problem, bits: int) -> Problem:
    """The same messages where bytes are all that counts: at most as many in total as with one width for all.

    Pairs stand in the same order, each in a round of its own.
    """
    exchanges = tuple(
        replace(
            exchange, hidden_ns=0, ports=False,
            rounds=tuple(
                (replace(pair, fixed_ns=0, ns_per_byte=1.0, pack_ns_per_byte=0.0, unpack_ns_per_byte=0.0),)
                for pair in exchange.pairs
            ),
        )
        for exchange in problem.exchanges
    )  # fmt: skip
    total = sum(e.dim * bits / 8 * pair.beta.size for e in problem.exchanges for pair in e.pairs)
    return replace(
        problem, exchanges=exchanges, time_limit_ns=math.ceil(total), variance_weight=1.0, time_weight=None,
        variance_limit=None,
    )  # fmt: skip
