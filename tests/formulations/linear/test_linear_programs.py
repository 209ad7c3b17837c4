"""The linear programs themselves: golden texts, reductions, units, whole columns.

Set QSYNC_REWRITE_GOLDEN=1 to write the golden texts anew, and review the difference.
"""

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qsync_opt import solve
from qsync_opt.formulations.linear import LinearModel, LinearOptions, LinearStatus
from qsync_opt.formulations.linear.solvers.ortools_solver import OrtoolsSolver
from qsync_opt.formulations.training.ilp import (
    Assignment,
    Choice,
    Limit,
    Product,
    Units,
    build_assignment,
    linearize,
)
from qsync_opt.testing import INSTANCES, diamond

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def _compare_with_golden(name, text):
    path = GOLDEN / f"{name}.lp"
    if os.environ.get("QSYNC_REWRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("make", INSTANCES, ids=lambda make: make.__name__)
def test_golden_text_of_the_compact_program(make):
    problem = make().problem
    _compare_with_golden(make.__name__, linearize(build_assignment(problem, problem.devices[0])).model.to_lp())


def test_golden_text_of_the_textbook_program(textbook):
    _compare_with_golden("diamond_textbook", textbook.build_textbook(diamond().problem)[0].to_lp())


def _optimum(model):
    found = OrtoolsSolver().solve(model, LinearOptions())
    assert found.status is LinearStatus.OPTIMAL, found.native
    return found


def test_every_assignment_of_the_diamond_is_a_point_of_the_program():
    """Fixing the choices leaves exactly the states that the assignment computes, at its cost and loads."""
    problem = diamond().problem
    assignment = build_assignment(problem, problem.devices[0])
    for plan in itertools.product(("FP16", "FP32"), repeat=3):
        labels = dict(zip("abc", plan, strict=True))
        allowed = {name: frozenset({label}) for name, label in labels.items()}
        program = linearize(assignment, allowed=allowed)
        found = OrtoolsSolver().solve(program.model, LinearOptions())
        states = assignment.states(labels)
        if any(value > 0 for value in assignment.excess(states).values()):
            assert found.status is LinearStatus.INFEASIBLE
            continue
        assert program.labels(found.values) == labels
        assert program.model.objective(found.values) == pytest.approx(assignment.cost(states))


@pytest.mark.parametrize("units", [Units(), Units(cost=1e-3, time_ns=18.2, memory_kib=0.058)])
@pytest.mark.parametrize("whole", [False, True])
def test_units_and_integrality_do_not_move_the_optimum(units, whole):
    problem = diamond().problem
    program = linearize(build_assignment(problem, problem.devices[0]), units=units, whole=whole and units == Units())
    assert program.model.objective(_optimum(program.model).values) * units.cost == pytest.approx(2.0)


def test_sensitivities_near_the_least_float_can_be_solved():
    """Their thousandth is 0, by which nothing can be scaled."""
    problem = diamond().problem
    device = problem.devices[0]
    tiny = {
        name: {precision: replace(cost, sensitivity=cost.sensitivity * 5e-324) for precision, cost in table.items()}
        for name, table in device.operators.items()
    }
    problem = replace(problem, devices=(replace(device, operators=tiny),))
    assert solve(problem, "ilp").evaluation.feasible


def test_the_relaxation_pays_no_less_than_the_marginals_force():
    """With u half A, half B and v half B, half C, at least half must change label, and half of it must pay.

    The textbook bound y >= x + x' - 1 would let all of it change for nothing.
    """
    free = {"cost_S": np.zeros(3), "load_SR": np.zeros((3, 2), np.int64), "labels": ("A", "B", "C")}
    identity = np.arange(3)
    pair = Product(
        name="u|v",
        left=0,
        left_class_S=identity,
        right=1,
        right_class_S=identity,
        cost_S=1 - np.eye(3).ravel(),
        load_SR=np.zeros((9, 2), np.int64),
    )
    assignment = Assignment(
        name="pair",
        resources=("memory", "time"),
        nodes=(Choice(name="u", **free), Choice(name="v", **free), pair),
        shared=(),
        limits=(Limit(name="time[0]", resources=(1,), bound=0),),
        constant_R=np.zeros(2, np.int64),
        constant_cost=0.0,
    )
    model = linearize(assignment).model
    marginals = {"u": (0.5, 0.5, 0.0), "v": (0.0, 0.5, 0.5)}
    fixed = {f"x[{n},{label}]": p for n, ps in marginals.items() for label, p in zip("ABC", ps, strict=True)}
    model.columns[:] = [
        replace(c, integer=False, lower=fixed[c.name], upper=fixed[c.name]) if c.name in fixed else c
        for c in model.columns
    ]
    assert _optimum(model).bound == pytest.approx(0.5)


def test_lp_text_keeps_names_apart_and_bounds_explicit():
    model = LinearModel(name="m", constant=2.0)
    first = model.add_column("x[a b]", lower=-math.inf, upper=math.inf, cost=1.5)
    second = model.add_column("x[a_b]", integer=True)
    model.add_row("r", {first: 1.0, second: -2.0}, lower=0.0, upper=4.0)
    model.add_row("empty", {second: 0.0}, upper=1.0)
    assert model.to_lp().splitlines() == [
        "\\ m",
        "Minimize",
        " objective: + 1.5 x(a_b) + 2",
        "Subject To",
        " r_upper: + 1 x(a_b) - 2 x(a_b)~2 <= 4",
        " r_lower: + 1 x(a_b) - 2 x(a_b)~2 >= 0",
        " empty: 0 <= 1",
        "Bounds",
        " -inf <= x(a_b) <= +inf",
        " 0 <= x(a_b)~2 <= 1",
        "Generals",
        " x(a_b)~2",
        "End",
    ]
