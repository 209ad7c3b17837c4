"""Rewriting of an ONNX graph in mixed precision: every node in its format, with explicit casts where formats meet.

A value is cast once per format, however many nodes read it so; no value is cast twice in a row. Weights are stored in
the format that they are read in. Results of the model stay FP32.

INT8 products and convolutions are written in ONNX's own operators. The input is quantized at run time
(``DynamicQuantizeLinear``: unsigned, asymmetric, one scale per tensor), a weight in advance (signed, symmetric, one
scale per column or channel). ``MatMulInteger`` and ``ConvInteger`` sum exactly; the result is the sum times both
scales, in FP32. No calibration data is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from google.protobuf.message import EncodeError
from onnx import TensorProto, helper, numpy_helper, shape_inference

from qsync_opt.errors import ModelError, UnsupportedError, first_line
from qsync_opt.model.onnx import GRAPH_KEY
from qsync_opt.runtimes.onnxruntime.number_types import ELEMENT_TYPE, TYPE_TEXT, stored, weight_codes
from qsync_opt.runtimes.onnxruntime.prepared import Array, PreparedModel

_OWN_DOMAINS = ("", "ai.onnx")
INTEGER_KINDS = frozenset({"MatMul", "Gemm", "Conv"})
"""Kinds of nodes that have an integer form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCast:
    """A value that is cast once, for all nodes that read it in ``target``.

    ``for_result``: only a result of the model needs it so.
    """

    value: str
    source: str
    target: str
    for_result: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedGraph:
    """A rewritten model; ``formats`` has the format of each floating-point value, ``names`` the new names of some."""

    proto: onnx.ModelProto
    casts: tuple[EdgeCast, ...]
    formats: Mapping[str, str]
    names: Mapping[str, str]


def rewrite(
    model: PreparedModel,
    node_formats: Sequence[str],
    *,
    arrivals: Mapping[str, str] | None = None,
    results_as_they_are: bool = False,
) -> MixedGraph:
    """Return the model with every node in its format.

    Args:
        model: In FP32.
        node_formats: Format of each node: FP32, FP16, BF16, or INT8 for those that have an integer form.
        arrivals: Formats of inputs of the model that are not FP32, for measuring parts of a model. An INT8 input is
            three inputs: codes, scale and zero point.
        results_as_they_are: Leave results in the format of their node, instead of FP32.

    Raises:
        UnsupportedError: A node cannot be written in its format; the text names it and says why.
        ModelError: The result is not a valid model.
    """
    writer = _Writer(model, arrivals or {}, results_as_they_are)
    for node, node_format in zip(model.proto.graph.node, node_formats, strict=True):
        writer.node(node, node_format)
    return writer.finish()


class _Quantized(NamedTuple):
    """Names of the values of a quantized tensor: codes, scale, zero point ("" where it is zero)."""

    codes: str
    scale: str
    zero: str


class _Writer:
    def __init__(self, model: PreparedModel, arrivals: Mapping[str, str], results_as_they_are: bool) -> None:
        self._model = model
        self._keep_results = results_as_they_are
        self.nodes: list[onnx.NodeProto] = []
        self._new_tensors: list[TensorProto] = []
        self._taken = {*model.types, *(v for node in model.proto.graph.node for v in (*node.input, *node.output))}
        self._results = {info.name for info in model.proto.graph.output}
        self._arrivals = dict(arrivals)
        self._formats: dict[str, str] = {v: "FP32" for v in model.types if model.is_floating(v)} | self._arrivals
        self._names: dict[str, str] = {}
        self._available: dict[tuple[str, str], str] = {}
        self._quantized: dict[str, _Quantized] = {}
        self._casts: dict[tuple[str, str], EdgeCast] = {}

    def fresh(self, base: str) -> str:
        """A name that no value has yet."""
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    def node(self, node: onnx.NodeProto, node_format: str) -> None:
        """Write the casts of one node, then the node in its format."""
        label = node.name or next(iter(node.output), node.op_type)
        if node_format == "INT8":
            if node.op_type in INTEGER_KINDS and node.domain in _OWN_DOMAINS:
                _IntegerForm(node, self, self._model.constants).write()
                self._formats[node.output[0]] = "FP32"
                return
            node_format = "FP32"  # the rest of an operator of several nodes
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        formats = self._bind(copy, node, node_format, label)
        for position, value_format in formats.items():
            value = node.output[position]
            self._formats[value] = value_format
            # The name of a result of the model stays with its FP32 form.
            if value_format != "FP32" and value in self._results and not self._keep_results:
                self._names[value] = copy.output[position] = self.fresh(f"{value}__{value_format}")
        if node.op_type == "Constant" and self._model.is_floating(node.output[0]):
            # Readers in another format have copies of their own.
            self._formats[node.output[0]] = "FP32"
        self.nodes.append(copy)

    def _bind(self, copy: onnx.NodeProto, node: onnx.NodeProto, node_format: str, label: str) -> Mapping[int, str]:
        """Point the inputs of a node to values in its format; return the format of each floating-point result."""
        floating = [(i, value) for i, value in enumerate(node.input) if value and self._model.is_floating(value)]
        results = [i for i, value in enumerate(node.output) if value and self._model.is_floating(value)]
        if node_format == "FP32" or not floating:
            for i, value in floating:
                copy.input[i] = self.wanted(value, "FP32")
            return dict.fromkeys(results, "FP32")
        domain = "" if node.domain in _OWN_DOMAINS else node.domain
        try:
            schema = onnx.defs.get_schema(node.op_type, self._model.opset, domain)
        except onnx.defs.SchemaError as error:
            raise UnsupportedError(
                f"node {label!r} is {node.domain or 'ai.onnx'}.{node.op_type}, whose types are not known here: keep "
                "its operator in FP32"
            ) from error
        wanted = TYPE_TEXT[node_format]
        bound: dict[str, str] = {}
        for i, value in floating:
            kind, allowed = _constraint(schema, schema.inputs, i)
            # Some parameters, such as the scales of Resize, are FP32 whatever the data is.
            chosen = node_format if wanted in allowed else "FP32"
            copy.input[i] = self.wanted(value, chosen)
            bound[kind] = chosen
        if node_format not in bound.values():
            raise UnsupportedError(
                f"node {label!r} ({node.op_type}, version {schema.since_version}) takes no {node_format}: convert the "
                "model to a later operator set, or keep the operator in FP32"
            )
        return {i: bound.get(_constraint(schema, schema.outputs, i)[0], "FP32") for i in results}

    def _value(self, value: str, target: str) -> str:
        """Name of a value in a format; the first call writes the cast, or the copy of a weight."""
        source = self._formats[value]
        if source == target:
            return self._names.get(value, value)
        if (value, target) not in self._available:
            self._available[value, target] = self._converted(value, source, target)
        return self._available[value, target]

    def _converted(self, value: str, source: str, target: str) -> str:
        constant = self._model.constants.get(value)
        if constant is not None:
            name = self.fresh(f"{value}__{target}")
            self._new_tensors.append(stored(constant, name, target, label=value))
            return name
        if source == "INT8":
            raise ModelError(f"value {value!r} arrives in codes and is wanted in {target}, which is not measured so")
        returned = value in self._results and target == "FP32" and not self._keep_results
        name = value if returned else self.fresh(f"{value}__{target}")
        node = helper.make_node("Cast", [self._names.get(value, value)], [name], to=ELEMENT_TYPE[target])
        node.name = self.fresh(f"cast__{value}__{target}")
        self.nodes.append(node)
        return name

    def quantized(self, value: str) -> _Quantized:
        """A value in 8-bit codes, written once; the operator takes FP32 only, so other formats are cast to it first."""
        if value not in self._quantized:
            source = self._formats[value]
            parts = [f"{value}__{part}" for part in ("codes", "scale", "zero")]
            if source != "INT8":
                wide = self._value(value, "FP32")
                parts = [self.fresh(part) for part in parts]
                node = helper.make_node("DynamicQuantizeLinear", [wide], parts)
                node.name = self.fresh(f"cast__{value}__INT8")
                self.nodes.append(node)
                self._note(value, "INT8")
            self._quantized[value] = _Quantized(*parts)
        return self._quantized[value]

    def _note(self, value: str, target: str, *, for_result: bool = False) -> None:
        source = self._formats[value]
        if source != target and value not in self._model.constants:
            cast = EdgeCast(value=value, source=source, target=target, for_result=for_result)
            self._casts.setdefault((value, target), cast)

    def wanted(self, value: str, target: str) -> str:
        """Name of a value in the format that a node reads; the cast counts as one of the plan's."""
        self._note(value, target)
        return self._value(value, target)

    def store(self, values: Array, name: str) -> str:
        """Store an array as an initializer and return its name."""
        tensor = numpy_helper.from_array(values, self.fresh(name))
        self._new_tensors.append(tensor)
        return tensor.name

    def finish(self) -> MixedGraph:
        """Cast the model's results back to FP32, drop what is not read, and check the graph."""
        for info in self._model.proto.graph.output:
            if info.name in self._names:
                self._note(info.name, "FP32", for_result=True)
                self._value(info.name, "FP32")
        before = self._model.proto
        read = {value for node in self.nodes for value in node.input} | self._results
        graph = onnx.GraphProto(name=before.graph.name, doc_string=before.graph.doc_string)
        graph.node.extend(node for node in self.nodes if node.op_type != "Constant" or node.output[0] in read)
        graph.initializer.extend(tensor for tensor in before.graph.initializer if tensor.name in read)
        graph.initializer.extend(self._new_tensors)
        weights = {tensor.name for tensor in before.graph.initializer}
        graph.input.extend(i for info in before.graph.input if info.name not in weights for i in self._arriving(info))
        graph.output.extend(before.graph.output)
        for info in graph.output if self._keep_results else ():
            if info.name in self._formats:
                info.type.tensor_type.elem_type = ELEMENT_TYPE[self._formats[info.name]]
        proto = onnx.ModelProto(ir_version=before.ir_version, producer_name="qsync_opt", graph=graph)
        proto.opset_import.extend(before.opset_import)
        proto.metadata_props.extend(entry for entry in before.metadata_props if entry.key != GRAPH_KEY)
        try:
            onnx.checker.check_model(proto, full_check=True)  # types and shapes included
        except (onnx.checker.ValidationError, shape_inference.InferenceError, EncodeError, ValueError) as error:
            raise ModelError(
                f"the mixed-precision graph of {proto.graph.name!r} is not valid: {first_line(error)}"
            ) from error
        return MixedGraph(
            proto=proto, casts=tuple(self._casts.values()), formats=dict(self._formats), names=dict(self._names)
        )

    def _arriving(self, info: onnx.ValueInfoProto) -> list[onnx.ValueInfoProto]:
        """An input in its format; one in codes is three."""
        arrival = self._arrivals.get(info.name, "FP32")
        if arrival == "FP32":
            return [info]
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        if arrival != "INT8":
            return [helper.make_tensor_value_info(info.name, ELEMENT_TYPE[arrival], shape)]
        return [
            helper.make_tensor_value_info(f"{info.name}__codes", TensorProto.UINT8, shape),
            helper.make_tensor_value_info(f"{info.name}__scale", TensorProto.FLOAT, []),
            helper.make_tensor_value_info(f"{info.name}__zero", TensorProto.UINT8, []),
        ]


class _IntegerForm:
    """The nodes that compute a node on 8-bit integers, with its result in FP32."""

    def __init__(self, node: onnx.NodeProto, writer: _Writer, constants: Mapping[str, Array]) -> None:
        self._name = node.name or node.output[0]
        self._node = node
        self._writer = writer
        self._constants = constants

    def write(self) -> None:
        """Add the nodes.

        Raises:
            UnsupportedError: This node has no integer form; the text says why.
        """
        node, convolves = self._node, self._node.op_type == "Conv"
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if convolves and node.input[1] not in self._constants:
            raise UnsupportedError(f"node {self._name!r} convolves with a computed weight, which has no integer form")
        left = self._operand(0, bool(attributes.get("transA", 0)), "left")
        right = self._operand(1, bool(attributes.get("transB", 0)), "right")
        operands = [left.codes, right.codes, left.zero, *filter(None, [right.zero])]
        kind, options = ("ConvInteger", attributes) if convolves else ("MatMulInteger", {})
        sums = self._add(kind, operands, "sums", **options)
        shape = [-1, *[1] * (self._constants[node.input[1]].ndim - 2)] if convolves else []
        right_scale = self._reshaped(right.scale, shape, "weight_scale") if convolves else right.scale
        scale = self._add("Mul", [left.scale, right_scale], "scale")
        scale = self._times(scale, float(attributes.get("alpha", 1.0)), "alpha")
        bias = self._writer.wanted(node.input[2], "FP32") if len(node.input) > 2 and node.input[2] else None
        if bias is not None and convolves:
            bias = self._reshaped(bias, shape, "bias")
        elif bias is not None:
            bias = self._times(bias, float(attributes.get("beta", 1.0)), "beta")
        wide = self._add("Cast", [sums], "wide", to=TensorProto.FLOAT)
        result = self._add("Mul", [wide, scale], "scaled" if bias is not None else "")
        if bias is not None:
            self._add("Add", [result, bias], "")

    def _operand(self, position: int, transposed: bool, side: str) -> _Quantized:
        """An operand: a weight as the second is quantized in advance, all else at run time."""
        value = self._node.input[position]
        weight = self._constants.get(value) if position else None
        if weight is None:
            q = self._writer.quantized(value)
            if transposed:
                q = q._replace(codes=self._add("Transpose", [q.codes], f"{side}_transposed", perm=[1, 0]))
            return q
        if not weight.size:
            raise UnsupportedError(f"node {self._name!r} has an empty weight: keep it in FP32")
        weight = np.ascontiguousarray(weight.T) if transposed else weight
        # Scales per column do not broadcast over products of a vector or of a stack of matrices.
        axis = 0 if self._node.op_type == "Conv" else 1 if weight.ndim == 2 else None
        codes, scales = weight_codes(weight, axis)
        return _Quantized(codes=self._store(codes, "weight"), scale=self._store(scales, "weight_scale"), zero="")

    def _add(self, kind: str, inputs: list[str], what: str, **attributes: Any) -> str:
        """Add a node with one result; ``what`` names it, "" is the result of the whole form."""
        output = self._node.output[0]
        output = self._writer.fresh(f"{output}__{what}") if what else output
        name = f"{self._name}__{what or 'result'}"
        self._writer.nodes.append(helper.make_node(kind, inputs, [output], name=name, **attributes))
        return output

    def _store(self, values: Array, what: str) -> str:
        return self._writer.store(values, f"{self._node.output[0]}__{what}")

    def _reshaped(self, value: str, shape: list[int], what: str) -> str:
        sizes = self._store(np.array(shape, dtype=np.int64), f"{what}_shape")
        return self._add("Reshape", [value, sizes], f"{what}_reshaped")

    def _times(self, value: str, factor: float, what: str) -> str:
        if factor == 1.0:
            return value
        return self._add("Mul", [value, self._store(np.array(factor, dtype=np.float32), what)], f"{what}_times")


def _constraint(schema: onnx.defs.OpSchema, formal: Sequence[Any], position: int) -> tuple[str, frozenset[str]]:
    """Name of the type of a parameter, and the types it may be; all of a variadic parameter are of one."""
    parameter = formal[min(position, len(formal) - 1)]
    for constraint in schema.type_constraints:
        if constraint.type_param_str == parameter.type_str:
            return parameter.type_str, frozenset(constraint.allowed_type_strs)
    return parameter.type_str, frozenset({parameter.type_str})
