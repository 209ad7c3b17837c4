"""Formats in which operators run on a device: each operator is loaded by ONNX Runtime as a model of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.model import ROLE_TABLE, Operator, Role, base_kind
from qsync_opt.numerics import PrecisionFormats, number_format
from qsync_opt.runtimes.onnxruntime.graph_rewrite import INTEGER_KINDS, rewrite
from qsync_opt.runtimes.onnxruntime.prepared import Array, PreparedModel, prepare
from qsync_opt.runtimes.onnxruntime.sessions import Device, record_values, sample_feeds, small_model, start_session

FORMATS = ("INT8", "BF16", "FP16", "FP32")
"""Formats that this runtime writes, coarsest first."""
# By kind of torch operator, as files of its exporter name it, the kind of node that is tried in its place.
_NODE_KINDS = {
    "linear": "Gemm",
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"), "MatMul"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "Conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "ConvTranspose"),
    "einsum": "Einsum",
    "embedding": "Gather",
}
# Of the input and the weight of a sample of each kind of node.
_SAMPLE_SHAPES = {
    **dict.fromkeys(("MatMul", "Gemm", "Einsum"), ((4, 8), (8, 4))),
    **dict.fromkeys(("Conv", "ConvTranspose"), ((1, 4, 8, 8), (4, 4, 3, 3))),
    "Gather": ((4,), (8, 4)),
}


def border_formats(precision: str) -> PrecisionFormats:
    """Formats at the borders of an operator: results of INT8 are FP32, and nothing runs backward."""
    output = "FP32" if precision == "INT8" else precision
    return PrecisionFormats(output=output, gradient_input="FP32", gradient_output="FP32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One operator as a model; ``inputs`` are the values that it reads from others, as recorded in one run."""

    model: PreparedModel
    inputs: Mapping[str, Array]

    def arrivals(self, number_format: str) -> dict[str, str]:
        """Formats of the floating-point inputs when the operator runs in a format."""
        floating = [value for value in self.inputs if self.model.is_floating(value)]
        if number_format != "INT8":
            return dict.fromkeys(floating, number_format)
        nodes = self.model.proto.graph.node
        operands = {v for node in nodes if node.op_type in INTEGER_KINDS for v in node.input[:2]}
        others = {v for node in nodes for v in node.input[2 if node.op_type in INTEGER_KINDS else 0 :]}
        return {value: "INT8" if value in operands - others else "FP32" for value in floating}

    def session(self, precision: str, device: Device, *, own_device_only: bool = False) -> Any:
        """A session of the operator in a precision, with inputs and results in the formats that it has there."""
        formats = [precision] * len(self.model.proto.graph.node)
        mixed = rewrite(self.model, formats, arrivals=self.arrivals(precision), results_as_they_are=True)
        what = f"operator {self.model.owners[0]!r} in {precision}"
        return start_session(mixed.proto, device, what, own_device_only=own_device_only)


class Support:
    """Formats of the operators of one model on one device; equal operators are tried once.

    Args:
        model: The model.
        device: The device.
        values: Of one run, by `record_values`; only shapes and integers matter.
    """

    def __init__(self, model: PreparedModel, device: Device, values: Mapping[str, Array]) -> None:
        self._model = model
        self._device = device
        self._values = values
        self._known: dict[tuple[str, tuple[bool, ...], str], str | None] = {}

    def part(self, operator: Operator) -> Part:
        """The operator as a model.

        Raises:
            ModelError: It reads or writes what is no tensor.
        """
        model, values = self._model, self._values
        graph = model.proto.graph
        owned = list(zip(graph.node, model.owners, strict=True))
        nodes = [node for node, owner in owned if owner == operator.name]
        inside = {value for node in nodes for value in node.output if value}
        reads = list(dict.fromkeys(v for node in nodes for v in node.input if v and v not in inside))
        for value in (*reads, *inside):
            if value not in model.types:
                raise ModelError(f"operator {operator.name!r} reads or writes {value!r}, which is no tensor")
        weights = {tensor.name: tensor for tensor in graph.initializer}
        fixed = {value for node in graph.node if node.op_type == "Constant" for value in node.output}
        needed = {v for node, owner in owned if owner != operator.name for v in node.input}
        needed |= {info.name for info in graph.output}
        written = [v for node in nodes for v in node.output if v]
        inputs = {v: values[v] for v in reads if v not in weights and v not in fixed}
        part = onnx.GraphProto(name=f"{graph.name}: {operator.name}", node=nodes)
        part.initializer.extend(weights[v] for v in reads if v in weights)
        part.initializer.extend(numpy_helper.from_array(values[v], v) for v in reads if v in fixed)
        part.input.extend(helper.make_tensor_value_info(v, model.types[v], a.shape) for v, a in inputs.items())
        results = [v for v in written if v in needed] or written
        part.output.extend(helper.make_tensor_value_info(v, model.types[v], values[v].shape) for v in results)
        proto = onnx.ModelProto(ir_version=model.proto.ir_version, graph=part)
        proto.opset_import.extend(model.proto.opset_import)
        constants = {v: a for v, a in model.constants.items() if v in reads or v in inside}
        owners = (operator.name,) * len(nodes)
        return Part(model=replace(model, proto=proto, owners=owners, constants=constants), inputs=inputs)

    def precisions(self, operator: Operator) -> tuple[str, ...]:
        """Formats that an operator can run in, coarsest first, whatever its role allows in a plan."""
        return tuple(name for name in FORMATS if self.refusal(operator, name) is None)

    def refusal(self, operator: Operator, precision: str) -> str | None:
        """Why an operator cannot run in a format; None if it can."""
        if precision == "FP32":
            return None
        number_format(precision)
        if precision not in FORMATS:
            return f"this runtime writes {', '.join(FORMATS)} only"
        if operator.op_type == "input":
            return "the model's inputs are FP32"
        constant = tuple(
            value in self._model.constants
            for node, owner in zip(self._model.proto.graph.node, self._model.owners, strict=True)
            if owner == operator.name
            for value in node.input
        )
        key = (operator.signature, constant, precision)
        if key not in self._known:
            self._known[key] = self._try(operator, precision)
        return self._known[key]

    def _try(self, operator: Operator, precision: str) -> str | None:
        try:
            part = self.part(operator)
            integer_nodes = sum(node.op_type in INTEGER_KINDS for node in part.model.proto.graph.node)
            if precision == "INT8" and integer_nodes != 1:
                return f"it has {integer_nodes} nodes with an integer form, but exactly one is needed"
            part.session(precision, self._device, own_device_only=True)
        except (UnsupportedError, ModelError) as error:
            return str(error)
        return None


def kind_precisions(op_type: str, device: Device) -> tuple[str, ...]:
    """Formats of a small operator of a kind, coarsest first; only FP32 for kinds that are not adjustable."""
    node = _NODE_KINDS.get(base_kind(op_type), op_type)
    if ROLE_TABLE.get(base_kind(op_type)) is not Role.ADJUSTABLE and node != "Gather":
        return ("FP32",)
    return _sample_precisions(node, device)


@cache
def _sample_precisions(kind: str, device: Device) -> tuple[str, ...]:
    if kind not in _SAMPLE_SHAPES:
        return ("FP32",)
    x_shape, w_shape = _SAMPLE_SHAPES[kind]
    gathers = kind == "Gather"
    attributes = {"equation": "ij,jk->ik"} if kind == "Einsum" else {}
    node = helper.make_node(kind, ["w", "x"] if gathers else ["x", "w"], ["y"], name="sample", **attributes)
    x = helper.make_tensor_value_info("x", TensorProto.INT64 if gathers else TensorProto.FLOAT, x_shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = prepare(small_model([node], [x], [y], [numpy_helper.from_array(np.ones(w_shape, np.float32), "w")]))
    values = record_values(model, sample_feeds(model.proto), device)
    return Support(model, device, values).precisions(model.graph["sample"])
