"""Statistics of trained weights that rounding errors depend on: mean squares and largest magnitudes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from qsync_opt.errors import ModelError
from qsync_opt.io import Json, check_fields, check_number, freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStatistics:
    """Statistics of one weight.

    ``mean_square`` is over all elements; ``mean_square_amax`` maps an axis (``"first"``, ``"last"``) to the mean over
    its slices of the squared largest magnitude, which INT8 with one scale per slice depends on. ``first_size`` and
    ``last_size`` are the lengths of these axes.
    """

    elements: Annotated[int, Json(minimum=1)]
    mean_square: float
    mean_square_amax: Mapping[str, float]
    first_size: Annotated[int, Json(minimum=1)]
    last_size: Annotated[int, Json(minimum=1)]

    def __post_init__(self) -> None:
        check_fields(self, "weight")
        for axis in ("first", "last"):
            check_number(self.mean_square_amax.get(axis), f"weight: mean_square_amax of the {axis} axis")
        freeze(self, "mean_square_amax")


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
