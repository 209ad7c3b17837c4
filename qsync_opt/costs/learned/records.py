"""Records of measured times: devices, workloads and samples in one compressed JSON file (``qsync-cost-record/1``)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import statistics
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from qsync_opt.costs.learned.devices import DeviceVector, check_same_devices, merged_vector, reference_ns
from qsync_opt.costs.learned.programs import Phase, Program, Workload, cast_program, programs_of, sum_program
from qsync_opt.errors import ProblemError, reason_of
from qsync_opt.io import Json, Name, check_fields, decode, encode, parse_json, read_bounded, write_bytes
from qsync_opt.numerics import PrecisionFormats, formats_for

RECORD_FORMAT = "qsync-cost-record/1"
LARGEST_FILE_BYTES = 64 * 2**20
LARGEST_TEXT_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured time.

    Attributes:
        device: Position in the record's devices.
        workload: Position in the record's workloads.
        precision: In which it ran; of a cast its target.
        phase: Pass of the operator, ``cast`` or ``sum``.
        ns: Median time.
        spread: Relative distance of the two lowest medians; above 0.1 the sample was measured again without success.
        model: Where the workload occurs: a captured model, or ``sweep``.
        kernel: Which kernel of ours ran, where there are several.
        source: Of a cast, the format that it reads.
    """

    device: int
    workload: int
    precision: Name
    phase: Phase
    ns: float
    spread: float = 0.0
    model: Name = "sweep"
    kernel: Annotated[str, Json(empty=True, omitted=True)] = ""
    source: Annotated[str, Json(empty=True, omitted=True)] = ""

    def __post_init__(self) -> None:
        check_fields(self, "sample")
        if not self.ns > 0:
            raise ProblemError(f"sample: ns is {self.ns!r}, but a measured time is above zero; measure again")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRecord:
    """Measured times of workloads on devices; ``note`` says how they were measured."""

    devices: tuple[DeviceVector, ...]
    half_formats: tuple[Name, ...]
    workloads: tuple[Workload, ...]
    samples: tuple[Sample, ...]
    note: Annotated[str, Json(empty=True)] = ""

    def __post_init__(self) -> None:
        check_fields(self, "cost record")
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ProblemError(f"cost record: devices are {', '.join(names)}, but names must be unique")
        if len(self.half_formats) != len(names):
            raise ProblemError(f"cost record: {len(self.half_formats)} half formats for {len(names)} devices")
        for sample in self.samples:
            if sample.device >= len(self.devices) or sample.workload >= len(self.workloads):
                raise ProblemError(
                    f"cost record: a sample is of device {sample.device} and workload {sample.workload}, but there "
                    f"are {len(self.devices)} and {len(self.workloads)}; the file is damaged, collect again"
                )

    def __len__(self) -> int:
        return len(self.samples)

    def program(self, sample: Sample) -> Program:
        """What a sample measures."""
        work = self.workloads[sample.workload]
        if sample.phase is Phase.CAST:
            return cast_program(sample.source, sample.precision, work.outputs[0].elements)
        if sample.phase is Phase.SUM:
            return sum_program(sample.precision, work.outputs[0].elements)
        formats = self.formats(sample.device)
        if sample.precision not in formats:
            raise ProblemError(
                f"cost record: a sample of {work.kind!r} is in {sample.precision!r}, but device "
                f"{self.devices[sample.device].name!r} has {', '.join(formats)}; collect again"
            )
        forward, backward = programs_of(work, sample.precision, formats[sample.precision])
        return forward if sample.phase is Phase.FORWARD else backward

    def formats(self, device: int) -> dict[str, PrecisionFormats]:
        """The precisions of a device with their border formats."""
        return formats_for(self.devices[device].peak_flops, self.half_formats[device])

    def programs(self) -> Iterator[tuple[Program, DeviceVector, Sample]]:
        """Every sample with its program and device."""
        return ((self.program(sample), self.devices[sample.device], sample) for sample in self.samples)

    def select(self, indices: Iterable[int]) -> CostRecord:
        """The record with some of its samples only."""
        return replace(self, samples=tuple(self.samples[i] for i in indices))

    def digest(self) -> str:
        """Digest of all that the record holds."""
        text = json.dumps(encode(self), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record as compressed JSON, whole or not at all."""
        text = json.dumps(encode(self, version=RECORD_FORMAT), separators=(",", ":"), allow_nan=False)
        write_bytes(path, gzip.compress(text.encode(), 9, mtime=0))

    @classmethod
    def from_json(cls, data: Any, where: str = "cost record") -> CostRecord:
        """Read a record from its JSON data; ``where`` names it in errors.

        Raises:
            ProblemError: Unknown, missing or unusable entry.
        """
        return decode(cls, data, where, version=RECORD_FORMAT)


def load_record(path: str | os.PathLike[str]) -> CostRecord:
    """Read a record of measurements.

    Raises:
        ProblemError: Missing, truncated or too large file, another format version, unknown key, value out of range.
    """
    where = os.fspath(path)
    again = "collect again with 'qsync-opt costs collect'"
    try:
        data = read_bounded(path, LARGEST_FILE_BYTES)
        if data is None:
            raise ProblemError(f"{where}: the file has more than {LARGEST_FILE_BYTES} bytes; {again}")
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            content = stream.read(LARGEST_TEXT_BYTES + 1)
        if len(content) > LARGEST_TEXT_BYTES:
            raise ProblemError(f"{where}: the file unpacks to more than {LARGEST_TEXT_BYTES} bytes; {again}")
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError) as failure:
        reason = reason_of(failure) if isinstance(failure, OSError) else str(failure)
        raise ProblemError(f"cannot read {where!r}: {reason}; give a record of costs (compressed JSON)") from failure
    return CostRecord.from_json(parse_json(text, [RECORD_FORMAT], where=where, again=again), where)


def merge_records(records: Sequence[CostRecord]) -> CostRecord:
    """One record of several; devices of equal names must be the same device.

    Raises:
        ProblemError: No record, or a device that changed between two of them.
    """
    if not records:
        raise ProblemError("no record of costs; give at least one")
    check_same_devices(device for record in records for device in record.devices)
    devices: dict[str, tuple[int, DeviceVector, str]] = {}
    workloads: dict[Workload, int] = {}
    samples: list[Sample] = []
    for record in records:
        for device, half in zip(record.devices, record.half_formats, strict=True):
            place, known, _ = devices.get(device.name, (len(devices), device, half))
            devices[device.name] = (place, merged_vector(known, device), half)
        for sample in record.samples:
            work = record.workloads[sample.workload]
            place = workloads.setdefault(work, len(workloads))
            number = devices[record.devices[sample.device].name][0]
            samples.append(replace(sample, device=number, workload=place))
    return CostRecord(
        devices=tuple(device for _, device, _ in devices.values()),
        half_formats=tuple(half for _, _, half in devices.values()),
        workloads=tuple(workloads),
        samples=tuple(samples),
        note="; ".join(dict.fromkeys(record.note for record in records if record.note)),
    )


def check_times(record: CostRecord) -> None:
    """Refuse times that no model can be fitted to.

    Raises:
        ProblemError: Fewer than 40 samples, or all times are equal.
    """
    if len(record) < MIN_SAMPLES:
        raise ProblemError(f"the record has {len(record)} samples, but at least {MIN_SAMPLES} are needed; collect more")
    times = {sample.ns for sample in record.samples}
    if len(times) == 1 or max(times) - min(times) < 1e-9 * max(times):
        raise ProblemError(
            f"all {len(record)} times of the record are {math.floor(next(iter(times)))} ns: the clock is too coarse or "
            "the record was filled in; collect again"
        )


MIN_SAMPLES = 40
OUTLIER = 3.5
"""Scaled absolute deviations from the median of its group from which on a time is an outlier."""


def outliers(record: CostRecord) -> tuple[int, ...]:
    """Samples whose time stands out among those of the same kind, precision and pass, the worst first.

    Compared are logarithms of the time over roofline and launches. Groups of fewer than five samples have no outliers.

    Source: the scaled median absolute deviation of Iglewicz and Hoaglin (1993), with their bound.
    """
    groups: dict[tuple[int, str, str, str], list[tuple[int, float]]] = {}
    for i, (program, device, sample) in enumerate(record.programs()):
        ratio = math.log(sample.ns / reference_ns(program, device))
        key = (sample.device, program.family, program.precision, program.phase)
        groups.setdefault(key, []).append((i, ratio))
    scored: list[tuple[float, int]] = []
    for members in groups.values():
        if len(members) < 5:
            continue
        center = statistics.median(ratio for _, ratio in members)
        deviation = max(0.02, statistics.median(abs(ratio - center) for _, ratio in members))
        scored += [(0.6745 * abs(ratio - center) / deviation, i) for i, ratio in members]
    return tuple(i for score, i in sorted(scored, reverse=True) if score > OUTLIER)
