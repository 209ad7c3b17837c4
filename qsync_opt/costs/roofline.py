"""Roofline estimates of profiles from the data sheets of GPUs.

A kernel takes the larger of two times, its operations at the peak of its precision and its bytes at the memory
bandwidth, each at an assumed share of the data sheet's figure, plus a constant. What is kept for the backward pass
follows from the kind of operator. Estimates rank precisions and tell what is memory bound; measure a profile before
you trust a time, because kernels reach other efficiencies at other shapes.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields, replace

from qsync_opt.cluster import DataSheet, DeviceType, data_sheet
from qsync_opt.costs.profile import (
    ESTIMATE_OPTION,
    MI_ELEMENTS,
    CostFit,
    DeviceIdentity,
    DeviceProfile,
    MeasuredCost,
    OptimizerCost,
)
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import check_fields, encode
from qsync_opt.model import (
    ATTENTION,
    BYTE_MASKS,
    DTYPE_BYTES,
    INDEX_MASKS,
    LOOKUPS,
    PRODUCTS,
    SAVES_NOTHING,
    SAVES_OUTPUT,
    Operator,
    OpGraph,
    Role,
    TensorSpec,
    base_kind,
)
from qsync_opt.numerics import FORMATS, PrecisionFormats, formats_for, is_eight_bit, number_format

MODEL_VERSION = "1"
"""Changes with the estimates."""
STORAGE_BYTES = 4
"""Bytes per element of parameters and their gradients (FP32)."""
OPTIMIZERS: dict[str, tuple[int, int]] = {"adamw": (2, 7), "momentum": (1, 5), "sgd": (0, 3)}
"""Optimizer to tensors of state per parameter, and tensors per parameter that a step reads or writes."""
STEP_RATIOS: dict[bool, tuple[float, float]] = {False: (0.99, 1.26), True: (1.0, 5.06)}
"""Whether a precision has 8 bits to the smallest and largest ratio of measured to estimated training steps.

Measured under uniform plans of one GPT on one H200, with the default assumptions (benchmarks/results/roofline.json).
All steps in 8 bits took longer than estimated: there the smallest ratio is that of the estimate itself.
"""
BATCHES = frozenset(("bmm", "baddbmm"))
_ATTENTION_BACKWARD = 2.5
"""Backward products of attention per forward product: five for two, because scores are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions of a roofline estimate; `fit_assumptions` measures all of them on a card of yours.

    The defaults are not of your card: they were measured on one H200 (``benchmarks/results/roofline.json`` and
    ``host-cost.json``), and other cards reach other shares of their data sheets. Quantization is assumed to run at
    memory bandwidth, as in fused kernels; in eager PyTorch uniform 8-bit plans were measured four to five times slower
    than estimated (`STEP_RATIOS`).

    Attributes:
        efficiency: Share of the data sheet's peak that 16- and 32-bit kernels reach; measured for large matrix products
            on one H200: 0.65 to 0.85.
        efficiency_8bit: The same of 8-bit kernels; measured there: 0.4.
        memory_efficiency: Share of the memory bandwidth; measured there for copies: 0.87.
        kernel_ns: Device time of a kernel beside its work.
        launch_ns: Host time per operator and pass; about 40 microseconds in eager PyTorch, about 0 in a captured graph.
        optimizer: One of `OPTIMIZERS`.
    """

    efficiency: float = 0.7
    efficiency_8bit: float = 0.45
    memory_efficiency: float = 0.85
    kernel_ns: int = 2000
    launch_ns: int = 40_000
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        check_fields(self, "roofline")
        for name in ("efficiency", "efficiency_8bit", "memory_efficiency"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ProblemError(f"roofline: {name} is {value!r}, but it is a share: above 0 and at most 1")
        if self.optimizer not in OPTIMIZERS:
            raise UnsupportedError(
                f"roofline: optimizer is {self.optimizer!r}, but allowed are {', '.join(OPTIMIZERS)}; profile the "
                "device for any other"
            )


_DEFAULTS = Assumptions()
_HARDLY = 0.1
"""Share of an operator's time up to which its work at the data sheet's figures is hardly any."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Operations, moved bytes and kernels of one pass of an operator."""

    flops: float
    num_bytes: int
    kernels: int


def roofline_profile(graph: OpGraph, sheet: DataSheet, *, assumptions: Assumptions | None = None) -> DeviceProfile:
    """Estimate the profile of a model on a device, such as ``data_sheet("T4")``.

    It is labelled as an estimate by its option ``estimated_by``.

    Source: Williams, Waterman and Patterson, "Roofline" (CACM 2009); what is kept for backward is ours.
    """
    model = _Roofline(sheet, assumptions or Assumptions())
    formats = formats_for(_precisions(sheet), sheet.half_format)
    costs = {operator.name: model.costs(graph, operator, formats) for operator in graph}
    num_parameters = sum(parameter.spec.elements for parameter in graph.parameters)
    states, touched = OPTIMIZERS[model.assumptions.optimizer]
    pairs = [(a, b) for a in formats for b in formats if a != b]
    return DeviceProfile(
        device=DeviceIdentity(name=sheet.name, kind="cuda", threads=1, versions={"roofline": MODEL_VERSION}),
        model=graph.name,
        fingerprint=graph.fingerprint(),
        options={
            ESTIMATE_OPTION: f"roofline from the {sheet.source}",
            **encode(model.assumptions),
        },
        formats=formats,
        measurements=costs,
        operators={operator.name: operator.name for operator in graph},
        casts={f"{a}>{b}": model.fit(_cast_bytes(a, b)) for a, b in pairs},
        gradient_sums={name: model.fit(3 * number_format(name).num_bytes) for name in formats if _stored(name)},
        optimizer=OptimizerCost(
            name=model.assumptions.optimizer,
            step_ns=model.memory_ns(touched * STORAGE_BYTES * num_parameters),
            zero_grad_ns=0,
            state_bytes=states * STORAGE_BYTES * num_parameters,
            workspace_bytes=0,
        ),
    )


class RooflineCosts:
    """Estimates from the data sheet of a device type's ``hardware``, or of the GPU that it is named after."""

    def __init__(self, assumptions: Assumptions | None = None) -> None:
        self._assumptions = assumptions

    def profile(self, graph: OpGraph, device: DeviceType) -> DeviceProfile:
        """Estimate the profile; see `CostModel.profile`."""
        return roofline_profile(graph, data_sheet(device.hardware or device.name), assumptions=self._assumptions)


def used_assumptions(profile: DeviceProfile) -> Assumptions | None:
    """The assumptions of a profile that `roofline_profile` made, None for any other."""
    if "roofline" not in profile.device.versions:
        return None
    return Assumptions(**{f.name: profile.options.get(f.name) for f in fields(Assumptions)})  # type: ignore[arg-type]


def _precisions(sheet: DataSheet) -> list[str]:
    """Precisions of a card: those of its data sheet, those in 8 bits with either backward pass."""
    return [f.name for f in FORMATS.values() if f.operands in sheet.peak_flops]


def _stored(name: str) -> bool:
    return number_format(name).bits > 8 and name != "TF32"


def _cast_bytes(source: str, target: str) -> int:
    """Bytes that a cast moves per element: none from FP32 to TF32; 8-bit casts read twice, first for the maximum.

    For an 8-bit backward pass they also write the transposed codes.
    """
    if {source, target} == {"FP32", "TF32"}:
        return 0
    read, written = number_format(source).num_bytes, number_format(target).num_bytes
    written += number_format(target).eight_bit_backward
    return read * (2 if is_eight_bit(target) else 1) + written


def _elements(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.elements for spec in specs if spec.is_floating)


def _other_bytes(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.elements * DTYPE_BYTES[spec.dtype] for spec in specs if not spec.is_floating)


@dataclass(frozen=True, slots=True)
class _Roofline:
    """One device under some assumptions."""

    sheet: DataSheet
    assumptions: Assumptions

    def memory_ns(self, num_bytes: float) -> int:
        return round(1e9 * num_bytes / (self.sheet.bandwidth_bytes_per_s * self.assumptions.memory_efficiency))

    def fit(self, bytes_per_element: int) -> CostFit:
        base_ns = self.assumptions.kernel_ns if bytes_per_element else 0
        return CostFit(base_ns=base_ns, ns_per_mi_elements=self.memory_ns(bytes_per_element * MI_ELEMENTS))

    def time_ns(self, work: _Work, precision: str) -> int:
        if not work.kernels:
            return 0
        share = self.assumptions.efficiency_8bit if is_eight_bit(precision) else self.assumptions.efficiency
        compute_ns = round(1e9 * work.flops / (self.sheet.peak_flops[number_format(precision).operands] * share))
        return work.kernels * self.assumptions.kernel_ns + max(compute_ns, self.memory_ns(work.num_bytes))

    def costs(
        self, graph: OpGraph, operator: Operator, formats: dict[str, PrecisionFormats]
    ) -> dict[str, MeasuredCost]:
        """Cost of an operator in every precision that it can run in."""
        kind = base_kind(operator.op_type).lower()
        if operator.role is Role.ADJUSTABLE:
            allowed = [name for name in formats if _can_run(kind, name)]
        elif operator.role is Role.DEPENDENT:
            allowed = [name for name in formats if _stored(name)]
        else:
            allowed = ["FP32"]
        return {name: self._cost(graph, operator, kind, name, formats[name]) for name in allowed}

    def _cost(
        self, graph: OpGraph, operator: Operator, kind: str, precision: str, borders: PrecisionFormats
    ) -> MeasuredCost:
        form = number_format(precision)
        backward_precision = precision if form.bits > 8 or form.eight_bit_backward else borders.gradient_input
        forward, backward = _work(graph, operator, kind, precision, borders)
        saved_bytes, saves_inputs, saves_output = kept_for_backward(graph, operator, precision)
        launch_ns = self.assumptions.launch_ns
        return MeasuredCost(
            forward_ns=self.time_ns(forward, precision),
            backward_ns=self.time_ns(backward, backward_precision),
            host_forward_ns=launch_ns,
            host_backward_ns=launch_ns if operator.inputs or operator.parameters else 0,
            saved_bytes=saved_bytes,
            saves_inputs=saves_inputs,
            saves_output=saves_output,
            alias_input=0 if operator.inputs and not operator.num_bytes else None,
        )


def fit_assumptions(graph: OpGraph, profile: DeviceProfile, sheet: DataSheet) -> Assumptions:
    """The assumptions under which estimates agree with what was measured on a card, for other models on such cards.

    Shares are total times at the data sheet's figures over total measured times, of the operators that the data sheet
    says are bound by them; a kernel's constant is the shortest time of an operator of one kernel that has hardly any
    work, a launch the median of the host's times. What the profile has no operator for keeps its default.

    Args:
        graph: A model, large enough that its products keep the card busy.
        profile: Measured from it on the card (`qsync_opt.profile`).
        sheet: The card's data sheet.

    Raises:
        ProblemError: The profile is an estimate, or of another graph.

    Source: ours.
    """
    profile.check_graph(graph)
    if used_assumptions(profile) is not None:
        raise ProblemError(f"profile of {profile.device.name!r} is a roofline estimate; measure one on the card")
    ideal = _Roofline(sheet, replace(Assumptions(), efficiency=1.0, efficiency_8bit=1.0, memory_efficiency=1.0))
    samples: list[tuple[str, float, int, int]] = []  # what bounds it, its ideal and measured time, its kernels
    for operator in graph:
        kind = base_kind(operator.op_type).lower()
        for precision, cost in profile.cost(operator.name).items():
            if precision not in sheet.peak_flops:
                continue
            work, _ = _work(graph, operator, kind, precision, profile.formats[precision])
            compute_ns, memory_ns = 1e9 * work.flops / sheet.peak_flops[precision], ideal.memory_ns(work.num_bytes)
            by_products = "efficiency_8bit" if number_format(precision).bits == 8 else "efficiency"
            bound = by_products if compute_ns > memory_ns else "memory_efficiency"
            if work.kernels and cost.forward_ns:
                samples.append((bound, max(compute_ns, memory_ns), cost.forward_ns, work.kernels))
    idle_ns = [measured for _, best, measured, kernels in samples if kernels == 1 and best < _HARDLY * measured]
    kernel_ns = min(idle_ns, default=_DEFAULTS.kernel_ns)
    shares: dict[str, float] = {}
    for bound in dict.fromkeys(bound for bound, *_ in samples):
        own = [sample for sample in samples if sample[0] == bound]
        measured_ns = sum(max(measured - kernels * kernel_ns, 0) for *_, measured, kernels in own)
        shares[bound] = min(1.0, sum(best for _, best, *_ in own) / max(measured_ns, 1))
    hosts = [cost.host_forward_ns for table in profile.measurements.values() for cost in table.values()]
    launch_ns = round(statistics.median(hosts)) if any(hosts) else _DEFAULTS.launch_ns
    optimizer = profile.optimizer.name.lower()
    optimizer = optimizer if optimizer in OPTIMIZERS else _DEFAULTS.optimizer
    return Assumptions(kernel_ns=kernel_ns, launch_ns=launch_ns, optimizer=optimizer, **shares)


def _can_run(kind: str, precision: str) -> bool:
    """Whether a kind of operator has kernels for a precision; 8-bit ones need a matrix product."""
    if kind in LOOKUPS or kind in ATTENTION:
        return precision in ("BF16", "FP16", "FP32")
    form = number_format(precision)
    if form.eight_bit_backward and kind in BATCHES:  # these run backward in 16 bits in any case
        return False
    if form.operands == "FP8":
        return kind in ("linear", "addmm", "mm", "gemm", "matmul")
    if precision == "TF32":
        return kind in PRODUCTS or kind.startswith("conv")
    return form.operands != "INT8" or kind in PRODUCTS


def _work(
    graph: OpGraph, operator: Operator, kind: str, precision: str, borders: PrecisionFormats
) -> tuple[_Work, _Work]:
    """Forward and backward work of an operator."""
    if operator.role is Role.ADJUSTABLE and kind not in LOOKUPS:
        return _product_work(graph, operator, kind, precision, borders)
    if operator.role is Role.ADJUSTABLE:
        return _lookup_work(graph, operator, borders)
    return _streaming_work(operator, kind, number_format(borders.output).num_bytes)


def _parameter_elements(graph: OpGraph, operator: Operator) -> int:
    sizes = {parameter.name: parameter.spec.elements for parameter in graph.parameters}
    return sum(sizes[name] for name in operator.parameters)


def _product_work(
    graph: OpGraph, operator: Operator, kind: str, precision: str, borders: PrecisionFormats
) -> tuple[_Work, _Work]:
    """Forward and backward work of products: weights are cast from FP32; backward is one product per operand.

    In 8 bits backward the gradient of the result is quantized, and every operand of a product moves one byte.
    """
    width, eight = number_format(precision).num_bytes, number_format(precision).eight_bit_backward
    weights = _parameter_elements(graph, operator)
    activations = max(0, _elements(operator.input_specs) - weights)
    result = operator.output_elements * number_format(borders.output).num_bytes
    lowered = width < STORAGE_BYTES
    weight_bytes = weights * (STORAGE_BYTES + 2 * width if lowered else STORAGE_BYTES)
    if width == 1:
        weight_bytes += weights * STORAGE_BYTES  # to find the largest magnitude
    if eight:
        weight_bytes += weights * width  # transposed codes
    forward = _Work(
        operator.flops, activations * width + weight_bytes + result, 1 + (lowered and weights > 0) + 2 * (width == 1)
    )
    # Inputs of the model need no gradient.
    operands = sum(graph[source].op_type != "input" for source in operator.inputs) + bool(weights)
    products = _ATTENTION_BACKWARD if kind in ATTENTION else float(operands)
    back_width = number_format(borders.gradient_input).num_bytes
    elements = activations + weights + operator.output_elements
    if eight and operands:
        quantized = operator.output_elements * (2 * back_width + 2 * width)
        delivered = activations * back_width * (operands - bool(weights)) + weights * STORAGE_BYTES
        moved = quantized + operands * elements * width + delivered
        return forward, _Work(operator.flops * products, moved, operands + 2)
    moved = operands * elements * back_width + weights * STORAGE_BYTES
    return forward, _Work(operator.flops * products, moved, operands + (lowered and weights > 0))


def _lookup_work(graph: OpGraph, operator: Operator, borders: PrecisionFormats) -> tuple[_Work, _Work]:
    """Work of a look-up: it reads the selected rows; its gradient is as large as the table."""
    rows, width = operator.output_elements, number_format(borders.output).num_bytes
    table = _parameter_elements(graph, operator)
    forward = _Work(0, rows * (STORAGE_BYTES + width) + _other_bytes(operator.input_specs), 1 + (width < STORAGE_BYTES))
    return forward, _Work(0, rows * (width + 2 * STORAGE_BYTES) + table * STORAGE_BYTES, 2)


def _streaming_work(operator: Operator, kind: str, width: int) -> tuple[_Work, _Work]:
    """Work of other operators: forward moves all tensors once, backward also reads the gradient of the result."""
    if not operator.num_bytes:
        return _Work(0, 0, 0), _Work(0, 0, 0)
    tensors = _elements(operator.input_specs) + _elements(operator.output_specs)
    moved = tensors * width + _other_bytes(operator.input_specs) + _other_bytes(operator.output_specs)
    if not operator.inputs or not operator.is_floating:
        return _Work(operator.flops, moved, 1), _Work(0, 0, 0)
    backward = moved if kind in SAVES_NOTHING else moved + operator.output_elements * width
    return _Work(operator.flops, moved, 1), _Work(2 * operator.flops, backward, 1)


def kept_for_backward(graph: OpGraph, operator: Operator, precision: str) -> tuple[int, tuple[int, ...], bool]:
    """Bytes that an operator saves for itself, the positions of the inputs it saves, and whether it saves its result.

    Source: ours, by the kind of operator.
    """
    kind = base_kind(operator.op_type).lower()
    product = operator.role is Role.ADJUSTABLE and kind not in LOOKUPS
    every = tuple(range(len(operator.inputs)))
    weights = _parameter_elements(graph, operator)
    width = number_format(precision).num_bytes
    if product:
        if width == 1:
            activations = max(0, _elements(operator.input_specs) - weights)
            return activations + weights, (), False
        return (weights * width if width < STORAGE_BYTES else 0), every, kind in ATTENTION
    if not operator.is_floating or not operator.num_bytes or kind in LOOKUPS or kind in SAVES_NOTHING:
        return 0, (), False
    if kind in BYTE_MASKS:
        return operator.output_elements, (), False
    if kind in INDEX_MASKS:
        return operator.output_elements * DTYPE_BYTES["int64"], every[:1], False
    return (0, (), True) if kind in SAVES_OUTPUT else (0, every, False)
