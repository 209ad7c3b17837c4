"""The serving problem: groups of layers, their costs on each device in each weight scheme, memory, and links.

Times are integer nanoseconds of one micro-batch and memory integer KiB (1024 bytes).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    LARGEST_INTEGER,
    Document,
    Extras,
    Fields,
    Json,
    Name,
    Optimum,
    check_fields,
    check_integer,
    freeze,
    load_file,
    near_match,
)

PROBLEM_FORMAT = "qsync-serving/1"


class Times(NamedTuple):
    """Nanoseconds of one micro-batch in each phase."""

    prefill: int
    decode: int


def _read_times(data: Any, place: str) -> tuple[Times, ...]:
    if not isinstance(data, list | tuple):
        raise ProblemError(
            f"{place} is {data!r}, but it must be a list of [prefill, decode] pairs, one per micro-batch"
        )
    result = []
    for k, pair in enumerate(data):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ProblemError(f"{place}[{k}] is {pair!r}, but it must be a pair [prefill, decode] of nanoseconds")
        result.append(Times(*(check_integer(value, f"{place}[{k}] in ns") for value in pair)))
    return tuple(result)


def _write_times(times: Iterable[Times]) -> list[list[int]]:
    return [list(pair) for pair in times]


def _read_costs(data: Any, place: str) -> dict[str, dict[str, dict[str, tuple[Times, ...]]]]:
    devices: dict[str, dict[str, dict[str, tuple[Times, ...]]]] = {}
    outer = Fields(data, place)
    for device in outer:
        kinds = Fields(outer.take(device), f"{place}: device {device!r}")
        devices[device] = {}
        for kind in kinds:
            schemes = Fields(kinds.take(kind), f"{kinds.where}, kind {kind!r}")
            devices[device][kind] = {
                scheme: _read_times(schemes.take(scheme), f"{schemes.where}, scheme {scheme!r}") for scheme in schemes
            }
    return devices


def _write_costs(costs: Mapping[str, Mapping[str, Mapping[str, tuple[Times, ...]]]]) -> dict[str, Any]:
    return {
        device: {
            kind: {scheme: _write_times(times) for scheme, times in table.items()} for kind, table in kinds.items()
        }
        for device, kinds in costs.items()
    }


def _read_links(data: Any, place: str) -> dict[tuple[str, str], tuple[Times, ...]]:
    fields, links = Fields(data, place), {}
    for key in fields:
        source, separator, target = key.partition(">")
        if not (separator and source and target):
            raise ProblemError(f"{place}: the key {key!r} must read FROM>TO, such as 'A>B'")
        links[source, target] = _read_times(fields.take(key), f"{place} {key!r}")
    return links


def _write_links(links: Mapping[tuple[str, str], tuple[Times, ...]]) -> dict[str, Any]:
    return {f"{source}>{target}": _write_times(times) for (source, target), times in links.items()}


_TimesField = Annotated[tuple[Times, ...], Json(read=_read_times, write=_write_times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One option: in how many micro-batches the prompts are prefilled, and in how many they are decoded."""

    prefill: Annotated[int, Json(minimum=1)]
    decode: Annotated[int, Json(minimum=1)]

    def __post_init__(self) -> None:
        check_fields(self, "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that may hold one stage, and the memory it has for that."""

    name: Name
    memory_kib: int

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What shares one scheme and one device, such as the attention of a layer; ``kind`` names its costs."""

    name: Name
    kind: Name

    def __post_init__(self) -> None:
        check_fields(self, f"group {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What the first stage (embedding) and the last stage (head) cost beside their groups, on one device."""

    first_kib: int
    last_kib: int
    first: _TimesField
    last: _TimesField

    def __post_init__(self) -> None:
        check_fields(self, "ends")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Document):
    """A serving problem, checked.

    Lists that are indexed by micro-batch option have one entry per option. ``costs`` is keyed by device, kind and
    scheme; ``links`` by (from, to) device; ``harm`` by group and scheme. ``harm_limit`` None means no limit.
    ``extras`` holds the file's ``x-*`` keys by path.

    Raises:
        ProblemError: Any rule of the format is broken; the text names the place.

    Source: the problem file format of this package, "qsync-serving/1"; the problem is LLM-PQ's (PPoPP 2024), with the
    decode time of a pipeline whose stages wait for each other.
    """

    FORMAT: ClassVar = PROBLEM_FORMAT
    KIND: ClassVar = "problem"
    DIGEST: ClassVar = False

    name: Name
    new_tokens: Annotated[int, Json(minimum=1)]
    schemes: tuple[Name, ...]
    harm_limit: float | None
    microbatches: tuple[Microbatch, ...]
    devices: tuple[Device, ...]
    groups: tuple[Group, ...]
    weights_kib: Mapping[Name, Mapping[Name, int]]
    state_kib: Mapping[Name, tuple[int, ...]]
    costs: Annotated[
        Mapping[str, Mapping[str, Mapping[str, tuple[Times, ...]]]], Json(read=_read_costs, write=_write_costs)
    ]
    ends: Mapping[Name, Ends]
    links: Annotated[Mapping[tuple[str, str], tuple[Times, ...]], Json(read=_read_links, write=_write_links)]
    harm: Mapping[Name, Mapping[Name, float]]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        for name in ("schemes", "microbatches", "devices", "groups"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            if not getattr(self, name):
                raise ProblemError(f"{name} is empty, but a serving problem needs at least one")
        _unique("scheme", self.schemes)
        _unique("device", [device.name for device in self.devices])
        _unique("group", [group.name for group in self.groups])
        for device in self.devices:
            if ">" in device.name:
                raise ProblemError(f"device name is {device.name!r}, but '>' separates the two devices of a link")
        freeze(self, "state_kib", "ends", "links", "extras")
        freeze(self, "weights_kib", "harm", depth=2)
        kinds = {
            device: {k: MappingProxyType(dict(t)) for k, t in table.items()} for device, table in self.costs.items()
        }
        object.__setattr__(self, "costs", MappingProxyType({d: MappingProxyType(t) for d, t in kinds.items()}))
        self._check_tables()
        self._check_sums()

    def _check_tables(self) -> None:
        devices = [device.name for device in self.devices]
        kinds = list(dict.fromkeys(group.kind for group in self.groups))
        schemes, options = self.schemes, len(self.microbatches)
        _same_names("weights_kib", "kind", self.weights_kib, kinds, extra=True)
        _same_names("state_kib", "kind", self.state_kib, kinds, extra=True)
        _same_names("costs", "device", self.costs, devices)
        _same_names("ends", "device", self.ends, devices)
        _same_names("harm", "group", self.harm, [group.name for group in self.groups])
        for kind, weights in self.weights_kib.items():
            _same_names(f"weights_kib {kind!r}", "scheme", weights, schemes)
        for group, harms in self.harm.items():
            _same_names(f"harm of group {group!r}", "scheme", harms, schemes)
        for kind, state in self.state_kib.items():
            _one_per_option(f"state_kib {kind!r}", state, options)
        for device in devices:
            _same_names(f"costs of device {device!r}", "kind", self.costs[device], kinds, extra=True)
            for kind, table in self.costs[device].items():
                _same_names(f"costs of device {device!r}, kind {kind!r}", "scheme", table, schemes)
                for scheme, times in table.items():
                    _one_per_option(f"costs of device {device!r}, kind {kind!r}, scheme {scheme!r}", times, options)
            _one_per_option(f"ends of device {device!r}: first", self.ends[device].first, options)
            _one_per_option(f"ends of device {device!r}: last", self.ends[device].last, options)
        pairs = [f"{a}>{b}" for a in devices for b in devices if a != b]
        _same_names("links", "link", [f"{a}>{b}" for a, b in self.links], pairs)
        for (a, b), times in self.links.items():
            _one_per_option(f"links '{a}>{b}'", times, options)

    def _check_sums(self) -> None:
        """No plan's sums may overflow 64 bits, so that every implementation computes the same integers."""
        time_ns = 0
        for phase in range(2):
            links = max((t[phase] for times in self.links.values() for t in times), default=0)
            ends = max(t[phase] for e in self.ends.values() for times in (e.first, e.last) for t in times)
            worst = {
                kind: max(t[phase] for table in self.costs.values() for times in table[kind].values() for t in times)
                for kind in {group.kind for group in self.groups}
            }
            once = sum(worst[group.kind] for group in self.groups) + 2 * ends + len(self.devices) * links
            parts = max(m.decode if phase else m.prefill for m in self.microbatches)
            time_ns += once * (parts * (self.new_tokens if phase else 1) + 1)
        memory_kib = sum(max(self.weights_kib[g.kind].values()) + max(self.state_kib[g.kind]) for g in self.groups)
        memory_kib += max(e.first_kib + e.last_kib for e in self.ends.values())
        for what, total in (("times in ns", time_ns), ("memory in KiB", memory_kib)):
            if total > LARGEST_INTEGER:
                raise ProblemError(f"{what} add up to {total:.1e}, but sums must be below 2**63; check units")
        if not math.isfinite(sum(max(harms.values()) for harms in self.harm.values())):
            raise ProblemError("the harms add up to infinity; scale all of them by one factor")

    def device(self, name: str) -> Device:
        """The device called ``name``.

        Raises:
            ProblemError: No such device.
        """
        for device in self.devices:
            if device.name == name:
                return device
        names = [device.name for device in self.devices]
        raise ProblemError(
            f"problem {self.name!r} has no device {name!r}{near_match(name, names)}; it has {', '.join(names)}"
        )


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read and check a serving problem file.

    Raises:
        ProblemError: The file is missing, truncated, of another format version, or breaks a rule of the format.

    Source: the problem file format of this package, "qsync-serving/1".
    """
    return load_file(path, {PROBLEM_FORMAT: Problem.from_json})


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProblemError(f"{what} {name!r} is named twice; names must be unique")
        seen.add(name)


def _same_names(where: str, what: str, actual: Iterable[str], expected: Iterable[str], *, extra: bool = False) -> None:
    """Refuse a table that lacks a name, or, unless ``extra`` ones are harmless, has one too many."""
    names, wanted = list(actual), list(expected)
    for name in wanted:
        if name not in names:
            raise ProblemError(f"{where} lacks the {what} {name!r}; add it")
    for name in () if extra else names:
        if name not in wanted:
            raise ProblemError(
                f"{where} names the {what} {name!r}{near_match(name, wanted)}; allowed are "
                f"{', '.join(wanted) or 'none'}"
            )


def _one_per_option(where: str, values: tuple[Any, ...], options: int) -> None:
    if len(values) != options:
        raise ProblemError(
            f"{where} has {len(values)} entries, but it must have one for each of {options} microbatches"
        )
