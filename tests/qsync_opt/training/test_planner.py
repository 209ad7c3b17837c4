import logging
import math
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError, SolverError, UnsupportedError
from qsync_opt.formulations.training import ExhaustiveFormulation
from qsync_opt.registry import BUILT_IN, Kind
from qsync_opt.testing import buckets, cast_coupling, chain, late_peers, no_memory, no_time
from qsync_opt.training import Answer, TerminationStatus, evaluate, fastest, load_problem, solve


class _Claims:
    """A formulation that says whatever it is told to."""

    def __init__(self, **answer):
        self.answer = answer

    def solve(self, problem, options):
        return Answer(**{"termination": TerminationStatus.FEASIBLE, **self.answer})


GOOD = {"T4": {"a": "FP32", "b": "FP32", "c": "FP16"}}


def test_an_honest_instance_is_believed():
    solution = solve(chain().problem, _Claims(devices=GOOD, objective=0.25, bound=0.2))
    assert solution.objective == 0.25
    assert solution.method == "_Claims"
    assert solution.gap == pytest.approx(0.2)
    assert solution.plan.solution["objective"] == 0.25


@pytest.mark.parametrize(
    ("answer", "needle"),
    [
        ({"devices": {"T4": dict.fromkeys("abc", "FP32")}}, "breaks limits: memory of 'T4': 60 KiB"),
        ({"devices": GOOD, "objective": 0.2}, "claims the objective 0.2 for a plan whose objective is 0.25"),
        ({"devices": GOOD, "bound": 0.3}, "claims the lower bound 0.3 above the objective 0.25"),
        ({"termination": TerminationStatus.OPTIMAL}, "ended optimal without a plan"),
        ({"termination": TerminationStatus.INFEASIBLE, "devices": GOOD}, "ended infeasible with a plan"),
    ],
)
def test_false_claims_raise(answer, needle):
    with pytest.raises(SolverError, match=needle):
        solve(chain().problem, _Claims(**answer))


@pytest.mark.parametrize("method", ["greedy", "qsync", "exact", "exhaustive"])
@pytest.mark.parametrize(("make", "needle"), [(no_memory, "memory limit of device"), (no_time, "the latency limit of")])
def test_every_method_names_the_limit_and_its_least_value(method, make, needle):
    solution = solve(make().problem, method)
    assert solution.termination == "infeasible"
    assert needle in solution.reason
    assert "the least value that could be met is" in solution.reason


@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_bounding_methods_prove_infeasibility_in_no_time(method):
    solution = solve(no_memory().problem, method, time_limit_s=1e-9)
    assert solution.termination is TerminationStatus.INFEASIBLE
    assert "least value that could be met" in solution.reason


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"time_limit_s": "3"}, "time limit is '3' s, but it must be a finite number above 0"),
        ({"time_limit_s": math.nan}, "time limit is nan s"),
        ({"gap": "0.1"}, "gap is '0.1', but it must be at least 0 and below 1"),
        ({"gap": math.nan}, "gap is nan"),
    ],
)
def test_options_out_of_range(options, needle):
    with pytest.raises(ProblemError) as caught:
        solve(chain().problem, **options)
    assert needle in str(caught.value)


def test_a_path_is_no_problem():
    with pytest.raises(ProblemError, match=r"problem is a str, but a Problem is needed: load_problem\(path\)"):
        solve("problem.json")
    with pytest.raises(ProblemError, match=r"problem is a str, but a Problem is needed"):
        fastest("problem.json")


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"start": "plan.json"}, "start is a str, but a Plan is needed: load_plan(path) reads one from a file"),
        ({"tied": ["a", "b"]}, "tied holds 'a', but each group must be a sequence of names"),
        ({"tied": "ab"}, "tied holds 'ab', but each group"),
        ({"tied": [1]}, "tied holds 1, but each group"),
    ],
)
def test_what_is_easily_taken_for_the_right_argument_is_refused(options, needle):
    with pytest.raises(ProblemError) as caught:
        solve(chain().problem, **options)
    assert needle in str(caught.value)


@pytest.mark.parametrize("method", [None, 5, ExhaustiveFormulation])
def test_a_method_is_a_name_or_an_instance(method):
    with pytest.raises(UnsupportedError, match="must be a name, such as 'greedy', or an instance"):
        solve(chain().problem, method)


@pytest.mark.parametrize("method", ["qsync", "exhaustive"])
def test_no_plan_in_no_time_has_a_reason(method):
    solution = solve(no_memory().problem, method, time_limit_s=1e-9)
    assert solution.plan is None
    needle = "cannot be met" if solution.termination == "infeasible" else "proves nothing"
    assert needle in solution.reason


def test_a_solver_for_a_method_that_uses_none_is_refused():
    with pytest.raises(UnsupportedError, match="'exhaustive' lacks a feature: uses a solver"):
        solve(chain().problem, "exhaustive", solver="pulp")


def test_a_gap_without_a_bound_is_noted(caplog):
    with caplog.at_level(logging.WARNING):
        assert solve(chain().problem, "qsync", gap=0.1).objective == 0.25
    assert "method 'qsync' has no bound" in caplog.text


def test_exact_stops_at_a_gap_and_says_so(instance_path):
    problem = load_problem(instance_path("bertb-native"))
    solution = solve(problem, "exact", gap=0.5)
    assert solution.gap <= 0.5
    assert solution.termination in (TerminationStatus.FEASIBLE, TerminationStatus.OPTIMAL)
    assert solution.bound <= problem.optimum.objective * (1 + 1e-9)


@pytest.mark.parametrize("solver", ["ortools", "pulp"])
def test_no_time_is_a_result_with_a_valid_bound(instance_path, solver):
    problem = load_problem(instance_path("bertl-mix"))
    solution = solve(problem, "exact", solver=solver, time_limit_s=0.8)
    assert solution.termination in (TerminationStatus.TIME_LIMIT, TerminationStatus.OPTIMAL)
    assert solution.bound <= problem.optimum.objective * (1 + 1e-9)
    if solution.objective is not None:
        assert solution.objective >= problem.optimum.objective * (1 - 1e-9)


@pytest.mark.parametrize("name", [entry.name for entry in BUILT_IN[Kind.SOLVER]])
def test_the_fastest_plan_is_found_and_proved(name):
    # Every plan of the coupled chain but "all FP16" casts or computes longer.
    found = fastest(replace(cast_coupling().problem, latency_limit_ns=0), solver=name)
    assert (found.iteration_ns, found.bound_ns, found.proved) == (9000, 9000, True)
    assert set(found.plan.devices["T4"].values()) == {"FP16"}


def test_the_fastest_plan_need_not_be_the_lowest():
    problem = cast_coupling().problem
    device = problem.devices[0]
    # With b fixed in FP32 the casts make its neighbours faster in FP32, too.
    tables = {**device.operators, "b": {"FP32": device.operators["b"]["FP32"]}}
    problem = replace(problem, devices=(replace(device, operators=tables, memory_limit_kib=10**6),))
    found = fastest(problem)
    assert set(found.plan.devices["T4"].values()) == {"FP32"}
    assert found.iteration_ns == 18000


def test_the_fastest_plan_keeps_memory_and_counts_communication():
    assert fastest(no_memory().problem) is None
    assert fastest(buckets().problem).iteration_ns == 10000
    assert fastest(late_peers().problem).iteration_ns == 11000


def test_the_fastest_plan_is_proved_without_a_solver(monkeypatch):
    monkeypatch.setattr("qsync_opt.training.planner.default_solver", lambda: None)
    found = fastest(chain().problem)
    assert (found.iteration_ns, found.proved, found.bound_ns) == (9000, True, 9000)
    assert found.method == "bound and fix"


def test_the_papers_allocator_proves_infeasibility_without_a_solver(monkeypatch):
    monkeypatch.setattr("qsync_opt.formulations.training.paper_greedy.default_solver", lambda: None)
    assert solve(chain().problem, "qsync").objective == 0.25
    solution = solve(no_memory().problem, "qsync")
    assert solution.termination is TerminationStatus.INFEASIBLE
    assert "cannot be met by any plan; the least value that could be met is" in solution.reason
    assert solve(late_peers().problem, "qsync").termination is TerminationStatus.INFEASIBLE


def test_the_default_proves_without_a_solver(monkeypatch):
    monkeypatch.setattr("qsync_opt.formulations.training.exact.default_solver", lambda: None)
    for method in ("greedy", "exact"):
        assert solve(chain().problem, method).termination is TerminationStatus.OPTIMAL
        solution = solve(no_memory().problem, method)
        assert solution.termination is TerminationStatus.INFEASIBLE
        assert "least value that could be met" in solution.reason


@pytest.mark.parametrize("name", ["bertb-fp8", "resnet50-copy", "tiny"])
def test_the_fastest_plan_of_recorded_problems(instance_path, name):
    problem = load_problem(instance_path(name))
    found = fastest(problem)
    assert found.proved
    assert found.bound_ns == found.iteration_ns
    assert found.evaluation == evaluate(problem, found.plan)
    assert found.iteration_ns <= problem.latency_limit_ns
    # One nanosecond less is infeasible, and the reason names that least value.
    tight = replace(problem, latency_limit_ns=found.iteration_ns - 1)
    solution = solve(tight, "exact")
    assert solution.termination is TerminationStatus.INFEASIBLE
    assert f"least value that could be met is {found.iteration_ns} ns" in solution.reason
    assert math.isfinite(solve(replace(problem, latency_limit_ns=found.iteration_ns), "greedy").objective)
