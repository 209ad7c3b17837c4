"""Joins with many inputs and many readers: dense blocks, mixtures of experts, casts counted once."""

import sys
from pathlib import Path

import numpy as np
import pytest

from qsync_opt import solve
from qsync_opt.formulations.assignment import relax
from qsync_opt.formulations.training import collapse, peers_ns
from qsync_opt.training import evaluate_device, iteration_time, propagate

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    from families import Recipe, generate
finally:
    sys.path.remove(BENCHMARKS)

KINDS = [
    Recipe(family="dense", operators=9),
    Recipe(family="dense", operators=9, formats=4, native=True),
    Recipe(family="dense", operators=9, formats=4, sharing="producer", seed=1),
    Recipe(family="moe", operators=40, sharing="producer", formats=4),
    Recipe(family="moe", operators=40, seed=2),
]


@pytest.mark.parametrize("recipe", KINDS, ids=lambda recipe: recipe.name)
def test_every_plan_costs_what_it_is_evaluated_at(recipe):
    problem = generate(recipe)
    rng = np.random.default_rng(0)
    formats = tuple(problem.formats)
    for device in problem.devices:
        collapsed = collapse(problem, device)
        model = collapsed.model
        for _ in range(10):
            labels = model.complete(rng.integers(0, model.sizes_N))
            choices = collapsed.choices(labels)
            assert (collapsed.labels(choices) == labels).all()
            resolved = propagate(problem, device, choices)
            assert [formats[p] for p in collapsed.precisions(labels)] == [resolved[o.name] for o in problem.operators]
            truth = evaluate_device(problem, device, resolved)
            excess = model.excess(labels)
            assert model.objective(labels) + collapsed.constant_objective == pytest.approx(truth.sensitivity)
            assert excess[-1] == truth.memory_kib - device.memory_limit_kib
            late = bool((excess[:-1] > 0).any()) or peers_ns(problem) > problem.latency_limit_ns
            assert late == (iteration_time(problem, (truth,))[1] > problem.latency_limit_ns)


@pytest.mark.parametrize("sharing", ["edge", "producer"])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_of_a_dense_block_is_that_of_exhaustive_search(seed, sharing):
    problem = generate(Recipe(family="dense", operators=9, formats=2, seed=seed, sharing=sharing))
    known = solve(problem, "exhaustive")
    for method in ("exact", "greedy"):
        found = solve(problem, method)
        assert found.objective == pytest.approx(known.objective, rel=1e-9)
        assert found.bound <= known.objective * (1 + 1e-9)


def test_concatenations_that_go_on_share_their_joins():
    problem = generate(Recipe(family="dense", operators=50, formats=4, latency=0.5))
    collapsed = collapse(problem, problem.devices[0])
    joins = {(item.first, item.second) for item in collapsed.model.derived}
    assert len(joins) == len(collapsed.model.derived)
    relaxation = relax(collapsed.model)
    assert relaxation.entry_Y is None  # minimised exactly, no node was split
    assert relaxation.elimination.schedule.end < 20_000
