"""What rounding costs a run: at once, and through the gradient's variance over the steps to come."""

import math

import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.sensitivity import variance_weight


def test_the_horizon_sums_squared_rates():
    assert variance_weight(learning_rate=0.1, steps=50) == pytest.approx(0.5)
    assert variance_weight(learning_rate=0.1, steps=50, momentum=0.9, mean_square_gradient=1e-3) == pytest.approx(0.05)
    assert variance_weight(learning_rate=0.1, steps=0) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"learning_rate": 0.1, "steps": 5, "momentum": 1.0}, "momentum is 1.0"),
        ({"learning_rate": 0.1, "steps": -1}, "steps is -1"),
        ({"learning_rate": 0.1, "steps": True}, "steps is True"),
        ({"learning_rate": math.inf, "steps": 1}, "horizon is inf"),
    ],
)
def test_what_makes_no_horizon_is_refused(arguments, said):
    with pytest.raises(UnsupportedError, match=said):
        variance_weight(**arguments)
