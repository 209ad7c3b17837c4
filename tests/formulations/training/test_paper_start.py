import itertools
import math
from dataclasses import replace

import pytest

from qsync_opt.formulations.training import DeviceState, published_start, subgraphs
from qsync_opt.model import Role
from qsync_opt.testing import cast_coupling, chain, diamond, no_memory
from qsync_opt.training import Problem, TerminationStatus, solve

ROOMY = 10**9


def _names(problem: Problem) -> list[list[str]]:
    return [[problem.operators[p].name for p in block] for block in subgraphs(problem, problem.devices[0])]


def _with_memory(problem: Problem, limit_kib: int) -> Problem:
    device = replace(problem.devices[0], memory_limit_kib=limit_kib)
    return replace(problem, devices=(device,), latency_limit_ns=10**15)


def test_the_graph_is_cut_where_all_that_follows_reads_one_operator() -> None:
    assert _names(chain().problem) == [["a"], ["b"], ["c"]]
    problem = diamond().problem
    blocks = _names(problem)
    branching = next(
        o.name for o in problem.operators if sum(o.name in other.inputs for other in problem.operators) > 1
    )
    assert [name for block in blocks for name in block] == [
        o.name for o in problem.operators if o.role is Role.ADJUSTABLE and len(problem.devices[0].operators[o.name]) > 1
    ]
    # Branches that meet again are one block; what they branch from ends the one before.
    assert all(name != branching for block in blocks for name in block[:-1])
    assert any(len(block) > 1 for block in blocks)


@pytest.mark.parametrize("make", [chain, diamond, cast_coupling])
def test_with_one_block_the_start_is_the_fastest_of_all_assignments(make, monkeypatch) -> None:
    problem = _with_memory(make().problem, ROOMY)
    device = problem.devices[0]
    every = [position for block in subgraphs(problem, device) for position in block]
    monkeypatch.setattr("qsync_opt.formulations.training.paper_start.subgraphs", lambda *_: [every])
    state = published_start(problem, device, math.inf)
    names = [o.name for o in problem.adjustable]
    all_ns = [
        DeviceState(problem, device, dict(zip(names, choice, strict=True))).compute_ns
        for choice in itertools.product(*(device.operators[name] for name in names))
    ]
    assert state.compute_ns == min(all_ns)


def test_blocks_share_the_memory_in_proportion_to_what_they_can_save() -> None:
    instance = chain()
    problem = instance.problem
    device = problem.devices[0]
    lowest = DeviceState(problem, device, dict.fromkeys("abc", "FP16")).memory_kib
    highest = DeviceState(problem, device, dict.fromkeys("abc", "FP32")).memory_kib
    assert lowest < highest
    for limit_kib in range(lowest, highest + 1):
        limited = _with_memory(problem, limit_kib)
        assert published_start(limited, limited.devices[0], math.inf).memory_kib <= limit_kib


def test_the_published_allocator_solves_and_says_where_it_cannot() -> None:
    solution = solve(chain().problem, "qsync-published")
    assert (solution.termination, solution.objective) == (TerminationStatus.FEASIBLE, 0.25)
    failed = solve(no_memory().problem, "qsync-published")
    assert failed.plan is None
    assert failed.termination is TerminationStatus.ERROR
    assert "which proves nothing; use 'qsync' or 'greedy'" in failed.reason


def test_it_is_never_better_than_the_optimum(instance_path) -> None:
    from qsync_opt.training import load_problem

    problem = load_problem(instance_path("bertb-native"))
    solution = solve(problem, "qsync-published")
    if solution.plan is not None:
        assert solution.objective >= problem.optimum.objective * (1 - 1e-9)
