"""The greedy allocator and its incremental evaluation; exact, exhaustive and least values around it."""

import math
import random
from dataclasses import replace

import pytest

from qsync_opt.errors import NotInstalledError, SolverError, UnsupportedError
from qsync_opt.formulations.linear import LinearResult, LinearStatus
from qsync_opt.formulations.training import (
    DeviceState,
    GreedyFormulation,
    QsyncFormulation,
    adjustable_positions,
    fast_start,
    paper_greedy,
    recover,
)
from qsync_opt.formulations.training.certified import DeviceSearch
from qsync_opt.formulations.training.ilp import solve as whole_program
from qsync_opt.testing import (
    cast_coupling,
    chain,
    diamond,
    no_memory,
    random_plan,
    random_problem,
    skipped_level,
    stacked_problem,
)
from qsync_opt.training import (
    NO_LIMIT_NS,
    Plan,
    SolveOptions,
    TerminationStatus,
    evaluate,
    evaluate_device,
    fastest,
    iteration_time,
    load_problem,
    propagate,
    solve,
)


def _agrees(state):
    problem, device = state.problem, state.device
    found = evaluate_device(problem, device, propagate(problem, device, state.choices()))
    assert [time.precision for time in found.operators] == state.precisions
    assert (state.memory_kib, state.compute_ns) == (found.memory_kib, found.backward_end_ns)
    assert state.sensitivity == pytest.approx(found.sensitivity, abs=1e-300)
    # Together with what the peers and the all-reduces take alone it is the whole iteration.
    communication = problem.communication
    alone_ns = [ready + sum(communication.allreduce_ns[k:]) for k, ready in enumerate(communication.peer_ready_ns)]
    _, iteration_ns = iteration_time(problem, (found,))
    assert iteration_ns == max(state.iteration_ns, max(alone_ns, default=0) + problem.optimizer_ns)


@pytest.mark.parametrize("seed", range(40))
def test_incremental_and_independent_evaluation_agree_after_changes_and_undoes(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=12)
    for device in problem.devices:
        state = DeviceState(problem, device, random_plan(source, problem).devices[device.name])
        _agrees(state)
        positions = adjustable_positions(problem, device)
        for _ in range(12 if positions else 0):
            position = source.choice(positions)
            before = (list(state.precisions), state.memory_kib, state.compute_ns, state.iteration_ns)
            sensitivity = state.sensitivity
            moves = state.change(position, source.choice(list(device.operators[problem.operators[position].name])))
            _agrees(state)
            assert state.sensitivity_change(moves) == pytest.approx(state.sensitivity - sensitivity, abs=1e-9)
            if source.random() < 0.5:
                state.undo(moves)
                assert before == (list(state.precisions), state.memory_kib, state.compute_ns, state.iteration_ns)


@pytest.mark.parametrize("make", [chain, cast_coupling, diamond, skipped_level])
def test_both_allocators_reach_these_optima(make):
    instance = make()
    for formulation in (QsyncFormulation(), GreedyFormulation()):
        answer = formulation.solve(instance.problem, SolveOptions())
        found = evaluate(instance.problem, Plan(problem="p", devices=answer.devices))
        assert found.feasible
        assert found.objective == instance.objective


def test_recovery_takes_the_largest_decrement_first_and_keeps_the_limits():
    problem = replace(chain().problem, latency_limit_ns=12000)
    state = DeviceState(problem, problem.devices[0], dict.fromkeys("abc", "FP16"))
    recover(state, passes=1, deadline=math.inf)
    assert state.choices() == {"a": "FP32", "b": "FP16", "c": "FP16"}


def test_a_later_pass_finds_what_the_first_refused(instance_path):
    problem = load_problem(instance_path("bertb-native"))
    found = []
    for passes in (1, None):
        state = fast_start(problem, problem.devices[0], math.inf)
        recover(state, passes=passes, deadline=math.inf)
        found.append(evaluate(problem, Plan(problem="p", devices={problem.devices[0].name: state.choices()})).objective)
    assert problem.optimum.objective <= found[1] < found[0]


def test_the_default_is_near_the_optimum_where_the_papers_is_not(instance_path):
    problem = load_problem(instance_path("bertb-native"))
    plain, priced = (solve(problem, method) for method in ("qsync", "greedy"))
    assert priced.objective <= 1.01 * problem.optimum.objective < plain.objective
    assert priced.bound <= problem.optimum.objective * (1 + 1e-9)


def test_the_start_is_the_fastest_plan_and_not_the_lowest():
    problem = cast_coupling().problem
    device = problem.devices[0]
    tables = {**device.operators, "b": {"FP32": device.operators["b"]["FP32"]}}
    device = replace(device, operators=tables, memory_limit_kib=10**6)
    state = fast_start(replace(problem, devices=(device,)), device, math.inf)
    assert state.choices() == dict.fromkeys("abc", "FP32")


def test_qsync_searches_for_the_fastest_plan_where_descent_finds_no_start(monkeypatch):
    """A start that breaks the limits must not end as a claim of infeasibility."""
    problem = chain().problem

    def lost(problem, device, deadline):
        return DeviceState(problem, device, dict.fromkeys("abc", "FP32"))

    monkeypatch.setattr(paper_greedy, "fast_start", lost)
    solution = solve(problem, "qsync")
    assert solution.objective == 0.25
    assert solution.termination is TerminationStatus.FEASIBLE


def test_greedy_without_time_still_holds_a_plan_and_says_so(instance_path):
    problem = load_problem(instance_path("bertl-mix"))
    solution = solve(problem, time_limit_s=1e-4)
    assert solution.termination is TerminationStatus.TIME_LIMIT
    assert solution.evaluation.feasible


def test_exhaustive_refuses_what_is_too_large(instance_path):
    with pytest.raises(UnsupportedError, match=r"would evaluate .* plans for device 'L4#0'.*use method 'exact'"):
        solve(load_problem(instance_path("bertb-fp8")), "exhaustive")


def test_exhaustive_without_time():
    solution = solve(diamond().problem, "exhaustive", time_limit_s=1e-9)
    assert solution.termination is TerminationStatus.TIME_LIMIT


def test_exact_without_a_solver_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr("qsync_opt.formulations.linear.solver.default_solver", lambda: None)
    with pytest.raises(NotInstalledError, match=r"pip install 'qsync-opt\[solvers\]'"):
        solve(chain().problem, "ilp")


class _Lying:
    """Says what it is told about every program."""

    name, version, continuous = "lying", "1", True

    def __init__(self, **result):
        self.result = result

    def solve(self, model, options):
        told = {"status": LinearStatus.OPTIMAL, "values": None, "bound": None, "native": "told so", **self.result}
        return LinearResult(**told)


def test_a_solver_that_denies_a_plan_at_hand_is_an_error():
    with pytest.raises(SolverError, match=r"infeasible \(told so\) that has a plan at hand"):
        solve(chain().problem, "ilp", solver=_Lying(status=LinearStatus.INFEASIBLE))


@pytest.mark.parametrize("status", [LinearStatus.ERROR, LinearStatus.UNBOUNDED])
def test_a_failing_solver_is_an_error(status):
    with pytest.raises(SolverError, match="failed: told so"):
        solve(chain().problem, "ilp", solver=_Lying(status=status))


class _Sloppy:
    """Returns the plan that is best without limits, as if its tolerances were huge."""

    name, version, continuous = "sloppy", "1", True

    def solve(self, model, options):
        values = [0.0] * len(model.columns)
        for i, column in enumerate(model.columns):
            values[i] = 1.0 if column.name.endswith(",FP32]") else 0.0
        return LinearResult(status=LinearStatus.OPTIMAL, values=tuple(values), bound=0.0, native="sloppy")


def test_plans_beyond_the_limits_are_never_passed_on():
    with pytest.raises(SolverError, match=r"keeps returning plans for 'chain/T4' that exceed limits \(.*memory by 10"):
        solve(chain().problem, "ilp", solver=_Sloppy())


def test_a_solver_out_of_time_leaves_the_greedy_plan_and_a_bound():
    solution = solve(chain().problem, "ilp", solver=_Lying(status=LinearStatus.LIMIT, bound=100.0))
    assert solution.termination is TerminationStatus.TIME_LIMIT
    # The told bound is 100 thousandths of the incumbent.
    assert (solution.objective, solution.bound) == (0.25, pytest.approx(0.025))


def test_infeasibility_that_a_solver_proves_is_explained(monkeypatch):
    solver = _Lying(status=LinearStatus.INFEASIBLE)
    assert "cannot be met by any plan" in solve(no_memory().problem, "ilp", solver=solver).reason
    monkeypatch.setattr(whole_program, "prove_infeasible", lambda *_: None)
    solution = solve(no_memory().problem, "ilp", solver=solver)
    assert solution.termination is TerminationStatus.INFEASIBLE
    assert "no time to find out which limit" in solution.reason


@pytest.mark.parametrize("above_ns", [-1, 0, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_where_no_plan_was_found_the_search_starts_from_the_fastest_one(seed, above_ns, monkeypatch):
    """As under the fastest plan's own time and a memory limit that is nearly as tight."""
    problem = stacked_problem(2, seed=seed)
    least_ns = fastest(replace(problem, latency_limit_ns=NO_LIMIT_NS)).iteration_ns
    tight = replace(problem, latency_limit_ns=least_ns + above_ns)
    plain = DeviceSearch.advance
    monkeypatch.setattr(
        DeviceSearch, "advance", lambda self, *args, start=None, **how: start and plain(self, *args, start=start, **how)
    )
    solution = solve(tight, "greedy")
    if above_ns < 0:
        assert solution.termination is TerminationStatus.INFEASIBLE
        assert "latency limit" in solution.reason
        return
    assert evaluate(tight, solution.plan).feasible
