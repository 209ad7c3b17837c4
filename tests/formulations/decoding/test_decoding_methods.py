"""Every method finds the optimum of small problems; bounds hold; large ones end with a bound."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.cli import main
from qsync_opt.decoding import Acceptance, Choice, Draft, Problem, Regime
from qsync_opt.errors import UnsupportedError

DATA = Path(__file__).resolve().parents[2] / "data" / "decoding"
PUBLIC = sorted(DATA.glob("decoding-public-*.json"))
METHODS = ("default", "exact", "ilp", "exhaustive")


def random_problem(seed, regimes=3, drafts=3, lengths=2):
    random = np.random.default_rng(seed)
    names = [f"d{i}" for i in range(drafts)]
    memory = {name: Draft(memory_kib=int(random.integers(0, 100))) for name in names}
    made = []
    for r in range(regimes):
        choices = [
            Choice(
                draft=name,
                length=int(length),
                draft_ns=int(random.integers(0, 90)),
                verify_ns=int(random.integers(90, 200)),
                acceptance=Acceptance(low=float(random.random())),
            )
            for name in names
            for length in range(1, lengths + 1)
            if random.random() < 0.8
        ]
        made.append(
            Regime(name=f"r{r}", weight=float(random.random()), plain_ns=int(random.integers(50, 200)), choices=choices)
        )
    total = sum(draft.memory_kib for draft in memory.values())
    return Problem(
        name=f"random{seed}",
        memory_kib=int(random.random() * (total + 1)),
        confidence="low",
        drafts=memory,
        regimes=tuple(made),
    )


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: path.stem)
@pytest.mark.parametrize("method", METHODS)
def test_public_optima(path, method):
    problem = qsync_opt.load_problem(path)
    solution = qsync_opt.solve(problem, method)
    assert solution.termination == "optimal"
    assert solution.objective == pytest.approx(problem.optimum.objective, rel=1e-9)
    assert solution.bound <= solution.objective


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_search_equals_brute_force(seed):
    problem = random_problem(seed)
    best = qsync_opt.solve(problem, "exhaustive").objective
    for method in ("default", "exact"):
        assert qsync_opt.solve(problem, method).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_integer_program_equals_search_on_more_drafts(seed):
    problem = random_problem(seed, regimes=8, drafts=10, lengths=3)
    exact = qsync_opt.solve(problem, "exact")
    program = qsync_opt.solve(problem, "ilp")
    assert exact.termination == program.termination == "optimal"
    assert program.objective == pytest.approx(exact.objective, rel=1e-6)


@pytest.mark.parametrize("solver", ["ortools", "pulp", "cp-sat"])
def test_solvers_agree(solver):
    pytest.importorskip("pulp" if solver == "pulp" else "ortools")
    problem = random_problem(5, regimes=6, drafts=8)
    expected = qsync_opt.solve(problem, "exact").objective
    assert qsync_opt.solve(problem, "ilp", solver=solver).objective == pytest.approx(expected, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_more_memory_and_better_acceptance_never_hurt(seed, more):
    problem = random_problem(seed)
    objective = qsync_opt.solve(problem, "exact").objective
    roomy = replace(problem, memory_kib=problem.memory_kib + more)
    assert qsync_opt.solve(roomy, "exact").objective <= objective * (1 + 1e-12)
    better = replace(
        problem,
        regimes=tuple(
            replace(
                regime,
                choices=tuple(
                    replace(c, acceptance=Acceptance(low=(1 + c.acceptance.low) / 2)) for c in regime.choices
                ),
            )
            for regime in problem.regimes
        ),
    )
    assert qsync_opt.solve(better, "exact").objective <= objective * (1 + 1e-12)
    plain = sum(regime.weight * regime.plain_ns for regime in problem.regimes)
    assert objective <= plain * (1 + 1e-12)


def test_large_problems_end_with_a_bound():
    problem = random_problem(7, regimes=30, drafts=30, lengths=2)
    solution = qsync_opt.solve(problem)
    assert solution.plan is not None
    assert solution.gap < 0.05
    loose = qsync_opt.solve(problem, "exact", gap=0.05)
    assert loose.gap <= 0.05


def test_a_time_limit_keeps_the_plan_and_claims_nothing():
    problem = random_problem(7, regimes=60, drafts=60, lengths=4)
    solution = qsync_opt.solve(problem, "exact", time_limit_s=1e-6)
    assert solution.plan is not None
    assert solution.bound <= solution.objective
    assert solution.termination in ("time_limit", "optimal")


def test_nothing_to_choose_is_plain_decoding():
    problem = replace(random_problem(1), memory_kib=0, drafts={f"d{i}": Draft(memory_kib=1) for i in range(3)})
    for method in METHODS:
        solution = qsync_opt.solve(problem, method)
        assert set(solution.plan.choices.values()) == {None}
        assert solution.termination == "optimal"


def test_exhaustive_refuses_large_problems():
    with pytest.raises(UnsupportedError, match="use method 'exact'"):
        qsync_opt.solve(random_problem(7, regimes=60, drafts=10), "exhaustive")


def test_commands(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["decoding", "solve", str(PUBLIC[0]), "--output", str(plan), "--json"]) == 0
    solved = json.loads(capsys.readouterr().out)
    assert main(["decoding", "evaluate", str(PUBLIC[0]), str(plan), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert evaluated["objective"] == pytest.approx(solved["objective"])
    assert main(["decoding", "evaluate", str(PUBLIC[2]), str(plan), "--json"]) in (2, 3)
    spoiled = json.loads(PUBLIC[0].read_text()) | {"confidence": "none"}
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(spoiled))
    capsys.readouterr()
    assert main(["decoding", "solve", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
