"""Each 8-bit format with a 16-bit and with an 8-bit backward pass: separate choices of every method."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.numerics import BACKWARD, FORMATS
from qsync_opt.testing import random_problem
from qsync_opt.training import Problem, TerminationStatus, evaluate, solve

seeds = st.integers(0, 2**32 - 1)


def _with_both(problem, source):
    """The problem with an 8-bit backward pass beside every 8-bit precision: faster backward, more sensitive."""
    names = [name for name in problem.formats if FORMATS[name].bits == 8]
    adjustable = {operator.name for operator in problem.adjustable}
    formats = {name: FORMATS[name].num_bytes for name in FORMATS if name.removesuffix(BACKWARD) in problem.formats}

    def widened(device):
        casts = dict(device.casts)
        for name in names:
            variant = name + BACKWARD
            for pair, cast in device.casts.items():
                casts[tuple(variant if side == name else side for side in pair)] = cast
            casts[name, variant] = casts[variant, name] = next(iter(device.casts.values()), None)
        for one in names:
            for other in names:
                if one != other:
                    casts[one + BACKWARD, other + BACKWARD] = device.casts[one, other]
        operators = {}
        for operator, table in device.operators.items():
            own = dict(table)
            if operator in adjustable:
                for name in names:
                    if name in own:
                        cost = own[name]
                        own[name + BACKWARD] = replace(
                            cost,
                            backward_ns=int(cost.backward_ns * source.uniform(0.4, 1.1)),
                            sensitivity=cost.sensitivity * source.uniform(1, 3),
                        )
            operators[operator] = own
        return replace(
            device,
            precisions={**device.precisions, **{name + BACKWARD: device.precisions[name] for name in names}},
            casts={pair: cast for pair, cast in casts.items() if cast is not None},
            operators=operators,
        )

    return replace(problem, formats=formats, devices=tuple(map(widened, problem.devices)))


@st.composite
def problems(draw):
    """A problem and the same with the 8-bit backward passes."""
    source = random.Random(draw(seeds))
    problem = random_problem(source, max_operators=5)
    while not any(FORMATS[name].bits == 8 for name in problem.formats) or len(problem.formats) < 2:
        problem = random_problem(source, max_operators=5)
    return problem, _with_both(problem, source)


def _objective(problem, method):
    solution = solve(problem, method)
    if solution.plan is None:
        assert solution.termination is TerminationStatus.INFEASIBLE, solution
        return None
    check = evaluate(problem, solution.plan)
    assert check.feasible
    assert check.objective == pytest.approx(solution.objective)
    assert solution.bound is None or solution.bound <= solution.objective * (1 + 1e-9) + 1e-300
    return solution.objective


@given(pair=problems())
@settings(max_examples=60, deadline=None)
def test_all_methods_agree(pair):
    _, both = pair
    known = _objective(both, "exhaustive")
    for method in ("exact", "ilp"):
        found = _objective(both, method)
        assert (found is None) == (known is None)
        assert found is None or found == pytest.approx(known, rel=1e-6, abs=1e-300)
    greedy = _objective(both, "greedy")
    assert (greedy is None) == (known is None)
    assert greedy is None or greedy >= known * (1 - 1e-9)


@given(pair=problems())
@settings(max_examples=60, deadline=None)
def test_more_choices_never_harm_and_old_plans_stay_valid(pair):
    half, both = pair
    before, after = solve(half, "exact"), _objective(both, "exact")
    if before.plan is not None:
        assert after is not None and after <= before.objective * (1 + 1e-9) + 1e-300
        old, new = evaluate(half, before.plan), evaluate(both, before.plan)
        assert (old.objective, old.iteration_ns, old.memory_bytes) == (
            new.objective,
            new.iteration_ns,
            new.memory_bytes,
        )


@given(pair=problems())
@settings(max_examples=20, deadline=None)
def test_files_hold_them(pair):
    _, both = pair
    assert Problem.from_json(both.to_json()) == both
