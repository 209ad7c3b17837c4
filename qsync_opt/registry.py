"""The registered plug-ins of each kind, by name; nothing is imported until it is asked for.

Built-ins stand in the tables below. Other packages add theirs through entry points: the group is the kind's
(``qsync_opt.solvers``, ``qsync_opt.indicators``, ...), for formulations and quantizers of a system beside training
``qsync_opt.formulations.<system>`` and ``qsync_opt.quantizers.<system>``. Such an object declares what it can do in a
``FEATURES`` attribute. Wherever a name is accepted, so is an instance. The contracts are protocols; `qsync_opt.testing`
checks them.
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
    """What a registered name stands for.

    A quantizer has the protocol of `qsync_opt.numerics.Quantizer`. A communication hook is what DDP takes: a callable
    of a state and a gradient bucket that returns a future. A checkpoint writer saves and loads as `Checkpoints` does.
    """

    SOLVER = "solver"
    FORMULATION = "formulation"
    INDICATOR = "indicator"
    COST_MODEL = "cost model"
    RUNTIME = "runtime"
    QUANTIZER = "quantizer"
    COMMUNICATION_HOOK = "communication hook"
    CHECKPOINT_WRITER = "checkpoint writer"

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


_BY_SYSTEM = (Kind.FORMULATION, Kind.QUANTIZER)
"""Kinds whose names belong to a system each."""


def attribute(target: str) -> Any:
    """Import and return what ``"module:attribute"`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One registered name: ``target`` is ``"module:attribute"``, ``packages`` what must be importable."""

    name: str
    target: str
    features: frozenset[Feature]
    packages: tuple[str, ...] = ()
    install: str = ""
    origin: str = "qsync_opt"
    system: str = "training"
    """Of formulations: whose problems it solves; of quantizers: what they round (``"training"``: operators)."""

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
        factory: Callable[[], Any] = attribute(self.target)
        return factory


_LINEAR = (Feature.PROOF, Feature.GAP, Feature.TIME_LIMIT)
_CERTIFIED = (*_LINEAR, Feature.START, Feature.TIED, Feature.SOLVER)


def _built_in(
    name: str,
    target: str,
    *features: Feature,
    extra: str = "",
    needs: tuple[str, ...] = (),
    system: str = "training",
) -> Entry:
    """An entry of this package; ``extra`` is the one that installs the packages it ``needs``."""
    install = f"pip install 'qsync-opt[{extra}]'" if extra else ""
    target = f"qsync_opt.{target}"
    return Entry(name=name, target=target, features=frozenset(features), packages=needs, install=install, system=system)


def _solver(name: str, factory: str, package: str, *features: Feature) -> Entry:
    target = f"formulations.linear.solvers.{package}_solver:{factory}"
    return _built_in(name, target, *_LINEAR, *features, extra="solvers", needs=(package,))


def _formulation(name: str, factory: str, *features: Feature, system: str = "training") -> Entry:
    return _built_in(name, f"formulations.{system}.{factory}", *features, system=system)


def _scheme(name: str) -> Entry:
    """A scheme of compressed all-reduce, by the lower-case name of its function."""
    factory = name.lower().replace("-", "_")
    return _built_in(name, f"gradients.compression:{factory}", system="gradients")


_WEIGHINGS = ("propagated", "probed", "loss", "progress", "depth", "published", "hessian", "fisher", "weight", "random")
"""Indicators of statistics, too, each by a weighing of its own."""
# Order is preference: the first available solver is the default.
BUILT_IN: Mapping[Kind, tuple[Entry, ...]] = MappingProxyType(
    {
        Kind.SOLVER: (
            _solver("ortools", "OrtoolsSolver", "ortools", Feature.CONTINUOUS),
            _solver("pulp", "PulpSolver", "pulp", Feature.CONTINUOUS),
            _solver("highs", "OrtoolsSolver", "ortools", Feature.CONTINUOUS),
            _solver("scip", "scip_solver", "ortools", Feature.CONTINUOUS),
            _solver("cp-sat", "cp_sat_solver", "ortools"),
        ),
        Kind.FORMULATION: (
            _formulation("greedy", "greedy:GreedyFormulation", *_CERTIFIED),
            _formulation("qsync", "paper_greedy:QsyncFormulation", Feature.SOLVER, Feature.TIME_LIMIT),
            _formulation("qsync-published", "paper_start:PublishedFormulation", Feature.TIME_LIMIT),
            _formulation("exact", "exact:ExactFormulation", *_CERTIFIED),
            _formulation("ilp", "ilp.solve:IlpFormulation", *_LINEAR, Feature.SOLVER),
            _formulation("exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, Feature.TIME_LIMIT),
            _formulation("dynamic", "dynamic:DynamicFormulation", *_LINEAR, system="gradients"),
            _formulation("exact", "dynamic:ExactFormulation", *_LINEAR, system="gradients"),
            _formulation("ilp", "ilp:IlpFormulation", *_LINEAR, Feature.SOLVER, system="gradients"),
            _formulation(
                "exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, Feature.TIME_LIMIT, system="gradients"
            ),
            _built_in("greedy", "formulations.gradients.joint:JointFormulation", *_CERTIFIED, system="joint"),
            _built_in("exact", "formulations.gradients.joint:ExactJointFormulation", *_CERTIFIED, system="joint"),
            _built_in(
                "ilp", "formulations.gradients.joint:IlpJointFormulation", *_LINEAR, Feature.SOLVER, system="joint"
            ),
            _built_in("greedy", "formulations.training.shares:SharesFormulation", *_LINEAR[1:], system="shares"),
            _built_in(
                "exact",
                "formulations.training.shares:ExactSharesFormulation",
                *_LINEAR,
                Feature.SOLVER,
                system="shares",
            ),
            _built_in(
                "ilp", "formulations.training.shares:IlpSharesFormulation", *_LINEAR, Feature.SOLVER, system="shares"
            ),
            _built_in(
                "exhaustive",
                "formulations.training.shares:ExhaustiveSharesFormulation",
                Feature.PROOF,
                Feature.TIME_LIMIT,
                system="shares",
            ),
            _formulation("threshold", "threshold:ThresholdFormulation", Feature.PROOF, system="messages"),
            _formulation(
                "exact", "exact:ExactFormulation", Feature.PROOF, Feature.GAP, Feature.TIME_LIMIT, system="messages"
            ),
            _formulation("ilp", "ilp:IlpFormulation", *_LINEAR, Feature.SOLVER, system="messages"),
            _formulation("exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, system="messages"),
            _formulation("grouped", "ilp:GroupedFormulation", Feature.TIME_LIMIT, Feature.SOLVER, system="messages"),
            _formulation("default", "search:DefaultFormulation", Feature.GAP, Feature.TIME_LIMIT, system="decoding"),
            _formulation("exact", "search:ExactFormulation", *_LINEAR, system="decoding"),
            _formulation("ilp", "ilp:IlpFormulation", *_LINEAR, Feature.SOLVER, system="decoding"),
            _formulation(
                "exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, Feature.TIME_LIMIT, system="decoding"
            ),
            _formulation("chain", "certified:ChainFormulation", *_LINEAR, system="serving"),
            _formulation("exact", "certified:ExactFormulation", *_LINEAR, system="serving"),
            _formulation("ilp", "ilp:IlpFormulation", *_LINEAR, Feature.SOLVER, system="serving"),
            _formulation("llm-pq", "paper:PaperFormulation", system="serving"),
            _formulation(
                "exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, Feature.TIME_LIMIT, system="serving"
            ),
            _formulation("wrap-around", "wrap_around:WrapAroundFormulation", system="checkpoints"),
            _formulation("exact", "program:ExactFormulation", *_LINEAR, Feature.SOLVER, system="checkpoints"),
            _formulation("ilp", "program:IlpFormulation", *_LINEAR, Feature.SOLVER, system="checkpoints"),
            _formulation("exhaustive", "exhaustive:ExhaustiveFormulation", Feature.PROOF, system="checkpoints"),
        ),
        Kind.INDICATOR: (
            _built_in("statistics", "sensitivity.indicators:StatisticsIndicator"),
            _built_in("weights", "sensitivity.indicators:WeightIndicator"),
            _built_in("formats", "sensitivity.indicators:FormatIndicator"),
            *(_built_in(kind, f"sensitivity.indicators:{kind}") for kind in _WEIGHINGS),
        ),
        Kind.COST_MODEL: (
            _built_in("profile", "costs.profile:ProfileCosts"),
            _built_in("roofline", "costs.roofline:RooflineCosts"),
            _built_in("learned", "costs.learned.source:LearnedCosts"),
        ),
        Kind.RUNTIME: (
            _built_in("torch", "runtimes.torch.runtime:TorchRuntime", extra="torch", needs=("torch", "onnxscript")),
            _built_in(
                "onnxruntime",
                "runtimes.onnxruntime.runtime:OnnxRuntime",
                extra="onnxruntime",
                needs=("onnxruntime",),
            ),
        ),
        Kind.QUANTIZER: (
            *(_built_in(name, f"numerics.formats:{name}") for name in ("int8", "fp8", "bf16", "fp16")),
            *(_scheme(name) for name in ("FP32", "BF16", "two8", "two-fp8", "sum8", "packed8")),
            *(_scheme(name) for name in ("sum16", "sum10", "sum6", "sum4", "linear", "exponential")),
        ),
        Kind.COMMUNICATION_HOOK: (),
        Kind.CHECKPOINT_WRITER: (
            _built_in(
                "folder",
                "runtimes.torch.checkpoints.checkpoints:Checkpoints",
                extra="torch",
                needs=("torch", "safetensors"),
            ),
        ),
    }
)


@cache
def entries(kind: Kind, system: str = "training") -> Mapping[str, Entry]:
    """All registered names of one kind (of formulations and quantizers: those of one system), built-ins first.

    Raises:
        UnsupportedError: Two packages claim the same name; both are shown.
    """
    result: dict[str, Entry] = {}
    own = (entry for entry in BUILT_IN[kind] if kind not in _BY_SYSTEM or entry.system == system)
    for entry in (*own, *_foreign(kind, system)):
        if entry.name in result:
            raise UnsupportedError(
                f"the {kind} name {entry.name!r} is claimed by {result[entry.name].origin} and by {entry.origin}; "
                "uninstall one, or pass an instance instead of the name"
            )
        result[entry.name] = entry
    return MappingProxyType(result)


def _foreign(kind: Kind, system: str) -> Iterable[Entry]:
    group = kind.group if kind not in _BY_SYSTEM or system == "training" else f"{kind.group}.{system}"
    for point in importlib.metadata.entry_points(group=group):
        origin = point.dist.name if point.dist else point.value
        yield Entry(name=point.name, target=point.value, features=frozenset(), origin=origin, system=system)


def find(kind: Kind, name: str, system: str = "training") -> Entry:
    """Return the entry called ``name``.

    Raises:
        UnsupportedError: No such name; the text lists the names and the nearest one.
    """
    known = entries(kind, system)
    if name not in known:
        raise UnsupportedError(f"unknown {kind} {name!r}{near_match(name, known)}; allowed are {', '.join(known)}")
    return known[name]


def default_solver() -> str | None:
    """Name of the first solver whose package is installed, or None."""
    return next((name for name, entry in entries(Kind.SOLVER).items() if entry.available), None)


def create(kind: Kind, choice: Any, system: str = "training") -> Any:
    """Return an instance: of the registered ``choice`` if it is a name, else ``choice`` itself.

    Raises:
        UnsupportedError: No such name.
        NotInstalledError: Its package is missing.
    """
    return find(kind, choice, system).load()() if isinstance(choice, str) else choice


def features(kind: Kind, choice: Any, system: str = "training") -> frozenset[Feature]:
    """What the registered name, or instance, ``choice`` declares."""
    if not isinstance(choice, str):
        return frozenset(getattr(choice, "FEATURES", ()))
    entry = find(kind, choice, system)
    if entry.origin == "qsync_opt":
        return entry.features
    return frozenset(getattr(entry.load(), "FEATURES", ()))


def require(kind: Kind, choice: Any, wanted: Feature, system: str = "training") -> None:
    """Refuse a choice that lacks a feature.

    Raises:
        UnsupportedError: It lacks it; the text lists who has it.
    """
    if wanted not in features(kind, choice, system):
        able = [name for name in entries(kind, system) if wanted in features(kind, name, system)]
        label = choice if isinstance(choice, str) else type(choice).__name__
        raise UnsupportedError(f"{kind} {label!r} lacks a feature: {wanted}; those that have it: {', '.join(able)}")
