"""What was measured of a plan, to stand beside what was predicted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import Fields, check_integer, read_json, split_extras
from qsync_opt.training.problem import Problem

MEASURED_FORMAT = "qsync-measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """One worker of a device type: its iteration time alone and its peak memory; None is what was not measured."""

    iteration_ns: int | None = None
    peak_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("iteration_ns", "peak_memory_bytes"):
            if getattr(self, name) is not None:
                check_integer(getattr(self, name), f"measured: {name}", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a plan. ``iteration_ns`` is that of the whole cluster; ``source`` says how it was measured."""

    source: str
    iteration_ns: int | None
    devices: Mapping[str, MeasuredDevice]

    def __post_init__(self) -> None:
        if self.iteration_ns is not None:
            check_integer(self.iteration_ns, "measured: iteration_ns", minimum=1)
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))

    def check(self, problem: Problem) -> None:
        """Refuse measurements of device types that the problem lacks."""
        for name in self.devices:
            problem.device(name)


def load_measured(path: str | os.PathLike[str]) -> Measured:
    """Read a file of measurements.

    It is a JSON object: ``"format": "qsync-measured/1"``, ``source`` (how and on what it was measured), optionally
    ``iteration_ns`` of the whole cluster, and optionally ``devices``, an object by device type with the optional
    ``iteration_ns`` (of one worker alone) and ``peak_memory_bytes``.

    Raises:
        ProblemError: The file cannot be read, has another format, or holds anything but positive integers.
    """
    data = read_json(path, (MEASURED_FORMAT,))
    try:
        fields = Fields(split_extras(data)[0], "measured")
        fields.version(MEASURED_FORMAT)
        devices = {}
        given = fields.take_or("devices", None) is not None
        for name, device in fields.children("devices") if given else ():
            devices[name] = MeasuredDevice(
                iteration_ns=device.take_or("iteration_ns", None),
                peak_memory_bytes=device.take_or("peak_memory_bytes", None),
            )
            device.finish()
        measured = Measured(
            source=fields.text("source"), iteration_ns=fields.take_or("iteration_ns", None), devices=devices
        )
        fields.finish()
    except ProblemError as failure:
        raise ProblemError(f"{os.fspath(path)}: {failure}") from failure
    return measured
