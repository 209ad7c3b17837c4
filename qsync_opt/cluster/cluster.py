"""Which devices train together, how many of each, how much memory they may use, and how fast the network is.

A cluster file is YAML::

    name: two-kinds
    devices:
      - {name: A100, count: 8, role: fixed, memory: 40 GiB, precisions: [FP32], profile: a100.json}
      - {name: T4, count: 8, role: planned, memory: 15 GiB, precisions: [INT8, FP16, FP32], profile: t4.json}
    network: {latency: 20 us, bandwidth: 10 Gbit/s, source: data sheet}

A type without ``profile`` is estimated from the data sheet of its ``hardware`` (or of the GPU that it is named after).
"""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    RATE_BYTES_PER_S,
    SIZE_BYTES,
    TIME_S,
    Fields,
    check_integer,
    check_name,
    check_number,
    near_match,
    parse_quantity,
    read_text,
)
from qsync_opt.numerics import FORMATS

LARGEST_BYTES = 2**20
"""Of a cluster file; reading YAML is slow."""
LARGEST_VALUES = 100_000
"""That a cluster file may stand for, aliases written out."""
LONGEST_NUMBER = 300
"""Characters of an integer."""


class DeviceRole(enum.StrEnum):
    """How the workers of a device type get their precisions."""

    PLANNED = "planned"
    """A plan picks them."""
    FIXED = "fixed"
    """All operators run in the one precision of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of worker. ``precisions`` are those that a plan may use, or the single one of a fixed type.

    ``profile`` is the path of its profile file, or None where the caller hands the profile over. ``hardware`` is the
    GPU model whose data sheet costs are estimated from where there is no profile; None: the type's own name.
    """

    name: str
    count: int
    memory_limit_bytes: int
    precisions: tuple[str, ...]
    role: DeviceRole = DeviceRole.PLANNED
    profile: Path | None = None
    hardware: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "cluster: device name")
        what = f"device type {self.name!r}"
        check_integer(self.count, f"{what}: count", minimum=1)
        check_integer(self.memory_limit_bytes, f"{what}: memory limit in bytes", minimum=1)
        try:
            object.__setattr__(self, "role", DeviceRole(self.role))
        except ValueError:
            raise ProblemError(f"{what}: role is {self.role!r}, but allowed are {', '.join(DeviceRole)}") from None
        if self.hardware is not None:
            check_name(self.hardware, f"{what}: hardware")
        object.__setattr__(self, "precisions", tuple(self.precisions))
        for precision in self.precisions:
            if precision not in FORMATS:
                raise ProblemError(
                    f"{what}: unknown precision {precision!r}{near_match(str(precision), FORMATS)}; allowed are "
                    f"{', '.join(FORMATS)}"
                )
        if len(set(self.precisions)) != len(self.precisions) or not self.precisions:
            raise ProblemError(f"{what}: precisions is {list(self.precisions)}; name at least one, each once")
        if self.role is DeviceRole.FIXED and len(self.precisions) != 1:
            raise ProblemError(
                f"{what}: its role is fixed, but precisions lists {', '.join(self.precisions)}; name exactly one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The slowest link that an all-reduce crosses: start-up time per message and bytes per second.

    ``source`` says where the figures are from (a measurement, a data sheet).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        check_number(self.latency_s, "network: latency in seconds")
        check_number(self.bandwidth_bytes_per_s, "network: bandwidth in bytes per second")
        if self.bandwidth_bytes_per_s == 0:
            raise ProblemError("network: bandwidth is 0 bytes per second, but it must be above zero")
        check_name(self.source, "network: source")

    def allreduce_ns(self, num_bytes: int, num_workers: int) -> int:
        """Time of one all-reduce over a ring, in nanoseconds; 0 for a single worker.

        Each worker sends ``2 (N - 1)`` messages of ``num_bytes / N``: a reduce-scatter and an all-gather.

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009),
        with the alpha-beta (start-up time, time per byte) cost of a message.
        """
        check_integer(num_bytes, "all-reduce: bytes")
        check_integer(num_workers, "all-reduce: workers", minimum=1)
        messages = 2 * (num_workers - 1)
        seconds = messages * (self.latency_s + num_bytes / num_workers / self.bandwidth_bytes_per_s)
        return round(seconds * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Device types and the network between them; at least one type is planned."""

    name: str
    devices: tuple[DeviceType, ...]
    network: Network

    def __post_init__(self) -> None:
        check_name(self.name, "cluster name")
        object.__setattr__(self, "devices", tuple(self.devices))
        names = [device.name for device in self.devices]
        for name in names:
            if names.count(name) > 1:
                raise ProblemError(f"cluster {self.name!r}: device type {name!r} is named twice; names must be unique")
        if not self.planned:
            raise ProblemError(
                f"cluster {self.name!r} has no device type whose role is planned, so there is nothing to plan; "
                "give at least one"
            )

    @property
    def num_workers(self) -> int:
        """Workers of all types together."""
        return sum(device.count for device in self.devices)

    @property
    def planned(self) -> tuple[DeviceType, ...]:
        """The types that a plan is made for."""
        return tuple(device for device in self.devices if device.role is DeviceRole.PLANNED)

    @property
    def fixed(self) -> tuple[DeviceType, ...]:
        """The types whose precision is given."""
        return tuple(device for device in self.devices if device.role is DeviceRole.FIXED)

    def device(self, name: str) -> DeviceType:
        """The device type called ``name``.

        Raises:
            ProblemError: There is none; the text lists those that exist.
        """
        for device in self.devices:
            if device.name == name:
                return device
        names = [device.name for device in self.devices]
        raise ProblemError(
            f"cluster {self.name!r} has no device type {name!r}{near_match(name, names)}; it has {', '.join(names)}"
        )

    @classmethod
    def from_mapping(cls, data: Any, where: str = "cluster", folder: Path | None = None) -> Self:
        """Build a cluster from parsed YAML.

        Args:
            data: The top-level mapping.
            where: Names the file in errors.
            folder: Relative profile paths start here (None: the working directory).

        Raises:
            ProblemError: Missing, unknown or unusable entry.
        """
        reader = Fields(data, where)
        network = Fields(reader.take("network"), f"{where}: network")
        cluster = cls(
            name=reader.text("name"),
            devices=tuple(
                _read_device(item, f"{where}: devices[{position}]", folder)
                for position, item in enumerate(reader.sequence("devices"))
            ),
            network=_read_network(network),
        )
        reader.finish()
        return cluster


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster file; profile paths in it are relative to the file.

    Raises:
        ProblemError: Unreadable file, not YAML, a key that stands twice, unknown key or unit, no memory limit, unknown
            precision, a device type named twice.
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
    except ValueError as failure:  # what looks like a date or a number, and is none
        raise ProblemError(f"{where}: not usable YAML ({failure}); put the value in quotes") from failure
    if not isinstance(data, dict):
        held = "nothing" if data is None else repr(data)[:40]
        raise ProblemError(f"{where}: the file holds {held}, but a mapping is needed; give name, devices and network")
    return Cluster.from_mapping(data, where, Path(path).parent)


def _read_device(item: Any, where: str, folder: Path | None) -> DeviceType:
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
        precisions=reader.texts("precisions"),
        profile=None if profile is None else (folder or Path()) / profile,
        hardware=reader.take_or("hardware", None),
    )
    reader.finish()
    return device


def _read_network(reader: Fields) -> Network:
    network = Network(
        latency_s=parse_quantity(reader.take("latency"), TIME_S, f"{reader.where}: latency"),
        bandwidth_bytes_per_s=parse_quantity(reader.take("bandwidth"), RATE_BYTES_PER_S, f"{reader.where}: bandwidth"),
        source=reader.text("source"),
    )
    reader.finish()
    return network


def _refuse_repeated_keys(node: yaml.Node | None, where: str, seen_values: Iterator[int]) -> None:
    """YAML lets a later key hide an earlier one; a file that says two things is refused instead."""
    # An alias stands for all that it names, so a few lines can stand for more than any memory holds.
    if next(seen_values) >= LARGEST_VALUES:
        raise ProblemError(
            f"{where}: with its aliases the file stands for more than {LARGEST_VALUES} values; shorten it"
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
            if not isinstance(key, yaml.ScalarNode):
                raise ProblemError(
                    f"{where}: a key is no plain text (line {key.start_mark.line + 1}); keys must be names"
                )
            _refuse_repeated_keys(key, where, seen_values)
            if key.value in seen:
                raise ProblemError(
                    f"{where}: the key {key.value!r} stands twice in one mapping (line {key.start_mark.line + 1}); "
                    "keep one"
                )
            seen.add(key.value)
            _refuse_repeated_keys(value, where, seen_values)
