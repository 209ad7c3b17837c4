"""Types of the arrays that assignment problems are made of."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Whole = NDArray[np.integer[Any]]
"""Whole numbers of any width."""
