"""The precision-allocation problem: operators, their costs on each device type in each precision, and the limits.

Times are integer nanoseconds and memory integer KiB (1024 bytes), so that every implementation computes the same
integers. A `Problem` validates itself, whether it comes from a file or from code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    LARGEST_INTEGER,
    Document,
    Extras,
    Fields,
    Json,
    Name,
    check_fields,
    check_integer,
    check_number,
    decode,
    encode,
    freeze,
    load_file,
    near_match,
)
from qsync_opt.model import Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.training.propagation import missing_casts
from qsync_opt.views import Displayed, Tabular

PROBLEM_FORMAT = "qsync-problem/1"
NO_LIMIT_NS = 2**60
"""A latency limit that no step reaches."""
SCHEMES_KEY = ("x-schemes",)
"""Extension key of a problem whose all-reduces are compressed: the scheme of each bucket."""
MI_ELEMENTS = 2**20
"""Cast slopes are per this many elements."""
CAST_SHARINGS = ("edge", "producer")
"""How casts of one output are counted: per edge, or once per target format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemOperator:
    """One operator: its role, the operators it reads, and the all-reduce bucket that waits for its gradient."""

    name: Name
    type: str
    role: Role
    inputs: tuple[str, ...] = ()
    output_elements: int
    bucket: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, f"operator {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The all-reduce of each gradient bucket, in launch order.

    ``allreduce_ns`` is its duration, ``peer_ready_ns`` when the devices of fixed precision have it ready.
    """

    allreduce_ns: tuple[int, ...] = ()
    peer_ready_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "communication")
        if len(self.allreduce_ns) != len(self.peer_ready_ns):
            raise ProblemError(
                f"communication: allreduce_ns has {len(self.allreduce_ns)} buckets and peer_ready_ns "
                f"{len(self.peer_ready_ns)}, but both must have one value per bucket"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CastCost:
    """Time to cast n elements: ``base_ns + ns_per_mi_elements * n // 2**20``."""

    base_ns: int
    ns_per_mi_elements: int

    def __post_init__(self) -> None:
        check_fields(self, "cast")

    def time_ns(self, elements: int) -> int:
        """Nanoseconds to cast ``elements`` elements, rounded down."""
        return self.base_ns + self.ns_per_mi_elements * elements // MI_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """What one operator costs at one precision on one device type; casts are not in it."""

    forward_ns: int
    backward_ns: int
    memory_kib: int
    sensitivity: float

    def __post_init__(self) -> None:
        # By hand, because a problem has thousands of these.
        check_integer(self.forward_ns, "forward_ns")
        check_integer(self.backward_ns, "backward_ns")
        check_integer(self.memory_kib, "memory_kib")
        object.__setattr__(self, "sensitivity", check_number(self.sensitivity, "sensitivity"))


def _read_casts(data: Any, place: str) -> dict[tuple[str, str], CastCost]:
    fields, casts = Fields(data, place), {}
    for key in fields:
        source, _, target = key.partition(">")
        if not source or not target:
            raise ProblemError(f"{place} {key!r}: the key must read FROM>TO, such as 'FP16>INT8'")
        casts[source, target] = decode(CastCost, fields.take(key), f"{place} {key!r}")
    return casts


def _write_casts(casts: Mapping[tuple[str, str], CastCost]) -> dict[str, Any]:
    return {f"{source}>{target}": encode(cost) for (source, target), cost in casts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDevice:
    """A device type that gets a plan; all ``count`` workers of the type share it.

    ``casts`` is keyed by (from, to) format. ``operators`` has a table for every operator of the problem: precision to
    cost.
    """

    name: Name
    count: Annotated[int, Json(minimum=1)]
    memory_limit_kib: int
    precisions: Mapping[str, PrecisionFormats]
    casts: Annotated[Mapping[tuple[str, str], CastCost], Json(read=_read_casts, write=_write_casts)]
    operators: Mapping[str, Mapping[str, OperatorCost]]

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        check_fields(self, what)
        if not self.precisions:
            raise ProblemError(f"{what}: precisions is empty, but a device needs at least one")
        for operator, table in self.operators.items():
            if not table:
                raise ProblemError(f"{what}: operator {operator!r} has an empty table; give at least one precision")
            for precision in table:
                if precision not in self.precisions:
                    raise ProblemError(
                        f"{what}: operator {operator!r} has a cost for {precision!r}, which the device lacks; "
                        f"allowed are {', '.join(self.precisions)}"
                    )
        freeze(self, "precisions", "casts")
        freeze(self, "operators", depth=2)

    def cast_ns(self, source: str, target: str, elements: int) -> int:
        """Nanoseconds to cast ``elements`` elements from format ``source`` to ``target``; 0 if they are the same.

        Raises:
            ProblemError: The device has no cost for the pair.
        """
        if source == target:
            return 0
        try:
            return self.casts[source, target].time_ns(elements)
        except KeyError:
            raise ProblemError(
                f"device {self.name!r}: casts lacks the needed {source}>{target}; add '{source}>{target}'"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """A recorded optimum, for tests and reports; never used in solving.

    ``devices`` maps device to operator to precision.
    """

    objective: float
    bound: float
    devices: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        check_fields(self, "optimum")
        freeze(self, "devices", depth=2)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Problem(Document, Displayed, Tabular):
    """A precision-allocation problem, checked.

    ``formats`` maps number formats, from the lowest rank to the highest, to bytes per element. ``operators`` are in
    forward execution order; backward runs in reverse. ``extras`` holds the file's ``x-*`` keys by path.

    Raises:
        ProblemError: Any rule of the problem format is broken; the text names the operator or device.

    Source: the problem file format of this package, "qsync-problem/1"; the problem is QSync's (IPDPS 2024).
    """

    FORMAT: ClassVar = PROBLEM_FORMAT
    KIND: ClassVar = "problem"
    DIGEST: ClassVar = False

    name: Name
    formats: Mapping[Name, Annotated[int, Json(minimum=1)]]
    operators: tuple[ProblemOperator, ...]
    communication: Communication
    optimizer_ns: int
    latency_limit_ns: int
    devices: tuple[ProblemDevice, ...]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    cast_sharing: Annotated[str, Json(omitted=True)] = "edge"
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)
    _ranks: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _devices: Mapping[str, ProblemDevice] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        if self.cast_sharing not in CAST_SHARINGS:
            raise ProblemError(
                f"cast_sharing is {self.cast_sharing!r}, but allowed are {' or '.join(map(repr, CAST_SHARINGS))}"
            )
        object.__setattr__(self, "operators", tuple(self.operators))
        object.__setattr__(self, "devices", tuple(self.devices))
        freeze(self, "formats", "extras")
        if not self.formats:
            raise ProblemError("formats is empty, but a problem needs at least one number format")
        for name in self.formats:
            if ">" in name:
                raise ProblemError(f"format name is {name!r}, but '>' separates the two formats of a cast")
        object.__setattr__(self, "_ranks", {name: rank for rank, name in enumerate(self.formats)})
        object.__setattr__(self, "_index", self._check_operators())
        object.__setattr__(self, "_devices", self._check_devices())

    def _check_operators(self) -> dict[str, int]:
        if not self.operators:
            raise ProblemError(f"problem {self.name!r} has no operators; an empty model has nothing to plan")
        index: dict[str, int] = {}
        names = {operator.name for operator in self.operators}
        buckets = len(self.communication.allreduce_ns)
        for position, operator in enumerate(self.operators):
            if operator.name in index:
                raise ProblemError(f"operator {operator.name!r} is named twice; names must be unique")
            for source in operator.inputs:
                if source not in index:
                    fault = (
                        "which comes later or is itself; operators must stand in forward execution order"
                        if source in names
                        else f"which is no operator{near_match(str(source), index)}; name one that stands before it"
                    )
                    raise ProblemError(f"operator {operator.name!r} reads {source!r}, {fault}")
            if operator.bucket is not None and operator.bucket >= buckets:
                raise ProblemError(
                    f"operator {operator.name!r}: bucket is {operator.bucket}, but communication has {buckets} "
                    "buckets; allowed are null and indices below that"
                )
            index[operator.name] = position
        return index

    def _check_devices(self) -> dict[str, ProblemDevice]:
        if not self.devices:
            raise ProblemError("devices is empty; give at least one device type that gets a plan")
        devices: dict[str, ProblemDevice] = {}
        for device in self.devices:
            if device.name in devices:
                raise ProblemError(f"device {device.name!r} is named twice; names must be unique")
            self._check_device(device)
            self._check_sums(device)
            devices[device.name] = device
            for source, target, producer, consumer in missing_casts(self, device):
                raise ProblemError(
                    f"device {device.name!r}: the cast {source}>{target} is needed between {producer!r} and "
                    f"{consumer!r}, but casts lacks it; add '{source}>{target}'"
                )
        return devices

    def _check_device(self, device: ProblemDevice) -> None:
        """Formats must be those of this problem; every operator needs a table, a fixed one exactly one precision."""
        what = f"device {device.name!r}"
        used = [(name, "precisions") for name in device.precisions]
        for precision, borders in device.precisions.items():
            used += [(getattr(borders, f.name), f"{f.name} of {precision}") for f in fields(borders)]
        used += [(name, f"cast {'>'.join(pair)}") for pair in device.casts for name in pair]
        for name, place in used:
            if name not in self.formats:
                raise ProblemError(
                    f"{what}: {place} names the format {name!r}, which formats lacks; allowed are "
                    f"{', '.join(self.formats)}"
                )
        for operator in self.operators:
            table = device.operators.get(operator.name)
            if table is None:
                raise ProblemError(
                    f"{what}: {operator.role} operator {operator.name!r} has no table; every operator needs its costs"
                )
            if operator.role is Role.FIXED and len(table) != 1:
                raise ProblemError(
                    f"{what}: fixed operator {operator.name!r} has costs for {', '.join(table)}, but a fixed operator "
                    "has exactly one precision; keep one, or make it adjustable"
                )
        for name in device.operators:
            if name not in self._index:
                raise ProblemError(f"{what}: there is a table for {name!r}, which is no operator of this problem")

    def _check_sums(self, device: ProblemDevice) -> None:
        """Some plan's sums on a device, or the products that they are made of, must not overflow."""
        elements = {operator.name: operator.output_elements for operator in self.operators}
        widest = max(self.formats.values())
        time_ns = sum(self.communication.allreduce_ns) + max(self.communication.peer_ready_ns, default=0)
        time_ns, memory_kib, sensitivity = time_ns + self.optimizer_ns, 0, 0.0
        for operator in self.operators:
            table = device.operators[operator.name].values()
            time_ns += max(cost.forward_ns for cost in table) + max(cost.backward_ns for cost in table)
            memory_kib += max(cost.memory_kib for cost in table)
            sensitivity += max(cost.sensitivity for cost in table)
            for source in operator.inputs:
                time_ns += 2 * max((cast.time_ns(elements[source]) for cast in device.casts.values()), default=0)
                memory_kib += elements[source] * widest // 2**10 + 1
        what = f"device {device.name!r}"
        for sums, total in (("times in ns", time_ns), ("memory in KiB with cast buffers", memory_kib)):
            if total > LARGEST_INTEGER:
                raise ProblemError(f"{what}: {sums} add up to {total:.1e}, but sums must be below 2**63; check units")
        if not math.isfinite(sensitivity * len(self.devices)):
            raise ProblemError(f"{what}: the sensitivities add up to infinity; scale all of them by one factor")
        # Solvers multiply before they divide, for all edges at once.
        most = LARGEST_INTEGER // max([widest, *(cast.ns_per_mi_elements for cast in device.casts.values())])
        for name, count in elements.items():
            if count > most:
                raise ProblemError(
                    f"operator {name!r}: output_elements is {count}, but on {what} bytes and cast times fit into 64 "
                    f"bits for at most {most}; check units"
                )

    def index(self, operator: str) -> int:
        """Position of an operator in forward order."""
        try:
            return self._index[operator]
        except KeyError:
            raise ProblemError(
                f"problem {self.name!r} has no operator {operator!r}{near_match(operator, self._index)}"
            ) from None

    def device(self, name: str) -> ProblemDevice:
        """The device type called ``name``."""
        try:
            return self._devices[name]
        except KeyError:
            raise ProblemError(
                f"problem {self.name!r} has no device type {name!r}{near_match(name, self._devices)}; it has "
                f"{', '.join(self._devices)}"
            ) from None

    def rank(self, format_name: str) -> int:
        """Rank of a number format: its position in ``formats``, 0 is the lowest."""
        return self._ranks[format_name]

    @property
    def adjustable(self) -> tuple[ProblemOperator, ...]:
        """The operators that a plan decides on, in forward order."""
        return tuple(operator for operator in self.operators if operator.role is Role.ADJUSTABLE)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read and check a problem file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format; one
            line that names the file, the place and what is allowed.

    Source: the problem file format of this package, "qsync-problem/1".
    """
    return load_file(path, {PROBLEM_FORMAT: Problem.from_json})
