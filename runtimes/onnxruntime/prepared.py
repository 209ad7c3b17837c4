"""ONNX models prepared for rewriting: their nodes with operators, element types and constants."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import TensorProto, numpy_helper, shape_inference

from qsync_opt.errors import ModelError, first_line
from qsync_opt.model import OpGraph, RoleTable
from qsync_opt.model.onnx import EXTERNAL_FAILURES, inline_functions, load_proto, read_onnx

LARGEST_BYTES = 2**31 - 1
"""The limit of protocol buffers: a model is passed to its session as one."""
_FLOATING = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_INVALID = (onnx.checker.ValidationError, shape_inference.InferenceError)
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model in FP32 with all its weights, and its operator graph.

    ``owners`` has the operator of each node, in the order of the nodes. ``types`` has the ONNX element type of each
    value that is a tensor. ``constants`` are the floating-point initializers and results of ``Constant`` nodes.
    """

    proto: onnx.ModelProto
    graph: OpGraph
    owners: tuple[str, ...]
    types: Mapping[str, int]
    constants: Mapping[str, Array]

    def is_floating(self, value: str) -> bool:
        """True for FP32 tensors, the only floating-point ones that a prepared model has."""
        return self.types.get(value) == TensorProto.FLOAT

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators."""
        return next((entry.version for entry in self.proto.opset_import if entry.domain in ("", "ai.onnx")), 1)


def prepare(
    source: str | os.PathLike[str] | onnx.ModelProto, *, roles: RoleTable | None = None, name: str | None = None
) -> PreparedModel:
    """Read a model with its weights and check that plans can be made for it.

    Args:
        source: Path of the file, or the model itself, which is left as it is.
        roles: The role table with changes; None is the shipped one.
        name: Of the graph; None takes the one in the model.

    Raises:
        ModelError: Not a usable ONNX model, its weights are missing or lie outside of its folder, it is larger than a
            session takes as one, or it computes in floating-point types other than FP32; the first value is named.
    """
    proto = _with_weights(source)
    where = "the ONNX model" if isinstance(source, onnx.ModelProto) else f"ONNX file {os.fspath(source)}"
    proto = inline_functions(proto, where)
    graph = read_onnx(proto, roles=roles, name=name)
    try:
        types = _types(proto)
        onnx.checker.check_model(proto)
        constants = _constants(proto, types)
    except (*_INVALID, EncodeError, ValueError, TypeError, IndexError) as error:
        raise ModelError(f"the ONNX model {graph.name!r} is not valid: {first_line(error)}") from error
    for value, kind in types.items():
        if kind in _FLOATING and kind != TensorProto.FLOAT:
            raise ModelError(
                f"value {value!r} of the ONNX model {graph.name!r} is {TensorProto.DataType.Name(kind)}, but a plan "
                "starts from a model in FP32 (FLOAT): export it without lower or double precision"
            )
    return PreparedModel(
        proto=proto,
        graph=graph,
        owners=_owners(proto, graph),
        types=MappingProxyType(types),
        constants=MappingProxyType(constants),
    )


def _with_weights(source: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        for tensor in proto.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                raise ModelError(
                    f"weight {tensor.name!r} is in an external file, which a model in memory does not lead to: give "
                    "the path of the model's file, or load it with its external data"
                )
        return proto
    proto = load_proto(Path(source))
    try:
        _check_external(proto, Path(source))
        # onnx refuses external files outside of the model's folder.
        onnx.load_external_data_for_model(proto, str(Path(source).parent))
    except EXTERNAL_FAILURES as error:
        raise ModelError(
            f"ONNX file {str(source)!r} cannot be read with its weights: {first_line(error)}; export it again, with "
            "its external data beside it"
        ) from error
    return proto


def _check_external(proto: onnx.ModelProto, path: Path) -> None:
    """Refuse external weights that are too many for a session, before they are read: a file may be mostly holes."""
    total = proto.ByteSize()
    inner = [attribute.t for node in proto.graph.node for attribute in node.attribute if attribute.HasField("t")]
    for tensor in (*proto.graph.initializer, *inner):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        stated = {entry.key: entry.value for entry in tensor.external_data}
        if "length" in stated:
            total += max(0, int(stated["length"]))
        else:  # to the end of the file
            total += max(0, os.path.getsize(path.parent / stated.get("location", "")) - int(stated.get("offset", 0)))
    _check_size(total, f"ONNX file {str(path)!r}")


def _check_size(size_bytes: int, where: str) -> None:
    if size_bytes > LARGEST_BYTES:
        raise ModelError(
            f"{where} has {size_bytes} bytes with its weights, but at most {LARGEST_BYTES} can be rewritten: plan it "
            "in parts"
        )


def _types(proto: onnx.ModelProto) -> dict[str, int]:
    """Element type of every tensor, inferred where the model does not state it; states shapes of results."""
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    _check_size(proto.ByteSize(), "the ONNX model")
    inferred = shape_inference.infer_shapes(proto)
    # ONNX's checks want the shapes of results stated, which sessions do not need.
    proto.graph.ClearField("output")
    proto.graph.output.extend(inferred.graph.output)
    for info in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        if info.type.HasField("tensor_type"):
            types[info.name] = info.type.tensor_type.elem_type
    return types


def _constants(proto: onnx.ModelProto, types: Mapping[str, int]) -> dict[str, Array]:
    """Values of the FP32 initializers and ``Constant`` nodes."""
    tensors = [tensor for tensor in proto.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}
    for node in proto.graph.node:
        if node.op_type == "Constant" and types.get(node.output[0]) == TensorProto.FLOAT:
            value = onnx.helper.get_attribute_value(node.attribute[0])
            is_tensor = isinstance(value, TensorProto)
            constants[node.output[0]] = numpy_helper.to_array(value) if is_tensor else np.asarray(value, np.float32)
    return constants


def _owners(proto: onnx.ModelProto, graph: OpGraph) -> tuple[str, ...]:
    """Operator of each node; nodes of equal name belong to operators in the order of both."""
    by_name: dict[str, list[str]] = {}
    for operator in graph:
        for node_name in operator.onnx_nodes:
            by_name.setdefault(node_name, []).append(operator.name)
    owners = []
    for position, node in enumerate(proto.graph.node):
        outputs = [value for value in node.output if value]
        node_name = node.name or (outputs[0] if outputs else f"{node.op_type}_{position}")
        owners.append(by_name[node_name].pop(0))
    return tuple(owners)
