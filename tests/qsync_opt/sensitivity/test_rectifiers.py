import math

import pytest

from qsync_opt.sensitivity import SIGN_CHANGE_RATIOS, sign_change_variance

ROOTS = tuple(100.0 * math.sqrt(ratio) for ratio in SIGN_CHANGE_RATIOS)


@pytest.mark.parametrize("ratio", [1e-9, 1e-6, 3e-5, 1e-3, 0.01, 0.5])
def test_a_root_is_a_root_between_and_beyond_the_measured_ratios(ratio):
    assert sign_change_variance(ROOTS, ratio) == pytest.approx(100.0 * math.sqrt(ratio))


def test_where_nothing_flips_nothing_is_added():
    few = (0.0, 0.0, 2.0, 4.0, 8.0)
    assert sign_change_variance(ROOTS, 0.0) == 0.0
    assert sign_change_variance(few, 1e-5) == 0.0
    assert 0.0 < sign_change_variance(few, 5e-5) < 2.0


def test_the_measured_values_are_met_and_joined_by_powers():
    curve = (1.0, 2.0, 8.0, 9.0, 30.0)
    for ratio, value in zip(SIGN_CHANGE_RATIOS, curve, strict=True):
        assert sign_change_variance(curve, ratio) == pytest.approx(value)
    for place in range(len(curve) - 1):
        between = math.sqrt(SIGN_CHANGE_RATIOS[place] * SIGN_CHANGE_RATIOS[place + 1])
        assert sign_change_variance(curve, between) == pytest.approx(math.sqrt(curve[place] * curve[place + 1]))
    assert sign_change_variance(curve, 4 * SIGN_CHANGE_RATIOS[-1]) == pytest.approx(2 * curve[-1])
    assert sign_change_variance(curve, SIGN_CHANGE_RATIOS[0] / 9) == pytest.approx(curve[0] / 3)


def test_from_nothing_to_something_the_change_is_even_on_the_logarithmic_scale():
    curve = (0.0, 4.0, 8.0, 9.0, 30.0)
    between = SIGN_CHANGE_RATIOS[0] ** 0.75 * SIGN_CHANGE_RATIOS[1] ** 0.25
    assert sign_change_variance(curve, between) == pytest.approx(1.0)
