import math

import pytest

from qsync_opt.errors import SolverError
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearStatus, solve_in_units
from qsync_opt.formulations.linear.solvers import ortools_solver, pulp_solver
from qsync_opt.registry import BUILT_IN, Kind

NAMES = [entry.name for entry in BUILT_IN[Kind.SOLVER]]


@pytest.fixture(params=NAMES)
def solver(request):
    return next(entry for entry in BUILT_IN[Kind.SOLVER] if entry.name == request.param).load()()


def _knapsack(limit):
    """Maximise 5a + 4b + 3c (as a minimum) within 2a + 3b + c <= limit."""
    model = LinearModel(name="knapsack", constant=100.0)
    columns = [model.add_column(name, integer=True, cost=cost) for name, cost in (("a", -5), ("b", -4), ("c", -3))]
    model.add_row("weight", dict(zip(columns, (2, 3, 1), strict=True)), upper=limit)
    return model


def test_optimum_with_its_constant(solver):
    model = _knapsack(5)
    found = solver.solve(model, LinearOptions())
    assert found.status is LinearStatus.OPTIMAL
    assert [round(value) for value in found.values] == [1, 1, 0]
    assert model.objective(found.values) == pytest.approx(91)
    assert found.bound == pytest.approx(91)


def test_infeasible(solver):
    found = solver.solve(_knapsack(-1), LinearOptions())
    assert found.status in (LinearStatus.INFEASIBLE, LinearStatus.INFEASIBLE_OR_UNBOUNDED)
    assert found.values is None


def test_equalities_and_lower_sides(solver):
    model = LinearModel(name="rows")
    a = model.add_column("a", upper=10.0, integer=True, cost=1.0)
    b = model.add_column("b", upper=10.0, integer=True, cost=2.0)
    model.add_row("sum", {a: 1.0, b: 1.0}, lower=7.0, upper=7.0)
    model.add_row("between", {a: 1.0, b: -1.0}, lower=-2.0, upper=1.0)
    found = solver.solve(model, LinearOptions())
    assert [round(value) for value in found.values] == [4, 3]


def test_names_and_versions_are_told(solver):
    assert solver.name.split(":")[0] in ("ortools", "pulp")
    assert solver.version[0].isdigit()


def test_every_native_status_of_mathopt_is_mapped():
    from ortools.math_opt.python import mathopt

    assert set(ortools_solver.STATUSES) == {reason.name for reason in mathopt.TerminationReason}


def test_every_native_status_of_pulp_is_mapped():
    import pulp

    assert set(pulp_solver.STATUSES) == set(pulp.LpSolution.values())


def test_a_failing_solver_raises_with_its_own_words():
    model = LinearModel(name="broken")
    model.add_column("a", lower=0.0, upper=math.nan, integer=True, cost=1.0)
    with pytest.raises(SolverError, match="ortools:highs failed on 'broken'"):
        ortools_solver.OrtoolsSolver().solve(model, LinearOptions())


@pytest.mark.parametrize(
    ("status", "values", "log", "bound"),
    [
        (LinearStatus.OPTIMAL, (1.0,), "", 5.0),
        (LinearStatus.OPTIMAL, (1.0,), "Result - Optimal solution found\n\nLower bound:            3.500\n", 5.499),
        (LinearStatus.LIMIT, (1.0,), "After 0 nodes, 4 best solution, best possible 2.25 (0.1 seconds)", 4.249),
        (LinearStatus.LIMIT, None, "Lower bound:                    -1e+400\n", None),
        (LinearStatus.LIMIT, None, "", None),
    ],
)
def test_bounds_are_read_from_cbc_and_never_rounded_up(status, values, log, bound):
    model = LinearModel(name="m", constant=2.0)
    model.add_column("a", cost=3.0)
    found = pulp_solver._bound(model, status, values, log)
    assert found == (None if bound is None else pytest.approx(bound))


def test_gaps_and_node_limits_are_taken_and_never_spoil_a_bound(solver):
    model = _knapsack(5)
    for options in (LinearOptions(absolute_gap=2.0), LinearOptions(node_limit=1)):
        found = solver.solve(model, options)
        assert found.bound is None or found.bound <= 91 + 1e-6
        if found.values is not None:
            assert model.objective(found.values) >= 91 - 1e-6
        if options.absolute_gap:
            assert model.objective(found.values) <= 93 + 1e-6


def test_choices_that_cost_little_are_told_apart_beside_others_that_cost_much(solver):
    """One of four choices, and a maximum that is paid for at a high price but is tiny."""
    model = LinearModel(name="units", constant=7.0)
    costs = (3e-9, 2e-9, 0.5, 0.1)
    choices = [model.add_column(f"c{k}", integer=True, cost=cost) for k, cost in enumerate(costs)]
    most = model.add_column("most", upper=math.inf, cost=1e-3)
    model.add_row("one", dict.fromkeys(choices, 1.0), lower=1.0, upper=1.0)
    model.add_row("most", {most: 1.0, choices[0]: -1e-6, choices[1]: -1e-6}, lower=0.0)
    result = solve_in_units(solver, model, LinearOptions())
    assert result.status is LinearStatus.OPTIMAL
    assert [round(value) for value in result.values[:4]] == [0, 1, 0, 0]
    assert result.bound == pytest.approx(7.0 + 3e-9, abs=1e-9)


def test_programs_without_costs_and_without_points_are_solved_in_units(solver):
    model = LinearModel(name="free")
    column = model.add_column("c", integer=True)
    model.add_row("one", {column: 1.0}, lower=1.0)
    assert solve_in_units(solver, model, LinearOptions()).bound == pytest.approx(0, abs=1e-9)
    model.add_row("none", {column: 1.0}, upper=0.0)
    assert solve_in_units(solver, model, LinearOptions()).values is None
