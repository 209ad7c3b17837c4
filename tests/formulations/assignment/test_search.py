"""The search finds the optimum of any assignment problem, bounds it, and says so when there is none."""

import time

import numpy as np
import pytest

from qsync_opt.formulations.assignment import BoundAndFix, Effort, Elimination, Pass, Pricer, maximise
from qsync_opt.formulations.assignment.core import core_search

QUICK = Effort(passes=(Pass(2, 2, True), Pass(None, 3, False)), max_nodes=3)
WALKS = Effort(passes=(Pass(2, walks=(2,)), Pass(None, walks=(3, 100_000))))


def best_of(model, labellings):
    values = [model.objective(x) for x in labellings if (model.excess(x) <= 0).all()]
    return min(values, default=np.inf)


@pytest.mark.parametrize(
    ("seed", "effort"), [*((s, Effort()) for s in range(60)), *((s, WALKS) for s in range(0, 60, 2))]
)
def test_equals_enumeration(seed, effort, random_model, every_labelling):
    model = random_model(seed, rows=1 + seed % 4, density=[0.2, 0.6, 1.0][seed % 3], joins=seed % 3)
    truth = best_of(model, every_labelling(model))
    outcome = BoundAndFix(model).solve(effort)
    if truth == np.inf:
        assert outcome.proved_infeasible
        assert outcome.labels_N is None
        return
    assert outcome.objective == pytest.approx(truth, rel=1e-8, abs=1e-12)
    assert (model.excess(outcome.labels_N) <= 0).all()
    assert truth * (1 - 1e-8) - 1e-12 <= outcome.bound <= truth * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("seed", range(40))
def test_little_effort_never_bounds_wrongly(seed, random_model, every_labelling):
    model = random_model(seed, rows=1 + seed % 3)
    truth = best_of(model, every_labelling(model))
    outcome = BoundAndFix(model).solve(QUICK)
    assert outcome.bound <= truth * (1 + 1e-12) + 1e-12
    assert outcome.objective >= truth * (1 - 1e-12)
    if truth == np.inf:
        assert outcome.labels_N is None


@pytest.mark.parametrize("seed", range(20))
def test_dual_is_a_lower_bound_and_stops(seed, random_model, every_labelling):
    model = random_model(seed, rows=3)
    pricer = Pricer(model, Elimination(model))
    plans = []
    result = maximise(pricer, model.allowed_Z, prices_R=None, plans=plans, upper=1e9, tolerance=1e-6, max_steps=300)
    assert result.bound <= best_of(model, every_labelling(model)) + 1e-9
    assert pricer.count < 300


def test_many_rows_are_priced_lazily(random_model, every_labelling):
    model = random_model(5, rows=20)
    assert BoundAndFix(model).solve(Effort()).objective == pytest.approx(best_of(model, every_labelling(model)))


def test_a_given_plan_is_the_incumbent(random_model, every_labelling):
    model = random_model(2, rows=1)
    feasible = [x for x in every_labelling(model) if (model.excess(x) <= 0).all()]
    worst = max(feasible, key=model.objective)
    outcome = BoundAndFix(model).solve(Effort(max_nodes=0), start=worst)
    assert outcome.objective <= model.objective(worst)


def test_no_time_gives_a_valid_bound_and_says_so(random_model, every_labelling):
    model = random_model(4, rows=2)
    outcome = BoundAndFix(model).solve(Effort(), deadline=time.monotonic() - 1)
    assert outcome.out_of_time or outcome.proved_infeasible
    assert outcome.bound <= best_of(model, every_labelling(model))


def test_interrupt_keeps_what_is_known(random_model, every_labelling, monkeypatch):
    model = next(m for m in (random_model(s, rows=1) for s in range(20)) if best_of(m, every_labelling(m)) < np.inf)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(core_search, "extract", stop)
    monkeypatch.setattr(BoundAndFix, "_closed", lambda *args: False)
    outcome = BoundAndFix(model).solve(Effort())
    assert outcome.interrupted
    assert outcome.labels_N is not None
    assert outcome.bound <= best_of(model, every_labelling(model))


def test_same_input_same_plan(random_model):
    model = random_model(7, nodes=8)
    one, two = BoundAndFix(model).solve(Effort()), BoundAndFix(model).solve(Effort())
    assert one.objective == two.objective
    assert one.labels_N is None or (one.labels_N == two.labels_N).all()
