"""Operator graphs: operators in execution order, the tensors between them, and their files (``qsync-graph/1``).

Independent of ONNX and torch. Sizes are in elements or bytes, as the names say.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Protocol, runtime_checkable

from qsync_opt.errors import ModelError
from qsync_opt.io import Fields, Json, decode, encode, parse_json, read_json, write_json
from qsync_opt.views import Displayed, Tabular

OPAQUE = "qsync_opt.opaque"
"""Kind of the operators that stand for a whole module, which a runtime could not look into: fixed, in FP32."""


class Role(enum.StrEnum):
    """How the precision of an operator is decided."""

    ADJUSTABLE = "adjustable"
    """By the plan."""
    DEPENDENT = "dependent"
    """By its inputs: the highest rank among their formats."""
    FIXED = "fixed"
    """Always FP32; lower inputs are cast."""


DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        name: num_bytes
        for num_bytes, names in (
            (1, "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"),
            (2, "uint16 int16 bfloat16 float16"),
            (4, "uint32 int32 float32"),
            (8, "uint64 int64 float64 complex64"),
            (16, "complex128"),
        )
        for name in names.split()
    }
)
"""Element type (as named by numpy and torch) to bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and element type of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"unknown element type {self.dtype!r}: allowed are {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ModelError(f"negative size in shape {self.shape}: every size must be known and at least 0")

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """True for floating-point and complex element types, which precision plans are about."""
        return "float" in self.dtype or self.dtype.startswith("complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One trainable parameter, named as in ``Module.named_parameters``; tied weights appear once."""

    name: str
    spec: TensorSpec


def _read_parameter(data: Any, where: str) -> ParameterSpec:
    fields = Fields(data, where, error=ModelError)
    name = fields.text("name")
    shape_and_type = {key: fields.take(key) for key in ("shape", "dtype")}
    fields.finish()
    return ParameterSpec(name=name, spec=decode(TensorSpec, shape_and_type, where, error=ModelError))


def _write_parameter(parameter: ParameterSpec) -> dict[str, Any]:
    return {"name": parameter.name, "shape": list(parameter.spec.shape), "dtype": parameter.spec.dtype}


def _read_tensor(data: Any, where: str) -> TensorSpec:
    match data:
        case [str(dtype), list(sizes)] if all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
            return TensorSpec(shape=tuple(sizes), dtype=dtype)
    raise ModelError(f'{where} is {data!r}, but a tensor is written ["float32", [2, 3]]')


_TensorInFile = Annotated[TensorSpec, Json(read=_read_tensor, write=lambda spec: [spec.dtype, list(spec.shape)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One torch operation of the forward pass, or one ONNX node.

    Attributes:
        name: Unique in the graph.
        op_type: Kind, as named by ATen or ONNX.
        module: Path of the module that it belongs to; empty for the model itself.
        role: How its precision is decided.
        inputs: Operators whose floating-point results it reads, once per argument, in order. Results without precision
            (integers, booleans) and 0-dim or empty operands of a dependent operator with larger ones are left out.
        input_specs: All tensor arguments, parameters and integer tensors included.
        output_specs: All results.
        parameters: Names of the parameters that it reads.
        onnx_nodes: Names of the ONNX nodes that it consists of.
        flops: Of the forward pass, a multiply-add counted as two; 0 for all but matrix products and convolutions.
        num_bytes: Read and written by the forward pass in the exported types; 0 where no data moves.
        signature: Equal for two operators exactly when they cost the same: kind, shapes, types and attributes.
    """

    name: str
    op_type: Annotated[str, Json(key="type")]
    module: Annotated[str, Json(empty=True)] = ""
    role: Role
    inputs: tuple[str, ...] = ()
    input_specs: Annotated[tuple[_TensorInFile, ...], Json(key="input_tensors")] = ()
    output_specs: Annotated[tuple[_TensorInFile, ...], Json(key="output_tensors")]
    parameters: tuple[str, ...] = ()
    onnx_nodes: tuple[str, ...] = ()
    flops: int = 0
    num_bytes: Annotated[int, Json(key="bytes")] = 0
    signature: str

    def __post_init__(self) -> None:
        if not self.name or not self.op_type:
            raise ModelError(f"operator {self.name!r} of type {self.op_type!r}: name and type must not be empty")
        if self.flops < 0 or self.num_bytes < 0:
            raise ModelError(
                f"operator {self.name!r} has {self.flops} FLOPs and {self.num_bytes} bytes: both must be at least 0"
            )

    @property
    def output_elements(self) -> int:
        """Elements of all floating-point results together."""
        return sum(spec.elements for spec in self.output_specs if spec.is_floating)

    @property
    def is_floating(self) -> bool:
        """True if any result is floating point, so that the operator delivers a format."""
        return any(spec.is_floating for spec in self.output_specs)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OpGraph(Displayed, Tabular):
    """Operators in forward execution order; every input stands before its user.

    ``parameters`` are in registration order, which is what gradient buckets are built from.
    """

    name: str
    parameters: tuple[Annotated[ParameterSpec, Json(read=_read_parameter, write=_write_parameter)], ...] = ()
    operators: tuple[Operator, ...]
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _consumers: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.operators:
            raise ModelError(f"graph {self.name!r} has no operators: a model with at least one operation is needed")
        index: dict[str, int] = {}
        consumers: dict[str, list[str]] = {}
        known_parameters = {p.name for p in self.parameters}
        for position, operator in enumerate(self.operators):
            if operator.name in index:
                raise ModelError(
                    f"operator {operator.name!r} is named twice in graph {self.name!r}: names must be unique"
                )
            for source in operator.inputs:
                if source not in index:
                    raise ModelError(
                        f"operator {operator.name!r} reads {source!r}, which does not come before it: "
                        "operators must be in execution order"
                    )
                consumers[source].append(operator.name)
            for parameter in operator.parameters:
                if parameter not in known_parameters:
                    raise ModelError(f"operator {operator.name!r} uses unknown parameter {parameter!r}")
            index[operator.name] = position
            consumers[operator.name] = []
        object.__setattr__(self, "_index", MappingProxyType(index))
        object.__setattr__(self, "_consumers", MappingProxyType({name: tuple(u) for name, u in consumers.items()}))

    def __len__(self) -> int:
        return len(self.operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> Operator:
        return self.operators[self.index(name)]

    def index(self, name: str) -> int:
        """Position of operator ``name`` in execution order."""
        try:
            return self._index[name]
        except KeyError:
            raise ModelError(f"graph {self.name!r} has no operator {name!r}") from None

    def consumers(self, name: str) -> tuple[str, ...]:
        """Names of the operators that read the floating-point output of ``name``, once per argument."""
        self.index(name)
        return self._consumers[name]

    def by_role(self, role: Role) -> tuple[Operator, ...]:
        """Operators of one role, in execution order."""
        return tuple(operator for operator in self.operators if operator.role is role)

    def lifted_kinds(self) -> tuple[str, ...]:
        """Kinds of fixed operators whose inputs a runtime must cast to FP32, sorted.

        Left out are kinds that also occur as dependent ones, whose fixed occurrences read FP32 weights and so deliver
        FP32 by type promotion, and operators with integer results.
        """
        fixed = {o.op_type for o in self.by_role(Role.FIXED) if o.is_floating and o.op_type != OPAQUE}
        return tuple(sorted(fixed - {operator.op_type for operator in self.by_role(Role.DEPENDENT)}))

    def opaque_modules(self) -> tuple[str, ...]:
        """Paths of the modules that are one operator each (`OPAQUE`); a runtime casts what they read to FP32."""
        return tuple(operator.module for operator in self if operator.op_type == OPAQUE)

    def distances_to_input(self) -> Mapping[str, int]:
        """Number of adjustable operators before each operator (itself excluded) on the longest path from the inputs.

        Source:
            Ours: the longest path, so that a residual shortcut does not make an operator look shallow, counted over
            adjustable operators, because only these add quantization noise.
        """
        return self._distances(self.operators, {operator.name: operator.inputs for operator in self})

    def distances_to_loss(self) -> Mapping[str, int]:
        """Number of adjustable operators behind each operator (itself excluded) on the longest path to the results.

        Source: ours, as in ``distances_to_input``.
        """
        return self._distances(self.operators[::-1], self._consumers)

    def _distances(
        self, operators: tuple[Operator, ...], neighbors: Mapping[str, tuple[str, ...]]
    ) -> Mapping[str, int]:
        distances: dict[str, int] = {}
        for operator in operators:
            reached = (distances[n] + (self[n].role is Role.ADJUSTABLE) for n in neighbors[operator.name])
            distances[operator.name] = max(reached, default=0)
        return MappingProxyType(distances)

    def fingerprint(self) -> str:
        """Hex digest of names, kinds, edges and shapes; equal on all ranks that captured the same model."""
        rows = [
            [o.name, o.op_type, o.inputs, [[s.shape, s.dtype] for s in o.output_specs], o.parameters]
            for o in self.operators
        ]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


@runtime_checkable
class HasGraph(Protocol):
    """Anything that holds an operator graph, such as a captured model."""

    @property
    def graph(self) -> OpGraph:
        """The operators."""


def graph_of(source: OpGraph | HasGraph) -> OpGraph:
    """The operator graph that is meant: the graph itself, or that of a captured model.

    Raises:
        ModelError: It is neither.
    """
    graph = source if isinstance(source, OpGraph) else getattr(source, "graph", None)
    if not isinstance(graph, OpGraph):
        raise ModelError(
            f"graph is a {type(source).__name__}: an operator graph or a captured model is needed, as capture(...) or "
            "capture_model(...) returns it"
        )
    return graph


FORMAT = "qsync-graph/1"


def graph_to_json(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain JSON data, with the format version."""
    return encode(graph, version=FORMAT)


def save_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph file, whole or not at all.

    Raises:
        ModelError: The file cannot be written.
    """
    write_json(path, graph_to_json(graph), error=ModelError)


def load_graph(path: str | os.PathLike[str]) -> OpGraph:
    """Read a graph file.

    Raises:
        ModelError: Missing file, not JSON, another format version, an unknown key or an unusable value.
    """
    data = read_json(path, (FORMAT,), error=ModelError)
    return decode(OpGraph, data, os.fspath(path), version=FORMAT, error=ModelError)


def parse_graph(text: str, *, where: str) -> OpGraph:
    """Build a graph from its JSON text; ``where`` names the text in errors.

    Raises:
        ModelError: As in ``load_graph``.
    """
    data = parse_json(text, (FORMAT,), where=where, error=ModelError)
    return decode(OpGraph, data, where, version=FORMAT, error=ModelError)
