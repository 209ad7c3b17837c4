"""Data sheets of GPUs: peak throughput per precision and memory bandwidth, for estimates without a device.

Peaks are in operations per second, without structured sparsity, a multiply-add counted as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import Name, check_fields, near_match
from qsync_opt.numerics import FORMATS, check_precisions


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One GPU model as its maker describes it.

    ``peak_flops`` maps precisions, FP32 among them, to operations per second; ``half_format`` is the 16-bit format that
    8-bit operators deliver and run backward in. ``source`` says where the figures are from.
    """

    name: Name
    peak_flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    half_format: str
    source: Name

    def __post_init__(self) -> None:
        what = f"data sheet {self.name!r}"
        check_fields(self, what)
        check_precisions(self.peak_flops, what)
        for name in self.peak_flops:
            if name != (operands := FORMATS[name].operands):
                raise ProblemError(f"{what}: peak_flops has {name}, which multiplies in {operands}; name that instead")
        for needed in ("FP32", self.half_format):
            if needed not in self.peak_flops:
                raise ProblemError(f"{what}: peak_flops lacks {needed}; add it")
        figures = {f"operations per second in {precision}": peak for precision, peak in self.peak_flops.items()}
        for name, value in {**figures, "bandwidth in bytes per second": self.bandwidth_bytes_per_s}.items():
            if value == 0:
                raise ProblemError(f"{what}: {name} is 0, but it must be above zero")
        ordered = sorted(self.peak_flops, key=lambda name: FORMATS[name].rank)
        object.__setattr__(self, "peak_flops", MappingProxyType({name: self.peak_flops[name] for name in ordered}))


def _sheet(name: str, half_format: str, bandwidth_gb_per_s: float, source: str, **peak_tflops: float) -> DataSheet:
    return DataSheet(
        name=name,
        peak_flops={precision: 1e12 * peak for precision, peak in peak_tflops.items()},
        bandwidth_bytes_per_s=1e9 * bandwidth_gb_per_s,
        half_format=half_format,
        source=f"NVIDIA {name} data sheet{source}",
    )


_HOPPER = {"INT8": 1979.0, "FP8": 1979.0, "BF16": 989.0, "FP16": 989.0, "TF32": 494.0, "FP32": 67.0}
_A100 = " (40 GB; the 80 GB card has 2039 GB/s)"
_HALVED = ", figures with sparsity halved"
_SHEETS = (
    _sheet("V100", "FP16", 900, " (SXM2)", FP16=125, FP32=15.7),
    _sheet("T4", "FP16", 300, "", INT8=130, FP16=65, FP32=8.1),
    _sheet("A10", "BF16", 600, "", INT8=250, BF16=125, FP16=125, TF32=62.5, FP32=31.2),
    _sheet("L4", "BF16", 300, _HALVED, INT8=242, FP8=242, BF16=121, FP16=121, TF32=60, FP32=30.3),
    _sheet("A100", "BF16", 1555, _A100, INT8=624, BF16=312, FP16=312, TF32=156, FP32=19.5),
    _sheet("H100", "BF16", 3350, f" (SXM5){_HALVED}", **_HOPPER),
    _sheet("H200", "BF16", 4800, f" (SXM5){_HALVED}", **_HOPPER),
)
DATA_SHEETS: Mapping[str, DataSheet] = MappingProxyType({sheet.name: sheet for sheet in _SHEETS})
"""GPU model to its data sheet."""


def data_sheet(name: str) -> DataSheet:
    """The data sheet of a GPU model, whatever the case of its name.

    Raises:
        UnsupportedError: There is none; the text lists those that exist.
    """
    known = {key.upper(): sheet for key, sheet in DATA_SHEETS.items()}
    try:
        return known[name.upper()]
    except KeyError:
        raise UnsupportedError(
            f"there is no data sheet for {name!r}{near_match(name.upper(), known)}; there is one for "
            f"{', '.join(DATA_SHEETS)}; write hardware: NAME in the cluster file, or profile the device"
        ) from None
