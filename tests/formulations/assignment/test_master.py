"""The master program: optimum, prices and weights on programs solved by hand."""

import numpy as np
import pytest

from qsync_opt.formulations.assignment import Master
from qsync_opt.formulations.assignment import dual as master_module


def test_two_plans_meet_where_the_limit_holds_on_average():
    master = Master(1, box=1e6)
    master.add(0.0, np.array([2.0]))  # free, but 2 over the limit
    master.add(6.0, np.array([-1.0]))
    value, prices, weights = master.solve()
    # Mix 1/3 and 2/3 to sit on the limit: cost 4; the price is 6 / 3.
    assert value == pytest.approx(4.0)
    assert prices == pytest.approx([2.0])
    assert weights == pytest.approx([1 / 3, 2 / 3])


def test_without_a_plan_within_the_limit_the_price_is_the_box():
    master = Master(1, box=50.0)
    master.add(1.0, np.array([2.0]))
    value, prices, _ = master.solve()
    assert prices == pytest.approx([50.0])
    assert value == pytest.approx(101.0)


@pytest.mark.parametrize("seed", range(20))
def test_prices_and_weights_prove_each_other(seed):
    rng = np.random.default_rng(seed)
    rows, plans = int(rng.integers(1, 6)), int(rng.integers(2, 40))
    cost, excess = rng.uniform(0, 10, plans), rng.normal(0, 1, (plans, rows))
    master = Master(rows, box=100.0)
    for number in range(plans):  # added in portions, as the dual does
        master.add(cost[number], excess[number])
        value, prices, weights = master.solve()
    assert weights.sum() == pytest.approx(1.0)
    assert (prices >= 0).all()
    assert (prices <= 100).all()
    assert value == pytest.approx(float((cost + excess @ prices).min()), rel=1e-8, abs=1e-8)
    over = np.maximum(weights @ excess, 0.0)
    assert value == pytest.approx(float(weights @ cost + 100.0 * over.sum()), rel=1e-6, abs=1e-6)


def test_equal_plans_far_from_the_limits_take_few_pivots(monkeypatch):
    # No mix keeps both limits, so a price is at the box, where reduced costs of equal plans are rounding of about 1e-8.
    excess = [(0.3982014, -1.0)] * 4 + [
        (0.36248413, -0.82495195), (1.0, -0.13244715), (0.77465269, -0.48991031), (0.6881792, -0.57126842),
        (0.62354871, -0.64253684), (0.54930538, -0.84737348), (0.4846749, -0.9186419), (0.3982014, -1.0),
        (-0.52069116, 2.4401025),
    ]  # fmt: skip
    cost = [0.0718162] * 4 + [
        0.10219806, 0.01380564, 0.02624094, 0.03177122, 0.03762096, 0.0518334, 0.06010458, 0.0718162, 0.04886268,
    ]  # fmt: skip
    monkeypatch.setattr(master_module, "_MAX_PIVOTS", 20)
    monkeypatch.setattr(master_module, "_pivot", master_module._pivot.py_func)
    master = Master(2, 1e9 * max(cost), max(cost))
    for each, excess_R in zip(cost, excess, strict=True):
        master.add(each, np.array(excess_R))
    master._basis = np.array([8, 2, 1])  # columns of the fifth plan, the first row's box, the second row's slack
    value, prices, _ = master.solve()
    assert value == pytest.approx((np.array(cost) + np.array(excess) @ prices).min(), rel=1e-12)
    assert len(set(master._basis.tolist())) == 3
