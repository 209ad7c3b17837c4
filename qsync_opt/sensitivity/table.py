"""Sensitivities with their parts, as an indicator gives them, and the indicators that there are."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import Fields, check_integer, check_name, check_number
from qsync_opt.sensitivity.propagation import Distances
from qsync_opt.sensitivity.rounding_variance import OperatorVariances
from qsync_opt.sensitivity.statistics import GradientNoise

SENSITIVITY_FORMAT = "qsync-sensitivities/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityValues(Mapping[str, Mapping[str, float]]):
    """Operator to precision to sensitivity of one worker.

    ``unit`` says what they are measured in. ``excluded`` names, per operator, the precisions that it must not get, each
    with the reason in words.
    """

    unit: str
    values_of: Mapping[str, Mapping[str, float]]
    excluded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.unit, "sensitivities: unit")
        for operator, row in self.values_of.items():
            for precision, value in row.items():
                check_number(value, f"sensitivity of {operator!r} in {precision}")
        for name in ("values_of", "excluded"):
            nested = {key: MappingProxyType(dict(row)) for key, row in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(nested))

    def __getitem__(self, operator: str) -> Mapping[str, float]:
        return self.values_of[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)

    def to_json(self) -> dict[str, Any]:
        """The values as plain JSON data."""
        return {
            "format": SENSITIVITY_FORMAT,
            "unit": self.unit,
            "values": {operator: dict(row) for operator, row in self.values_of.items()},
            "excluded": {operator: dict(row) for operator, row in self.excluded.items()},
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "sensitivities") -> Self:
        """Read values from their JSON data.

        Raises:
            ProblemError: Another format; an unknown, missing or unusable entry.
        """
        reader = Fields(data, where)
        reader.version(SENSITIVITY_FORMAT)
        values = {
            operator: {precision: row.number(precision) for precision in row}
            for operator, row in reader.children("values")
        }
        excluded = {
            operator: {precision: row.text(precision) for precision in row}
            for operator, row in reader.children("excluded")
        }
        found = cls(unit=reader.text("unit"), values_of=values, excluded=excluded)
        reader.finish()
        return found


class IndicatorKind(enum.StrEnum):
    """How the noise of operators is weighed against each other."""

    PROPAGATED = "propagated"
    """By sweeping it through the graph with the collected norms (``qsync_opt.sensitivity.propagation``)."""
    PROBED = "probed"
    """By the gains that were measured by differentiating the gradient once more; exact to first order."""
    LOSS = "loss"
    """By the loss that is expected to be lost: at once, and through the gradient's variance over the steps to come
    (``qsync_opt.sensitivity.scores``)."""
    PROGRESS = "progress"
    """By the share of every training step's progress that the noise costs Adam and those like it
    (``qsync_opt.sensitivity.scores``); needs adaptive gains."""
    DEPTH = "depth"
    """QSync's form ``gamma * (L - d) * Var[z] + d * (Var[dw] + Var[dx])`` with true distances and these variances."""
    HESSIAN = "hessian"
    """Trace of the loss's Hessian times perturbation; needs curvatures (``qsync_opt.sensitivity.baselines``)."""
    FISHER = "fisher"
    """Squared output gradient times squared output error (``qsync_opt.sensitivity.baselines``)."""
    WEIGHT = "weight"
    """Variance of the rounded weights alone (``qsync_opt.sensitivity.baselines``)."""
    RANDOM = "random"
    """Numbers that mean nothing: what any indicator has to beat (``qsync_opt.sensitivity.baselines``)."""

    @property
    def unit(self) -> str:
        """What a sensitivity of this kind is measured in."""
        units = {
            **{"hessian": "loss", "loss": "squared loss", "fisher": "squared loss"},
            **{"progress": "share of progress", "weight": "squared weight", "random": "none"},
        }
        return units.get(self.value, "squared gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSensitivity:
    """One operator at one precision.

    ``value`` is the sensitivity; ``own``, ``backward`` and ``forward`` are its parts and add up to it.
    ``flips`` is what of it comes from rectifiers that noise pushes over zero, which grows with the root of the noise.
    ``variances`` are those of its results.
    """

    own: float
    backward: float
    forward: float
    variances: OperatorVariances
    flips: float = 0.0

    @property
    def value(self) -> float:
        """Own, backward and forward part together."""
        return self.own + self.backward + self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable(Mapping[str, Mapping[str, float]]):
    """Sensitivities of all adjustable operators on one device type: operator to precision to value.

    Excluded precisions are absent. ``details`` has the parts of every value.
    ``excluded`` names, per operator, the precisions that it must not get, each with the reason in words.
    ``distances`` are the longest paths to input and loss, in adjustable operators.
    """

    kind: IndicatorKind
    details: Mapping[str, Mapping[str, OperatorSensitivity]]
    excluded: Mapping[str, Mapping[str, str]]
    distances: Distances

    def __post_init__(self) -> None:
        for name in ("details", "excluded"):
            nested = {key: MappingProxyType(dict(value)) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, MappingProxyType(nested))

    def __getitem__(self, operator: str) -> Mapping[str, float]:
        return MappingProxyType({precision: part.value for precision, part in self.details[operator].items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.details)

    def __len__(self) -> int:
        return len(self.details)

    def values_only(self) -> SensitivityValues:
        """The bare numbers with what is excluded, to be kept in a file or sent to other workers."""
        return SensitivityValues(
            unit=self.kind.unit, values_of={name: dict(row) for name, row in self.items()}, excluded=self.excluded
        )

    def relative_to(self, noise: GradientNoise | None, *, workers: int) -> SensitivityValues:
        """The same sensitivities as shares of the noise that the averaged gradient has anyway.

        A plan whose total is 0.05 raises the variance of the gradient, averaged over all workers, by 5 %: the workers
        average independent batches, so that the gradient's own variance is the batch's over N, and what one worker's
        rounding adds is its sensitivity over N squared.

        Args:
            noise: From the statistics; two batches or more must have been collected.
            workers: All workers of the job, planned or not.

        Returns:
            Shares, to be handed to ``build_problem``.

        Raises:
            ProblemError: No noise was measured, or it is 0; fewer than one worker.
            UnsupportedError: Sensitivities of a kind that is not a variance of the gradient.

        Source:
            Ours.
        """
        if self.kind.unit != "squared gradient":
            raise UnsupportedError(
                f"sensitivities of kind {str(self.kind)!r} are in units of {self.kind.unit}: only variances of the "
                "gradient (probed, propagated, depth) can be compared with the gradient's own noise"
            )
        if noise is None or noise.variance <= 0:
            raise ProblemError("the statistics hold no gradient noise: collect them over two different batches or more")
        check_integer(workers, "workers", minimum=1)
        scale = 1.0 / (workers * noise.variance)
        return SensitivityValues(
            unit="gradient noise",
            values_of={
                name: {precision: value * scale for precision, value in row.items()} for name, row in self.items()
            },
            excluded=self.excluded,
        )
