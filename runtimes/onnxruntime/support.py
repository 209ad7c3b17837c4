"""In which formats can each operator run on a device? Found out by asking ONNX Runtime to load it alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qsync_opt.errors import ModelError, UnsupportedError
from qsync_opt.model import ROLE_TABLE, Operator, Role, base_kind
from qsync_opt.numerics import PrecisionFormats, number_format
from qsync_opt.runtimes.onnxruntime.graph_rewrite import rewrite
from qsync_opt.runtimes.onnxruntime.parts import Part, record_values, take_part
from qsync_opt.runtimes.onnxruntime.prepared import Array, PreparedModel, prepare
from qsync_opt.runtimes.onnxruntime.sessions import Device, start_session

FORMATS = ("INT8", "BF16", "FP16", "FP32")
"""Those that this runtime writes, coarsest first."""
_OPSET = 21
# Kinds of torch operators, as files of its exporter name them, by the node that stands for them.
_STAND_FOR = {
    "linear": "Gemm",
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"), "MatMul"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "Conv"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "ConvTranspose"),
    "einsum": "Einsum",
    "embedding": "Gather",
}


def border_formats(precision: str) -> PrecisionFormats:
    """Formats at the borders of an operator: integers answer in FP32, and nothing runs backward."""
    output = "FP32" if precision == "INT8" else precision
    return PrecisionFormats(output=output, gradient_input="FP32", gradient_output="FP32")


class Support:
    """What the operators of one model can run in on one device, each kind asked once.

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
        """The operator as a model of its own."""
        return take_part(self._model, operator.name, self._values)

    def precisions(self, operator: Operator) -> tuple[str, ...]:
        """Formats that an operator can run in, coarsest first, whatever its role lets a plan choose."""
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
            if precision == "INT8" and part.integer_nodes != 1:
                return f"it has {part.integer_nodes} nodes with an integer form, but exactly one is needed"
            formats = [precision] * len(part.model.proto.graph.node)
            mixed = rewrite(part.model, formats, arrivals=part.arrivals(precision), results_as_they_are=True)
            start_session(mixed.proto, self._device, f"operator {operator.name!r} in {precision}", own_device_only=True)
        except (UnsupportedError, ModelError) as error:
            return str(error)
        return None


def kind_precisions(op_type: str, device: Device) -> tuple[str, ...]:
    """Formats that a small operator of a kind can run in, coarsest first; FP32 alone for kinds not adjustable."""
    node = _STAND_FOR.get(base_kind(op_type), op_type)
    if ROLE_TABLE.get(base_kind(op_type)) is not Role.ADJUSTABLE and node != "Gather":
        return ("FP32",)
    return _sample_precisions(node, device)


@cache
def _sample_precisions(kind: str, device: Device) -> tuple[str, ...]:
    proto = _sample(kind)
    if proto is None:
        return ("FP32",)
    model = prepare(proto)
    values: dict[str, Array] = {"x": np.zeros([d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim])}
    values["x"] = values["x"].astype(np.int64 if kind == "Gather" else np.float32)
    values = record_values(model, values, device)
    support = Support(model, device, values)
    return support.precisions(model.graph["sample"])


def _sample(kind: str) -> onnx.ModelProto | None:
    """The smallest model of a kind of node with a weight."""
    shapes = {
        "MatMul": ((4, 8), (8, 4)),
        "Gemm": ((4, 8), (8, 4)),
        "Einsum": ((4, 8), (8, 4)),
        "Conv": ((1, 4, 8, 8), (4, 4, 3, 3)),
        "ConvTranspose": ((1, 4, 8, 8), (4, 4, 3, 3)),
        "Gather": ((4,), (8, 4)),
    }
    if kind not in shapes:
        return None
    x_shape, w_shape = shapes[kind]
    attributes = {"equation": "ij,jk->ik"} if kind == "Einsum" else {}
    inputs = ["w", "x"] if kind == "Gather" else ["x", "w"]
    x_type = TensorProto.INT64 if kind == "Gather" else TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(kind, inputs, ["y"], name="sample", **attributes)],
        "sample",
        [helper.make_tensor_value_info("x", x_type, x_shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(w_shape, np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=10)
