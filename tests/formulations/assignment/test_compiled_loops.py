"""Same plans, bounds and numbers with and without compiled loops, to the last bit."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt import solve
from qsync_opt.formulations.assignment import Elimination, compiled, schedule
from qsync_opt.formulations.assignment import dual as master
from qsync_opt.formulations.assignment import elimination as elimination_loops
from qsync_opt.formulations.assignment import incumbent as blend
from qsync_opt.formulations.assignment.core import condensed as condense
from qsync_opt.formulations.assignment.core import frontier as frontier_loops
from qsync_opt.formulations.assignment.core import paths as walk_loops
from qsync_opt.formulations.training import collapse

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    from families import Recipe, generate
finally:
    sys.path.remove(BENCHMARKS)

pytest.importorskip("numba")
EXAMPLES = settings(max_examples=15)


@pytest.fixture(scope="module", autouse=True)
def machine_code():
    """Compile everything; afterwards other tests decide for themselves again."""
    compiled.prepare()
    yield
    _forget()


def _forget():
    compiled.compiled_by.cache_clear()
    compiled.Loop.python_s = 0.0
    for loop in compiled.LOOPS:
        loop.forget()


def _solved(problem, method, patch, switch):
    patch.setenv(compiled.SWITCH, switch)
    _forget()
    solution = solve(problem, method)
    return solution.plan and solution.plan.devices, solution.objective, solution.bound, solution.termination


@given(
    family=st.sampled_from(["cnn", "encoder", "decoder", "moe", "encoder_decoder", "dense"]),
    operators=st.integers(5, 60),
    formats=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    limits=st.sampled_from([(0.3, 0.3), (0.5, None), (None, 0.4), (0.1, 0.1)]),
    sharing=st.sampled_from(["edge", "producer"]),
    method=st.sampled_from(["greedy", "exact"]),
)
@EXAMPLES
def test_plans_and_bounds_are_the_same(family, operators, formats, seed, limits, sharing, method):
    latency, memory = limits
    recipe = Recipe(
        family=family, operators=operators, formats=formats, seed=seed, latency=latency, memory=memory, sharing=sharing
    )
    problem = generate(recipe)
    with pytest.MonkeyPatch.context() as patch:
        assert _solved(problem, method, patch, "1") == _solved(problem, method, patch, "0")


@given(seed=st.integers(0, 10**6), family=st.sampled_from(["cnn", "dense", "moe"]), operators=st.integers(5, 60))
@EXAMPLES
def test_tables_are_minimised_the_same(seed, family, operators):
    _forget()
    compiled.prepare()
    problem = generate(Recipe(family=family, operators=operators, seed=seed, sharing=["edge", "producer"][seed % 2]))
    model = collapse(problem, problem.devices[0]).model
    rng = np.random.default_rng(seed)
    graph = (model.sizes_N, model.edges_E2, model.offset_N, model.offset_E, len(model.objective_Z), 64, 1 << 17)
    for one, two in zip(*_both(schedule._eliminate, *graph), strict=True):
        np.testing.assert_array_equal(one, two)
    elimination = Elimination(model)
    cost = model.priced(rng.lognormal(-15, 3, len(model.limits_R)), rng.random(len(model.objective_Z)) < 0.95)
    for name in ("minimise", "min_marginals"):
        loop, found = getattr(elimination_loops, f"_{name}"), []
        for run in (loop.compiled(), _python(loop)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(elimination_loops, f"_{name}", run)
                found.append(getattr(elimination, name)(cost.copy()))
        for one, two in zip(*found, strict=True):
            np.testing.assert_array_equal(one, two)


def _python(loop):
    """The loop as Python, silent as machine code is."""

    def run(*args):
        with np.errstate(all="ignore"):
            return loop.py_func(*args)

    return run


def _both(loop, *args):
    """Results of both forms, and what they have made of their arguments."""
    found = []
    for run in (loop.compiled(), _python(loop)):
        own = [each.copy() if isinstance(each, np.ndarray) else each for each in args]
        found.append((run(*own), own))
    for one, two in zip(*(own for _, own in found), strict=True):
        np.testing.assert_array_equal(one, two)
    return found[0][0], found[1][0]


@given(seed=st.integers(0, 10**9))
@settings(max_examples=100)
def test_small_loops_do_the_same_in_python(seed):
    rng = np.random.default_rng(seed)
    count, rows, labels = int(rng.integers(1, 40)), int(rng.integers(0, 4)), int(rng.integers(1, 5))
    wide = int(rng.choice([3, 10**6]))
    rows_KR = rng.integers(-wide, wide, (count, rows))
    rows_AR = rng.integers(-wide, wide, (labels, rows))
    objective = np.round(rng.normal(size=count), int(rng.integers(0, 9)))
    code = rng.integers(0, 3, count)
    np.testing.assert_array_equal(*_both(frontier_loops.undominated, code, objective, rows_KR))
    limits = rng.integers(-wide, wide, rows)
    found = _both(frontier_loops.extend, objective, rows_KR, objective[:1], rows_AR[:1], 0.3, 0.1, 0.6, limits)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
    holed = np.where(rng.random(count) < 0.1, np.inf, objective)
    np.testing.assert_array_equal(*_both(condense._undominated, holed, rows_KR, rng.random(count), float(rng.random())))
    edges = rng.integers(0, count, (int(rng.integers(0, 60)), 2))
    np.testing.assert_array_equal(*_both(blend._roots, rng.random(count) < 0.6, edges))
    where, arc = rng.integers(0, 3, count), rng.integers(0, count, count)
    if rows:
        np.testing.assert_array_equal(*_both(walk_loops.in_order, where, objective, rows_KR, 0, rows - 1))
    grown = _both(
        walk_loops.grown, rng.permutation(count), arc, objective, rows_KR, arc, rng.normal(size=count), rows_KR
    )
    for one, two in zip(*grown, strict=True):
        np.testing.assert_array_equal(one, two)
    excess = np.round(rng.normal(size=(count, rows)), int(rng.integers(0, 9)))
    basis = np.concatenate([[2 * rows], np.where(excess[0] > 0, np.arange(rows) + rows, np.arange(rows))])
    ends = np.concatenate([np.zeros(rows), np.full(rows, 1e6)])
    columns = np.zeros((2 * rows + count, 1 + rows))
    columns[2 * rows :, 0], columns[2 * rows :, 1:] = 1.0, excess
    columns[: 2 * rows, 1:] = np.concatenate([np.eye(rows), -np.eye(rows)])
    costs = np.concatenate([ends, rng.lognormal(0, 2, count)])
    for one, two in zip(*_both(master._pivot, costs, columns, basis, 10.0), strict=True):
        np.testing.assert_array_equal(one, two)
