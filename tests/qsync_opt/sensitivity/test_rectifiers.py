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
