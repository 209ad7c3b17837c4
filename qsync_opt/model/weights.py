"""What rounding needs to know of a trained weight: mean square and largest magnitudes. Axes: none kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.errors import ModelError
from qsync_opt.io import check_integer, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStatistics:
    """One weight.

    ``mean_square`` is over all elements; ``mean_square_amax`` maps an axis (``"first"``, ``"last"``) to the mean over
    its slices of the squared largest magnitude: what INT8 with one scale per slice is rounded by. ``first_size`` and
    ``last_size`` are the lengths of these axes.
    """

    elements: int
    mean_square: float
    mean_square_amax: Mapping[str, float]
    first_size: int
    last_size: int

    def __post_init__(self) -> None:
        for name in ("elements", "first_size", "last_size"):
            check_integer(getattr(self, name), f"weight: {name}", minimum=1)
        check_number(self.mean_square, "weight: mean_square")
        for axis in ("first", "last"):
            check_number(self.mean_square_amax.get(axis), f"weight: mean_square_amax of the {axis} axis")
        object.__setattr__(self, "mean_square_amax", MappingProxyType(dict(self.mean_square_amax)))


def weight_statistics(name: str, values: NDArray[Any]) -> WeightStatistics:
    """Statistics of a weight of at least two dimensions.

    Raises:
        ModelError: A value is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise ModelError(f"weight {name!r} holds NaN or infinity; repair the model before planning it")
    magnitudes = np.abs(values)
    amax_by_axis = {
        "first": magnitudes.reshape(values.shape[0], -1).max(axis=1),
        "last": magnitudes.reshape(-1, values.shape[-1]).max(axis=0),
    }
    return WeightStatistics(
        elements=int(values.size),
        mean_square=float(np.mean(np.square(values), dtype=np.float64)),
        mean_square_amax={
            axis: float(np.mean(np.square(amax), dtype=np.float64)) for axis, amax in amax_by_axis.items()
        },
        first_size=int(values.shape[0]),
        last_size=int(values.shape[-1]),
    )
