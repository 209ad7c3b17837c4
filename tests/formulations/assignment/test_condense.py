"""Condensed cores say the same as the cores they come from."""

import itertools

import numpy as np
import pytest

from qsync_opt.formulations.assignment import DualResult, Priced, assemble, split_count
from qsync_opt.formulations.assignment.core import Condensed, Core, CoreEdge, CoreNode, close, condense, search
from qsync_opt.registry import Kind, create

ROWS = 2


def make_core(seed: int, copies: int) -> Core:
    """Copies of one random part of two joined nodes, and two random nodes of their own; only limits join them."""
    rng = np.random.default_rng(seed)

    def node(number: int) -> CoreNode:
        labels = int(rng.integers(2, 4))
        objective = np.concatenate([[0.0], np.round(rng.uniform(-3, 3, labels - 1), 2)])
        rows = rng.integers(-9, 10, (labels, ROWS))
        rows[0] = 0
        # At prices of 1 the base is the least: what a label saves in rows it costs more in the objective.
        objective[1:] = np.maximum(objective[1:], -rows[1:].sum(axis=1) + rng.uniform(0, 2, labels - 1))
        return CoreNode(number, np.arange(labels), objective, rows, objective + rows.sum(axis=1))

    one, two = node(0), node(1)
    shape = (len(one.labels_A), len(two.labels_A))
    objective_AB, rows_ABR = np.zeros(shape), np.zeros((*shape, ROWS), dtype=np.int64)
    rows_ABR[1:, 1:] = rng.integers(0, 5, (shape[0] - 1, shape[1] - 1, ROWS))
    if seed % 3 == 0:
        objective_AB[-1, -1] = np.inf
    nodes, edges = [], []
    for copy in range(copies):
        for item in (one, two):
            nodes.append(CoreNode(len(nodes), item.labels_A, item.objective_A, item.rows_AR, item.priced_A))
        edges.append(CoreEdge(2 * copy, 2 * copy + 1, objective_AB, rows_ABR, objective_AB + rows_ABR.sum(axis=2)))
    for _ in range(2):
        nodes.append(node(len(nodes)))
    excess = rng.integers(1, 12, ROWS)
    prices = np.ones(len(excess))
    return Core(np.zeros(len(nodes), dtype=np.int64), 5.0, 5.0 + float(excess.sum()), excess, nodes, edges, prices)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_labelling_is_the_same(seed, merge, values, truth):
    core = make_core(seed, copies=3)
    best = truth(core)
    small = condense(core, np.inf, merge=merge)
    assert isinstance(small, Condensed)
    assert [len(copies) for copies in small.classes] == [3]
    found = search(small, np.inf, 100_000, spread=True)
    if best == np.inf:
        assert found.labels_N is None
        return
    assert found.objective == pytest.approx(best)
    objective, rows = values(core, found.labels_N)
    assert objective == pytest.approx(best)
    assert (rows <= 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_solver_counts_copies(seed, values):
    pytest.importorskip("ortools")
    core = make_core(seed, copies=4)
    small = condense(core, np.inf, merge=False)
    found = close(small, np.inf, create(Kind.SOLVER, "ortools"), 20.0)
    best = search(core, np.inf, 100_000, spread=True)
    assert (found.labels_N is None) == (best.labels_N is None)
    if found.labels_N is not None:
        assert values(core, found.labels_N)[0] == pytest.approx(best.objective, rel=1e-6)
        assert (values(core, found.labels_N)[1] <= 0).all()


def test_what_is_too_dear_goes_and_the_best_stays(truth):
    for seed in range(12):
        core = make_core(seed, copies=3)
        best = truth(core)
        if best < np.inf:
            found = search(condense(core, best * (1 + 1e-6) + 1e-6, merge=True), np.inf, 100_000, spread=True)
            assert found.objective == pytest.approx(best)


def test_many_copies_are_counted_in_two_digits():
    core = make_core(1, copies=400)
    small = condense(core, np.inf, merge=True)
    assert len(small.nodes) < 40
    labels = small.labels(np.array([len(node.labels_A) - 1 if c < 2 else 0 for c, node in enumerate(small.nodes)]))
    assert labels.shape == (802,)


def test_a_split_by_count_leaves_every_count_on_one_side():
    sizes = np.full(4, 2)
    empty = np.zeros(0, dtype=np.int64)
    model = assemble(
        sizes=sizes, 
        node_terms=[(np.arange(4), np.ones(4, dtype=np.int64), np.zeros(4, dtype=np.int64), np.full(4, -3))],
        edge_pair=np.zeros((0, 2), dtype=np.int64), edge_terms=(empty,) * 5, ties=[],
        node_objective=np.tile([0.0, 1.0], 4), rows=np.ones((1, 1), dtype=np.int64), limits=np.array([-7]), derived=(),
    )  # fmt: skip
    node = CoreNode(0, np.arange(2), np.array([0.0, 1.0]), np.array([[0], [-3]]), np.array([0.0, 0.0]))
    nodes = [CoreNode(n, node.labels_A, node.objective_A, node.rows_AR, node.priced_A) for n in range(4)]
    core = Core(np.zeros(4, dtype=np.int64), 0.0, 0.0, np.array([7]), nodes, [], np.ones(1))
    small = condense(core, np.inf, merge=True)
    plans = [Priced(np.full(4, label), 4.0 * label, np.array([7 - 12 * label])) for label in (0, 1)]
    # On average 7/12 of the four copies change: more than two, fewer than three.
    dual = DualResult(7 / 3, np.array([1 / 3]), plans, np.array([5 / 12, 7 / 12]))
    at_least, at_most = split_count(model, small, dual)
    assert sorted(at_least.tolist()) == [0, 2, 4]  # three copies may not stay
    assert sorted(at_most.tolist()) == [5, 7]  # two copies may not change
    counts = {0: 0, 1: 0}
    for labels in itertools.product(range(2), repeat=4):
        chosen = model.chosen(np.array(labels))
        for side, forbidden in enumerate((at_least, at_most)):
            counts[side] |= (not np.isin(chosen, forbidden).any()) << sum(labels)
    assert counts[0] | counts[1] == 0b11111
    assert not counts[0] & counts[1]
