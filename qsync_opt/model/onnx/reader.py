"""Operator graphs and weight statistics from ONNX files and ModelProtos; the only module that imports ``onnx``.

The metadata of a model decides how nodes become operators: those written by ``capture`` have operators of their own,
in those of torch's dynamo exporter the nodes of one torch operation are one operator, in others every node is one.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import inliner, shape_inference
from onnx.reference import ReferenceEvaluator

from qsync_opt.errors import ModelError, first_line, reason_of
from qsync_opt.io import read_bounded
from qsync_opt.model.graph import DTYPE_BYTES, OpGraph, TensorSpec
from qsync_opt.model.onnx.graph import GRAPH_KEY, AttributeValue, OnnxModel, OnnxNode, build_graph, match_graph
from qsync_opt.model.roles import RoleTable
from qsync_opt.model.weights import WeightStatistics, weight_statistics

_LARGEST_EXPANSION = 1_000_000  # nodes, after functions are inlined
# Larger constants are weights, of which shape inference needs no values.
_SMALL_ELEMENTS = 1024
_LARGEST_BYTES = 2**31 - 1  # of a protocol buffer
# Kinds with which exporters compute shapes.
_SHAPE_TEXT = """
    Constant ConstantOfShape Identity Cast CastLike Gather Concat Slice Squeeze Unsqueeze Reshape
    Expand Where Equal Greater Less Not Add Sub Mul Div Mod Neg Abs Floor Ceil Min Max ReduceProd ReduceSum
"""
_SHAPE_KINDS = frozenset(_SHAPE_TEXT.split())
_OWN_DOMAINS = ("", "ai.onnx")
# What exporters call every graph: torch by dynamo and by tracing, and the default of this package.
_GENERIC_NAMES = frozenset({"", "main_graph", "torch_jit", "torch-jit-export", "onnx", "graph"})
_STATE_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_DOUBLE = onnx.TensorProto.DOUBLE
_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
EXTERNAL_FAILURES = (OSError, ValueError, TypeError, MemoryError, RuntimeError, onnx.checker.ValidationError)
"""Errors of onnx for unusable external files: also for names that are not text (TypeError) or too long (RuntimeError),
and for sparse files that are larger than the memory (MemoryError)."""


def read_onnx(
    source: str | os.PathLike[str] | onnx.ModelProto, *, roles: RoleTable | None = None, name: str | None = None
) -> OpGraph:
    """Read the operators of an ONNX model, which is not changed; external weights are not loaded.

    There is one operator per torch operation where the metadata has them, else one per node.

    ``roles`` None is the default table; files written by ``capture`` contain their roles and take none. ``name`` None
    is the one in the model, or that of the file where exporters give all models the same.

    Raises:
        ModelError: No such file, not ONNX or truncated, a shape that is not fixed or not known, control flow, or
            metadata that contradicts the nodes.
    """
    if isinstance(source, onnx.ModelProto):
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
    else:
        proto = load_proto(Path(source))
    _drop_weights(proto)
    where = "the ONNX model" if isinstance(source, onnx.ModelProto) else f"ONNX file {source}"
    if not proto.graph.node:
        raise ModelError(f"{where} has no nodes: a model with at least one operation is needed")
    proto = inline_functions(proto, where)
    _check_texts(proto, where)
    if name is None and not isinstance(source, onnx.ModelProto) and proto.graph.name in _GENERIC_NAMES:
        name = Path(source).stem
    model = _records(_with_shapes(proto, where), where, name)
    if GRAPH_KEY in model.metadata:
        if roles is not None:
            raise ModelError(f"{where} was written by capture with its roles: give the role table to capture instead")
        return match_graph(model, where)
    graph, unknown = build_graph(model, roles or RoleTable())
    if unknown:
        warnings.warn(
            f"operations unknown to the role table are kept in FP32: {', '.join(sorted(unknown))}; "
            "RoleTable(by_type={...}) gives them a role",
            stacklevel=2,
        )
    return graph


def read_weights(source: str | os.PathLike[str] | onnx.ModelProto) -> dict[str, WeightStatistics]:
    """Statistics of the weights of an ONNX model by initializer, for floating-point ones of at least two dimensions.

    External files are read one by one; those of a model that is no file are relative to the working directory.

    Raises:
        ModelError: No such file, not ONNX, or an external file of weights is missing or too short.
    """
    proto = source if isinstance(source, onnx.ModelProto) else load_proto(Path(source))
    folder = "" if isinstance(source, onnx.ModelProto) else str(Path(source).parent)
    statistics = {}
    for tensor in proto.graph.initializer:
        is_floating = "FLOAT" in _type_name(tensor.data_type) or tensor.data_type == _DOUBLE
        if len(tensor.dims) < 2 or not is_floating or not math.prod(tensor.dims):
            continue
        try:
            values = onnx.numpy_helper.to_array(tensor, base_dir=folder)
        except EXTERNAL_FAILURES as error:
            why = "it is larger than the memory" if isinstance(error, MemoryError) else first_line(error)
            raise ModelError(
                f"the values of weight {tensor.name!r} cannot be read: {why}; put its external file "
                "beside the model, or estimate without weights"
            ) from error
        statistics[tensor.name] = weight_statistics(tensor.name, np.asarray(values, dtype=np.float32))
    return statistics


def load_proto(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without its external weights.

    Raises:
        ModelError: No such file, too large, truncated, or not ONNX.
    """
    try:
        data = read_bounded(path, _LARGEST_BYTES)
        if data is None:
            raise ModelError(
                f"ONNX file {path} has more than {_LARGEST_BYTES} bytes: keep its weights in external files"
            )
        proto = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"ONNX file {path} is truncated or not ONNX: {error}; export the model again") from error
    except (OSError, ValueError) as error:
        advice = "give the path of an ONNX model"
        raise ModelError(f"cannot read ONNX file {str(path)!r}: {reason_of(error)}; {advice}") from error
    if proto.ir_version <= 0 or not proto.opset_import:
        raise ModelError(f"file {path} is not an ONNX model: it has no IR version or no operator set")
    return proto


def inline_functions(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """A model whose calls of its own functions are replaced by their bodies.

    Raises:
        ModelError: A function calls itself, or there would be too many nodes.
    """
    if not len(proto.functions):
        return proto
    bodies = {(function.domain, function.name): function.node for function in proto.functions}
    sizes: dict[tuple[str, str], int] = {}
    try:
        total = _expanded_nodes(proto.graph.node, bodies, sizes, ())
    except RecursionError as error:
        raise ModelError(f"{where} has functions or graphs that are nested too deeply; inline them before") from error
    if total > _LARGEST_EXPANSION:
        raise ModelError(
            f"{where} has {min(total, 10**18)} nodes or more with its functions written out, but at most "
            f"{_LARGEST_EXPANSION} can be read"
        )
    try:
        return inliner.inline_local_functions(proto)
    except Exception as error:  # malformed functions raise anything
        raise ModelError(f"the functions of {where} cannot be written out: {first_line(error)}") from error


def _expanded_nodes(
    nodes: Iterable[onnx.NodeProto],
    bodies: Mapping[tuple[str, str], Iterable[onnx.NodeProto]],
    sizes: dict[tuple[str, str], int],
    callers: tuple[tuple[str, str], ...],
) -> int:
    total = 0
    for node in nodes:
        call = (node.domain, node.op_type)
        if call in callers:
            raise ModelError(f"ONNX function {node.op_type!r} calls itself, which no model may do")
        if call in bodies and call not in sizes:
            sizes[call] = _expanded_nodes(bodies[call], bodies, sizes, (*callers, call))
        total += sizes.get(call, 1)
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                total += _expanded_nodes(graph.node, bodies, sizes, callers)
    return total


def _check_texts(proto: onnx.ModelProto, where: str) -> None:
    """Refuse names that are not UTF-8, which the library returns as bytes."""
    graph = proto.graph
    infos = (*graph.input, *graph.value_info, *graph.output)
    entries = [*proto.metadata_props, *(entry for info in infos for entry in info.metadata_props)]
    texts = [graph.name, *(tensor.name for tensor in graph.initializer), *(info.name for info in infos)]
    for node in graph.node:
        texts += [node.name, node.op_type, node.domain, *node.input, *node.output]
        texts += [attribute.name for attribute in node.attribute]
        entries += node.metadata_props
    for text in (*texts, *(entry.key for entry in entries), *(entry.value for entry in entries)):
        if not isinstance(text, str):
            raise ModelError(
                f"{where} holds the name {text!r}, which is not UTF-8 text: it is damaged, export it again"
            )


def _drop_weights(proto: onnx.ModelProto) -> None:
    """Remove the values of large initializers, but not their shapes and types."""
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) > _SMALL_ELEMENTS:
            for key, _ in tensor.ListFields():
                if key.name.endswith("_data"):
                    tensor.ClearField(key.name)


def _with_shapes(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """The model with inferred shapes where it states none."""
    shapes = _shapes(proto)
    if all(value in shapes for node in proto.graph.node for value in node.output if value):
        return proto
    scratch = onnx.ModelProto()
    scratch.CopyFrom(proto)
    try:
        while True:
            inferred = shape_inference.infer_shapes(scratch, data_prop=True)
            # Shape inference propagates values through few kinds of nodes; others that compute shapes run here.
            if not _fold_constants(scratch, _shapes(inferred)):
                break
        shapes = _shapes(inferred)
        if any(value not in shapes for node in proto.graph.node for value in node.output if value):
            # Only strict inference says why; with data propagation it would refuse valid models.
            shape_inference.infer_shapes(scratch, strict_mode=True)
    except Exception as error:  # malformed nodes raise anything
        raise ModelError(f"shape inference fails on {where}: {first_line(error)}") from error
    for field in ("value_info", "output"):
        proto.graph.ClearField(field)
        getattr(proto.graph, field).extend(getattr(inferred.graph, field))
    return proto


def _shapes(proto: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Value to its shape, for shapes that the model states and that are fixed."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    for info in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
        if (shape := _fixed_shape(info)) is not None:
            shapes[info.name] = shape
    return shapes


def _fixed_shape(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(int(dim.dim_value) for dim in tensor.shape.dim)


def _fold_constants(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Replace small computations on constants and known shapes by their results; False if there were none."""
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    values = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if _is_small(tensor.dims) and tensor.data_location != onnx.TensorProto.EXTERNAL
    }
    has_changed = False
    for node in proto.graph.node:
        results = _evaluate(node, values, shapes, versions)
        if not results or not all(_is_small(result.shape) for result in results):
            continue
        values.update(zip(node.output, results, strict=True))
        if node.op_type != "Constant":
            constant = onnx.helper.make_node("Constant", [], [node.output[0]], name=node.name)
            constant.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(results[0])))
            node.CopyFrom(constant)
            has_changed = True
    return has_changed


def _is_small(sizes: Sequence[int]) -> bool:
    """True for scalars and short vectors, as shape computations have them."""
    return len(sizes) <= 1 and math.prod(sizes) <= _SMALL_ELEMENTS


def _evaluate(
    node: onnx.NodeProto, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], versions: Mapping[str, int]
) -> list[Any]:
    """Results of a node that are small and independent of the model's inputs; else none."""
    if node.op_type == "Shape" and node.input[0] in shapes:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        sizes = shapes[node.input[0]]
        return [np.array(sizes[bounds.get("start", 0) : bounds.get("end", len(sizes))], dtype=np.int64)]
    inputs = {value: values.get(value) for value in node.input if value}
    if node.op_type not in _SHAPE_KINDS or node.domain not in _OWN_DOMAINS or any(v is None for v in inputs.values()):
        return []
    if node.op_type in ("ConstantOfShape", "Expand") and np.prod(values[node.input[-1]]) > _SMALL_ELEMENTS:
        return []
    if not all(_is_small(attribute.t.dims) for attribute in node.attribute if attribute.HasField("t")):
        return []
    return list(ReferenceEvaluator(node, opsets=dict(versions)).run(None, inputs))


def _records(proto: onnx.ModelProto, where: str, name: str | None) -> OnnxModel:
    graph = proto.graph
    if graph.sparse_initializer:
        raise ModelError(f"{where} has sparse initializer {graph.sparse_initializer[0].values.name!r}: make it dense")
    states = {
        tensor.name: TensorSpec(shape=tuple(tensor.dims), dtype=_dtype(tensor.data_type, tensor.name, where))
        for tensor in graph.initializer
    }
    specs: dict[str, TensorSpec | None] = {}
    unfixed: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for info in (*graph.input, *graph.value_info, *graph.output):
        kinds[info.name] = next((p.value for p in info.metadata_props if p.key == _STATE_KIND), "")
        if info.name not in states:
            _note_spec(specs, unfixed, info, where)
    specs |= states
    inputs = tuple(info.name for info in graph.input if info.name not in states)
    for name_of_input in inputs:
        if name_of_input not in specs:
            raise ModelError(
                f"input {name_of_input!r} of {where} has shape {unfixed.get(name_of_input, 'unknown')}: set the "
                "dimensions that have names (onnx.tools.update_model_dims) or export with fixed shapes"
            )
    nodes = tuple(_node(node, position, where) for position, node in enumerate(graph.node))
    # Buffers are marked as such by the metadata, or by their use.
    buffers = {name for name, kind in kinds.items() if kind and kind != "PARAMETER"}
    buffers.update(*(node.inputs[3:5] for node in nodes if node.kind == "BatchNormalization"))
    return OnnxModel(
        name=name or graph.name or "onnx",
        nodes=nodes,
        specs=specs,
        unfixed=unfixed,
        inputs=inputs,
        outputs=tuple(info.name for info in graph.output),
        states=frozenset(states),
        parameters=tuple(name for name in states if name not in buffers and states[name].is_floating),
        metadata={entry.key: entry.value for entry in proto.metadata_props},
    )


def _note_spec(
    specs: dict[str, TensorSpec | None], unfixed: dict[str, str], info: onnx.ValueInfoProto, where: str
) -> None:
    """Record the spec of one value, or why it has none; later statements win."""
    kind = info.type.WhichOneof("value")
    if kind is None:
        return
    if kind != "tensor_type":
        specs[info.name] = None
        return
    tensor = info.type.tensor_type
    dtype = _dtype(tensor.elem_type, info.name, where)
    if (shape := _fixed_shape(info)) is not None:
        specs[info.name] = TensorSpec(shape=shape, dtype=dtype)
        return
    sizes = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
    text = f"[{', '.join(sizes)}]" if tensor.HasField("shape") else "unknown"
    unfixed[info.name] = f"{dtype} {text}, which is not fixed"


def _dtype(element_type: Any, name: str, where: str) -> str:
    text = _type_name(element_type).lower()
    dtype = {"float": "float32", "double": "float64"}.get(text, text)
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"tensor {name!r} in {where} has element type {dtype}: allowed are {', '.join(DTYPE_BYTES)}")
    return dtype


def _type_name(element_type: Any) -> str:
    types = onnx.TensorProto.DataType
    return str(types.Name(element_type)) if element_type in types.values() else f"number {element_type}"


def _node(node: onnx.NodeProto, position: int, where: str) -> OnnxNode:
    outputs = tuple(value for value in node.output if value)
    name = node.name or (outputs[0] if outputs else f"{node.op_type}_{position}")
    if node.op_type in _CONTROL_FLOW and node.domain in _OWN_DOMAINS:
        raise ModelError(f"ONNX node {name!r} in {where} is {node.op_type}: models with control flow cannot be planned")
    return OnnxNode(
        name=name,
        kind=node.op_type if node.domain in _OWN_DOMAINS else f"{node.domain}.{node.op_type}",
        inputs=tuple(node.input),
        outputs=outputs,
        attributes={attribute.name: _attribute(attribute, name, where) for attribute in node.attribute},
        metadata={entry.key: entry.value for entry in node.metadata_props},
    )


def _attribute(attribute: onnx.AttributeProto, node: str, where: str) -> AttributeValue:
    try:
        value: Any = onnx.helper.get_attribute_value(attribute)
    except ValueError as error:
        raise ModelError(
            f"attribute {attribute.name!r} of ONNX node {node!r} in {where} has no value: {first_line(error)}"
        ) from error
    match value:
        case bytes():
            return value.decode("utf-8", "replace")
        case int() | float() | str():
            return value
        case onnx.TensorProto():
            return f"tensor {_type_name(value.data_type)} {list(value.dims)}"
    if isinstance(value, Iterable):
        return tuple(item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in value)
    return type(value).__name__
