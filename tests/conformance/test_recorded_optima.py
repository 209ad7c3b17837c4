"""Every solver on the hand-made instances, and every recorded problem to its recorded optimum."""

from pathlib import Path

import pytest

from qsync_opt.registry import BUILT_IN, Kind
from qsync_opt.testing import INSTANCES, Instance, check_formulation, check_solution, check_solver
from qsync_opt.training import Plan, TerminationStatus, evaluate, load_problem, solve

DATA = Path(__file__).resolve().parents[1] / "data" / "instances"
RECORDED = {path.stem: path for path in sorted(DATA.glob("*.json"))}
FEASIBLE = [name for name in RECORDED if name != "resnet50-infeasible"]
SOLVERS = [entry.name for entry in BUILT_IN[Kind.SOLVER]]
SLOW = {("bertl-mix", "pulp"), ("bertl-mix", "scip"), ("resnet50-both30", "scip"), ("bertb-native", "scip")}


@pytest.mark.parametrize("solver", SOLVERS)
def test_solver_conforms(solver):
    check_solver(solver)


@pytest.mark.parametrize("method", ["greedy", "qsync", "exhaustive", "exact"])
def test_formulation_conforms(method):
    check_formulation(method)


@pytest.mark.parametrize("make", INSTANCES, ids=lambda make: make.__name__)
def test_textbook_conforms(make, textbook):
    instance = make()
    solution = solve(instance.problem, textbook.TextbookFormulation())
    # It knows that no plan exists, but not which limit is at fault.
    check_solution(Instance(problem=instance.problem, objective=instance.objective), solution, proves=True)


def _pairs():
    for name in FEASIBLE:
        for solver in ("ortools", "pulp", "scip"):
            marks = [pytest.mark.slow] if (name, solver) in SLOW else []
            yield pytest.param(name, solver, marks=marks, id=f"{name}-{solver}")


@pytest.mark.parametrize(("name", "solver"), list(_pairs()))
def test_exact_reaches_the_recorded_optimum(name, solver):
    problem = load_problem(RECORDED[name])
    solution = solve(problem, "exact", solver=solver, time_limit_s=120)
    assert solution.termination is TerminationStatus.OPTIMAL
    assert solution.objective == pytest.approx(problem.optimum.objective, rel=1e-9)
    assert solution.bound <= problem.optimum.objective * (1 + 1e-9)
    assert solution.gap <= 1e-6


@pytest.mark.parametrize("name", ["tiny", "tiny-shared"])
def test_cp_sat_and_exhaustive_reach_the_tiny_optima(name):
    problem = load_problem(RECORDED[name])
    for solution in (solve(problem, "exact", solver="cp-sat"), solve(problem, "exhaustive")):
        assert solution.termination is TerminationStatus.OPTIMAL
        assert solution.objective == pytest.approx(problem.optimum.objective, rel=1e-9)


@pytest.mark.parametrize("name", FEASIBLE)
@pytest.mark.parametrize("method", ["greedy", "qsync"])
def test_greedy_is_feasible_and_never_below_the_optimum(name, method):
    problem = load_problem(RECORDED[name])
    solution = solve(problem, method)
    assert evaluate(problem, Plan(problem=problem.name, devices=solution.plan.devices)).feasible
    assert solution.objective >= problem.optimum.objective * (1 - 1e-9)


@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_the_recorded_infeasible_problem_is_proved_so(method):
    solution = solve(load_problem(RECORDED["resnet50-infeasible"]), method)
    assert solution.termination is TerminationStatus.INFEASIBLE
    assert "2850674 KiB" in solution.reason
