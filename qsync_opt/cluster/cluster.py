"""Device types of a cluster, how many workers each has, their memory limits, and the links between them.

A cluster file is YAML::

    name: two-kinds
    devices:
      - {name: A100, count: 8, role: fixed, memory: 40 GiB, precisions: [FP32], profile: a100.json}
      - {name: T4, count: 8, role: planned, memory: 15 GiB, precisions: [INT8, FP16, FP32], profile: t4.json}
    network: {latency: 20 us, bandwidth: 10 Gbit/s, source: data sheet}
    links:
      - {from: A100, to: A100, latency: 5 us, bandwidth: 300 GB/s, source: measured}

A type without ``profile`` is estimated from the data sheet of its ``hardware`` (or of the GPU that it is named after).
``links`` may be left out. A link holds for both directions unless the other direction has an entry of its own; pairs
of types without a link have the figures of ``network``. An all-reduce over them is a ring in the alpha-beta (latency,
bandwidth) model.
"""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    RATE_BYTES_PER_S,
    SIZE_BYTES,
    TIME_S,
    Fields,
    Json,
    Name,
    check_fields,
    check_integer,
    freeze,
    near_match,
    parse_quantity,
    read_text,
)
from qsync_opt.numerics import check_precisions

LARGEST_BYTES = 2**20
"""Largest cluster file that is read: YAML is slow to parse."""
LARGEST_VALUES = 100_000
"""Most values of a cluster file, aliases written out."""
LONGEST_NUMBER = 300
"""Most characters of an integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two workers: start-up time per message in seconds and bandwidth in bytes per second.

    ``source`` says where the figures are from (a measurement, a data sheet).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: Name

    def __post_init__(self) -> None:
        what = type(self).__name__.lower()
        check_fields(self, what)
        if self.bandwidth_bytes_per_s == 0:
            raise ProblemError(f"{what}: bandwidth is 0 bytes per second, but it must be above zero")

    def message_s(self, num_bytes: float) -> float:
        """Time of one message in seconds: latency plus bytes over bandwidth."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Link):
    """The link between any two workers that have none of their own: the slowest that an all-reduce crosses."""

    def allreduce_ns(self, num_bytes: int, num_workers: int) -> int:
        """Time of one all-reduce over a ring of this link alone, in nanoseconds; 0 for a single worker."""
        return ring_allreduce_ns([self], num_bytes, num_workers)


def ring_allreduce_ns(links: Iterable[Link], num_bytes: int, num_workers: int) -> int:
    """Time of one all-reduce over a ring, in nanoseconds; 0 for a single worker.

    Each worker sends ``2 (N - 1)`` messages of ``num_bytes / N``, a reduce-scatter and an all-gather. All workers send
    at the same time, so that every message takes as long as the slowest one. ``links`` are those between neighbors of
    the ring, at least one if there are several workers.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    check_integer(num_bytes, "all-reduce: bytes")
    check_integer(num_workers, "all-reduce: workers", minimum=1)
    messages = 2 * (num_workers - 1)
    return round(messages * max((link.message_s(num_bytes / num_workers) for link in links), default=0.0) * 1e9)


class DeviceRole(enum.StrEnum):
    """How the precisions of a device type are decided."""

    PLANNED = "planned"
    """By the plan."""
    FIXED = "fixed"
    """All operators run in the only precision of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of worker.

    Attributes:
        name: Unique in the cluster.
        count: Number of workers.
        memory_limit_bytes: Per worker.
        precisions: Those that a plan may use, or the only one of a fixed type.
        role: Whether it is planned.
        profile: Path of its profile file; None: the caller gives the profile, or costs are estimated.
        hardware: GPU model whose data sheet costs are estimated from; None: the type's name.
    """

    name: Name
    count: Annotated[int, Json(minimum=1)]
    memory_limit_bytes: Annotated[int, Json(minimum=1)]
    precisions: tuple[str, ...]
    role: DeviceRole = DeviceRole.PLANNED
    profile: Path | None = None
    hardware: Name | None = None

    def __post_init__(self) -> None:
        what = f"device type {self.name!r}"
        check_fields(self, what)
        check_precisions(self.precisions, what)
        if len(set(self.precisions)) != len(self.precisions) or not self.precisions:
            raise ProblemError(f"{what}: precisions is {list(self.precisions)}; name at least one, each once")
        if self.role is DeviceRole.FIXED and len(self.precisions) != 1:
            raise ProblemError(
                f"{what}: its role is fixed, but precisions lists {', '.join(self.precisions)}; name exactly one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Device types and the links between them; at least one type is planned.

    ``links`` maps pairs of device types (sender, receiver) to their link; see `link`.
    """

    name: Name
    devices: tuple[DeviceType, ...]
    network: Network
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self, "cluster")
        object.__setattr__(self, "devices", tuple(self.devices))
        names = [device.name for device in self.devices]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ProblemError(f"cluster {self.name!r}: device type {twice!r} is named twice; names must be unique")
        if not self.planned:
            raise ProblemError(
                f"cluster {self.name!r} has no device type whose role is planned, so there is nothing to plan; "
                "give at least one"
            )
        freeze(self, "links")
        for name in itertools.chain(*self.links):
            if name not in names:
                raise ProblemError(
                    f"cluster {self.name!r}: a link is for device type {name!r}{near_match(str(name), names)}; "
                    f"the cluster has {', '.join(names)}"
                )

    @property
    def num_workers(self) -> int:
        """Number of workers of all types."""
        return sum(device.count for device in self.devices)

    @property
    def planned(self) -> tuple[DeviceType, ...]:
        """Device types that are planned."""
        return tuple(device for device in self.devices if device.role is DeviceRole.PLANNED)

    @property
    def fixed(self) -> tuple[DeviceType, ...]:
        """Device types of fixed precision."""
        return tuple(device for device in self.devices if device.role is DeviceRole.FIXED)

    def device(self, name: str) -> DeviceType:
        """The device type called ``name``.

        Raises:
            ProblemError: There is none; the text lists those that exist.
        """
        names = [device.name for device in self.devices]
        if name in names:
            return self.devices[names.index(name)]
        raise ProblemError(
            f"cluster {self.name!r} has no device type {name!r}{near_match(name, names)}; it has {', '.join(names)}"
        )

    def link(self, sender: str, receiver: str) -> Link:
        """The link from workers of one device type to workers of another, or of the same.

        It is the entry for this direction, else that for the other direction, else the network's figures.

        Raises:
            ProblemError: Unknown device type.
        """
        pair = self.device(sender).name, self.device(receiver).name
        return self.links.get(pair) or self.links.get(pair[::-1]) or self.network

    def allreduce_ns(self, num_bytes: int) -> int:
        """Time of one all-reduce over a ring of all workers, in nanoseconds; 0 for a single worker.

        The ring passes the device types in the order of ``devices``, all workers of a type one after the other.

        Source: the ring of `ring_allreduce_ns`; the order of types is ours.
        """
        names = [device.name for device in self.devices]
        neighbors = [(device.name, device.name) for device in self.devices if device.count > 1]
        if len(names) > 1:
            neighbors += zip(names, names[1:] + names[:1], strict=True)
        return ring_allreduce_ns(itertools.starmap(self.link, neighbors), num_bytes, self.num_workers)


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file; profile paths in it are relative to the file.

    Raises:
        ProblemError: Unreadable file, not YAML, repeated or unknown key, unknown unit, no memory limit, unknown
            precision, repeated device type or link.
    """
    where = os.fspath(path)
    text = read_text(path, "cluster (YAML)", LARGEST_BYTES)
    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), where, itertools.count())
        data = yaml.safe_load(text)
    except yaml.YAMLError as failure:
        reason = " ".join(str(failure).split())
        raise ProblemError(f"{where}: not valid YAML ({reason}); correct the file") from failure
    except RecursionError as failure:
        raise ProblemError(f"{where}: not usable YAML, it is nested too deeply or holds itself") from failure
    except ValueError as failure:  # a text that looks like a date or a number
        raise ProblemError(f"{where}: not usable YAML ({failure}); put the value in quotes") from failure
    if not isinstance(data, dict):
        content = "nothing" if data is None else repr(data)[:40]
        needed = "a mapping is needed; give name, devices and network"
        raise ProblemError(f"{where}: the file holds {content}, but {needed}")
    reader = Fields(data, where)
    network = Network(**_read_link(Fields(reader.take("network"), f"{where}: network")))
    cluster = Cluster(
        name=reader.text("name"),
        devices=tuple(
            _read_device(item, f"{where}: devices[{position}]", Path(path).parent)
            for position, item in enumerate(reader.sequence("devices"))
        ),
        network=network,
        links=_read_links(reader) if "links" in reader else {},
    )
    reader.finish()
    return cluster


def _read_device(item: Any, where: str, folder: Path) -> DeviceType:
    reader = Fields(item, where)
    name = reader.text("name")
    where = reader.where = f"{where} {name!r}"
    if "memory" not in reader:
        reader.fail("there is no memory limit; add one, such as memory: 16 GiB")
    profile = reader.take_or("profile", None)
    if profile is not None and not isinstance(profile, str):
        reader.fail(f"profile is {profile!r}, but it must be the path of a profile file")
    device = DeviceType(
        name=name,
        count=reader.integer("count", minimum=1),
        role=reader.take_or("role", DeviceRole.PLANNED),
        memory_limit_bytes=int(parse_quantity(reader.take("memory"), SIZE_BYTES, f"{where}: memory")),
        precisions=tuple(reader.sequence("precisions")),
        profile=None if profile is None else folder / profile,
        hardware=reader.take_or("hardware", None),
    )
    reader.finish()
    return device


def _read_links(cluster: Fields) -> dict[tuple[str, str], Link]:
    links: dict[tuple[str, str], Link] = {}
    for position, item in enumerate(cluster.sequence("links")):
        reader = Fields(item, f"{cluster.where}: links[{position}]")
        pair = reader.text("from"), reader.text("to")
        if pair in links:
            reader.fail(f"there is a link from {pair[0]!r} to {pair[1]!r} already; keep one")
        links[pair] = Link(**_read_link(reader))
    return links


def _read_link(reader: Fields) -> dict[str, Any]:
    units = {"latency": TIME_S, "bandwidth": RATE_BYTES_PER_S}
    values = [parse_quantity(reader.take(key), units[key], f"{reader.where}: {key}") for key in units]
    source = reader.text("source")
    reader.finish()
    return {"latency_s": values[0], "bandwidth_bytes_per_s": values[1], "source": source}


def _refuse_repeated_keys(node: yaml.Node | None, where: str, seen_values: Iterator[int]) -> None:
    """Refuse repeated keys, of which YAML would take the last, and files that expand to too many values."""
    # Aliases of aliases: a few lines may expand to more than fits into memory.
    if next(seen_values) >= LARGEST_VALUES:
        raise ProblemError(
            f"{where}: with its aliases written out the file has more than {LARGEST_VALUES} values; shorten it"
        )
    if isinstance(node, yaml.ScalarNode) and len(node.value) > LONGEST_NUMBER and "int" in node.tag:
        raise ProblemError(
            f"{where}: a number of {len(node.value)} characters (line {node.start_mark.line + 1}); allowed are "
            f"{LONGEST_NUMBER}"
        )
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_repeated_keys(child, where, seen_values)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ProblemError(f"{where}: a key is no plain text (line {line}); keys must be names")
            if key.value in seen:
                raise ProblemError(f"{where}: the key {key.value!r} is repeated in one mapping (line {line}); keep one")
            seen.add(key.value)
            for child in (key, value):
                _refuse_repeated_keys(child, where, seen_values)
