"""The priced minimum is exact for any graph, and so are min-marginals."""

import numpy as np
import pytest

from qsync_opt.formulations.assignment import Elimination, TooWideError, schedule


@pytest.mark.parametrize("seed", range(30))
def test_minimum_and_min_marginals_equal_enumeration(seed, random_model, every_labelling):
    model = random_model(seed, density=[0.2, 0.6, 1.0][seed % 3], joins=seed % 3)
    rng = np.random.default_rng(seed)
    allowed = model.allowed_Z.copy()
    cost = model.priced(rng.uniform(0, 2, len(model.limits_R)), allowed)
    truth = [float(cost[model.chosen(x)].sum()) for x in every_labelling(model)]
    order = Elimination(model)
    value, labels = order.minimise(cost)
    assert value == pytest.approx(min(truth), rel=1e-12)
    assert float(cost[model.chosen(labels)].sum()) == pytest.approx(value, rel=1e-12)
    least_value, least = order.min_marginals(cost)
    assert least_value == pytest.approx(value, rel=1e-12)
    expected = np.full(len(cost), np.inf)
    for x, total in zip(every_labelling(model), truth, strict=True):
        np.minimum.at(expected, model.chosen(x), total)
    np.testing.assert_allclose(least, expected, rtol=1e-9)


def test_everything_forbidden_is_infinite(random_model):
    model = random_model(1)
    value, _ = Elimination(model).minimise(np.full(len(model.objective_Z), np.inf))
    assert value == np.inf


def test_too_dense_graph_is_refused(random_model, monkeypatch):
    monkeypatch.setattr(schedule, "MAX_TABLE_ENTRIES", 8)
    model = random_model(3, nodes=8, density=1.0)
    with pytest.raises(TooWideError) as caught:
        Elimination(model)
    assert caught.value.remaining
