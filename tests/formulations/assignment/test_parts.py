"""Parts of the search by themselves: relaxation, blending, the core program, new limits."""

import numpy as np
import pytest

from qsync_opt.formulations.assignment import (
    AssignmentModel,
    BoundAndFix,
    Effort,
    Pricer,
    blend,
    maximise,
    relax,
    schedule,
)
from qsync_opt.formulations.assignment import incumbent as blending
from qsync_opt.formulations.assignment.core import close, extract, frontier, search
from qsync_opt.formulations.assignment.core.frontier import _narrow
from qsync_opt.registry import Kind, create


def best_of(model, labellings):
    return min((model.objective(x) for x in labellings if (model.excess(x) <= 0).all()), default=np.inf)


@pytest.mark.parametrize("seed", range(12))
def test_dense_graphs_are_split_and_still_solved(seed, random_model, every_labelling, monkeypatch):
    monkeypatch.setattr(schedule, "MAX_TABLE_ENTRIES", 20)
    monkeypatch.setattr(schedule, "_SMALL_TABLE", 20)
    model = random_model(seed, nodes=7, density=1.0)
    relaxation = relax(model)
    assert relaxation.entry_Y is not None
    prices = np.full(len(model.limits_R), 0.3)
    bound, _ = relaxation.elimination.minimise(relaxation.model.priced(prices, relaxation.allowed(model.allowed_Z)))
    cost = model.priced(prices, model.allowed_Z)
    assert bound <= min(float(cost[model.chosen(x)].sum()) for x in every_labelling(model)) + 1e-9
    outcome, truth = BoundAndFix(model).solve(Effort()), best_of(model, every_labelling(model))
    assert outcome.objective == pytest.approx(truth, rel=1e-8, abs=1e-12)
    assert outcome.bound <= truth + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_blending_keeps_the_limits_and_never_loses(seed, random_model, every_labelling):
    model = random_model(seed, nodes=7, density=0.15)
    every = every_labelling(model)
    feasible = [x for x in every if (model.excess(x) <= 0).all()]
    if not feasible:
        pytest.skip("no labelling keeps these limits")
    worst, best = max(feasible, key=model.objective), min(every, key=model.objective)
    mixed = blend(model, worst, best, np.ones(len(model.limits_R)))
    assert (model.excess(mixed) <= 0).all()
    assert model.objective(mixed) <= model.objective(worst) + 1e-12
    assert np.isfinite(model.objective(mixed))


@pytest.mark.parametrize(("seed", "missing"), [*((seed, 0) for seed in range(8)), (0, 1000), (1, 1000)])
def test_core_search_and_solver_agree(seed, missing, random_model, every_labelling):
    model = random_model(seed, rows=2)
    model.limits_R[:] -= missing
    truth = best_of(model, every_labelling(model))
    assert (truth == np.inf) == (missing > 0)
    relaxation = relax(model)
    prices = np.full(2, 0.1)
    base = relaxation.elimination.minimise(model.priced(prices, model.allowed_Z))[1]
    core = extract(model, base, model.allowed_Z, prices)
    upper = 1e6
    searched = search(core, upper, 10_000, spread=False)
    closed = close(core, upper, create(Kind.SOLVER, "ortools"), None)
    for found in (searched, closed):
        if truth == np.inf:
            assert found.labels_N is None
        else:
            assert (model.excess(found.labels_N) <= 0).all()
            assert model.objective(found.labels_N) == pytest.approx(truth, rel=1e-6, abs=1e-6)
            assert found.bound <= truth + 1e-6


@pytest.mark.parametrize("seed", range(8))
def test_open_nodes_beyond_the_axes_of_an_array_only_weaken_the_bound(seed, random_model, every_labelling, monkeypatch):
    monkeypatch.setattr(frontier, "_MAX_AXES", 2)
    model = random_model(seed, rows=2)
    prices = np.full(2, 0.1)
    base = relax(model).elimination.minimise(model.priced(prices, model.allowed_Z))[1]
    found = search(extract(model, base, model.allowed_Z, prices), 1e6, 10_000, spread=False)
    truth = best_of(model, every_labelling(model))
    assert found.labels_N is None if truth == np.inf else model.objective(found.labels_N) == pytest.approx(truth)
    assert found.bound <= truth + 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_new_limits_reuse_the_search(seed, random_model, every_labelling):
    model = random_model(seed, rows=2)
    first = BoundAndFix(model)
    first.solve(Effort())
    for change in (-15, 20):
        other = first.under(model.limits_R + change)
        truth = best_of(other.model, every_labelling(model))
        outcome = other.solve(Effort())
        assert outcome.objective == pytest.approx(truth, rel=1e-8, abs=1e-12)
        assert outcome.bound <= truth + 1e-9


def test_a_wide_fan_is_taken_narrowly():
    """Seventy leaves joined by a chain: each join is taken as soon as its leaf is, so few nodes are ever open."""
    leaves = 70
    near = [[] for _ in range(2 * leaves - 1)]
    for k in range(1, leaves):
        join = leaves + k - 1
        for parent in (k, 0 if k == 1 else join - 1):
            near[parent].append(join)
            near[join].append(parent)
    order = _narrow(list(range(len(near))), near)
    assert sorted(order) == list(range(len(near)))
    place = {node: i for i, node in enumerate(order)}
    last = {node: max([place[o] for o in near[node]], default=place[node]) for node in order}
    widest = max(sum(place[n] <= step < last[n] for n in order) for step in range(len(order)))
    assert widest <= 2


def test_two_plans_that_differ_everywhere_are_cut(random_model, monkeypatch):
    # All zeros and all ones differ in every node of a chain, so in one part; only a cut mixes them.
    monkeypatch.setattr(blending, "_LARGE_PART", 2)
    nodes = 40
    edges = np.stack([np.arange(nodes - 1), np.arange(1, nodes)], axis=1)
    objective = np.concatenate([np.tile([1.0, 0.0], nodes), np.tile([0.0, 0.1, 0.1, 0.0], nodes - 1)])
    # Load 0 is one unit for every node with label 1.
    is_one = np.zeros(len(objective), dtype=np.int64)
    is_one[1 : 2 * nodes : 2] = 1
    model = AssignmentModel(
        sizes_N=np.full(nodes, 2), edges_E2=edges, objective_Z=objective,
        allowed_Z=np.ones(len(objective), dtype=np.bool_), pointer_Z1=np.concatenate([[0], np.cumsum(is_one)]),
        load_T=np.zeros(nodes, dtype=np.int64), value_T=np.ones(nodes, dtype=np.int64),
        rows_RS=np.ones((1, 1), dtype=np.int64), limits_R=np.array([25]),
    )  # fmt: skip
    zeros, ones = np.zeros(nodes, dtype=np.int64), np.ones(nodes, dtype=np.int64)
    mixed = blend(model, zeros, ones, np.array([0.5]))
    assert mixed.sum() == 25
    assert model.objective(mixed) == pytest.approx(15.1)


@pytest.mark.parametrize("tolerance", [0.0, 0.5])
def test_a_solver_may_stop_early_and_its_bound_says_so(random_model, every_labelling, tolerance):
    for seed in range(6):
        model = random_model(seed, rows=2)
        truth = best_of(model, every_labelling(model))
        prices = np.full(2, 0.1)
        base = relax(model).elimination.minimise(model.priced(prices, model.allowed_Z))[1]
        core = extract(model, base, model.allowed_Z, prices)
        found = close(core, 1e6, create(Kind.SOLVER, "ortools"), None, tolerance=tolerance, most_nodes=1)
        if found.labels_N is not None:
            assert (model.excess(found.labels_N) <= 0).all()
            assert model.objective(found.labels_N) >= truth - 1e-9
        assert found.bound <= truth + 1e-6


def dual_of(model, upper=np.inf):
    relaxation = relax(model)
    assert relaxation.entry_Y is None
    pricer = Pricer(model, relaxation.elimination)
    result = maximise(pricer, model.allowed_Z, prices_R=None, plans=[], upper=upper, tolerance=1e-11, max_steps=400)
    return pricer, result


@pytest.mark.parametrize("unit", [1.0, 1e15])
@pytest.mark.parametrize(("seed", "rows"), [*((seed, 2) for seed in range(8)), *((seed, 4) for seed in range(8, 12))])
def test_the_best_prices_are_proved_by_a_mix_of_plans_that_costs_as_much(
    seed, rows, unit, random_model, every_labelling
):
    model = random_model(seed, nodes=7, rows=rows, density=0.3)
    model.objective_Z[:] *= unit
    if best_of(model, every_labelling(model)) == np.inf:
        pytest.skip("no labelling keeps these limits")
    pricer, result = dual_of(model)
    assert pricer.count == len(result.plans)
    excess_IR = np.stack([plan.excess_R for plan in result.plans])
    mix = result.weights_I
    assert mix.min() >= 0 and mix.sum() == pytest.approx(1)
    assert (mix @ excess_IR <= 1e-6).all()
    cost = float(mix @ [plan.objective for plan in result.plans])
    assert result.bound == pytest.approx(cost, rel=1e-7, abs=1e-9 * unit)


@pytest.mark.parametrize("seed", range(8))
def test_prices_rise_no_further_than_to_the_level_that_is_asked_for(seed, random_model, every_labelling):
    model = random_model(seed, nodes=7, rows=1, density=0.3)
    labellings = every_labelling(model)
    cost = np.array([model.objective(x) for x in labellings])
    excess = np.array([float(model.excess(x)[0]) for x in labellings])
    if not ((excess <= 0) & (cost > cost.min())).any() or excess[cost.argmin()] <= 0:
        pytest.skip("the limit costs nothing, or cannot be kept")
    level = (cost.min() + best_bound(cost, excess)) / 2
    below = cost < level
    least = ((level - cost[below]) / excess[below]).max()  # from there on no labelling's line is below the level
    _, result = dual_of(model, upper=level)
    assert result.bound >= level * (1 - 1e-9)
    assert least * (1 - 1e-6) <= result.prices_R[0] <= least * 1.01


def best_bound(cost, excess):
    """The maximum over prices of the least priced cost: lines of kept and broken limits cross there."""
    kept, broken = excess <= 0, excess > 0
    (a, b), (c, d) = (cost[kept], excess[kept]), (cost[broken], excess[broken])
    crossing = (a[:, None] - c[None, :]) / (d[None, :] - b[:, None])
    prices = np.concatenate([[0.0], crossing[crossing > 0]])
    return max(float((cost + price * excess).min()) for price in np.unique(prices))
