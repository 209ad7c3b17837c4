"""What a language model's layers cost on a device: time and memory by kind, scheme and phase; measured or by roofline.

Times are tables over the rows of a micro-batch and a length (the prompt while prefilling, the tokens in the cache while
decoding). A table never decreases, and is never fitted: between its points it is interpolated, and beyond them it grows
in proportion.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import Document, Extras, Json, Name, check_fields, freeze, load_file, near_match

PROFILE_FORMAT = "qsync-serving-profile/1"
KINDS = ("attn", "mlp")
"""Kinds of groups: attention and MLP of a layer."""
CACHE_PAGE = 16
"""Tokens by which a cache grows."""
_KIB = 1024
SCHEME_BITS: Mapping[str, float] = MappingProxyType({"W4": 4 + 32 / 128, "W8": 8 + 32 / 128, "W16": 16.0, "W32": 32.0})
"""Bits of a weight in memory, scales of groups of 128 included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeModel:
    """Sizes of a decoder-only language model."""

    name: Name
    layers: Annotated[int, Json(minimum=1)]
    hidden: Annotated[int, Json(minimum=1)]
    inner: Annotated[int, Json(minimum=1)]
    heads: Annotated[int, Json(minimum=1)]
    kv_heads: Annotated[int, Json(minimum=1)]
    head_size: Annotated[int, Json(minimum=1)]
    vocabulary: Annotated[int, Json(minimum=1)]

    def __post_init__(self) -> None:
        check_fields(self, f"model {self.name!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes: models of the same have the same costs."""
        return (
            self.layers, self.hidden, self.inner, self.heads, self.kv_heads, self.head_size, self.vocabulary
        )  # fmt: skip

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups in order: ``0.attn``, ``0.mlp``, ``1.attn``, ..."""
        return tuple(f"{layer}.{kind}" for layer in range(self.layers) for kind in KINDS)

    def parameters(self, kind: str) -> int:
        """Weights of the matrices of one group."""
        if kind == "mlp":
            return 3 * self.hidden * self.inner
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    def weights_kib(self, kind: str, scheme: str) -> int:
        """KiB of the matrices of one group in a scheme of `SCHEME_BITS`, scales included."""
        return int(-(-self.parameters(kind) * SCHEME_BITS[scheme] // (8 * _KIB)))

    def cache_bytes(self, tokens: int, bytes_per_number: int = 4) -> int:
        """Bytes of one sequence's keys and values in one layer, in whole pages."""
        pages = -(-tokens // CACHE_PAGE)
        return 2 * pages * CACHE_PAGE * self.kv_heads * self.head_size * bytes_per_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Nanoseconds or KiB by rows and length, ``values[i][j]`` for ``rows[i]``, ``lengths[j]``; monotone once built."""

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self, "table")
        for name in ("rows", "lengths"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if not values or values[0] < 1 or any(a >= b for a, b in itertools.pairwise(values)):
                raise ProblemError(f"table: {name} is {list(values)}, but it must rise from at least 1")
        if len(self.values) != len(self.rows) or any(len(line) != len(self.lengths) for line in self.values):
            raise ProblemError("table: values must have one line for each of rows, with one number for each of lengths")
        table = [list(line) for line in self.values]
        for i, j in itertools.product(range(len(self.rows)), range(len(self.lengths))):
            table[i][j] = max(table[i][j], table[i - 1][j] if i else 0, table[i][j - 1] if j else 0)
        object.__setattr__(self, "values", tuple(map(tuple, table)))

    def plus(self, value: int) -> Table:
        """This with a value more everywhere."""
        return replace(self, values=tuple(tuple(each + value for each in line) for line in self.values))

    def at(self, rows: int, length: int) -> float:
        """The value for so many rows and such a length."""
        by_row = [_interpolate(self.lengths, line, length) for line in self.values]
        return _interpolate(self.rows, by_row, rows)


def _interpolate(points: Sequence[int], values: Sequence[float], at: float) -> float:
    if at <= points[0]:
        return float(values[0])
    if at >= points[-1]:
        return float(values[-1]) * at / points[-1]
    j = bisect.bisect_right(points, at)
    share = (at - points[j - 1]) / (points[j] - points[j - 1])
    return values[j - 1] + share * (values[j] - values[j - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Times of one group, or of one end of the model, in both phases."""

    prefill: Table
    decode: Table

    def of(self, phase: str) -> Table:
        """Times of ``"prefill"`` or ``"decode"``."""
        return self.prefill if phase == "prefill" else self.decode

    def longer_by(self, ns: int) -> PhaseCosts:
        """These with so many nanoseconds more everywhere."""
        return PhaseCosts(prefill=self.prefill.plus(ns), decode=self.decode.plus(ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProfile(Document):
    """What one kind of device needs for a model's layers, its ends, and a link.

    ``base_kib`` is what a process holds before it holds anything of a model, ``load_kib`` what loading needs for a
    moment beside that and the weights, while there are no caches yet, ``workspace`` what a pass needs, in KiB by
    rows and length. ``cache_bytes_per_number`` is the size of a number in the cache. A message to the next stage
    takes ``link_ns`` and ``link_ns_per_kib``; where there are several stages, a process holds ``link_kib`` more.
    ``estimates`` says of costs that were not measured, by kind and scheme, where they are from.
    """

    FORMAT: ClassVar = PROFILE_FORMAT
    KIND: ClassVar = "profile"

    name: Name
    source: Name
    model: ServeModel
    threads: Annotated[int | None, Json(minimum=1, optional=True)] = None
    base_kib: int
    load_kib: int
    cache_bytes_per_number: Annotated[int, Json(minimum=1)]
    weights_kib: Mapping[Name, Mapping[Name, int]]
    costs: Mapping[Name, Mapping[Name, PhaseCosts]]
    workspace: Table
    first_kib: int
    last_kib: int
    first: PhaseCosts
    last: PhaseCosts
    link_ns: int
    link_ns_per_kib: float
    link_kib: Annotated[int, Json(optional=True)] = 0
    estimates: Annotated[Mapping[Name, Mapping[Name, Name]], Json(omitted=True)] = field(default_factory=dict)
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, f"profile {self.name!r}")
        freeze(self, "extras")
        freeze(self, "weights_kib", "costs", "estimates", depth=2)
        for kind in KINDS:
            for what, table in (("weights_kib", self.weights_kib), ("costs", self.costs)):
                if kind not in table:
                    raise ProblemError(f"profile {self.name!r}: {what} lacks the kind {kind!r}; add it")
            if set(self.weights_kib[kind]) != set(self.costs[kind]):
                raise ProblemError(f"profile {self.name!r}: weights_kib and costs of kind {kind!r} have unlike schemes")
        for kind, texts in self.estimates.items():
            for scheme in texts:
                if scheme not in self.costs.get(kind, {}):
                    raise ProblemError(
                        f"profile {self.name!r}: estimates names kind {kind!r} and scheme {scheme!r}, but there are no "
                        "such costs; leave it out"
                    )

    @property
    def estimated_by(self) -> str | None:
        """Which costs are estimates, and where they are from; None: all were measured."""
        places: dict[str, list[str]] = {}
        for kind, texts in self.estimates.items():
            for scheme, text in texts.items():
                places.setdefault(text, []).append(f"{kind} {scheme}")
        if [sum(map(len, self.costs.values()))] == [len(names) for names in places.values()]:
            return next(iter(places))
        return "; ".join(f"{', '.join(names)}: {text}" for text, names in places.items()) or None

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes that all kinds have, in the profile's order."""
        return tuple(s for s in self.costs[KINDS[0]] if all(s in self.costs[kind] for kind in KINDS))

    def check_scheme(self, scheme: str) -> None:
        """Refuse a scheme that a kind lacks.

        Raises:
            ProblemError: It is not profiled; the text names what is.
        """
        for kind in KINDS:
            if scheme not in self.costs[kind]:
                raise ProblemError(
                    f"profile {self.name!r} has no costs of kind {kind!r} in scheme {scheme!r}"
                    f"{near_match(scheme, self.costs[kind])}; it has {', '.join(self.costs[kind])}: profile that "
                    "scheme too, have it estimated (fill_serving_profile; serving plan --costs learned), or plan "
                    "without it"
                )


def check_known_scheme(scheme: str) -> None:
    """Refuse a scheme whose bits are not known.

    Raises:
        ProblemError: It is none of `SCHEME_BITS`.
    """
    if scheme not in SCHEME_BITS:
        allowed = ", ".join(SCHEME_BITS)
        raise ProblemError(f"scheme is {scheme!r}{near_match(scheme, SCHEME_BITS)}; allowed are {allowed}")


def load_serving_profile(path: str | os.PathLike[str]) -> ServingProfile:
    """Read and check a profile of serving costs.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format.

    Source: the profile file format of this package, "qsync-serving-profile/1".
    """
    return load_file(path, {PROFILE_FORMAT: ServingProfile.from_json})


def roofline_serving_profile(
    model: ServeModel,
    name: str,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    schemes: Sequence[str] = ("W4", "W8", "W16"),
    link_bytes_per_s: float = 1e9,
    link_s: float = 50e-6,
) -> ServingProfile:
    """A profile from two rates alone: a pass takes its products or its bytes, whichever takes longer.

    Args:
        model: Sizes.
        name: Of the profile.
        flops_per_s: Multiplications and additions per second that the device reaches.
        bytes_per_s: Bytes per second that it reads.
        schemes: Weight schemes.
        link_bytes_per_s: Rate to the next stage.
        link_s: What every message takes besides.

    Raises:
        ProblemError: A rate is not above 0, or a scheme is unknown.

    Source: Williams et al., Roofline (CACM 2009).
    """
    for what, rate in (
        ("flops_per_s", flops_per_s),
        ("bytes_per_s", bytes_per_s),
        ("link_bytes_per_s", link_bytes_per_s),
    ):
        if not 0 < rate < float("inf"):
            raise ProblemError(f"{what} is {rate!r}, but it must be a finite number above 0")
    for scheme in schemes:
        check_known_scheme(scheme)
    rows, lengths = (1, 4096), (1, 65536)

    def table(weight_bytes: float, parameters: int, cache_bytes: float, *, per_length: bool) -> Table:
        def ns(count: int, length: int) -> int:
            tokens = count * length if per_length else count
            read = weight_bytes + (0 if per_length else count * length * cache_bytes)
            return round(1e9 * max(2 * parameters * tokens / flops_per_s, read / bytes_per_s))

        # Points in between, where the larger of two lines bends.
        grid_rows = tuple(2**k for k in range(13))
        grid = tuple(4**k for k in range(9))
        return Table(rows=grid_rows, lengths=grid, values=tuple(tuple(ns(b, t) for t in grid) for b in grid_rows))

    def phases(scheme_bits: float, parameters: int, cache_bytes: float) -> PhaseCosts:
        size = parameters * scheme_bits / 8
        return PhaseCosts(
            prefill=table(size, parameters, 0.0, per_length=True),
            decode=table(size, parameters, cache_bytes, per_length=False),
        )

    head = model.vocabulary * model.hidden
    per_token = 2 * model.kv_heads * model.head_size * 2.0
    nothing = Table(rows=(1,), lengths=(1,), values=((0,),))
    last = table(head * 2.0, head, 0.0, per_length=False)
    work = tuple(tuple(b * t * (3 * model.hidden + 2 * model.inner) * 2 // _KIB for t in lengths) for b in rows)
    return ServingProfile(
        name=name,
        source="roofline",
        model=model,
        base_kib=0,
        load_kib=0,
        cache_bytes_per_number=2,
        weights_kib={kind: {s: model.weights_kib(kind, s) for s in schemes} for kind in KINDS},
        costs={
            kind: {
                s: phases(SCHEME_BITS[s], model.parameters(kind), per_token if kind == "attn" else 0.0) for s in schemes
            }
            for kind in KINDS
        },
        workspace=Table(rows=rows, lengths=lengths, values=work),
        first_kib=-(-head * 2 // _KIB),
        last_kib=-(-head * 2 // _KIB),
        first=PhaseCosts(prefill=nothing, decode=nothing),
        last=PhaseCosts(prefill=last, decode=last),
        link_ns=round(1e9 * link_s),
        link_ns_per_kib=1e9 * _KIB / link_bytes_per_s,
        estimates={kind: dict.fromkeys(schemes, "roofline") for kind in KINDS},
    )


def profile_json(profile: ServingProfile) -> dict[str, Any]:
    """What ``--json`` prints of a profile: everything but the tables of times."""
    data = profile.to_json()
    for key in ("costs", "first", "last", "workspace"):
        data.pop(key)
    return {**data, "schemes": list(profile.schemes)}
