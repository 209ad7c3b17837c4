"""Data sheets of GPUs: peak throughput per precision and memory bandwidth, for estimates without a device.

Peaks are in operations per second, without structured sparsity, a multiply-add counted as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import check_name, check_number, near_match
from qsync_opt.numerics import FORMATS

_T = 1e12
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """One GPU model as its maker describes it.

    ``peak_flops`` maps precisions, FP32 among them, to operations per second; ``half_format`` is the 16-bit format that
    8-bit operators deliver and run backward in. ``source`` says where the figures are from.
    """

    name: str
    peak_flops: Mapping[str, float]
    bandwidth_bytes_per_s: float
    half_format: str
    source: str

    def __post_init__(self) -> None:
        check_name(self.name, "data sheet: name")
        check_name(self.source, f"data sheet {self.name!r}: source")
        for precision, peak in self.peak_flops.items():
            if precision not in FORMATS:
                raise ProblemError(
                    f"data sheet {self.name!r}: unknown precision {precision!r}{near_match(precision, FORMATS)}; "
                    f"allowed are {', '.join(FORMATS)}"
                )
            _check_positive(peak, f"data sheet {self.name!r}: operations per second in {precision}")
        _check_positive(self.bandwidth_bytes_per_s, f"data sheet {self.name!r}: bandwidth in bytes per second")
        for needed in ("FP32", self.half_format):
            if needed not in self.peak_flops:
                raise ProblemError(f"data sheet {self.name!r}: peak_flops lacks {needed}; add it")
        ordered = sorted(self.peak_flops, key=lambda name: FORMATS[name].rank)
        object.__setattr__(self, "peak_flops", MappingProxyType({name: self.peak_flops[name] for name in ordered}))


def _check_positive(value: float, what: str) -> None:
    check_number(value, what)
    if value == 0:
        raise ProblemError(f"{what} is 0, but it must be above zero")


_HOPPER = {"INT8": 1979 * _T, "FP8": 1979 * _T, "BF16": 989 * _T, "FP16": 989 * _T, "TF32": 494 * _T, "FP32": 67 * _T}

DATA_SHEETS: Mapping[str, DataSheet] = MappingProxyType(
    {
        sheet.name: sheet
        for sheet in (
            DataSheet(
                name="V100",
                peak_flops={"FP16": 125 * _T, "FP32": 15.7 * _T},
                bandwidth_bytes_per_s=900 * _GB,
                half_format="FP16",
                source="NVIDIA V100 data sheet (SXM2)",
            ),
            DataSheet(
                name="T4",
                peak_flops={"INT8": 130 * _T, "FP16": 65 * _T, "FP32": 8.1 * _T},
                bandwidth_bytes_per_s=300 * _GB,
                half_format="FP16",
                source="NVIDIA T4 data sheet",
            ),
            DataSheet(
                name="A10",
                peak_flops={"INT8": 250 * _T, "BF16": 125 * _T, "FP16": 125 * _T, "TF32": 62.5 * _T, "FP32": 31.2 * _T},
                bandwidth_bytes_per_s=600 * _GB,
                half_format="BF16",
                source="NVIDIA A10 data sheet",
            ),
            DataSheet(
                name="L4",
                peak_flops={
                    "INT8": 242 * _T,
                    "FP8": 242 * _T,
                    "BF16": 121 * _T,
                    "FP16": 121 * _T,
                    "TF32": 60 * _T,
                    "FP32": 30.3 * _T,
                },
                bandwidth_bytes_per_s=300 * _GB,
                half_format="BF16",
                source="NVIDIA L4 data sheet, figures with sparsity halved",
            ),
            DataSheet(
                name="A100",
                peak_flops={"INT8": 624 * _T, "BF16": 312 * _T, "FP16": 312 * _T, "TF32": 156 * _T, "FP32": 19.5 * _T},
                bandwidth_bytes_per_s=1555 * _GB,
                half_format="BF16",
                source="NVIDIA A100 data sheet (40 GB; the 80 GB card has 2039 GB/s)",
            ),
            DataSheet(
                name="H100",
                peak_flops=_HOPPER,
                bandwidth_bytes_per_s=3350 * _GB,
                half_format="BF16",
                source="NVIDIA H100 data sheet (SXM5), figures with sparsity halved",
            ),
            DataSheet(
                name="H200",
                peak_flops=_HOPPER,
                bandwidth_bytes_per_s=4800 * _GB,
                half_format="BF16",
                source="NVIDIA H200 data sheet (SXM5), figures with sparsity halved",
            ),
        )
    }
)
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
