"""How is an operator graph kept in a file? Reads and writes ``"format": "qsync-graph/1"`` (JSON).

Unknown keys are refused, except those that begin with ``x-``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qsync_opt.errors import ModelError
from qsync_opt.graph import Operator, OpGraph, ParameterSpec, Role, TensorSpec

FORMAT = "qsync-graph/1"

_GRAPH_KEYS = ("format", "name", "parameters", "operators")
_PARAMETER_KEYS = ("name", "shape", "dtype")
_OPERATOR_KEYS = (
    "name",
    "type",
    "module",
    "role",
    "inputs",
    "input_tensors",
    "output_tensors",
    "parameters",
    "onnx_nodes",
    "flops",
    "bytes",
    "signature",
)
_T = TypeVar("_T")


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
        "input_tensors": [_tensor_to_json(spec) for spec in operator.input_specs],
        "output_tensors": [_tensor_to_json(spec) for spec in operator.output_specs],
        "parameters": list(operator.parameters),
        "onnx_nodes": list(operator.onnx_nodes),
        "flops": operator.flops,
        "bytes": operator.num_bytes,
        "signature": operator.signature,
    }


def _tensor_to_json(spec: TensorSpec) -> list[Any]:
    return [spec.dtype, list(spec.shape)]


def save_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Write ``graph`` to ``path``; the file appears whole or not at all.

    Raises:
        ModelError: The folder cannot be written to.
    """
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(graph_to_json(graph), file, allow_nan=False, indent=1)
                file.write("\n")
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ModelError(f"cannot write graph file {target}: {error.strerror or error}") from error


def load_graph(path: str | os.PathLike[str]) -> OpGraph:
    """Read a graph file.

    Raises:
        ModelError: The file is missing, is not JSON, has another format version, an unknown key or an unusable value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read graph file {path}: {error}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"graph file {path} is not JSON ({error}): is it truncated?") from error
    return graph_from_json(data, where=f"graph file {path}")


def graph_from_json(data: Any, *, where: str = "graph") -> OpGraph:
    """Build the graph that ``graph_to_json`` described; ``where`` begins the text of errors.

    Raises:
        ModelError: Wrong format version, missing or unknown key, or a value of the wrong kind.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise ModelError(f"{where} has format {found!r}: {FORMAT!r} is needed")
    _check_keys(data, _GRAPH_KEYS, where)
    parameters = tuple(
        _parameter_from_json(entry, f"{where}: parameter {position}")
        for position, entry in enumerate(_value(data, "parameters", list, where))
    )
    operators = tuple(
        _operator_from_json(entry, f"{where}: operator {position}")
        for position, entry in enumerate(_value(data, "operators", list, where))
    )
    return OpGraph(name=_value(data, "name", str, where), operators=operators, parameters=parameters)


def _parameter_from_json(data: Any, where: str) -> ParameterSpec:
    _check_keys(data, _PARAMETER_KEYS, where)
    spec = _tensor_from_json([_value(data, "dtype", str, where), _value(data, "shape", list, where)], where)
    return ParameterSpec(name=_value(data, "name", str, where), spec=spec)


def _operator_from_json(data: Any, where: str) -> Operator:
    _check_keys(data, _OPERATOR_KEYS, where)
    name = _value(data, "name", str, where)
    where = f"{where} ({name!r})"
    role = _value(data, "role", str, where)
    if role not in {member.value for member in Role}:
        raise ModelError(f"{where} has role {role!r}: allowed are {', '.join(Role)}")
    return Operator(
        name=name,
        op_type=_value(data, "type", str, where),
        module=_value(data, "module", str, where),
        role=Role(role),
        inputs=_texts(data, "inputs", where),
        input_specs=tuple(_tensor_from_json(t, where) for t in _value(data, "input_tensors", list, where)),
        output_specs=tuple(_tensor_from_json(t, where) for t in _value(data, "output_tensors", list, where)),
        parameters=_texts(data, "parameters", where),
        onnx_nodes=_texts(data, "onnx_nodes", where),
        flops=_value(data, "flops", int, where),
        num_bytes=_value(data, "bytes", int, where),
        signature=_value(data, "signature", str, where),
    )


def _check_keys(data: Any, allowed: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise ModelError(f"{where} is {type(data).__name__}: an object with keys {', '.join(allowed)} is needed")
    unknown = [key for key in data if key not in allowed and not str(key).startswith("x-")]
    if unknown:
        raise ModelError(f"{where} has unknown key {unknown[0]!r}: allowed are {', '.join(allowed)} and x-...")
    missing = [key for key in allowed if key not in data]
    if missing:
        raise ModelError(f"{where} lacks key {missing[0]!r}: it must have {', '.join(allowed)}")


def _value(data: Mapping[str, Any], key: str, kind: type[_T], where: str) -> _T:
    value = data[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"{where} has {key} = {value!r}: a value of type {kind.__name__} is needed")
    return value


def _texts(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = _value(data, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{where} has {key} = {values!r}: a list of texts is needed")
    return tuple(values)


def _tensor_from_json(data: Any, where: str) -> TensorSpec:
    match data:
        case [str(dtype), list(sizes)] if all(isinstance(s, int) and not isinstance(s, bool) for s in sizes):
            return TensorSpec(shape=tuple(sizes), dtype=dtype)
    raise ModelError(f'{where} describes a tensor by {data!r}: ["float32", [2, 3]] is the form')
