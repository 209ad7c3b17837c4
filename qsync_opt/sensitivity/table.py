"""Tables of sensitivities: with their parts, as indicators return them, and as plain values, as files hold them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Self

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import Json, check_integer, check_name, check_number, decode, encode, freeze
from qsync_opt.sensitivity.rounding_variance import OperatorVariances
from qsync_opt.sensitivity.statistics import GradientNoise

SENSITIVITY_FORMAT = "qsync-sensitivities/1"


class IndicatorKind(enum.StrEnum):
    """How the noise of operators is weighed; the last six are baselines (``qsync_opt.sensitivity.scores``)."""

    PROPAGATED = "propagated"
    """By a sweep through the graph with the collected norms (``qsync_opt.sensitivity.propagation``)."""
    PROBED = "probed"
    """By gains, which were measured by differentiating the gradient once more; exact to first order."""
    LOSS = "loss"
    """By the expected increase of the loss: immediately, and through the gradient's variance over the steps to come."""
    PROGRESS = "progress"
    """By the share of every training step's progress that the noise costs Adam and its variants; needs adaptive
    gains."""
    DEPTH = "depth"
    """By QSync's form ``gamma * (L - d) * Var[z] + d * (Var[dw] + Var[dx])`` with true distances and our variances."""
    PUBLISHED = "published"
    """By QSync's indicator as it was released, with its mistakes (``qsync_opt.sensitivity.published``)."""
    HESSIAN = "hessian"
    """By the trace of the loss's Hessian times the perturbation; needs curvatures."""
    FISHER = "fisher"
    """By squared output gradient times squared output error."""
    WEIGHT = "weight"
    """By the variance of the rounded weights alone."""
    RANDOM = "random"
    """By meaningless numbers, which any indicator must beat."""

    @property
    def unit(self) -> str:
        """Unit of the sensitivities."""
        units = {
            **{"hessian": "loss", "loss": "squared loss", "fisher": "squared loss"},
            **{"progress": "share of progress", "published": "none", "weight": "squared weight", "random": "none"},
        }
        return units.get(self.value, "squared gradient")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSensitivity:
    """Sensitivity of one operator at one precision: the sum of its parts ``own``, ``backward`` and ``forward``.

    ``flips`` is the share of it from sign changes of rectifiers, which grows with the root of the noise.
    ``variances`` are those of the operator's results.
    """

    own: float
    backward: float
    forward: float
    variances: OperatorVariances
    flips: float = 0.0

    @property
    def value(self) -> float:
        """Sum of the own, backward and forward part."""
        return self.own + self.backward + self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable(Mapping[str, Mapping[str, float]]):
    """Sensitivities of all adjustable operators on one device type: operator to precision to value.

    ``details`` has the parts of every value. ``excluded`` has the reason, by operator, for each precision that the
    operator must not get; the table lacks those.
    """

    kind: IndicatorKind
    details: Mapping[str, Mapping[str, OperatorSensitivity]]
    excluded: Mapping[str, Mapping[str, str]]

    def __post_init__(self) -> None:
        freeze(self, "details", "excluded", depth=2)

    def __getitem__(self, operator: str) -> Mapping[str, float]:
        return MappingProxyType({precision: part.value for precision, part in self.details[operator].items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.details)

    def __len__(self) -> int:
        return len(self.details)

    def values_only(self) -> SensitivityValues:
        """The values without their parts, for a file or for other workers."""
        return SensitivityValues(
            unit=self.kind.unit, values_of={name: dict(row) for name, row in self.items()}, excluded=self.excluded
        )

    def relative_to(self, noise: GradientNoise | None, *, workers: int) -> SensitivityValues:
        """The same sensitivities relative to the variance that the averaged gradient has without rounding.

        A plan whose total is 0.05 raises the variance of the gradient, averaged over all workers, by 5 %: the workers
        average independent batches, so that the gradient's own variance is the batch's over N, and one worker's
        rounding adds its sensitivity over N squared.

        ``noise`` is from the statistics, which must be of two batches or more; ``workers`` are all of the job, planned
        or not. The shares are for ``build_problem``.

        Raises:
            ProblemError: No noise was measured, or it is 0; fewer than one worker.
            UnsupportedError: Sensitivities of a kind that is not a variance of the gradient.

        Source: ours.
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
        values = {name: {precision: value * scale for precision, value in row.items()} for name, row in self.items()}
        return SensitivityValues(unit="gradient noise", values_of=values, excluded=self.excluded)


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityValues(Mapping[str, Mapping[str, float]]):
    """Sensitivities of one worker: operator to precision to value, in ``unit``.

    ``excluded`` has the reason, by operator, for each precision that the operator must not get.
    """

    unit: str
    values_of: Annotated[Mapping[str, Mapping[str, float]], Json(key="values")]
    excluded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.unit, "sensitivities: unit")
        for operator, row in self.values_of.items():
            for precision, value in row.items():
                check_number(value, f"sensitivity of {operator!r} in {precision}")
        freeze(self, "values_of", "excluded", depth=2)

    def __getitem__(self, operator: str) -> Mapping[str, float]:
        return self.values_of[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)

    def to_json(self) -> dict[str, Any]:
        """The values as plain JSON data."""
        return encode(self, version=SENSITIVITY_FORMAT)

    @classmethod
    def from_json(cls, data: Any, where: str = "sensitivities") -> Self:
        """Read values from their JSON data.

        Raises:
            ProblemError: Another format; an unknown, missing or unusable entry.
        """
        return decode(cls, data, where, version=SENSITIVITY_FORMAT)
