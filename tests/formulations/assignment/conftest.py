"""Random assignment problems, and the truth about them by enumeration."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from qsync_opt.formulations.assignment import AssignmentModel, Derived, assemble
from qsync_opt.formulations.assignment.core import Core


def make_model(seed: int, *, nodes: int = 6, rows: int = 2, density: float = 0.5, joins: int = 1) -> AssignmentModel:
    """Random graph, costs, nested rows and joins; limits between the least and the most."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, size=nodes).tolist()
    derived, ties = [], []
    for _ in range(joins):
        first, second = sorted(rng.choice(len(sizes), size=2, replace=False).tolist())
        a, b = sizes[first], sizes[second]
        node = len(sizes)
        sizes.append(a * b)
        table = tuple(tuple(i * b + k for k in range(b)) for i in range(a))
        group = tuple(max(i, k) for i in range(a) for k in range(b))
        derived.append(Derived(node=node, first=first, second=second, label_AB=table, group_L=group))
        states = np.arange(a * b)
        ties.append((first, node, np.arange(a)[:, None] == states // b))
        ties.append((second, node, np.arange(b)[:, None] == states % b))
    size = np.array(sizes)
    count = int(size.sum())
    owner = np.repeat(np.arange(len(sizes)), size)
    label = np.concatenate([np.arange(s) for s in sizes])
    node_terms = [(owner, label, np.full(count, load), rng.integers(0, 50, count)) for load in range(rows)]
    pairs = [p for p in itertools.combinations(range(len(sizes)), 2) if rng.random() < density]
    raw, one, two, loads, values = [], [], [], [], []
    for number, (a, b) in enumerate(pairs):
        for i, k in itertools.product(range(sizes[a]), range(sizes[b])):
            raw.append(number)
            one.append(i)
            two.append(k)
            loads.append(int(rng.integers(0, rows)))
            values.append(int(rng.integers(0, 30)))
    objective = np.round(rng.lognormal(0, 2, count), 3) * (rng.random(count) < 0.8)
    model = assemble(
        sizes=size,
        node_terms=node_terms,
        edge_pair=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        edge_terms=tuple(np.array(x, dtype=np.int64) for x in (raw, one, two, loads, values)),
        ties=ties,
        node_objective=objective,
        rows=np.tril(np.ones((rows, rows), dtype=np.int64)),
        limits=np.zeros(rows, dtype=np.int64),
        derived=tuple(derived),
    )
    totals = np.array([model.rows_RS @ model.loads(x) for x in labellings(model)])
    share = rng.uniform(0.0, 0.6)
    model.limits_R[:] = (totals.min(axis=0) + share * np.ptp(totals, axis=0)).astype(np.int64)
    return model


def labellings(model: AssignmentModel) -> list[np.ndarray]:
    """Every labelling whose joins follow their parents."""
    joins = {item.node for item in model.derived}
    free = [range(size) if n not in joins else range(1) for n, size in enumerate(model.sizes_N.tolist())]
    return [model.complete(np.array(x, dtype=np.int64)) for x in itertools.product(*free)]


def core_values(core: Core, labels_N: np.ndarray) -> tuple[float, np.ndarray]:
    """Objective and rows of a labelling, by the tables."""
    objective, rows = core.objective, core.excess_R.copy()
    for node, label in zip(core.nodes, labels_N.tolist(), strict=True):
        objective, rows = objective + node.objective_A[label], rows + node.rows_AR[label]
    for edge in core.edges:
        a, b = labels_N[edge.first], labels_N[edge.second]
        objective, rows = objective + edge.objective_AB[a, b], rows + edge.rows_ABR[a, b]
    return float(objective), rows


def core_truth(core: Core) -> float:
    """Least objective within the limits, by enumeration."""
    best = np.inf
    for choice in itertools.product(*(range(len(node.labels_A)) for node in core.nodes)):
        objective, rows = core_values(core, np.array(choice))
        if (rows <= 0).all():
            best = min(best, objective)
    return best


@pytest.fixture(scope="session")
def random_model() -> Callable[..., AssignmentModel]:
    return make_model


@pytest.fixture(scope="session")
def every_labelling() -> Callable[[AssignmentModel], list[np.ndarray]]:
    return labellings


@pytest.fixture(scope="session")
def values() -> Callable[[Core, np.ndarray], tuple[float, np.ndarray]]:
    return core_values


@pytest.fixture(scope="session")
def truth() -> Callable[[Core], float]:
    return core_truth
