"""What an operator costs in one precision, and how a time that grows with the number of elements is fitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import Fields, check_integer, check_number

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
        for name in ("base_ns", "ns_per_mi_elements", "samples"):
            check_integer(getattr(self, name), f"fitted cost: {name}")
        check_number(self.worst_error, "fitted cost: worst_error")

    @classmethod
    def from_fields(cls, data: Fields) -> Self:
        """Read a fit from its JSON object."""
        fit = cls(
            base_ns=data.integer("base_ns"),
            ns_per_mi_elements=data.integer("ns_per_mi_elements"),
            worst_error=data.number("worst_error"),
            samples=data.integer("samples"),
        )
        data.finish()
        return fit

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
        for name in _INTEGERS:
            check_integer(getattr(self, name), f"operator cost: {name}")
        for position in self.saves_inputs:
            check_integer(position, "operator cost: position in saves_inputs")
        if not isinstance(self.saves_output, bool):
            raise ProblemError(f"operator cost: saves_output is {self.saves_output!r}, but it must be true or false")
        if self.alias_input is not None:
            check_integer(self.alias_input, "operator cost: alias_input")

    @classmethod
    def from_fields(cls, data: Fields) -> Self:
        """Read one cost from its JSON object."""
        saves_output = data.take("saves_output")
        cost = cls(
            **{name: data.integer(name) for name in _INTEGERS},
            saves_inputs=data.integers("saves_inputs"),
            saves_output=saves_output,
            alias_input=data.take("alias_input"),
        )
        data.finish()
        return cost

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this cost."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["saves_inputs"] = list(self.saves_inputs)
        return data


_INTEGERS = (
    "forward_ns",
    "backward_ns",
    "host_forward_ns",
    "host_backward_ns",
    "saved_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
)
