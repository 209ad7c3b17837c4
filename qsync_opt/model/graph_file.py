"""How is an operator graph kept in a file? Reads and writes ``"format": "qsync-graph/1"`` (JSON).

Unknown keys are refused, except those that begin with ``x-``.
"""

from __future__ import annotations

import os
from typing import Any

from qsync_opt.errors import ModelError
from qsync_opt.io.codec import Fields, parse_json, read_json, write_json
from qsync_opt.model.graph import Operator, OpGraph, ParameterSpec, Role, TensorSpec

FORMAT = "qsync-graph/1"


def graph_to_json(graph: OpGraph) -> dict[str, Any]:
    """Return ``graph`` as a JSON-ready mapping with its format version."""
    return {
        "format": FORMAT,
        "name": graph.name,
        "parameters": [{"name": p.name, "shape": list(p.spec.shape), "dtype": p.spec.dtype} for p in graph.parameters],
        "operators": [_operator_to_json(operator) for operator in graph.operators],
    }


def _operator_to_json(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "type": operator.op_type,
        "module": operator.module,
        "role": operator.role.value,
        "inputs": list(operator.inputs),
        "input_tensors": [[spec.dtype, list(spec.shape)] for spec in operator.input_specs],
        "output_tensors": [[spec.dtype, list(spec.shape)] for spec in operator.output_specs],
        "parameters": list(operator.parameters),
        "onnx_nodes": list(operator.onnx_nodes),
        "flops": operator.flops,
        "bytes": operator.num_bytes,
        "signature": operator.signature,
    }


def save_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Write ``graph`` to ``path``; the file appears whole or not at all.

    Raises:
        ModelError: The folder cannot be written to.
    """
    write_json(path, graph_to_json(graph), error=ModelError)


def load_graph(path: str | os.PathLike[str]) -> OpGraph:
    """Read a graph file.

    Raises:
        ModelError: The file is missing, is not JSON, has another format version, an unknown key or an unusable value.
    """
    return _graph(read_json(path, (FORMAT,), error=ModelError), os.fspath(path))


def parse_graph(text: str, *, where: str) -> OpGraph:
    """Build a graph from the JSON text of one; ``where`` names the text in errors.

    Raises:
        ModelError: As in ``load_graph``.
    """
    return _graph(parse_json(text, (FORMAT,), where=where, error=ModelError), where)


def _graph(data: Any, where: str) -> OpGraph:
    fields = Fields(data, where, error=ModelError)
    fields.take("format")
    name = fields.text("name")
    parameters = tuple(
        _parameter(Fields(entry, f"{where}: parameters[{i}]", error=ModelError))
        for i, entry in enumerate(fields.sequence("parameters"))
    )
    operators = tuple(
        _operator(Fields(entry, f"{where}: operators[{i}]", error=ModelError))
        for i, entry in enumerate(fields.sequence("operators"))
    )
    fields.finish()
    return OpGraph(name=name, operators=operators, parameters=parameters)


def _parameter(fields: Fields) -> ParameterSpec:
    spec = TensorSpec(shape=fields.integers("shape"), dtype=fields.text("dtype"))
    parameter = ParameterSpec(name=fields.text("name"), spec=spec)
    fields.finish()
    return parameter


def _operator(fields: Fields) -> Operator:
    name = fields.text("name")
    fields.where = f"{fields.where} {name!r}"
    role, module = fields.take("role"), fields.take("module")
    if role not in tuple(Role):
        fields.fail(f"role is {role!r}, but allowed are {', '.join(Role)}")
    if not isinstance(module, str):
        fields.fail(f"module is {module!r}, but it must be a text (empty for the model itself)")
    operator = Operator(
        name=name,
        op_type=fields.text("type"),
        module=module,
        role=Role(role),
        inputs=fields.texts("inputs"),
        input_specs=_tensors(fields, "input_tensors"),
        output_specs=_tensors(fields, "output_tensors"),
        parameters=fields.texts("parameters"),
        onnx_nodes=fields.texts("onnx_nodes"),
        flops=fields.integer("flops"),
        num_bytes=fields.integer("bytes"),
        signature=fields.text("signature"),
    )
    fields.finish()
    return operator


def _tensors(fields: Fields, key: str) -> tuple[TensorSpec, ...]:
    specs = []
    for value in fields.sequence(key):
        match value:
            case [str(dtype), list(sizes)] if all(isinstance(n, int) and not isinstance(n, bool) for n in sizes):
                specs.append(TensorSpec(shape=tuple(sizes), dtype=dtype))
            case _:
                fields.fail(f'{key} holds {value!r}, but a tensor is written ["float32", [2, 3]]')
    return tuple(specs)
