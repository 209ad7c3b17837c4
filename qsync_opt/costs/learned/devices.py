"""Devices as vectors of rates and sizes, and the time below which no program can run on one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from qsync_opt.cluster import DataSheet
from qsync_opt.costs.learned.programs import Program
from qsync_opt.errors import ProblemError
from qsync_opt.io import Name, check_fields, freeze
from qsync_opt.numerics import check_precisions

_KINDS = ("cpu", "cuda")
CHANGED = 0.35
"""Relative distance of two vectors of one name from which on they are of two devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceVector:
    """What the time of a program depends on, of a device (or a labelled part of one).

    Attributes:
        name: Of the device; a record has each once.
        kind: ``cpu`` or ``cuda``.
        peak_flops: Operations per second by precision, the higher of data sheet and probe; FP32 among them.
        bandwidth_bytes_per_s: Of the memory, likewise.
        cache_bytes: Of the last-level cache.
        cache_bytes_per_s: Rate of copies within it.
        multiprocessors: Of a card; cores in use of a cpu.
        launch_ns: Time of a kernel (on a cpu, of a call) beside its work.
        source: Where the figures are from, in words.
    """

    name: Name
    kind: str
    peak_flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    cache_bytes: float
    cache_bytes_per_s: float
    multiprocessors: int
    launch_ns: float
    source: Name

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        check_fields(self, what)
        if self.kind not in _KINDS:
            raise ProblemError(f"{what}: kind is {self.kind!r}, but allowed are {', '.join(_KINDS)}")
        check_precisions(self.peak_flops, what)
        if "FP32" not in self.peak_flops:
            raise ProblemError(f"{what}: peak_flops lacks FP32, but has {', '.join(self.peak_flops)}; add it")
        figures = {name: getattr(self, name) for name in _RATES}
        figures |= {f"peak_flops in {precision}": peak for precision, peak in self.peak_flops.items()}
        for name, value in figures.items():
            if not math.isfinite(value) or value <= 0:
                raise ProblemError(f"{what}: {name} is {value!r}, but it must be finite and above zero; probe it again")
        freeze(self, "peak_flops")

    def peak(self, precision: str) -> float:
        """Operations per second in a precision.

        Raises:
            ProblemError: The vector has none for it.
        """
        if precision not in self.peak_flops:
            raise ProblemError(f"device {self.name!r} has no peak for {precision}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[precision]

    def moved_ns(self, num_bytes: float) -> float:
        """Least time to move so many bytes: the first ``cache_bytes`` at the cache's rate, if that is the higher."""
        rate = max(self.cache_bytes_per_s, self.bandwidth_bytes_per_s)
        cached = min(num_bytes, self.cache_bytes)
        return 1e9 * (cached / rate + (num_bytes - cached) / self.bandwidth_bytes_per_s)

    def computed_ns(self, program: Program) -> float:
        """Least time for the operations of a program that no algorithm saves."""
        return math.fsum(
            1e9 * (leaf.flops - leaf.spare_flops) / self.peak(leaf.number_format)
            for leaf in program.leaves
            if leaf.flops
        )

    def floor_ns(self, program: Program) -> float:
        """The roofline of a program in nanoseconds, at the full rates: no prediction is below it.

        Source: Williams, Waterman and Patterson, "Roofline" (CACM 2009), with a cache.
        """
        return max(self.computed_ns(program), self.moved_ns(program.least_bytes))

    def distance(self, other: DeviceVector) -> float:
        """Largest relative difference between the figures of two vectors, but for the rate within the cache.

        That is the highest rate of all measurements, and so an extreme of noise.
        """
        pairs = [(getattr(self, name), getattr(other, name)) for name in _RATES if name != "cache_bytes_per_s"]
        pairs += [(self.peak_flops.get(p, 0.0), peak) for p, peak in other.peak_flops.items()]
        return max(float(abs(a - b) / max(a, b)) for a, b in pairs)

    def unlike(self, other: DeviceVector) -> tuple[str, float]:
        """The figure in which two vectors differ most, by which share, whatever units their times are in."""
        rates: dict[str, tuple[float, float]] = {
            "cache": (self.cache_bytes, other.cache_bytes),
            "number of multiprocessors": (self.multiprocessors, other.multiprocessors),
            "bandwidth": tuple(v.bandwidth_bytes_per_s * v.launch_ns for v in (self, other)),  # type: ignore[dict-item]
        }
        for precision in {*self.peak_flops, *other.peak_flops}:
            a, b = (v.peak_flops.get(precision, 0.0) * v.launch_ns for v in (self, other))
            rates[f"peak in {precision}"] = (a, b)
        name = max(sorted(rates), key=lambda name: abs(rates[name][0] - rates[name][1]) / max(rates[name]))
        return name, abs(rates[name][0] - rates[name][1]) / max(rates[name])


_RATES = ("bandwidth_bytes_per_s", "cache_bytes", "cache_bytes_per_s", "multiprocessors", "launch_ns")
_CARDS: Mapping[str, tuple[float, int]] = MappingProxyType(
    {
        "V100": (6e6, 80),
        "T4": (4e6, 40),
        "A10": (6e6, 72),
        "L4": (48e6, 58),
        "A100": (40e6, 108),
        "H100": (50e6, 132),
        "H200": (50e6, 132),
    }
)
"""Bytes of the second-level cache and number of multiprocessors, from the makers' data sheets."""
_CARD_CACHE_RATIO = 2.0
_CARD_LAUNCH_NS = 2000.0


def sheet_vector(sheet: DataSheet) -> DeviceVector:
    """The vector of a GPU from its data sheet; cache rate (twice the memory's) and launch time (2 us) are assumed.

    Raises:
        ProblemError: Cache and multiprocessors of this card are not known.
    """
    if sheet.name not in _CARDS:
        raise ProblemError(f"cache and multiprocessors of {sheet.name!r} are not known; known are {', '.join(_CARDS)}")
    cache_bytes, multiprocessors = _CARDS[sheet.name]
    return DeviceVector(
        name=sheet.name,
        kind="cuda",
        peak_flops=sheet.peak_flops,
        bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s,
        cache_bytes=cache_bytes,
        cache_bytes_per_s=_CARD_CACHE_RATIO * sheet.bandwidth_bytes_per_s,
        multiprocessors=multiprocessors,
        launch_ns=_CARD_LAUNCH_NS,
        source=f"{sheet.source}; cache rate and launch time assumed",
    )


def check_same_devices(vectors: Iterable[DeviceVector]) -> None:
    """Refuse vectors of one name that differ: the card, its clock or its partition changed between measurements.

    Raises:
        ProblemError: Two vectors of one name differ by more than `CHANGED` in some figure.
    """
    known: dict[str, DeviceVector] = {}
    for vector in vectors:
        first = known.setdefault(vector.name, vector)
        if (distance := first.distance(vector)) > CHANGED:
            raise ProblemError(
                f"device {vector.name!r} occurs with figures that differ by {100 * distance:.0f} %: the device was "
                "changed or throttled between the records; collect again, or give the devices different names"
            )


def with_observed_rates(vector: DeviceVector, times: Iterable[tuple[Program, float]]) -> DeviceVector:
    """The vector with rates raised until no program took less time than its roofline.

    All rates that a program uses are raised by the same factor: how much of what it moved came from the cache, say, is
    not known.

    Args:
        vector: With probed rates.
        times: Programs with their nanoseconds on the device.

    Source: ours.
    """
    # Largest first: what goes beyond the cache raises both rates, and what stays in it that of the cache alone.
    for program, ns in sorted(times, key=lambda pair: -pair[0].least_bytes):
        factor = vector.computed_ns(program) / ns
        if factor > 1:
            raised = {
                leaf.number_format: factor * vector.peak(leaf.number_format) for leaf in program.leaves if leaf.flops
            }
            vector = replace(vector, peak_flops={**vector.peak_flops, **raised})
        moved = program.least_bytes
        factor = vector.moved_ns(moved) / ns
        if factor > 1:
            memory = vector.bandwidth_bytes_per_s * (factor if moved > vector.cache_bytes else 1.0)
            cache = factor * max(vector.cache_bytes_per_s, vector.bandwidth_bytes_per_s)
            vector = replace(vector, bandwidth_bytes_per_s=memory, cache_bytes_per_s=cache)
    return vector


def merged_vector(first: DeviceVector, second: DeviceVector) -> DeviceVector:
    """The vector of a device that was probed twice: the higher of each rate, and the shorter launch."""
    peaks = {p: max(first.peak_flops.get(p, 0.0), second.peak_flops.get(p, 0.0)) for p in first.peak_flops}
    return replace(
        first,
        peak_flops={**second.peak_flops, **peaks},
        bandwidth_bytes_per_s=max(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s),
        cache_bytes_per_s=max(first.cache_bytes_per_s, second.cache_bytes_per_s),
        launch_ns=min(first.launch_ns, second.launch_ns),
    )


def reference_ns(program: Program, device: DeviceVector) -> float:
    """The scale of a program's time: its roofline plus a launch per leaf, in nanoseconds."""
    return device.floor_ns(program) + device.launch_ns * max(1, len(program.leaves))
