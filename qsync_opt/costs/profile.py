"""Device profiles: the measured costs of one model on one device, which plans are priced with.

Times are integer nanoseconds, memory is in bytes. Operators that cost the same share one measurement. Problems with
estimated costs or sensitivities are labelled by the extension key ``x-estimates``, and so are their plans.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    ESTIMATES_KEY,
    Extras,
    Json,
    Name,
    check_fields,
    check_name,
    check_number,
    decode,
    encode,
    freeze,
    read_json,
    write_json,
)
from qsync_opt.model import OpGraph
from qsync_opt.numerics import PrecisionFormats, check_precisions

if TYPE_CHECKING:
    from qsync_opt.cluster import DeviceType

MI_ELEMENTS = 2**20
"""Unit of ``ns_per_mi_elements``."""
ESTIMATE_OPTION = "estimated_by"
"""Option of a profile that was not (all) measured: where its figures are from."""
FP32_SHARE_OPTION = "fp32_share"
"""Option of a profile: time of a step in FP32 alone, as a share of the sum over its operators."""
MEASURED_OPTION = "measured"
"""Option of a profile: how its costs were measured, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """A time that is linear in the number of elements: ``base_ns + ns_per_mi_elements * elements // 2**20``.

    ``worst_error`` is the largest relative error of the fit at its measurements, ``samples`` their number (0 for costs
    that were not fitted).
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
    """Fit a base time and a time per element to measurements by least squares of the *relative* error.

    Relative, because sizes span orders of magnitude and small ones would not count otherwise. Coefficients are not
    negative: where the unconstrained fit has a negative one, the better of the two fits with one coefficient is taken.
    ``samples`` are pairs (elements, nanoseconds) above zero, at least one; a single size gives a base of zero.

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
    fit = CostFit(base_ns=round(base), ns_per_mi_elements=round(slope * MI_ELEMENTS), samples=len(points))
    return replace(fit, worst_error=max(abs(fit.ns(int(n)) - t) / t for n, t in points))


_SOURCES = ("", "learned", "roofline")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCost:
    """Cost of one operator in one precision.

    Times include casts of weights but not those of activations, which are priced per edge.

    Attributes:
        forward_ns: Device time.
        backward_ns: Device time.
        host_forward_ns: Host time to launch the same work; 0 on a cpu, where host and device are one.
        host_backward_ns: The same of the backward pass.
        saved_bytes: Kept until the backward pass for this operator alone: masks, quantized copies, statistics.
        saves_inputs: Floating-point inputs whose storage is kept (positions in ``Operator.inputs``).
        saves_output: Whether the result is kept.
        alias_input: Position of the input whose storage the result shares (a view), or None.
        forward_workspace_bytes: Allocated temporarily, beyond results and saved tensors.
        backward_workspace_bytes: The same of the backward pass.
        scaled_from: What was measured and scaled to this cost: another precision of the operator, or another operator
            as ``"NAME in PRECISION"``; empty: it was measured itself.
        source: ``learned`` or ``roofline`` for a time that fills a hole of measurements; empty: as the profile says.
        interval_ns: Ends of the 90 % intervals of an estimated time, forward low and high, backward low and high.
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
    scaled_from: Annotated[str, Json(key="x-scaled-from", empty=True, omitted=True)] = ""
    source: Annotated[str, Json(key="x-source", empty=True, omitted=True)] = ""
    interval_ns: Annotated[tuple[int, ...], Json(key="x-interval-ns", omitted=True)] = ()

    def __post_init__(self) -> None:
        check_fields(self, "operator cost")
        if self.source not in _SOURCES:
            allowed = ", ".join(filter(None, _SOURCES))
            raise ProblemError(f"operator cost: source is {self.source!r}, but allowed are {allowed} or none")
        ends = self.interval_ns
        if ends and not (
            len(ends) == 4 and ends[0] <= self.forward_ns <= ends[1] and ends[2] <= self.backward_ns <= ends[3]
        ):
            raise ProblemError(
                f"operator cost: interval_ns is {list(ends)}, but it must be the ends around forward_ns "
                f"({self.forward_ns}) and around backward_ns ({self.backward_ns})"
            )


PROFILE_FORMAT = "qsync-profile/1"
DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Device and software of a measurement; equal identities may share measurements."""

    name: Name
    kind: str
    threads: Annotated[int, Json(minimum=1)]
    versions: Mapping[Name, Name]

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name!r}")
        if self.kind not in DEVICE_KINDS:
            raise ProblemError(
                f"device {self.name!r}: kind is {self.kind!r}, but allowed are {', '.join(DEVICE_KINDS)}"
            )
        freeze(self, "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """One optimizer step over all parameters, the clearing of gradients, optimizer state and temporary memory."""

    name: Name
    step_ns: int
    zero_grad_ns: int
    state_bytes: int
    workspace_bytes: int

    def __post_init__(self) -> None:
        check_fields(self, f"optimizer {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCheck:
    """One uniform plan: measured as a whole, summed over operators and casts, and predicted with the overhead."""

    precision: Name
    forward_ns: int
    backward_ns: int
    summed_forward_ns: int
    summed_backward_ns: int
    predicted_forward_ns: int
    predicted_backward_ns: int

    def __post_init__(self) -> None:
        check_fields(self, f"whole iteration in {self.precision}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationOverhead:
    """Cost per operator of whole iterations beyond their operators: interpreter, interception, autograd engine.

    Fitted to ``iterations`` by `qsync_opt.training.calibration`.
    """

    forward_ns_per_operator: int = 0
    backward_ns_per_operator: int = 0
    iterations: tuple[IterationCheck, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "overhead")

    @property
    def residual(self) -> float:
        """Largest relative error of the predicted forward plus backward pass of an iteration."""
        errors = (
            abs(i.predicted_forward_ns + i.predicted_backward_ns - i.forward_ns - i.backward_ns)
            / max(1, i.forward_ns + i.backward_ns)
            for i in self.iterations
        )
        return max(errors, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Costs of one model on one device.

    Attributes:
        device: Where they were measured.
        model: Name of the graph.
        fingerprint: Of the graph.
        options: Of the measured kernels, and notes on the measurement.
        formats: Precision to its border formats.
        optimizer: Cost of the optimizer step.
        overhead: Of whole iterations.
        casts: Pair of formats ``"A>B"`` to the cost of a cast.
        gradient_sums: Format to the cost of adding gradients of a result with several users.
        measurements: Measurement to cost by precision.
        operators: Operator to measurement; operators that cost the same share one.
    """

    device: DeviceIdentity
    model: Name
    fingerprint: Name
    options: Mapping[str, str | int | float | bool]
    formats: Mapping[str, PrecisionFormats]
    optimizer: OptimizerCost
    overhead: IterationOverhead = field(default_factory=IterationOverhead)
    casts: Mapping[str, CostFit]
    gradient_sums: Mapping[str, CostFit]
    measurements: Mapping[str, Mapping[str, MeasuredCost]]
    operators: Mapping[Name, Name]

    def __post_init__(self) -> None:
        check_fields(self, "profile")
        for name, value in self.options.items():
            check_name(name, "profile: option")
            is_plain = value is None or isinstance(value, str | int | float)
            if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
                raise ProblemError(
                    f"profile: option {name!r} is {value!r}, but allowed are a text, a finite number, true, false, null"
                )
        for precision, borders in self.formats.items():
            check_precisions((precision, *astuple(borders)), f"profile: formats of {precision!r}")
        for name, key in self.operators.items():
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
            check_precisions((source, target), f"profile: cast {pair!r}")
        check_precisions(self.gradient_sums, "profile: gradient_sums")
        freeze(self, "options", "formats", "operators", "casts", "gradient_sums")
        freeze(self, "measurements", depth=2)

    def cost(self, operator: str) -> Mapping[str, MeasuredCost]:
        """Cost of an operator by precision.

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
        """One line of text: device, numbers of measurements, accuracy for whole iterations."""
        device = self.device
        threads = f", {device.threads} thread{'s' * (device.threads > 1)}" if device.kind == "cpu" else ""
        text = f"{device.name}{threads}: {len(self.operators)} operators ({len(self.measurements)} measured) in "
        text += ", ".join(self.formats)
        if self.overhead.iterations:
            text += f"; whole iterations predicted within {100 * self.overhead.residual:.1f} %"
        if how := self.options.get(MEASURED_OPTION):
            text += f"; {how}"
        return text

    def check_graph(self, graph: OpGraph) -> None:
        """Refuse a graph other than that of this profile.

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
        """The profile as plain JSON data."""
        return encode(self, version=PROFILE_FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)

    @classmethod
    def from_json(cls, data: Any, where: str = "profile") -> Self:
        """Read a profile from its JSON data; ``where`` names it in errors.

        Raises:
            ProblemError: Unknown, missing or unusable entry.
        """
        return decode(cls, data, where, version=PROFILE_FORMAT)


def load_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile file.

    Raises:
        ProblemError: Missing or truncated file, another format version, unknown key, NaN, negative or missing cost.
    """
    return DeviceProfile.from_json(read_json(path, [PROFILE_FORMAT]), os.fspath(path))


class CostModel(Protocol):
    """A source of profiles."""

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Costs of a model on a device type of the cluster file.

        Returns:
            A profile of this graph with the precisions of ``device``. If it was not measured, its option
            ``estimated_by`` says so.

        Raises:
            ProblemError: There is no profile of this device.
            UnsupportedError: The cost model does not know such a device.
        """


class ProfileCosts:
    """Measured profiles, from the files that the cluster file names."""

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Read the profile; see `CostModel.profile`."""
        if device.profile is None:
            raise ProblemError(
                f"device type {device.name!r} has no profile; add profile: FILE in the cluster file, or estimate its "
                "costs with the cost model 'roofline'"
            )
        profile = load_profile(device.profile)
        profile.check_graph(graph)
        return profile


def estimated_by(profile: DeviceProfile) -> str | None:
    """Where the figures of a profile are from if they were not measured, else None."""
    source = profile.options.get(ESTIMATE_OPTION)
    return None if source is None else str(source)


def estimate_extras(
    profiles: Mapping[str, DeviceProfile], sensitivity: str | None = None, quantile: float | None = None
) -> dict[tuple[str, ...], Any]:
    """The extension key of a problem with estimates; empty if all was measured.

    ``sensitivity`` says where the sensitivities are from; None: they were computed from collected statistics.
    ``quantile`` is that of their times at which estimated operators are priced; None: the estimates themselves.
    """
    sources = estimated_costs({name: estimated_by(profile) for name, profile in profiles.items()})
    note = dict(sources.get((ESTIMATES_KEY,), {}))
    if sensitivity is not None:
        note["sensitivity"] = sensitivity
    if quantile is not None:
        note["quantile"] = quantile
    return {(ESTIMATES_KEY,): note} if note else {}


def estimated_costs(sources: Mapping[str, str | None]) -> dict[tuple[str, ...], Any]:
    """The extension key of a problem with estimated costs, from what each device's are from (None: measured).

    Empty if all were measured.
    """
    costs = {name: source for name, source in sources.items() if source is not None}
    return {(ESTIMATES_KEY,): {"costs": costs}} if costs else {}


def estimate_lines(extras: Extras) -> tuple[str, ...]:
    """The estimates of a problem or plan, one line of text each."""
    note = extras.get((ESTIMATES_KEY,))
    if not isinstance(note, Mapping):
        return ()
    costs = note.get("costs")
    lines = []
    if isinstance(costs, Mapping):
        lines = [f"costs of {device} are estimates: {source}" for device, source in costs.items()]
    if note.get("sensitivity") is not None:
        lines.append(f"sensitivities are estimates: {note['sensitivity']}")
    if note.get("quantile") is not None:
        lines.append(f"times are at the {note['quantile']} quantile of every operator with an interval")
    return tuple(lines)
