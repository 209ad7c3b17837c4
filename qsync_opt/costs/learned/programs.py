"""What an operator does on a device, as a set of leaves: matrix products, casts, copies and element-wise passes.

A workload is the description of an operator that a record of measurements holds; `programs_of` turns it into its
forward and its backward program in one precision. Leaves have no order: nothing that is computed from a program
depends on it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from qsync_opt.costs.roofline import BATCHES
from qsync_opt.errors import ProblemError
from qsync_opt.io import Name, check_fields
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
from qsync_opt.numerics import PrecisionFormats, number_format


class Phase(enum.StrEnum):
    """What is timed: a pass of an operator, a cast of an activation, or a sum of gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CAST = "cast"
    SUM = "sum"


class LeafKind(enum.StrEnum):
    """What a leaf does."""

    PRODUCT = "product"
    ATTENTION = "attention"
    LOOKUP = "lookup"
    POINTWISE = "pointwise"
    STREAM = "stream"
    CAST = "cast"
    QUANTIZE = "quantize"
    VIEW = "view"

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices."""
        return self in (LeafKind.PRODUCT, LeafKind.ATTENTION)


STORAGE_BYTES = 4
"""Bytes per element of parameters and their gradients (FP32)."""
ATTENTION_BACKWARD = 2.5
"""Backward products of attention per forward product: five for two, because scores are computed again."""
_OTHER_PRODUCTS = frozenset({"einsum", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_HANDS_ON = frozenset({"add", "cat", "stack", "sum", "reducesum", "clone", "contiguous", "identity"})
"""Kinds whose backward pass hands on the gradient or a view of it, unless operands were repeated (broadcast)."""
_JOINS = frozenset({"cat", "stack"})
"""Kinds whose backward pass takes a view per operand."""
_SELECTIONS = frozenset({*LOOKUPS, "slice", "select", "narrow", "split", "chunk"})
"""Kinds that read no more than they return."""


_SAME_WORK = MappingProxyType(
    {
        "addmm": "linear", "gemm": "linear", "mm": "matmul", "bmm": "matmul", "conv": "conv2d", "attention":
        "scaled_dot_product_attention", "layernormalization": "layer_norm", "batchnormalization": "batch_norm",
        "logsoftmax": "log_softmax", "maxpool": "max_pool2d", "reducemean": "mean", "globalaveragepool":
        "adaptive_avg_pool2d", "concat": "cat", "_softmax": "softmax",
    }
)  # fmt: skip
"""Kinds of ONNX and of ATen that do the work of another kind, which is the one that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An operator as far as its time depends on it, without names and places.

    Attributes:
        kind: Of the operator, in its pure form.
        role: Who decides its precision.
        inputs: All tensors that it reads, parameters included.
        outputs: All results.
        weight_elements: Elements of the trainable parameters among the inputs.
        gradients: Number of activations that gradients flow into.
        flops: Of the forward pass, a multiply-add counted as two.
        moves_data: False for a view.
    """

    kind: Name
    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weight_elements: int = 0
    gradients: int = 0
    flops: int = 0
    moves_data: bool = True

    def __post_init__(self) -> None:
        check_fields(self, f"workload {self.kind!r}")
        if not self.outputs:
            raise ProblemError(f"workload {self.kind!r} has no result; a timed operator has at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One kernel's worth of work: operations, bytes, and the sizes of a product (of other work: rows and columns).

    A grouped convolution is a batch of products, one per group. Of ``flops`` an algorithm may save ``spare_flops``, and
    ``spare_bytes`` of ``num_bytes`` may be in the cache: the roofline is without them.
    """

    kind: LeafKind
    number_format: str
    flops: float = 0.0
    num_bytes: float = 0.0
    batch: int = 1
    rows: int = 1
    columns: int = 1
    depth: int = 1
    spare_flops: float = 0.0
    spare_bytes: float = 0.0

    def __post_init__(self) -> None:
        number_format(self.number_format)
        for name in ("flops", "num_bytes", "spare_flops", "spare_bytes"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ProblemError(f"leaf of kind {self.kind!r}: {name} is {value!r}; a finite number >= 0 is needed")
        for name in ("batch", "rows", "columns", "depth"):
            if getattr(self, name) < 1:
                raise ProblemError(
                    f"leaf of kind {self.kind!r}: {name} is {getattr(self, name)}, but sizes are at least 1; an "
                    "operator on empty tensors does nothing and has no time to predict"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The leaves of one pass of an operator; none: there is nothing to do.

    ``family`` is the operator's kind, ``precision`` that in which it is run, ``elements`` those of its results.
    """

    family: str
    precision: str
    phase: Phase
    elements: int
    leaves: tuple[Leaf, ...] = ()

    def __post_init__(self) -> None:
        number_format(self.precision)

    @property
    def num_bytes(self) -> float:
        """Bytes that all leaves move."""
        return math.fsum(leaf.num_bytes for leaf in self.leaves)

    @property
    def least_bytes(self) -> float:
        """Bytes that all leaves move at the least."""
        return math.fsum(leaf.num_bytes - leaf.spare_bytes for leaf in self.leaves)

    @property
    def moves_data(self) -> bool:
        """Whether it is more than views."""
        return any(leaf.kind is not LeafKind.VIEW for leaf in self.leaves)


def workload_of(graph: OpGraph, operator: Operator) -> Workload:
    """The workload of an operator of a graph."""
    sizes = {parameter.name: parameter.spec.elements for parameter in graph.parameters}
    return Workload(
        kind=family_of(operator),
        role=operator.role,
        inputs=operator.input_specs,
        outputs=operator.output_specs,
        weight_elements=sum(sizes[name] for name in operator.parameters),
        gradients=sum(graph[source].op_type != "input" for source in operator.inputs),
        flops=operator.flops,
        moves_data=operator.num_bytes > 0,
    )


def family_of(operator: Operator) -> str:
    """The kind of operator that does the same work, in the words of ATen: ``linear`` for ``Gemm``."""
    kind = base_kind(operator.op_type)
    kind = kind.lower() if kind[:1].isupper() else kind
    if kind in ("matmul", "mm") and operator.parameters:
        return "linear"
    if kind == "gather" and operator.parameters:
        return "embedding"
    if kind == "conv" and operator.output_specs and len(operator.output_specs[0].shape) != 4:
        return kind  # of one or three dimensions, which are not measured
    return _SAME_WORK.get(kind, kind)


def programs_of(work: Workload, precision: str, borders: PrecisionFormats) -> tuple[Program, Program]:
    """The forward and the backward program of a workload in a precision with these border formats.

    Weights are cast from FP32 inside the operator, and 8-bit operators quantize their activations inside. The backward
    pass of 8-bit operators runs in ``borders.gradient_input``, or in 8 bits if the precision says so; it has one
    product per operand that needs a gradient.

    Raises:
        ProblemError: Unknown precision, or a tensor without elements.
    """
    kind = base_kind(work.kind)
    if any(spec.elements == 0 for spec in (*work.inputs, *work.outputs)):
        raise ProblemError(f"workload {kind!r} has a tensor of size zero: it does nothing, so no time is predicted")
    if is_product(kind) and work.flops > 0:
        forward, backward = _product_leaves(work, kind, precision, borders)
    elif kind in LOOKUPS and work.weight_elements:
        forward, backward = _lookup_leaves(work, borders)
    else:
        forward, backward = _stream_leaves(work, kind, borders.output)
    elements = sum(spec.elements for spec in work.outputs)
    return (
        Program(family=kind, precision=precision, phase=Phase.FORWARD, elements=elements, leaves=forward),
        Program(family=kind, precision=precision, phase=Phase.BACKWARD, elements=elements, leaves=backward),
    )


def cast_program(source: str, target: str, elements: int) -> Program:
    """The program of a cast of activations; one to 8 bits reads twice, first for the largest magnitude."""
    read = number_format(source).num_bytes
    eight = number_format(target).bits == 8
    num_bytes = elements * (read * (1 + eight) + number_format(target).num_bytes)
    kind = LeafKind.QUANTIZE if eight else LeafKind.CAST
    leaf = Leaf(kind=kind, number_format=source, num_bytes=num_bytes, rows=elements)
    return Program(family="cast", precision=target, phase=Phase.CAST, elements=elements, leaves=(leaf,))


def sum_program(number_format_name: str, elements: int) -> Program:
    """The program that adds the gradients of a result with two users."""
    num_bytes = 3 * elements * number_format(number_format_name).num_bytes
    leaf = Leaf(kind=LeafKind.STREAM, number_format=number_format_name, num_bytes=num_bytes, rows=elements)
    return Program(
        family="gradient_sum", precision=number_format_name, phase=Phase.SUM, elements=elements, leaves=(leaf,)
    )


def is_product(kind: str) -> bool:
    """Whether operators of a kind multiply matrices, convolve or attend."""
    return kind in PRODUCTS or kind in ATTENTION or kind in _OTHER_PRODUCTS


def _elements(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.elements for spec in specs if spec.is_floating)


def _other_bytes(specs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.elements * DTYPE_BYTES[spec.dtype] for spec in specs if not spec.is_floating)


def _product_leaves(
    work: Workload, kind: str, precision: str, borders: PrecisionFormats
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    form = number_format(precision)
    operands = form.operands
    width, half = form.num_bytes, number_format(borders.output).num_bytes
    weights = work.weight_elements
    activations = max(0, _elements(work.inputs) - weights)
    result = _elements(work.outputs)
    batch, rows, columns, depth = _sizes(work, kind)
    name = LeafKind.ATTENTION if kind in ATTENTION else LeafKind.PRODUCT
    forward = []
    if width == 1:
        forward.append(
            Leaf(kind=LeafKind.QUANTIZE, number_format=borders.output, num_bytes=activations * (2 * half + 1))
        )
    if weights and width < STORAGE_BYTES:
        leaf = LeafKind.QUANTIZE if width == 1 else LeafKind.CAST
        moved = weights * (STORAGE_BYTES * (2 if width == 1 else 1) + width)
        forward.append(Leaf(kind=leaf, number_format="FP32", num_bytes=moved))
    moved = (activations + weights) * width + result * half
    spare = _spare(work, kind)
    sizes: dict[str, Any] = {"batch": batch, "rows": rows, "columns": columns, "depth": depth}
    forward.append(
        Leaf(
            kind=name,
            number_format=operands,
            flops=work.flops,
            num_bytes=moved,
            spare_flops=spare * work.flops,
            **sizes,
        )
    )
    backward = []
    if form.bits > 8:
        back_format = precision
    elif form.eight_bit_backward and kind not in BATCHES:
        back_format = operands
        moved = result * (2 * number_format(borders.gradient_input).num_bytes + width)
        backward.append(Leaf(kind=LeafKind.QUANTIZE, number_format=borders.gradient_input, num_bytes=moved))
    else:
        back_format = borders.gradient_input
    back_width = number_format(back_format).num_bytes
    moved = (activations + weights + result) * back_width
    same: dict[str, Any] = {"kind": name, "number_format": back_format}
    if kind in ATTENTION:
        if work.gradients:
            flops = work.flops * ATTENTION_BACKWARD
            backward.append(Leaf(flops=flops, spare_flops=spare * flops, num_bytes=2 * moved, **same, **sizes))
        return tuple(forward), tuple(backward)
    same |= {"flops": work.flops, "spare_flops": spare * work.flops, "num_bytes": moved}
    for operand in range(work.gradients):
        sizes = {"batch": batch, "rows": rows, "columns": depth, "depth": columns}
        if operand:
            sizes = {"batch": batch, "rows": depth, "columns": columns, "depth": rows}
        backward.append(Leaf(**same, **sizes))
    if weights:
        sizes = {"batch": batch, "rows": columns, "columns": depth, "depth": rows}
        backward.append(Leaf(**same, **sizes))
        if back_width < STORAGE_BYTES:
            bytes_of_cast = weights * (STORAGE_BYTES + back_width)
            backward.append(Leaf(kind=LeafKind.CAST, number_format=back_format, num_bytes=bytes_of_cast))
    return tuple(forward), tuple(backward)


def _sizes(work: Workload, kind: str) -> tuple[int, int, int, int]:
    """Batch, rows, columns and depth of the product that a workload is."""
    shape = work.outputs[0].shape or (1,)
    result = math.prod(shape)
    if kind in ATTENTION:
        batch, rows, columns = math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]
        return batch, rows, columns, max(1, round(work.flops / (4 * result)))
    depth = max(1, round(work.flops / (2 * result)))
    if kind.startswith("conv") and len(shape) > 1:
        groups = _groups(work, kind)
        return groups, result // shape[1], shape[1] // groups, depth
    if kind in ("bmm", "baddbmm", "matmul", "einsum") and len(shape) > 2 and not work.weight_elements:
        return math.prod(shape[:-2]), shape[-2], shape[-1], depth
    return 1, result // shape[-1], shape[-1], depth


def _spare(work: Workload, kind: str) -> float:
    """Share of operations that may be saved: half of attention, if causal; most of a convolution of several pixels.

    Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016): tiles of 4 by 4 leave a quarter.
    """
    if kind in ATTENTION:
        return 0.5
    pixels = math.prod(work.inputs[1].shape[2:]) if kind.startswith("conv") and len(work.inputs) > 1 else 1
    return 1 - max(0.25, 1 / pixels)


def _groups(work: Workload, kind: str) -> int:
    """Groups of a convolution, from the channels of its input and of its weight (whose order transposes it)."""
    if kind.startswith("conv_transpose") or len(work.inputs) < 2 or min(len(s.shape) for s in work.inputs[:2]) < 2:
        return 1
    channels, of_group = work.inputs[0].shape[1], work.inputs[1].shape[1]
    groups = channels // of_group
    return groups if groups * of_group == channels and work.outputs[0].shape[1] % groups == 0 else 1


def _lookup_leaves(work: Workload, borders: PrecisionFormats) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    width = number_format(borders.output).num_bytes
    elements = _elements(work.outputs)
    columns = (work.outputs[0].shape or (1,))[-1]
    sizes = {"rows": elements // columns, "columns": columns}
    forward = elements * (STORAGE_BYTES + width) + _other_bytes(work.inputs)
    backward = elements * (width + 2 * STORAGE_BYTES)
    again = max(0, elements - work.weight_elements) * STORAGE_BYTES  # of rows that are read or added to once more
    one, two = (
        Leaf(kind=LeafKind.LOOKUP, number_format=borders.output, num_bytes=moved, spare_bytes=spare, **sizes)
        for moved, spare in ((forward, again), (backward, 2 * again))
    )
    # The gradient of the whole table is filled with zeros first.
    cleared = Leaf(kind=LeafKind.STREAM, number_format="FP32", num_bytes=work.weight_elements * STORAGE_BYTES)
    return (one,), (two, cleared)


def _stream_leaves(work: Workload, kind: str, format_name: str) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Passes over memory; bytes are those that must be moved, so that the roofline is a floor.

    A backward pass reads the gradient of the result, what its derivative depends on (`_operand_elements`) and masks or
    indices (`_mask_width`), and writes the gradients of inputs and parameters; some hand on the gradient that they get.
    """
    gradient = bool(work.gradients or work.weight_elements) and any(spec.is_floating for spec in work.outputs)
    if not work.moves_data:
        view = Leaf(kind=LeafKind.VIEW, number_format=format_name)
        return (view,), (view,) if gradient else ()
    width = number_format(format_name).num_bytes
    result = _elements(work.outputs)
    read = min(_elements(work.inputs), result) if kind in _SELECTIONS else _elements(work.inputs)
    masks = result * _mask_width(kind) if gradient else 0
    moved = (read + result) * width + masks + _other_bytes(work.inputs) + _other_bytes(work.outputs)
    # Norms, softmax and losses, which reduce over a dimension before they return one, are fixed in FP32.
    largest = max((spec.elements for spec in work.inputs), default=0)
    alike = work.role is not Role.FIXED and not work.weight_elements and result == largest
    leaf_kind = LeafKind.POINTWISE if alike else LeafKind.STREAM
    # Rows are those of the largest tensor: a reduction works along the rows of its input.
    shape = max(((s.elements, s.shape) for s in (*work.inputs, *work.outputs)), default=(1, (1,)))[1] or (1,)
    sizes = {"rows": math.prod(shape[:-1]), "columns": shape[-1]}
    forward = Leaf(kind=leaf_kind, number_format=format_name, flops=work.flops, num_bytes=moved, **sizes)
    if not gradient:
        return (forward,), ()
    if kind in _HANDS_ON and (repeats := _broadcast_elements(work)) == 0:
        view = Leaf(kind=LeafKind.VIEW, number_format=format_name)
        return (forward,), (view,) * (max(1, work.gradients) if kind in _JOINS else 1)
    if kind in _HANDS_ON:
        return (forward,), (replace(forward, num_bytes=(result + repeats) * width),)
    elements = result + _gradient_elements(work) + _operand_elements(work, kind)
    moved = elements * width + masks + _other_bytes(work.inputs)
    return (forward,), (replace(forward, flops=2 * work.flops, num_bytes=moved),)


def _mask_width(kind: str) -> int:
    """Bytes per element of the result that only the backward pass needs: a mask, or where the result is from."""
    return 1 if kind in BYTE_MASKS else DTYPE_BYTES["int64"] if kind in INDEX_MASKS else 0


def _gradient_elements(work: Workload) -> int:
    """Elements of the gradients that a backward pass writes: those of the first inputs, and of the parameters."""
    inputs = [spec.elements for spec in work.inputs if spec.is_floating]
    return sum(inputs[: work.gradients]) + work.weight_elements


def _operand_elements(work: Workload, kind: str) -> int:
    """Elements that a backward pass reads beside the gradient, at the least."""
    if kind in SAVES_NOTHING or _mask_width(kind):
        return 0
    if kind in SAVES_OUTPUT:
        return _elements(work.outputs)
    inputs = [spec.elements for spec in work.inputs if spec.is_floating]
    # Of a product with a constant, say, only the other operand is needed.
    return sum(inputs) if work.weight_elements or len(inputs) <= work.gradients else min(inputs, default=0)


def _broadcast_elements(work: Workload) -> int:
    """Elements of the operands of ``add`` that are repeated and need gradients: sums over that of the result."""
    result = max(spec.elements for spec in work.outputs)
    small = [spec.elements for spec in work.inputs if spec.is_floating and spec.elements < result]
    needed = work.gradients + bool(work.weight_elements) >= sum(spec.is_floating for spec in work.inputs)
    return sum(small) if needed and base_kind(work.kind) == "add" else 0
