"""Maxima over rows: in the objective, as limits, and by every solver that takes them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.assignment import BoundAndFix, Effort, Maximum, labels_at, linear_program
from qsync_opt.formulations.linear import LinearOptions, LinearStatus
from qsync_opt.registry import Kind, create

EXAMPLES = settings(max_examples=60)


def _best(model, labellings):
    """Least objective within the limits by enumeration; infinite if there is none."""
    feasible = [x for x in labellings if (model.excess(x) <= 0).all()]
    return min((model.objective(x) for x in feasible), default=np.inf)


def _solved(model):
    """Least objective by the linear program."""
    result = create(Kind.SOLVER, "ortools").solve(linear_program(model), LinearOptions())
    if result.status is not LinearStatus.OPTIMAL:
        return np.inf
    labels = labels_at(model, result.values)
    assert (model.excess(labels) <= 0).all()
    return model.objective(labels)


def _with_maxima(seed, random_model):
    rng = np.random.default_rng(seed)
    model = random_model(seed, nodes=5, rows=3, joins=seed % 2)
    rows = [rng.integers(0, 2, (int(rng.integers(1, 4)), 3)) for _ in range(int(rng.integers(1, 3)))]
    return replace(model, maxima=tuple(Maximum(rows_KS=each, weight=float(rng.choice([0.1, 1.0]))) for each in rows))


@given(seed=st.integers(0, 10**6))
@example(seed=834)  # presolved, HiGHS called another plan optimal
@example(seed=2012)  # ... and this one infeasible
@EXAMPLES
def test_the_linear_program_minimises_maxima(seed, random_model, every_labelling):
    pytest.importorskip("ortools")
    model = _with_maxima(seed, random_model)
    assert _solved(model) == pytest.approx(_best(model, every_labelling(model)), rel=1e-6, abs=1e-6)


@given(seed=st.integers(0, 10**6))
@EXAMPLES
def test_a_maximum_is_limited_exactly(seed, random_model, every_labelling):
    rng = np.random.default_rng(seed)
    model = random_model(seed, nodes=5, rows=3, joins=seed % 2)
    rows, rest = rng.integers(0, 2, (3, 3)), rng.integers(0, 2, 3)
    labellings = every_labelling(model)
    values = [int((rows @ model.loads(x)).max() + rest @ model.loads(x)) for x in labellings]
    limit = int(rng.integers(min(values), max(values) + 1))
    limited = model.with_maximum_at_most(rows, limit, rest)
    kept = [x for x, value in zip(labellings, values, strict=True) if value <= limit]
    truth = _best(model, kept)
    assert _best(limited, labellings) == truth
    outcome = BoundAndFix(limited).solve(Effort())
    assert outcome.objective == pytest.approx(truth, rel=1e-6)
    assert outcome.proved_infeasible == (truth == np.inf)


def test_bound_and_fix_refuses_to_minimise_a_maximum(random_model):
    with pytest.raises(UnsupportedError, match="cannot minimise a maximum, but the model has"):
        BoundAndFix(_with_maxima(3, random_model))
