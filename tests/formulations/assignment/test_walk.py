"""Walks through layers find the best labelling of a core, and say no more than they have proved."""

import itertools

import numpy as np
import pytest

from qsync_opt.formulations.assignment.compiled import LOOPS, Loop
from qsync_opt.formulations.assignment.core import Core, CoreEdge, CoreNode, condense, lay_out, levels, walk
from qsync_opt.formulations.assignment.core import levels as level_loops
from qsync_opt.formulations.assignment.core import paths as module
from qsync_opt.formulations.assignment.core import paths as walk_loops


def make_core(seed: int) -> Core:
    """Seven nodes, some joined, one to three rows; the first row's amounts are multiples of 6."""
    rng = np.random.default_rng(seed)
    num_rows = 1 + seed % 3
    prices = rng.uniform(0.0, 0.2, num_rows)
    units = np.array([6, 1, 1])[:num_rows]
    nodes = []
    for number in range(7):
        labels = int(rng.integers(2, 4))
        rows = rng.integers(-9, 10, (labels, num_rows)) * units
        objective = rng.uniform(-3, 3, labels)
        rows[0], objective[0] = 0, 0.0
        nodes.append(CoreNode(number, np.arange(labels), objective, rows, objective + rows @ prices))
    edges = []
    for first, second in itertools.combinations(range(7), 2):
        if rng.random() < 0.2:
            shape = (len(nodes[first].labels_A), len(nodes[second].labels_A))
            objective_AB, rows_ABR = np.zeros(shape), np.zeros((*shape, num_rows), dtype=np.int64)
            objective_AB[1:, 1:] = rng.uniform(-1, 1, (shape[0] - 1, shape[1] - 1))
            rows_ABR[1:, 1:] = rng.integers(-3, 4, (shape[0] - 1, shape[1] - 1, num_rows)) * units
            if rng.random() < 0.3:
                objective_AB[-1, -1] = np.inf
            edges.append(CoreEdge(first, second, objective_AB, rows_ABR, objective_AB + rows_ABR @ prices))
    excess = rng.integers(-20, 21, num_rows)
    base = np.zeros(len(nodes), dtype=np.int64)
    return Core(base, 2.0, 2.0 + float(excess @ prices), excess, nodes, edges, prices)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("parts", [False, True])
def test_a_wide_walk_finds_the_best_and_proves_it(seed, parts, values, truth):
    core = make_core(seed)
    best = truth(core)
    walked = condense(core, np.inf, merge=True, count=False, product=False) if parts else core
    for upper in (np.inf, best + 1.0, best + 1e-6, best - 1e-6):
        if np.isnan(upper):
            continue
        found = walk(walked, upper, (10_000,))
        if best >= upper or best == np.inf:
            assert found.labels_N is None
            assert found.bound == upper
            continue
        assert found.objective == pytest.approx(best, rel=1e-12)
        assert found.bound == pytest.approx(best, rel=1e-9)
        objective, rows = values(core, found.labels_N)
        assert objective == pytest.approx(best, rel=1e-12)
        assert (rows <= 0).all()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("widths", [(1,), (2, 5), (1, 3, 10_000)])
def test_a_narrow_walk_never_bounds_too_high(seed, widths, truth):
    core = make_core(seed)
    best = truth(core)
    if best == np.inf:
        assert walk(core, np.inf, widths).labels_N is None
        return
    for tolerance in (0.0, 0.3):
        found = walk(core, best + 2.0, widths, tolerance=tolerance)
        assert found.bound <= best + 1e-9
        assert found.objective >= best - 1e-9
        if widths[-1] == 10_000:
            assert found.objective - found.bound <= tolerance + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_levels_bound_from_below_for_any_prices_unit_and_table(seed, truth):
    core = make_core(seed)
    best = truth(core)
    layers = lay_out(core)
    rng = np.random.default_rng(seed)
    for _ in range(6):
        prices = rng.uniform(0.0, 0.4, len(core.excess_R)) * rng.integers(0, 2, len(core.excess_R))
        row, unit = int(rng.integers(len(prices))), int(rng.integers(1, 9))
        start = -int(core.excess_R[row]) // unit
        number = int(rng.integers(8, 80)) + abs(start)
        lowest = min(start, 0) - int(rng.integers(0, number - abs(start)))
        chosen = levels.Levels(row=row, unit=unit, lowest=lowest, start=start, number=number)
        table = np.empty((layers.num_points, number))
        chosen.table(layers, prices, table)
        bound = float(table[0, start - lowest]) + levels.constant(layers, prices) + core.objective
        plain = sum(min(node.objective_A + node.rows_AR @ prices) for node in core.nodes)
        assert bound <= best + 1e-9
        if not core.edges:
            assert bound >= plain + float(prices @ core.excess_R) + core.objective - 1e-9
        through = chosen.least(layers, prices, table)
        assert through.min() == pytest.approx(float(table[0, start - lowest]))


def test_a_row_of_levels_knows_what_no_combination_reaches():
    # Every node saves 10 of a row that is 1 over its limit: prices alone pay a tenth of a step, levels a whole one.
    nodes = [
        CoreNode(n, np.arange(2), np.array([0.0, 1.0]), np.array([[0], [-10]]), np.array([0.0, 0.0])) for n in range(3)
    ]
    core = Core(np.zeros(3, dtype=np.int64), 0.0, 0.1, np.array([1]), nodes, [], np.array([0.1]))
    layers = lay_out(core)
    chosen = levels.choose_levels(layers, core.prices_R, 5.0)
    assert (chosen.unit, chosen.start) == (10, -1)
    found = levels.bound(layers, chosen, core.prices_R, 5.0, np.inf)
    assert found.bound == pytest.approx(1.0)
    assert walk(core, 5.0, (1,)).bound == pytest.approx(1.0)


def test_a_core_that_is_too_wide_is_left_to_others(monkeypatch):
    monkeypatch.setattr("qsync_opt.formulations.assignment.core.layers._MOST_ARCS", 4)
    assert walk(make_core(0), np.inf, (10,)) is None


def test_no_time_proves_nothing(truth):
    core = make_core(4)
    found = walk(core, np.inf, (10_000,), deadline=0.0)
    assert found.labels_N is None
    assert found.bound <= truth(core)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_beaten_goes_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    count = 60
    point, objective = rng.integers(0, 2, count), np.round(rng.uniform(0, 3, count), 1)
    rows = rng.integers(0, 6, (count, 2))
    order = np.lexsort((objective, rows[:, 1], rows[:, 0], point))
    keep = walk_loops.undominated.py_func(order, point, objective, rows, 1)
    for x in range(count):
        no_worse = (point == point[x]) & (objective <= objective[x]) & (rows <= rows[x]).all(axis=1)
        same = no_worse & (objective == objective[x]) & (rows == rows[x]).all(axis=1)
        beaten = (no_worse & ~same).any() or x != order[np.isin(order, np.flatnonzero(same))][0]
        assert keep[x] == (not beaten)


def recorded_calls(monkeypatch) -> list[tuple[Loop, tuple]]:
    """What the loops are called with while cores are walked."""
    calls = []
    for holder in (level_loops, walk_loops, levels, module):
        for name, loop in list(vars(holder).items()):
            if isinstance(loop, Loop):

                def call(*args, loop=loop):
                    before = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args)
                    calls.append((loop, before))
                    return loop(*args)

                monkeypatch.setattr(holder, name, call)
    for seed in range(6):
        walk(make_core(seed), np.inf, (4, 100))
    return calls


def test_compiled_and_python_loops_give_the_same_bits(monkeypatch):
    pytest.importorskip("numba")
    calls = recorded_calls(monkeypatch)
    own = [loop for loop in LOOPS if loop.py_func.__module__.endswith(("levels", "paths"))]
    assert {loop.py_func.__name__ for loop, _ in calls} == {loop.py_func.__name__ for loop in own}
    run = {id(loop): loop.compiled() for loop in own}
    for loop, args in calls:
        mine = tuple(arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args)
        plain, fast = loop.py_func(*args), run[id(loop)](*mine)
        for one, two in zip(*((each if isinstance(each, tuple) else (each,)) for each in (plain, fast)), strict=True):
            np.testing.assert_array_equal(one, two)
        used = plain if loop is walk_loops.extend else None
        for before, after in zip(args, mine, strict=True):
            if isinstance(before, np.ndarray):
                np.testing.assert_array_equal(before[:used], after[:used])


@pytest.mark.parametrize("excess", [-(10**9), 10**9])
def test_a_limit_far_away_needs_no_table_that_long(excess, truth):
    core = make_core(1)
    core.excess_R = np.array([excess, core.excess_R[1]])
    layers = lay_out(core)
    for room in (1.0, np.inf):
        for row in range(2):
            flat = core.prices_R * (np.arange(2) != row)
            chosen = levels.choose_levels(layers, flat, room)
            assert 0 <= chosen.first < chosen.number
    found = walk(core, np.inf, (10_000,))
    assert found.objective == pytest.approx(truth(core)) if excess < 0 else found.bound == np.inf
