import importlib.metadata

import pytest

from qsync_opt import registry
from qsync_opt.errors import NotInstalledError, UnsupportedError
from qsync_opt.registry import BUILT_IN, Entry, Feature, Kind, create, default_solver, entries, features, find, require


@pytest.fixture
def foreign(monkeypatch):
    """Pretend that other packages registered entry points."""

    def register(**points):
        def entry_points(*, group):
            found = [
                importlib.metadata.EntryPoint(name=name, value=value, group=group)
                for name, value in points.items()
                if group == "qsync_opt.formulations"
            ]
            return importlib.metadata.EntryPoints(found)

        monkeypatch.setattr(registry.importlib.metadata, "entry_points", entry_points)
        entries.cache_clear()

    yield register
    entries.cache_clear()


@pytest.mark.parametrize("entry", [e for kind in Kind for e in BUILT_IN[kind]], ids=lambda e: e.name)
def test_every_built_in_loads(entry):
    kind = next(kind for kind in Kind if entry in BUILT_IN[kind])
    methods = {
        Kind.INDICATOR: "sensitivities",
        Kind.COST_MODEL: "profile",
        Kind.RUNTIME: "apply",
        Kind.QUANTIZER: "variance",
        Kind.CHECKPOINT_WRITER: "save",
    }
    factory = entry.load()
    made = factory if kind is Kind.CHECKPOINT_WRITER else factory()  # a writer is given its folder
    assert callable(getattr(made, methods.get(kind, "solve")))


def test_unknown_names_get_the_nearest_one():
    with pytest.raises(
        UnsupportedError, match=r"unknown solver 'ortool'; did you mean 'ortools'\?; allowed are ortools"
    ):
        find(Kind.SOLVER, "ortool")


def test_an_instance_is_accepted_wherever_a_name_is():
    instance = object()
    assert create(Kind.SOLVER, instance) is instance
    assert features(Kind.SOLVER, instance) == frozenset()


def test_missing_packages_give_the_install_line():
    entry = Entry(name="s", target="m:a", features=frozenset(), packages=("no_such_package",), install="pip install s")
    assert not entry.available
    with pytest.raises(NotInstalledError, match="pip install s"):
        entry.load()


def test_default_solver_is_the_first_available(monkeypatch):
    assert default_solver() == "ortools"
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None if name == "ortools" else object())
    assert default_solver() == "pulp"
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert default_solver() is None


def test_refusals_list_who_has_the_feature():
    require(Kind.FORMULATION, "exact", Feature.GAP)
    with pytest.raises(
        UnsupportedError, match=r"'exhaustive' lacks a feature: uses a solver; .*: greedy, qsync, exact, ilp"
    ):
        require(Kind.FORMULATION, "exhaustive", Feature.SOLVER)


def test_other_packages_register_by_entry_point(foreign):
    foreign(mine="qsync_opt.formulations.training.exhaustive:ExhaustiveFormulation")
    assert "mine" in entries(Kind.FORMULATION)
    assert type(create(Kind.FORMULATION, "mine")).__name__ == "ExhaustiveFormulation"
    assert features(Kind.FORMULATION, "mine") == frozenset()


def test_a_name_claimed_twice_is_refused_and_shows_both(foreign):
    foreign(exact="other.package:Exact")
    with pytest.raises(UnsupportedError, match=r"'exact' is claimed by qsync_opt and by other\.package:Exact"):
        entries(Kind.FORMULATION)
