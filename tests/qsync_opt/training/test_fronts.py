import pytest

from qsync_opt.errors import SolverError
from qsync_opt.testing import diamond
from qsync_opt.training import solve
from qsync_opt.training.pareto import _checked


def test_a_false_claim_about_a_point_is_refused():
    problem = diamond().problem

    class Claim:
        iteration_ns, memory_kib, objective, bound = 1, {"T4": 35}, 7.0, 7.0
        plan = solve(problem).plan

    with pytest.raises(SolverError, match="the front claims 1 ns"):
        _checked(problem, Claim, None)
