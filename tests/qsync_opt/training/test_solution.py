import pytest

from qsync_opt.errors import ProblemError, SolverError
from qsync_opt.testing import chain, no_time
from qsync_opt.training import Solution, SolveOptions, TerminationStatus, relative_gap, solve

KEYS = [
    "termination",
    "point",
    "objective",
    "bound",
    "gap",
    "iteration_ns",
    "memory_kib",
    "sensitivity",
    "method",
    "solver",
    "build_seconds",
    "solve_seconds",
    "reason",
]


def test_gap_is_relative_and_never_negative():
    assert relative_gap(2.0, 1.0) == 0.5
    assert relative_gap(1.0, 1.0 + 1e-16) == 0.0
    assert relative_gap(0.0, 0.0) == 0.0
    assert relative_gap(None, 1.0) is None
    assert relative_gap(1.0, None) is None


@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_json_has_the_promised_keys_with_and_without_a_plan(method):
    held = solve(chain().problem, method).to_json()
    assert list(held) == KEYS
    assert held["memory_kib"] == {"T4": 50}
    assert held["sensitivity"] == {"T4": 0.25}
    empty = solve(no_time().problem, method).to_json()
    assert list(empty) == KEYS
    assert (empty["termination"], empty["point"], empty["objective"]) == ("infeasible", "none", None)


def _bare(termination):
    return Solution(
        termination=termination,
        plan=None,
        evaluation=None,
        bound=None,
        method="m",
        solver=None,
        build_seconds=0.0,
        solve_seconds=0.0,
    )


def test_status_and_plan_must_agree():
    with pytest.raises(SolverError, match="ended optimal without a plan"):
        _bare(TerminationStatus.OPTIMAL)
    assert _bare(TerminationStatus.TIME_LIMIT).gap is None


@pytest.mark.parametrize("options", [{"time_limit_s": 0}, {"time_limit_s": float("nan")}, {"gap": 1}, {"gap": -0.1}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ProblemError, match="but it must be"):
        SolveOptions(**options)
