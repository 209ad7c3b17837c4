"""Operator graphs from the nodes of ONNX models, given as plain records without the ``onnx`` package."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import or_

from qsync_opt.errors import ModelError
from qsync_opt.model.graph import Operator, OpGraph, ParameterSpec, Role, TensorSpec, parse_graph
from qsync_opt.model.roles import ATEN_PRODUCTS, ROLE_TABLE, RoleTable, decide_role

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]

GRAPH_KEY = "qsync_opt.model.graph"
"""Key of a model's metadata where ``capture`` stores the graph (JSON, without the nodes)."""
OPERATOR_KEY = "qsync_opt.operator"
"""Key of a node's metadata where ``capture`` stores the name of its operator."""

_CALL_KEY = "pkg.torch.onnx.fx_node"
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_TARGET = re.compile(r"call_function\[target=(?:torch\.ops\.)?([\w.]+)\]")
# Kinds that move no data, or little.
_VIEWS = frozenset(
    ["Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Constant", "Shape", "Size", "SequenceAt"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """One node. ``kind`` is its type, after the domain if that is not ONNX's own; a missing optional input is ""."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxModel:
    """A model without the values of its weights.

    ``specs`` describes values by name: graph inputs, initializers and results of nodes (None for a sequence).
    ``unfixed`` describes, as text, the shape of those whose shape is not fixed. ``states`` are the initializers,
    ``parameters`` those of them that training changes.
    """

    name: str
    nodes: tuple[OnnxNode, ...]
    specs: Mapping[str, TensorSpec | None]
    unfixed: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    states: frozenset[str]
    parameters: tuple[str, ...]
    metadata: Mapping[str, str]

    def spec(self, value: str, node: OnnxNode) -> TensorSpec | None:
        """The spec of a value that ``node`` reads or writes; None for a sequence.

        Raises:
            ModelError: The shape is not known.
        """
        try:
            return self.specs[value]
        except KeyError:
            shape = self.unfixed.get(value, "unknown")
            raise ModelError(
                f"tensor {value!r} of ONNX node {node.name!r} ({node.kind}) has shape {shape}: "
                "export with fixed shapes, or add the shape to the file's value_info"
            ) from None


def match_graph(model: OnnxModel, where: str) -> OpGraph:
    """The graph in the model's metadata, with the nodes of each operator, checked against the nodes.

    Raises:
        ModelError: Unusable metadata, a node without an operator, other products than the operators', or an edge
            between nodes without a path between their operators.
    """
    graph = parse_graph(model.metadata[GRAPH_KEY], where=f"metadata {GRAPH_KEY} of {where}")
    nodes: dict[str, list[OnnxNode]] = {operator.name: [] for operator in graph}
    for node in model.nodes:
        owner = node.metadata.get(OPERATOR_KEY)
        if owner not in nodes:
            raise ModelError(
                f"ONNX node {node.name!r} in {where} belongs to {owner!r}, which is no operator of its graph"
            )
        nodes[owner].append(node)
    _check_products(graph, nodes, model, where)
    _check_dataflow(graph, model, where)
    named = tuple(replace(o, onnx_nodes=tuple(node.name for node in nodes[o.name])) for o in graph)
    return replace(graph, operators=named)


def _check_products(graph: OpGraph, nodes: dict[str, list[OnnxNode]], model: OnnxModel, where: str) -> None:
    for operator in graph:
        # Products of other kinds are decomposed in different ways.
        if ROLE_TABLE.get(operator.op_type) is not Role.ADJUSTABLE:
            continue
        # Exporters drop what only buffers or nobody reads.
        if not nodes[operator.name]:
            continue
        # The library chooses the order of contracting three tensors or more, and what a product of complex numbers is
        # made of; of a single tensor an einsum is no product.
        if operator.op_type == "einsum" and sum(spec.is_floating for spec in operator.input_specs) != 2:
            continue
        if any(spec.dtype.startswith("complex") for spec in operator.input_specs):
            continue
        flops = sum(node_flops(node, model) for node in nodes[operator.name])
        if flops != operator.flops:
            raise ModelError(
                f"operator {operator.name!r} has {operator.flops} FLOPs, but its nodes in {where} have {flops}"
            )


def _check_dataflow(graph: OpGraph, model: OnnxModel, where: str) -> None:
    """Refuse a floating-point edge between nodes of two operators without a path between the operators."""
    ancestors: dict[str, int] = {}  # sets of operators as the bits of integers
    for position, operator in enumerate(graph):
        ancestors[operator.name] = reduce(or_, map(ancestors.__getitem__, operator.inputs), 1 << position)
    producers: dict[str, str] = {}
    for node in model.nodes:
        if node.kind == "Identity" and producers.keys().isdisjoint(node.inputs):
            # A buffer as it is before the step: a normalization that is called twice reads it under this name, because
            # exporters leave out how the first call updates it.
            continue
        owner = node.metadata[OPERATOR_KEY]
        for value in node.inputs:
            source = producers.get(value, owner)
            if not ancestors[owner] >> graph.index(source) & 1:
                raise ModelError(
                    f"ONNX node {node.name!r} in {where} reads {value!r} of operator {source!r}, "
                    f"but operator {owner!r} does not depend on that one"
                )
        # Operators may share constants, and 0-dim values decide no precision.
        if any(value for value in node.inputs):
            producers.update((value, owner) for value in node.outputs if _carries_precision(model, value))


def _carries_precision(model: OnnxModel, value: str) -> bool:
    spec = model.specs.get(value)
    return spec is not None and spec.is_floating and len(spec.shape) > 0


def build_graph(model: OnnxModel, roles: RoleTable) -> tuple[OpGraph, set[str]]:
    """The graph of a model without operators in its metadata, and the kinds that the role table lacks.

    Raises:
        ModelError: Unknown shape, no operators, or a role pattern that matches none.
    """
    builder = _Builder(model, roles)
    specs = {name: spec for name in model.parameters if (spec := model.specs[name]) is not None}
    parameters = tuple(ParameterSpec(name=name, spec=spec) for name, spec in specs.items())
    graph = OpGraph(name=model.name, operators=tuple(builder.operators()), parameters=parameters)
    roles.check_patterns(tuple(operator.name for operator in graph))
    return graph, builder.unknown


class _Builder:
    def __init__(self, model: OnnxModel, roles: RoleTable) -> None:
        self.unknown: set[str] = set()
        self._model = model
        self._roles = roles
        self._groups = _grouped(model)
        self._producers: dict[str, str] = {}
        # Values that do not depend on the inputs; results computed from them are FP32 under every plan.
        self._constants = set(model.states)
        self._users: dict[str, set[str]] = defaultdict(set)
        for name, nodes in self._groups.items():
            for value in chain.from_iterable(node.inputs for node in nodes):
                self._users[value].add(name)

    def operators(self) -> Iterable[Operator]:
        for value in self._model.inputs:
            spec = self._model.specs.get(value)
            if spec is not None and spec.is_floating:
                yield self._input(value, spec)
        for name, nodes in self._groups.items():
            yield self._operator(name, nodes)

    def _input(self, value: str, spec: TensorSpec) -> Operator:
        name = f"input/{value}"
        self._producers[value] = name
        signature = _signature("input", (spec,), ())
        return Operator(name=name, op_type="input", role=Role.FIXED, output_specs=(spec,), signature=signature)

    def _operator(self, name: str, nodes: Sequence[OnnxNode]) -> Operator:
        kind, module = _kind_and_module(nodes, self._model)
        inner = {value for node in nodes for value in node.outputs}
        reads = [v for node in nodes for v in node.inputs if v and v not in inner]
        outputs = [v for v in inner if self._users[v] - {name} or v in self._model.outputs]
        outputs = sorted(outputs or inner, key=[v for node in nodes for v in node.outputs].index)
        input_specs, output_specs = self._specs(nodes, reads), self._specs(nodes, outputs)
        role = self._role(name, kind, nodes, reads, output_specs)
        if all(node.kind == "Constant" for node in nodes):
            self._constants.update(inner)
        self._producers.update((value, name) for value in inner)
        is_view = all(node.kind in _VIEWS for node in nodes)
        return Operator(
            name=name,
            op_type=kind,
            module=module,
            role=role,
            inputs=self._edges(reads, role),
            input_specs=input_specs,
            output_specs=output_specs,
            parameters=tuple(dict.fromkeys(value for value in reads if value in self._model.parameters)),
            onnx_nodes=tuple(node.name for node in nodes),
            flops=sum(node_flops(node, self._model) for node in nodes),
            num_bytes=0 if is_view else sum(spec.num_bytes for spec in input_specs + output_specs),
            signature=_signature(kind, (*input_specs, *output_specs), [(n.kind, dict(n.attributes)) for n in nodes]),
        )

    def _specs(self, nodes: Sequence[OnnxNode], values: Iterable[str]) -> tuple[TensorSpec, ...]:
        # Integer tensors (shapes, indices) carry no precision, and their sizes may depend on the data.
        needed = [v for v in values if not self._model.unfixed.get(v, "float").startswith(("int", "uint", "bool"))]
        specs = [self._model.spec(value, nodes[0]) for value in needed]
        return tuple(spec for spec in specs if spec is not None)

    def _role(
        self, name: str, kind: str, nodes: Sequence[OnnxNode], reads: Sequence[str], outputs: Sequence[TensorSpec]
    ) -> Role:
        listed = self._roles.lookup(name, kind)
        floating = [value for value in reads if (s := self._model.specs.get(value)) is not None and s.is_floating]
        sequences = any(self._model.specs.get(value, True) is None for value in reads)
        activations = [value for value in floating if value not in self._constants]
        if kind == "Gather" and listed is Role.DEPENDENT and name not in self._roles.by_name and not activations:
            listed = Role.ADJUSTABLE  # rows of a weight: an embedding
        delivers_floating = any(spec.is_floating for spec in outputs)
        if listed is None and (delivers_floating or activations):
            self.unknown.add(kind)
        return decide_role(
            listed,
            delivers_floating=delivers_floating,
            reads_floating=bool(activations) or sequences,
            reads_state=any(_carries_precision(self._model, value) for value in floating if value not in activations),
            casts_to_full=any(node.kind == "Cast" for node in nodes),
        )

    def _edges(self, reads: Sequence[str], role: Role) -> tuple[str, ...]:
        produced = [v for v in reads if v not in self._constants and v in self._producers]
        specs = {value: self._model.specs.get(value) for value in produced}
        # In type promotion 0-dim operands follow the others.
        skip_scalars = role is Role.DEPENDENT and any(_carries_precision(self._model, value) for value in produced)
        return tuple(
            self._producers[value]
            for value in produced
            if (spec := specs[value]) is None or (spec.is_floating and (spec.shape or not skip_scalars))
        )


def _grouped(model: OnnxModel) -> dict[str, list[OnnxNode]]:
    """Operator name to nodes: those of one torch call together, each without torch's metadata alone."""
    by_call: dict[str, list[OnnxNode]] = {}
    for node in model.nodes:
        by_call.setdefault(node.metadata.get(_CALL_KEY, f"\0{node.outputs}"), []).append(node)
    order = {id(node): position for position, node in enumerate(model.nodes)}
    groups: dict[str, list[OnnxNode]] = {}
    occurrences: Counter[str] = Counter()
    # Ordered by last nodes, because constants shared with a later group come early.
    for members in sorted(by_call.values(), key=lambda members: order[id(members[-1])]):
        kind, module = _kind_and_module(members, model)
        base = f"{module}/{kind}" if module else kind
        if _CALL_KEY not in members[0].metadata:
            base = members[0].name
        groups[f"{base}_{occurrences[base]}" if occurrences[base] else base] = members
        occurrences[base] += 1
    return groups


def _kind_and_module(nodes: Sequence[OnnxNode], model: OnnxModel) -> tuple[str, str]:
    """Kind of operator and module path, from torch's metadata if present, else from the node's type.

    With metadata they are those that capture gives the operator, so that a plan of the file fits the model.
    """
    first = nodes[0]
    target = _TARGET.search(first.metadata.get(_CALL_KEY, ""))
    if target is None:
        return first.kind, ""
    parts = target[1].split(".")
    kind = parts[1] if parts[0] == "aten" else parts[-1] if parts[0] == "operator" else ".".join(parts[:-1])
    try:
        scopes = ast.literal_eval(first.metadata.get(_SCOPES_KEY, "[]"))
    except (SyntaxError, ValueError):
        scopes = []
    module = str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    product = next((node for node in nodes if ROLE_TABLE.get(node.kind) is Role.ADJUSTABLE), None)
    if product is None or kind in ATEN_PRODUCTS or ROLE_TABLE.get(kind) is Role.ADJUSTABLE:
        return kind, module
    # Exporters decompose convolutions (aten.convolution); optimizers fuse products into calls of other kinds and
    # modules, such as a convolution into the normalization after it. The weight tells whose product it is.
    weight = next((value for value in product.inputs[1:2] if value in model.states), None)
    if kind != "convolution" and weight is not None and "." in weight:
        module = weight.rpartition(".")[0]
    return _torch_kind(product, model), module


_TORCH_KINDS = {
    "MatMul": "matmul", "Gemm": "linear", "Einsum": "einsum", "Attention": "scaled_dot_product_attention"
}  # fmt: skip


def _torch_kind(product: OnnxNode, model: OnnxModel) -> str:
    """Torch's name for the kind of a product's node."""
    weight = model.specs.get(product.inputs[1]) if len(product.inputs) > 1 else None
    if product.kind in ("Conv", "ConvTranspose") and weight is not None and 3 <= len(weight.shape) <= 5:
        return f"{'conv' if product.kind == 'Conv' else 'conv_transpose'}{len(weight.shape) - 2}d"
    return _TORCH_KINDS.get(product.kind, product.kind)


def _signature(kind: str, specs: Iterable[TensorSpec], attributes: Sequence[object]) -> str:
    text = json.dumps([kind, [[spec.dtype, spec.shape] for spec in specs], attributes], default=str, sort_keys=True)
    return f"{kind}:{hashlib.sha256(text.encode()).hexdigest()[:24]}"


_THREE = frozenset({"Attention", "LSTM", "GRU", "RNN"})
_TWO = frozenset({"MatMul", "MatMulInteger", "Gemm", "Conv", "ConvInteger", "DeformConv", "ConvTranspose"})
_FLOP_KINDS = _TWO | _THREE | {"Einsum"}


def node_flops(node: OnnxNode, model: OnnxModel) -> int:
    """Forward floating-point operations of a product or convolution, a multiply-add counted as two; else 0.

    Raises:
        ModelError: A needed shape is not known, or operands do not match.

    Source:
        Ours, by the operators' definitions in the ONNX specification; same convention as torch.utils.flop_counter.
    """
    if node.kind not in _FLOP_KINDS:
        return 0
    try:
        return _product_flops(node, model)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"ONNX node {node.name!r} ({node.kind}) has operands or attributes that do not fit together ({error}): "
            "export the model again"
        ) from error


def _product_flops(node: OnnxNode, model: OnnxModel) -> int:
    # The last inputs (bias, state, length) are not multiplied.
    operands = node.inputs if node.kind == "Einsum" else node.inputs[:3] if node.kind in _THREE else node.inputs[:2]
    shapes = [spec.shape if (spec := model.spec(value, node)) else () for value in operands]
    first = model.spec(node.outputs[0], node)
    result = first.shape if first else ()
    match node.kind:
        case "MatMul" | "MatMulInteger":
            return 2 * math.prod(result) * shapes[0][-1]
        case "Gemm":
            inner = shapes[0][0] if node.attributes.get("transA") else shapes[0][1]
            return 2 * math.prod(result) * inner
        case "Conv" | "ConvInteger" | "DeformConv":
            return 2 * math.prod(result) * math.prod(shapes[1][1:])
        case "ConvTranspose":
            return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
        case "Einsum":
            return _einsum_flops(str(node.attributes["equation"]), shapes)
        case "Attention":
            return _attention_flops(node, shapes)
    # Recurrent kinds: every step multiplies the input by W and the state by R.
    return 2 * shapes[0][0] * shapes[0][1] * (math.prod(shapes[1]) + math.prod(shapes[2]))


def _einsum_flops(equation: str, shapes: list[tuple[int, ...]]) -> int:
    """FLOPs of contracting the operands from left to right; steps that sum over nothing count 0."""
    terms, _, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if "..." in equation:
        raise ModelError(f"einsum {equation!r} in the ONNX file has an ellipsis: write its dimensions out")
    sizes = {
        label: n for term, shape in zip(operands, shapes, strict=True) for label, n in zip(term, shape, strict=True)
    }
    if "->" not in equation:
        result = "".join(sorted(label for label in sizes if terms.count(label) == 1))
    total, left = 0, set(operands[0])
    for position, term in enumerate(operands[1:], start=1):
        later = set(result).union(*operands[position + 1 :])
        right = set(term)
        # Labels of one side that are not needed later are summed before the product.
        left, right = left & (right | later), right & (left | later)
        if (left & right) - later:
            total += 2 * math.prod(sizes[label] for label in left | right)
        left = (left | right) & later
    return total


def _attention_flops(node: OnnxNode, shapes: list[tuple[int, ...]]) -> int:
    query, key, value = shapes[:3]
    if len(query) == 4:
        batch, heads, length, width = query
        return 2 * batch * heads * length * key[2] * (width + value[3])
    # Three dimensions: (batch, length, heads * width); V has its own number of heads.
    repeats = int(str(node.attributes["q_num_heads"])) // int(str(node.attributes["kv_num_heads"]))
    batch, length, widths = query
    return 2 * batch * length * key[1] * (widths + value[2] * repeats)
