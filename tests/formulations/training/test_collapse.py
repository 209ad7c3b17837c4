"""Collapsed models count exactly what the independent evaluation counts."""

import random

import numpy as np
import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.formulations.training import collapse, peers_ns
from qsync_opt.testing import chain, diamond, random_problem
from qsync_opt.training import evaluate_device, iteration_time, propagate


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_costs_what_it_is_evaluated_at(seed):
    problem = random_problem(random.Random(seed))
    rng = np.random.default_rng(seed)
    formats = tuple(problem.formats)
    for device in problem.devices:
        collapsed = collapse(problem, device)
        model = collapsed.model
        for _ in range(5):
            labels = model.complete(rng.integers(0, model.sizes_N) if model.num_nodes else model.sizes_N)
            choices = collapsed.choices(labels)
            assert (collapsed.labels(choices) == labels).all()
            resolved = propagate(problem, device, choices)
            assert [formats[p] for p in collapsed.precisions(labels)] == [resolved[o.name] for o in problem.operators]
            truth = evaluate_device(problem, device, resolved)
            alone_ns = iteration_time(problem, (truth,))[1]
            excess = model.excess(labels)
            assert model.objective(labels) + collapsed.constant_objective == pytest.approx(truth.sensitivity)
            assert excess[-1] == truth.memory_kib - device.memory_limit_kib
            late = bool((excess[:-1] > 0).any()) or peers_ns(problem) > problem.latency_limit_ns
            assert late == (alone_ns > problem.latency_limit_ns)


def test_tied_operators_become_one_node():
    problem = diamond().problem
    names = [operator.name for operator in problem.adjustable]
    tables = problem.devices[0].operators
    alike = [name for name in names if set(tables[name]) == set(tables[names[0]])]
    collapsed = collapse(problem, problem.devices[0], tied=[alike])
    labels = collapsed.model.complete(collapsed.model.sizes_N - 1)
    assert len({collapsed.choices(labels)[name] for name in alike}) == 1


def test_tied_operators_must_be_adjustable():
    problem = chain().problem
    with pytest.raises(ProblemError, match="'nobody' is no adjustable operator"):
        collapse(problem, problem.devices[0], tied=[["nobody"]])
