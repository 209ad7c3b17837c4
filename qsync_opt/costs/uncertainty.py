"""Times of operators, layers and casts with an interval and the source of each figure.

Intervals come from observed errors only: where none was recorded they reach from zero to infinity. `Estimate.basis`
says which errors they are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qsync_opt.costs.profile import DeviceProfile, estimated_by
from qsync_opt.costs.roofline import STEP_RATIOS, Assumptions, used_assumptions
from qsync_opt.errors import ProblemError
from qsync_opt.io import near_match
from qsync_opt.model import OpGraph
from qsync_opt.numerics import closest_precision, number_format

Direction = Literal["forward", "backward"]


class CostSource(enum.StrEnum):
    """Where a time comes from, the most trustworthy source first."""

    MEASURED = "measured"
    """The operator itself was timed in this precision."""
    SCALED = "scaled"
    """It was timed in another precision, and scaled as operators that were timed in both."""
    LEARNED = "learned"
    """A model predicted it that was fitted to measurements of other operators, perhaps on other devices."""
    ROOFLINE = "roofline"
    """It was computed from operations, bytes and a data sheet."""
    ESTIMATED = "estimated"
    """A cost model estimated it in some other way, or it is of a profile with estimates that are not told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A time in seconds with an interval from observed errors.

    Attributes:
        time_s: The figure that plans are priced with.
        source: Where the figure comes from; of a sum the least trustworthy source.
        basis: Where the interval comes from, in words.
        low_s: Lower end of the interval; 0 if nothing is known.
        high_s: Upper end of the interval; infinity if nothing is known.
    """

    time_s: float
    source: CostSource
    basis: str
    low_s: float = 0.0
    high_s: float = math.inf


def operator_cost(profile: DeviceProfile, operator: str, precision: str, direction: Direction) -> Estimate:
    """Time of one pass of an operator on the profile's device, alone: without casts of its inputs and host time.

    The interval of a measured figure is the error of the whole iterations that the profile was checked against, that of
    a roofline estimate the error of whole training steps (`STEP_RATIOS`). Single operators may be further off.

    Raises:
        ProblemError: The profile has no such operator, or not in this precision; unknown direction.
    """
    if direction not in ("forward", "backward"):
        raise ProblemError(f"direction is {direction!r}, but allowed are forward and backward")
    costs = profile.cost(operator)
    if precision not in costs:
        raise ProblemError(
            f"profile of {profile.device.name!r}: operator {operator!r} was not profiled in {precision!r}"
            f"{near_match(precision, costs)}; it has {', '.join(costs)}"
        )
    cost = costs[precision]
    time_s = 1e-9 * (cost.forward_ns if direction == "forward" else cost.backward_ns)
    if cost.scaled_from:
        basis = f"scaled from {cost.scaled_from}; the error of the scaling is not recorded"
        return Estimate(time_s=time_s, source=CostSource.SCALED, basis=basis)
    if cost.source == CostSource.LEARNED:
        ends = cost.interval_ns[:2] if direction == "forward" else cost.interval_ns[2:]
        low_s, high_s = (1e-9 * end for end in ends) if ends else (0.0, math.inf)
        basis = "90 % interval of a learned model, calibrated on operators that were held out"
        return Estimate(time_s=time_s, source=CostSource.LEARNED, basis=basis, low_s=low_s, high_s=high_s)
    if cost.source == CostSource.ROOFLINE:
        basis = "the learned model does not know this kind of operator; the error of its roofline is not recorded"
        return Estimate(time_s=time_s, source=CostSource.ROOFLINE, basis=basis)
    error, basis = None, "the profile records no spread of its measurements"
    if count := len(profile.overhead.iterations):
        error = profile.overhead.residual
        basis = (
            f"largest error of {count} whole iteration{'s' * (count > 1)} predicted from this profile; "
            "single operators may be further off"
        )
    return _estimated(profile, time_s, precision) or _measured(time_s, error, basis)


def layer_cost(profile: DeviceProfile, graph: OpGraph, layer: str, precision: str, direction: Direction) -> Estimate:
    """Time of one pass of all operators of a layer, without casts and host time; see `operator_cost`.

    ``layer`` is the path of a module, whose sub-modules count too; empty: the whole model. Operators that lack the
    precision take the next finer one, else their finest.

    Raises:
        ProblemError: The graph has no such layer, or the profile not all of its operators; unknown direction.
    """
    names = [o.name for o in graph if not layer or o.module == layer or o.module.startswith(f"{layer}.")]
    if not names:
        near = near_match(layer, {operator.module for operator in graph})
        raise ProblemError(f"graph {graph.name!r} has no operators in a layer {layer!r}{near}")
    return total_cost(
        operator_cost(profile, name, closest_precision(profile.cost(name), precision), direction) for name in names
    )


def cast_cost(profile: DeviceProfile, source: str, target: str, elements: int) -> Estimate:
    """Time of casting a tensor of so many elements from one format to another.

    The interval of a fitted cost is the largest error of the fit at the sizes that were measured.

    Raises:
        ProblemError: The profile has no such cast.
    """
    fit = profile.casts.get(f"{source}>{target}")
    if fit is None:
        raise ProblemError(
            f"profile of {profile.device.name!r} has no cast from {source!r} to {target!r}; it has "
            f"{', '.join(profile.casts)}"
        )
    time_s = 1e-9 * fit.ns(elements)
    error, basis = None, "the fit records no measurements"
    if fit.samples:
        error, basis = fit.worst_error, f"largest error of the fit to {fit.samples} measurements"
    return _estimated(profile, time_s, target) or _measured(time_s, error, basis)


def total_cost(parts: Iterable[Estimate]) -> Estimate:
    """The sum of some times, at least one; its interval makes no use of errors that cancel out."""
    parts = list(parts)
    return Estimate(
        time_s=math.fsum(part.time_s for part in parts),
        low_s=math.fsum(part.low_s for part in parts),
        high_s=math.fsum(part.high_s for part in parts),
        source=max((part.source for part in parts), key=list(CostSource).index),
        basis="; ".join(dict.fromkeys(part.basis for part in parts)),
    )


def _measured(time_s: float, error: float | None, basis: str) -> Estimate:
    """A prediction whose distance from the truth is at most ``error`` times the truth; None: it is not known."""
    low_s = 0.0 if error is None else time_s / (1 + error)
    high_s = time_s / (1 - error) if error is not None and error < 1 else math.inf
    return Estimate(time_s=time_s, low_s=low_s, high_s=high_s, source=CostSource.MEASURED, basis=basis)


def _estimated(profile: DeviceProfile, time_s: float, precision: str) -> Estimate | None:
    """The estimate of a profile that was not measured, None for one whose unmarked costs were."""
    label = estimated_by(profile)
    costs = (cost for table in profile.measurements.values() for cost in table.values())
    if label is None or any(cost.scaled_from or cost.source for cost in costs):
        return None
    assumptions = used_assumptions(profile)
    if assumptions is None:
        return Estimate(time_s=time_s, source=CostSource.ESTIMATED, basis=f"{label}; its error is not recorded")
    if assumptions != Assumptions():
        basis = "nothing was measured under these assumptions of the roofline"
        return Estimate(time_s=time_s, source=CostSource.ROOFLINE, basis=basis)
    low, high = STEP_RATIOS[number_format(precision).bits == 8]
    return Estimate(
        time_s=time_s,
        source=CostSource.ROOFLINE,
        basis="measured over estimated training steps of one GPT on one H200 (benchmarks/results/roofline.json); "
        "single operators, other models and other devices may be further off",
        low_s=low * time_s,
        high_s=high * time_s,
    )
