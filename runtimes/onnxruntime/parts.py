"""Take one operator out of a model, as a model of its own with the inputs that it really gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.onnxruntime.integer import INTEGER_KINDS
from qsync_opt.runtimes.onnxruntime.prepared import LARGEST_BYTES, Array, PreparedModel
from qsync_opt.runtimes.onnxruntime.sessions import Device, reason_of, start_session

Feeds = Mapping[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One operator as a model; ``inputs`` are the values that it gets from others, with what they were in one run."""

    model: PreparedModel
    inputs: Mapping[str, Array]

    def arrivals(self, number_format: str) -> dict[str, str]:
        """Formats in which floating-point inputs arrive when the operator runs in a format."""
        floating = [value for value in self.inputs if self.model.is_floating(value)]
        if number_format != "INT8":
            return dict.fromkeys(floating, number_format)
        nodes = self.model.proto.graph.node
        operands = {v for node in nodes if node.op_type in INTEGER_KINDS for v in node.input[:2]}
        others = {v for node in nodes for v in node.input[2 if node.op_type in INTEGER_KINDS else 0 :]}
        return {value: "INT8" if value in operands - others else "FP32" for value in floating}

    @property
    def integer_nodes(self) -> int:
        """How many nodes have an integer form."""
        return sum(node.op_type in INTEGER_KINDS for node in self.model.proto.graph.node)


def made_up_feeds(proto: onnx.ModelProto) -> dict[str, Array]:
    """Inputs for a model: normal numbers, index 0, True; always the same ones.

    Raises:
        ModelError: They would take more memory than a whole model may.
    """
    generator = np.random.default_rng(0)
    left = LARGEST_BYTES
    weights = {tensor.name for tensor in proto.graph.initializer}
    feeds: dict[str, Array] = {}
    for info in proto.graph.input:
        if info.name in weights:
            continue
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        left -= math.prod(shape) * dtype.itemsize
        if left < 0:
            raise ModelError(
                f"input {info.name!r} of the model {proto.graph.name!r} has shape {tuple(shape)}: inputs of more than "
                f"{LARGEST_BYTES} bytes are not run here; export the model for a smaller batch"
            )
        if dtype == np.float32:
            feeds[info.name] = generator.standard_normal(shape, dtype=np.float32)
        else:
            feeds[info.name] = np.ones(shape, dtype) if dtype == np.bool_ else np.zeros(shape, dtype)
    return feeds


def record_values(model: PreparedModel, feeds: Feeds, device: Device) -> dict[str, Array]:
    """Run a model once in FP32 and return every tensor that a node reads or writes, inputs included.

    Raises:
        ModelError: It does not run on these inputs.
    """
    values = dict(feeds)
    wanted = [value for node in model.proto.graph.node for value in node.output if value in model.types]
    values.update(zip(wanted, run_exposed(model.proto, wanted, model.types, feeds, device), strict=True))
    return values


def run_exposed(
    proto: onnx.ModelProto, values: Sequence[str], types: Mapping[str, int], feeds: Feeds, device: Device
) -> list[Array]:
    """Run a model and return some of its values, whether it returns them or not."""
    scratch = onnx.ModelProto()
    scratch.CopyFrom(proto)
    scratch.graph.ClearField("output")
    for value in dict.fromkeys(values):
        scratch.graph.output.append(helper.make_tensor_value_info(value, types[value], None))
    session = start_session(scratch, device, f"the model {proto.graph.name!r} with all its values returned")
    try:
        found: list[Any] = session.run(list(values), dict(feeds))
    except Exception as error:  # the library's errors have no base of their own
        raise ModelError(f"the model {proto.graph.name!r} does not run: {reason_of(error)}") from error
    return [np.asarray(value) for value in found]


def take_part(model: PreparedModel, operator: str, values: Mapping[str, Array]) -> Part:
    """Return one operator of a model as a model of its own.

    Args:
        model: The whole.
        operator: Its name.
        values: Of one run, by `record_values`.

    Raises:
        ModelError: The operator reads or writes what is no tensor.
    """
    graph = model.proto.graph
    nodes = [node for node, owner in zip(graph.node, model.owners, strict=True) if owner == operator]
    inside = {value for node in nodes for value in node.output if value}
    reads = list(dict.fromkeys(v for node in nodes for v in node.input if v and v not in inside))
    for value in (*reads, *inside):
        if value not in model.types:
            raise ModelError(f"operator {operator!r} reads or writes {value!r}, which is no tensor")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    fixed = {value for node in graph.node if node.op_type == "Constant" for value in node.output}
    read_by_others = {
        v for node, owner in zip(graph.node, model.owners, strict=True) if owner != operator for v in node.input
    } | {info.name for info in graph.output}
    outputs = [v for node in nodes for v in node.output if v and v in read_by_others]
    inputs = {v: values[v] for v in reads if v not in weights and v not in fixed}
    part = onnx.GraphProto(name=f"{graph.name}: {operator}", node=nodes)
    part.initializer.extend(weights[v] for v in reads if v in weights)
    part.initializer.extend(numpy_helper.from_array(values[v], v) for v in reads if v in fixed)
    part.input.extend(helper.make_tensor_value_info(v, model.types[v], a.shape) for v, a in inputs.items())
    results = outputs or [v for node in nodes for v in node.output if v]
    part.output.extend(helper.make_tensor_value_info(v, model.types[v], values[v].shape) for v in results)
    proto = onnx.ModelProto(ir_version=model.proto.ir_version, graph=part)
    proto.opset_import.extend(model.proto.opset_import)
    constants = {v: a for v, a in model.constants.items() if v in reads or v in inside}
    whole = replace(model, proto=proto, owners=(operator,) * len(nodes), constants=constants)
    return Part(model=whole, inputs=inputs)
