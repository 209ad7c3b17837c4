from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

import qsync_opt
from qsync_opt import registry, systems
from qsync_opt.errors import ProblemError, SolverError, UnsupportedError
from qsync_opt.solving import Answer, Solution, SolveOptions, TerminationStatus, check_claim, relative_gap


@dataclass(frozen=True)
class Knapsack:
    """Values and weights of things, and the most weight: a second kind of problem."""

    values: tuple[float, ...]
    weights: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Packed:
    objective: float
    feasible: bool
    violations: tuple[str, ...] = ()


class Greedy:
    FEATURES = frozenset()

    def pack(self, problem, limit):
        chosen, weight = [], 0
        for index in sorted(range(len(problem.values)), key=lambda i: -problem.values[i] / problem.weights[i]):
            if weight + problem.weights[index] <= limit:
                chosen.append(index)
                weight += problem.weights[index]
        return tuple(sorted(chosen))


class Liar(Greedy):
    def pack(self, problem, limit):
        return tuple(range(len(problem.values)))


def pack(problem, method, **options):
    SolveOptions(**options)
    formulation = registry.create(registry.Kind.FORMULATION, method, "packing")
    plan = formulation.pack(problem, problem.limit)
    weight = sum(problem.weights[i] for i in plan)
    evaluation = Packed(
        objective=-sum(problem.values[i] for i in plan),
        feasible=weight <= problem.limit,
        violations=() if weight <= problem.limit else (f"weight {weight} exceeds {problem.limit}",),
    )
    check_claim(Answer(termination=TerminationStatus.FEASIBLE), evaluation, str(method))
    return Solution(
        termination=TerminationStatus.FEASIBLE, plan=plan, evaluation=evaluation, bound=None, method=str(method),
        solver=None, build_seconds=0.0, solve_seconds=0.0,
    )  # fmt: skip


PACKING = systems.System(
    name="packing",
    description="what goes into a bag",
    problem=f"{__name__}:Knapsack",
    plan=f"{__name__}:pack",
)


@pytest.fixture
def packing(monkeypatch):
    """A system that another package brings, with one formulation."""
    points = {
        "qsync_opt.systems": [EntryPoint("packing", f"{__name__}:PACKING", "qsync_opt.systems")],
        "qsync_opt.formulations.packing": [EntryPoint("greedy", f"{__name__}:Greedy", "g")],
    }
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: points.get(group, []))
    # These tests are modules of pytest's own naming: load what the texts name from here.
    monkeypatch.setattr(systems, "attribute", lambda target: globals()[target.partition(":")[2]])
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.value.partition(":")[2]])
    monkeypatch.setattr(registry.Entry, "load", lambda self: globals()[self.target.partition(":")[2]])
    for cached in (systems.systems, registry.entries):
        cached.cache_clear()
    yield
    for cached in (systems.systems, registry.entries):
        cached.cache_clear()


def test_a_further_system_is_solved_by_the_same_call(packing):
    solution = qsync_opt.solve(Knapsack(values=(3.0, 2.0, 2.0), weights=(3, 2, 2), limit=4))
    assert (solution.plan, solution.objective, solution.method) == ((0,), -3.0, "greedy")
    assert (solution.termination, solution.point, solution.gap) == ("feasible", "feasible", None)
    assert solution.to_json()["objective"] == -3.0


def test_a_plan_that_breaks_a_limit_is_refused_whatever_it_is_of(packing):
    with pytest.raises(SolverError, match=r"breaks limits: weight 5 exceeds 4"):
        qsync_opt.solve(Knapsack(values=(1.0, 1.0), weights=(3, 2), limit=4), Liar())


def test_methods_are_those_of_the_system(packing):
    assert systems.system("packing").methods == ("greedy",)
    assert systems.system("training").methods[:2] == ("greedy", "qsync")
    with pytest.raises(UnsupportedError, match=r"unknown formulation 'exact'; allowed are greedy"):
        qsync_opt.solve(Knapsack(values=(1.0,), weights=(1,), limit=1), "exact")


def test_a_problem_of_no_system_is_refused():
    with pytest.raises(ProblemError, match=r"problem is a dict, but a Problem is needed: load_problem"):
        qsync_opt.solve({})


def test_an_unknown_system_or_search_is_refused_with_what_is_allowed():
    with pytest.raises(UnsupportedError, match=r"unknown system 'training2'.*allowed are training"):
        systems.system("training2")
    with pytest.raises(UnsupportedError, match=r"has no search 'slowest'; allowed are fastest"):
        systems.system("training").search("slowest")


def test_two_packages_cannot_claim_one_system(packing, monkeypatch):
    twice = [EntryPoint(name, f"{__name__}:PACKING", "g") for name in ("one", "two")]
    monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: twice)
    systems.systems.cache_clear()
    with pytest.raises(UnsupportedError, match="'packing' is claimed twice"):
        systems.systems()


@pytest.mark.parametrize("system", systems.BUILT_IN, ids=lambda system: system.name)
def test_every_text_of_a_built_in_system_names_something(system):
    for target in (system.problem, system.plan, *system.searches.values(), *filter(None, [system.commands])):
        assert systems.attribute(target) is not None
    assert system.methods
    assert system.runtime is None or registry.find(registry.Kind.RUNTIME, system.runtime)


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(2.0, 1.0, 0.5), (-2.0, -3.0, 0.5), (1.0, 2.0, 0.0), (None, 1.0, None), (1.0, None, None)],
)
def test_the_relative_gap(objective, bound, gap):
    assert relative_gap(objective, bound) == gap
