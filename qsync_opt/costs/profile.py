"""What was measured about one model on one device: the profile that plans are priced with.

Times are integer nanoseconds, memory is in bytes. Operators that cost the same share one measurement: ``operators``
maps each name to a measurement key, ``measurements`` maps the key to a cost per precision.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Json,
    check_fields,
    check_integer,
    check_name,
    check_number,
    decode,
    encode,
    freeze,
    read_json,
    write_json,
)
from qsync_opt.model import OpGraph
from qsync_opt.numerics import FORMATS, PrecisionFormats

MI_ELEMENTS = 2**20
"""Elements that ``ns_per_mi_elements`` of a fitted cost counts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A time that grows with the number of elements: ``base_ns + ns_per_mi_elements * elements // 2**20``.

    ``worst_error`` is the largest relative distance between the fit and a measurement behind it, ``samples`` their
    number. A hand-written cost has ``samples`` 0.
    """

    base_ns: int
    ns_per_mi_elements: int
    worst_error: float = 0.0
    samples: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "fitted cost")

    def ns(self, elements: int) -> int:
        """Time for ``elements`` elements in nanoseconds, rounded as the problem file rounds it."""
        return self.base_ns + self.ns_per_mi_elements * elements // MI_ELEMENTS


def fit_cost(samples: Iterable[tuple[int, float]]) -> CostFit:
    """Fit a base time and a time per element to measurements, least squares of the *relative* error.

    Relative, because the sizes span orders of magnitude and the small ones would else not count at all. Both
    coefficients are kept at or above zero: where the free fit leaves that range, the better of the two borders is it.

    Args:
        samples: Pairs (elements, nanoseconds); at least one, times above zero. One size gives a base of zero.

    Returns:
        The fit, with the largest relative residual.

    Raises:
        ProblemError: No sample, or one that is not positive.

    Source: ours.
    """
    points = [(float(elements), float(time_ns)) for elements, time_ns in samples]
    if not points:
        raise ProblemError("no measurement to fit a cost to; at least one (elements, nanoseconds) pair is needed")
    for elements, time_ns in points:
        check_number(elements, "measured cost: elements")
        check_number(time_ns, "measured cost: nanoseconds")
        if time_ns == 0 or elements == 0:
            raise ProblemError(f"measured cost of {elements:g} elements is {time_ns:g} ns, but both must be above zero")
    # Rows (1/t, n/t) against 1: the residual of a row is the relative error.
    s11 = sum(1 / (t * t) for _, t in points)
    s12 = sum(n / (t * t) for n, t in points)
    s22 = sum(n * n / (t * t) for n, t in points)
    b1 = sum(1 / t for _, t in points)
    b2 = sum(n / t for n, t in points)
    determinant = s11 * s22 - s12 * s12
    candidates = [(b1 / s11, 0.0), (0.0, b2 / s22)]
    if len({n for n, _ in points}) == 1:
        candidates = candidates[1:]
    elif determinant > 1e-12 * s11 * s22:
        base, slope = (b1 * s22 - b2 * s12) / determinant, (s11 * b2 - s12 * b1) / determinant
        if base >= 0 and slope >= 0:
            candidates = [(base, slope)]
    base, slope = min(candidates, key=lambda c: sum(((c[0] + c[1] * n) / t - 1) ** 2 for n, t in points))
    fit = CostFit(base_ns=round(base), ns_per_mi_elements=round(slope * MI_ELEMENTS))
    worst = max(abs(fit.ns(int(n)) - t) / t for n, t in points)
    return CostFit(
        base_ns=fit.base_ns, ns_per_mi_elements=fit.ns_per_mi_elements, worst_error=worst, samples=len(points)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """What one operator costs in one precision.

    ``forward_ns`` and ``backward_ns`` are device time; the ``host_`` pair is the time the host needs to launch the
    same work where host and device run side by side, and zero where they are one (cpu). The casts of activations are
    *not* in them (they are priced per edge), those of weights are.

    What stays in memory until the backward pass: ``saved_bytes`` that belong to nobody else (masks, quantized copies,
    statistics), the floating inputs whose own storage is kept (``saves_inputs``, positions in ``Operator.inputs``),
    and the result itself (``saves_output``). ``alias_input`` is the position of the input whose storage the result
    shares (a view), or None. The ``workspace`` pair is what is allocated in passing, beyond results and saved tensors.
    """

    forward_ns: int
    backward_ns: int
    host_forward_ns: int = 0
    host_backward_ns: int = 0
    saved_bytes: int = 0
    saves_inputs: tuple[int, ...] = ()
    saves_output: bool = False
    alias_input: int | None = None
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "operator cost")
        for position in self.saves_inputs:
            check_integer(position, "operator cost: position in saves_inputs")


PROFILE_FORMAT = "qsync-profile/1"
DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Which device and which software a measurement holds for; equal identities may share measurements."""

    name: str
    kind: str
    threads: Annotated[int, Json(minimum=1)]
    versions: Annotated[Mapping[str, str], Json(checked=False)]

    def __post_init__(self) -> None:
        check_name(self.name, "device name")
        if self.kind not in DEVICE_KINDS:
            raise ProblemError(
                f"device {self.name!r}: kind is {self.kind!r}, but allowed are {', '.join(DEVICE_KINDS)}"
            )
        check_integer(self.threads, f"device {self.name!r}: threads", minimum=1)
        for library, version in self.versions.items():
            check_name(library, f"device {self.name!r}: library")
            check_name(version, f"device {self.name!r}: version of {library}")
        freeze(self, "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """One optimizer step over all parameters, the clearing of gradients, state kept and memory used in passing."""

    name: str
    step_ns: int
    zero_grad_ns: int
    state_bytes: int
    workspace_bytes: int

    def __post_init__(self) -> None:
        check_name(self.name, "optimizer name")
        check_fields(self, f"optimizer {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCheck:
    """One uniform plan: measured whole, added up from operators and casts, and predicted with the fitted overhead."""

    precision: str
    forward_ns: int
    backward_ns: int
    summed_forward_ns: int
    summed_backward_ns: int
    predicted_forward_ns: int
    predicted_backward_ns: int

    def __post_init__(self) -> None:
        check_name(self.precision, "whole iteration: precision")
        check_fields(self, f"whole iteration in {self.precision}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOverhead:
    """What a whole iteration costs beyond its operators, per operator: interpreter, interception, autograd engine.

    Fitted to whole iterations (`qsync_opt.training.calibration`), which are kept beside it
    so that the residual can be told.
    """

    forward_ns_per_operator: int = 0
    backward_ns_per_operator: int = 0
    iterations: tuple[IterationCheck, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "overhead")

    @property
    def residual(self) -> float:
        """Largest relative error of a whole iteration's forward plus backward pass, the overhead included."""
        errors = (
            abs(i.predicted_forward_ns + i.predicted_backward_ns - i.forward_ns - i.backward_ns)
            / max(1, i.forward_ns + i.backward_ns)
            for i in self.iterations
        )
        return max(errors, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Everything measured about one model on one device.

    ``casts`` has a fit for each pair ``"A>B"`` of formats, ``gradient_sums`` one for each format in which the
    gradients of a result with several users are added up. ``options`` are those of the kernels that were measured.
    """

    device: DeviceIdentity
    model: str
    fingerprint: str
    options: Mapping[str, str | int | float | bool]
    formats: Mapping[str, PrecisionFormats]
    optimizer: OptimizerCost
    overhead: IterationOverhead = field(default_factory=IterationOverhead)
    casts: Mapping[str, CostFit]
    gradient_sums: Mapping[str, CostFit]
    measurements: Mapping[str, Mapping[str, MeasuredCost]]
    operators: Annotated[Mapping[str, str], Json(checked=False)]

    def __post_init__(self) -> None:
        check_name(self.model, "profile: model")
        check_name(self.fingerprint, "profile: fingerprint")
        for name, value in self.options.items():
            check_name(name, "profile: option")
            is_plain = value is None or isinstance(value, str | int | float)
            if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
                raise ProblemError(
                    f"profile: option {name!r} is {value!r}, but allowed are a text, a finite number, true, false, null"
                )
        for precision, borders in self.formats.items():
            for name in (precision, borders.output, borders.gradient_input, borders.gradient_output):
                _check_format(name, f"profile: formats of {precision!r}")
        for name, key in self.operators.items():
            check_name(name, "profile: operator")
            check_name(key, f"profile: measurement of operator {name!r}")
            if key not in self.measurements:
                raise ProblemError(f"profile: operator {name!r} refers to measurement {key!r}, which is not there")
        for key, costs in self.measurements.items():
            if not costs:
                raise ProblemError(f"profile: measurement {key!r} has no precision; at least one is needed")
            for precision in costs:
                if precision not in self.formats:
                    raise ProblemError(
                        f"profile: measurement {key!r} has precision {precision!r}, but the device's formats are "
                        f"{', '.join(self.formats)}"
                    )
        for pair in self.casts:
            source, separator, target = pair.partition(">")
            if not separator:
                raise ProblemError(f"profile: cast {pair!r} is not a pair of formats such as 'FP32>BF16'")
            for name in (source, target):
                _check_format(name, f"profile: cast {pair!r}")
        for name in self.gradient_sums:
            _check_format(name, "profile: gradient_sums")
        freeze(self, "options", "formats", "operators", "casts", "gradient_sums")
        freeze(self, "measurements", depth=2)

    def cost(self, operator: str) -> Mapping[str, MeasuredCost]:
        """Cost of ``operator`` per precision.

        Raises:
            ProblemError: The profile has no such operator.
        """
        key = self.operators.get(operator)
        if key is None:
            raise ProblemError(
                f"profile of {self.device.name!r} for model {self.model!r} has no entry for operator {operator!r}; "
                "profile the model again"
            )
        return self.measurements[key]

    def describe(self) -> str:
        """One line for people: device, what was measured, how well whole iterations are predicted."""
        threads = (
            f", {self.device.threads} thread{'s' * (self.device.threads > 1)}" if self.device.kind == "cpu" else ""
        )
        text = (
            f"{self.device.name}{threads}: {len(self.operators)} operators ({len(self.measurements)} measured) in "
            f"{', '.join(self.formats)}"
        )
        if not self.overhead.iterations:
            return text
        return f"{text}; whole iterations predicted within {100 * self.overhead.residual:.1f} %"

    def check_graph(self, graph: OpGraph) -> None:
        """Refuse a graph that this profile was not measured on.

        Raises:
            ProblemError: Fingerprints differ; the text names the first operators that do.
        """
        if self.fingerprint == graph.fingerprint():
            return
        pairs = itertools.zip_longest(self.operators, (operator.name for operator in graph))
        different = [(mine, theirs) for mine, theirs in pairs if mine != theirs][:3]
        shown = "; ".join(
            f"the profile has {mine!r} where the graph has {theirs!r}".replace("None", "nothing")
            for mine, theirs in different
        )
        raise ProblemError(
            f"profile of {self.device.name!r} is of another model ({self.model!r}, the graph is {graph.name!r}): "
            f"{shown or 'operators have equal names but other shapes, kinds or parameters'}; profile this model"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this profile."""
        return encode(self, version=PROFILE_FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_json(path, self.to_json(), digest=True)

    @classmethod
    def from_json(cls, data: Any, where: str = "profile") -> Self:
        """Read a profile from its parsed JSON object; ``where`` names it in errors.

        Raises:
            ProblemError: Unknown, missing or unusable entry.
        """
        return decode(cls, data, where, version=PROFILE_FORMAT)


def load_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile file.

    Raises:
        ProblemError: Missing or truncated file, other format version, unknown key, NaN, negative or missing cost.
    """
    return DeviceProfile.from_json(read_json(path, [PROFILE_FORMAT]), os.fspath(path))


def _check_format(name: str, what: str) -> None:
    if name not in FORMATS:
        raise ProblemError(f"{what}: unknown format {name!r}; allowed are {', '.join(FORMATS)}")
