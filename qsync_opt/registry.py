"""Which plug-ins exist of each kind, and where their code is; nothing is imported until it is asked for.

Built-ins stand in the tables below. Other packages add theirs through the entry-point groups ``qsync_opt.solvers``,
``qsync_opt.formulations``, ``qsync_opt.indicators``, ``qsync_opt.cost_models`` and ``qsync_opt.runtimes``; such an
object declares what it can in a ``FEATURES`` attribute. Wherever a name is accepted, so is an instance. The contracts
are protocols (`qsync_opt.runtime`, and ``base`` beside formulations); `qsync_opt.testing` checks them.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from qsync_opt.errors import NotInstalledError, UnsupportedError
from qsync_opt.io import near_match


class Kind(enum.StrEnum):
    """What a registered name stands for."""

    SOLVER = "solver"
    FORMULATION = "formulation"
    INDICATOR = "indicator"
    COST_MODEL = "cost model"
    RUNTIME = "runtime"

    @property
    def group(self) -> str:
        """Entry-point group of other packages' plug-ins."""
        return f"qsync_opt.{self.value.replace(' ', '_')}s"


class Feature(enum.StrEnum):
    """What a formulation or solver can do."""

    PROOF = "proves optimality and infeasibility"
    SOLVER = "uses a solver"
    GAP = "stops at a relative gap"
    TIME_LIMIT = "keeps to a time limit"
    CONTINUOUS = "takes continuous columns"
    START = "starts from a plan"
    TIED = "ties operators to one precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One registered name: ``target`` is ``"module:attribute"``, ``packages`` what must be importable."""

    name: str
    target: str
    features: frozenset[Feature]
    packages: tuple[str, ...] = ()
    install: str = ""
    origin: str = "qsync_opt"

    @property
    def available(self) -> bool:
        """True if the packages it needs are installed; they are not imported to find out."""
        return all(importlib.util.find_spec(package) is not None for package in self.packages)

    def load(self) -> Callable[[], Any]:
        """Import and return the class or factory.

        Raises:
            NotInstalledError: A package is missing; the text holds the install line.
        """
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                raise NotInstalledError(f"{self.name!r} needs the package {package!r}; install it: {self.install}")
        module, _, attribute = self.target.partition(":")
        factory: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
        return factory


_SOLVERS = "pip install 'qsync-opt[solvers]'"
_LINEAR = frozenset({Feature.PROOF, Feature.GAP, Feature.TIME_LIMIT})
_CERTIFIED = frozenset({Feature.PROOF, Feature.GAP, Feature.TIME_LIMIT, Feature.START, Feature.TIED})


def _ortools(name: str, factory: str, features: frozenset[Feature]) -> Entry:
    target = f"qsync_opt.formulations.linear.solvers.ortools_solver:{factory}"
    return Entry(name=name, target=target, features=features, packages=("ortools",), install=_SOLVERS)


# Order is preference: the first available solver is the default.
BUILT_IN: Mapping[Kind, tuple[Entry, ...]] = MappingProxyType(
    {
        Kind.SOLVER: (
            _ortools("ortools", "OrtoolsSolver", _LINEAR | {Feature.CONTINUOUS}),
            Entry(
                name="pulp",
                target="qsync_opt.formulations.linear.solvers.pulp_solver:PulpSolver",
                features=_LINEAR | {Feature.CONTINUOUS},
                packages=("pulp",),
                install=_SOLVERS,
            ),
            _ortools("highs", "OrtoolsSolver", _LINEAR | {Feature.CONTINUOUS}),
            _ortools("scip", "scip_solver", _LINEAR | {Feature.CONTINUOUS}),
            _ortools("cp-sat", "cp_sat_solver", _LINEAR),
        ),
        Kind.FORMULATION: (
            Entry(
                name="greedy",
                target="qsync_opt.formulations.training.greedy:GreedyFormulation",
                features=_CERTIFIED | {Feature.SOLVER},
            ),
            Entry(
                name="qsync",
                target="qsync_opt.formulations.training.paper_greedy:QsyncFormulation",
                features=frozenset({Feature.SOLVER, Feature.TIME_LIMIT}),
            ),
            Entry(
                name="exact",
                target="qsync_opt.formulations.training.exact:ExactFormulation",
                features=_CERTIFIED | {Feature.SOLVER},
            ),
            Entry(
                name="ilp",
                target="qsync_opt.formulations.training.ilp.solve:IlpFormulation",
                features=frozenset({Feature.PROOF, Feature.SOLVER, Feature.GAP, Feature.TIME_LIMIT}),
            ),
            Entry(
                name="textbook",
                target="qsync_opt.formulations.training.textbook:TextbookFormulation",
                features=frozenset({Feature.SOLVER, Feature.GAP, Feature.TIME_LIMIT}),
            ),
            Entry(
                name="exhaustive",
                target="qsync_opt.formulations.training.exhaustive:ExhaustiveFormulation",
                features=frozenset({Feature.PROOF, Feature.TIME_LIMIT}),
            ),
        ),
        Kind.INDICATOR: tuple(
            Entry(name=name, target=f"qsync_opt.sensitivity.indicators:{factory}", features=frozenset())
            for name, factory in (
                ("statistics", "StatisticsIndicator"),
                ("weights", "WeightIndicator"),
                ("formats", "FormatIndicator"),
                # Of statistics, too, each by a weighing of its own.
                *((kind, kind) for kind in ("propagated", "probed", "loss", "progress", "depth")),
                *((kind, kind) for kind in ("hessian", "fisher", "weight", "random")),
            )
        ),
        Kind.COST_MODEL: (
            Entry(name="profile", target="qsync_opt.costs.sources:ProfileCosts", features=frozenset()),
            Entry(name="roofline", target="qsync_opt.costs.sources:RooflineCosts", features=frozenset()),
        ),
        Kind.RUNTIME: (
            Entry(
                name="torch",
                target="qsync_opt.runtimes.torch.runtime:TorchRuntime",
                features=frozenset(),
                packages=("torch", "onnxscript"),
                install="pip install 'qsync-opt[torch]'",
            ),
            Entry(
                name="onnxruntime",
                target="qsync_opt.runtimes.onnxruntime.runtime:OnnxRuntime",
                features=frozenset(),
                packages=("onnxruntime",),
                install="pip install 'qsync-opt[onnxruntime]'",
            ),
        ),
    }
)


@cache
def entries(kind: Kind) -> Mapping[str, Entry]:
    """All registered names of one kind, built-ins first.

    Raises:
        UnsupportedError: Two packages claim the same name; both are shown.
    """
    result: dict[str, Entry] = {}
    for entry in (*BUILT_IN[kind], *_foreign(kind)):
        if entry.name in result:
            raise UnsupportedError(
                f"the {kind} name {entry.name!r} is claimed by {result[entry.name].origin} and by {entry.origin}; "
                "uninstall one, or pass an instance instead of the name"
            )
        result[entry.name] = entry
    return MappingProxyType(result)


def _foreign(kind: Kind) -> Iterable[Entry]:
    for point in importlib.metadata.entry_points(group=kind.group):
        origin = point.dist.name if point.dist else point.value
        yield Entry(name=point.name, target=point.value, features=frozenset(), origin=origin)


def find(kind: Kind, name: str) -> Entry:
    """Return the entry called ``name``.

    Raises:
        UnsupportedError: No such name; the text lists the names and the nearest one.
    """
    known = entries(kind)
    if name not in known:
        raise UnsupportedError(f"unknown {kind} {name!r}{near_match(name, known)}; allowed are {', '.join(known)}")
    return known[name]


def default_solver() -> str | None:
    """Name of the first solver whose package is installed, or None."""
    return next((name for name, entry in entries(Kind.SOLVER).items() if entry.available), None)


def create(kind: Kind, choice: Any) -> Any:
    """Return an instance: of the registered ``choice`` if it is a name, else ``choice`` itself.

    Raises:
        UnsupportedError: No such name.
        NotInstalledError: Its package is missing.
    """
    return find(kind, choice).load()() if isinstance(choice, str) else choice


def features(kind: Kind, choice: Any) -> frozenset[Feature]:
    """What the registered name, or instance, ``choice`` declares."""
    if not isinstance(choice, str):
        return frozenset(getattr(choice, "FEATURES", ()))
    entry = find(kind, choice)
    if entry.origin == "qsync_opt":
        return entry.features
    return frozenset(getattr(entry.load(), "FEATURES", ()))


def require(kind: Kind, choice: Any, wanted: Feature) -> None:
    """Refuse a choice that lacks a feature.

    Raises:
        UnsupportedError: It lacks it; the text lists who has it.
    """
    if wanted not in features(kind, choice):
        able = [name for name in entries(kind) if wanted in features(kind, name)]
        label = choice if isinstance(choice, str) else type(choice).__name__
        raise UnsupportedError(f"{kind} {label!r} lacks a feature: {wanted}; those that have it: {', '.join(able)}")
