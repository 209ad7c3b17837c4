"""What a search learnt holds under other limits: the next one is right, and does no more than it must."""

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.formulations.assignment import BoundAndFix, Effort, Elimination, Pass, Pricer, maximise

QUICK = Effort(passes=(Pass(2, 2, True), Pass(None, 3, False)), max_nodes=3)
WALKS = Effort(passes=(Pass(2, walks=(2,)), Pass(None, walks=(3, 100_000))))
NEAR = replace(WALKS, margins=(0.3, 1.2, 5.0))
EFFORTS = {"little effort": QUICK, "proof": Effort(), "proof by walks": WALKS, "near the bound first": NEAR}


def best_of(model, labellings):
    values = [model.objective(x) for x in labellings if (model.excess(x) <= 0).all()]
    return min(values, default=np.inf)


@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
@pytest.mark.parametrize("seed", range(25))
def test_every_search_of_a_sweep_is_right(seed, effort, random_model, every_labelling):
    model = random_model(seed, rows=1 + seed % 3, joins=seed % 3)
    every = every_labelling(model)
    totals = np.array([model.left_sides(model.loads(x)) for x in every])
    low, high = totals.min(axis=0), totals.max(axis=0)
    rng = np.random.default_rng(seed)
    engine = BoundAndFix(model)
    for step in range(6):
        # Tighter and looser, all rows alike and one by one.
        share = rng.uniform(0, 0.8, size=len(low) if step % 2 else 1)
        limits = (low + share * (high - low)).astype(np.int64)
        engine = engine.under(limits)
        outcome = engine.solve(effort)
        truth = best_of(model.with_limits(limits), every)
        assert outcome.bound <= truth * (1 + 1e-9) + 1e-9
        assert outcome.objective >= truth * (1 - 1e-9)
        if effort is not QUICK:
            assert outcome.objective == pytest.approx(truth, rel=1e-8, abs=1e-12)
            assert outcome.proved_infeasible == (truth == np.inf)


def test_a_plan_that_stays_best_is_not_sought_again(random_model, every_labelling):
    model = random_model(3, rows=1)
    engine = BoundAndFix(model)
    found = engine.solve(Effort())
    room = model.limits_R - model.left_sides(model.loads(found.labels_N))
    again = engine.under(model.limits_R - room)  # as tight as the plan allows
    outcome = again.solve(Effort())
    assert again.pricer.count == 0
    assert outcome.objective == found.objective == best_of(again.model, every_labelling(model))
    assert outcome.bound == pytest.approx(found.objective)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_summed_by_their_steps(seed, random_model, every_labelling):
    model = random_model(seed, rows=1 + seed % 5)
    rng = np.random.default_rng(seed)
    prices = rng.lognormal(0, 3, len(model.limits_R)) * (rng.random(len(model.limits_R)) < 0.7)
    assert model.load_prices(prices) == pytest.approx(prices @ model.rows_RS)
    labels = every_labelling(model)[seed]
    assert (model.left_sides(model.loads(labels)) == model.rows_RS @ model.loads(labels)).all()
    entries = model.chosen(labels)
    group = rng.integers(0, 3, len(entries))
    loads = model.loads_of(entries, group, 3)
    assert (loads.sum(axis=0) == model.loads(labels)).all()
    rows, priced = model.amounts(entries, np.arange(len(prices)), prices)
    for number in range(3):
        assert (rows[group == number].sum(axis=0) == model.rows_RS @ loads[number]).all()
        assert priced[group == number].sum() == pytest.approx(prices @ (model.rows_RS @ loads[number]))


@pytest.mark.parametrize("seed", range(20))
def test_a_level_ends_the_dual_early_and_not_below_it(seed, random_model):
    model = random_model(seed, rows=1 + seed % 4, density=1.0)

    def dual(upper):
        pricer = Pricer(model, Elimination(model))
        result = maximise(pricer, model.allowed_Z, prices_R=None, plans=[], upper=upper, tolerance=1e-9, max_steps=400)
        return result.bound, pricer.count

    best, steps = dual(np.inf)
    level = best - 0.1 * abs(best) - 1e-6
    reached, fewer = dual(level)
    assert level <= reached <= best + 1e-9 * max(1.0, abs(best))
    assert fewer <= steps
    above, _ = dual(2 * abs(best) + 1.0)  # a level that nothing reaches changes nothing
    assert above == pytest.approx(best, rel=1e-6, abs=1e-6)


def test_splits_at_joins_are_handed_on_and_leave_nothing_out(random_model, every_labelling):
    effort = Effort(passes=(Pass(2, 2, True),), dives=0, max_nodes=6, joins_only=True)
    handed_on = 0
    for seed in range(12):
        model = random_model(seed, nodes=7, rows=2, joins=3)
        every = every_labelling(model)
        totals = np.array([model.left_sides(model.loads(x)) for x in every])
        low, high = totals.min(axis=0), totals.max(axis=0)
        engine = BoundAndFix(model)
        for share in (0.3, 0.45, 0.35, 0.6):
            engine = engine.under((low + share * (high - low)).astype(np.int64))
            outcome = engine.solve(effort)
            truth = best_of(engine.model, every)
            assert outcome.bound <= truth * (1 + 1e-9) + 1e-9
            assert outcome.objective >= truth * (1 - 1e-9)
        handed_on += len(engine._leaves) > 1
        proof = engine.under(engine.model.limits_R).solve(Effort())
        assert proof.objective == pytest.approx(best_of(engine.model, every), rel=1e-8, abs=1e-12)
    assert handed_on
