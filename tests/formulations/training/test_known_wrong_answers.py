"""Problems on which a solver, handed the program as it stood, claimed an optimum that is none."""

import random
from dataclasses import replace

import pytest

from qsync_opt.testing import random_problem
from qsync_opt.training import TerminationStatus, solve


def _with_sensitivities_times(problem, factor):
    def shrink(table):
        return {precision: replace(cost, sensitivity=cost.sensitivity * factor) for precision, cost in table.items()}

    devices = tuple(
        replace(device, operators={name: shrink(table) for name, table in device.operators.items()})
        for device in problem.devices
    )
    return replace(problem, devices=devices)


def test_the_preprocessing_of_cbc_cuts_off_this_optimum():
    problem = random_problem(random.Random(572))
    known = solve(problem, "exhaustive").objective
    found = solve(problem, "ilp", solver="pulp")
    assert found.termination is TerminationStatus.OPTIMAL
    assert found.objective == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("seed", [5, 7, 16, 30])
def test_sensitivities_below_the_absolute_gaps_of_solvers(seed, textbook):
    problem = _with_sensitivities_times(random_problem(random.Random(seed)), 1e-10)
    known = solve(problem, "exhaustive").objective
    assert known > 0
    found = solve(problem, textbook.TextbookFormulation(), solver="ortools")
    assert found.termination is TerminationStatus.OPTIMAL
    assert found.objective == pytest.approx(known, rel=1e-6)
    assert found.bound == pytest.approx(known, rel=1e-6)
