"""Captures a PyTorch model in training mode as an operator graph.

The model runs once, is exported with torch.export and the dynamo exporter to ONNX, and the ONNX model is read back: its
nodes carry the operators that they belong to, its metadata all operators, also those without a node. Where ONNX has no
form of some operation, the exported program alone gives the graph: the operation is opaque, fixed in FP32. So is a
module that torch.export cannot look into. The model is left unchanged: mode, buffers and random state are restored.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import ModelError, first_few
from qsync_opt.model import ROLE_TABLE, OpGraph, Role, RoleTable, graph_to_json
from qsync_opt.model.onnx import GRAPH_KEY, OPERATOR_KEY, read_onnx
from qsync_opt.runtimes.torch.capture.calls import RecordedCall
from qsync_opt.runtimes.torch.capture.export import (
    LocatedError,
    describe_module,
    export_onnx,
    export_program,
    locating,
    save_onnx,
    training_mode,
)
from qsync_opt.runtimes.torch.capture.opaque import OpaqueModule, PackedModuleError, in_one_piece, observe
from qsync_opt.runtimes.torch.capture.operators import Operators
from qsync_opt.runtimes.torch.capture.program import flatten, parameter_names, sized_by_data
from qsync_opt.runtimes.torch.interception import OperatorCall, intercept
from qsync_opt.runtimes.torch.support import call_arguments, check_samples, model_unchanged, without_recomputation

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A captured model: its operator graph, and by name the call of every operator, to run it by itself.

    ``program`` is the ``torch.export.ExportedProgram`` at the level of torch operations. ``notes`` says which modules
    are one operator each, and why.
    """

    graph: OpGraph
    program: Any
    calls: Mapping[str, RecordedCall]
    notes: tuple[str, ...] = ()


def capture_model(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    roles: RoleTable | None = None,
    name: str | None = None,
    onnx_path: str | os.PathLike[str] | None = None,
) -> CapturedModel:
    """Capture the operators of one training forward pass.

    Args:
        model: In FP32, on any device. In evaluation mode it is captured in training mode and then restored.
        args: Positional arguments of the forward pass as a tuple or list; or a batch as `auto_plan` takes it: a
            mapping of keyword arguments, or the single argument. As in training; shapes are fixed. Pass the labels too
            if the model computes its loss.
        kwargs: Keyword arguments of the forward pass.
        roles: The role table with changes; None: the built-in one.
        name: Of the graph; None: the class name of the model.
        onnx_path: Where to keep the ONNX file, its weights beside it if large; None keeps none, and captures models
            that ONNX has no form for.

    Returns:
        The graph, the exported program, and the call of each operator.

    Raises:
        ModelError: The forward pass or an exporter fails (with the reason, the module and the line where it stopped,
            and a remedy), a parameter is not FP32, or the exported model is not the one that runs. If torch.export
            stops inside a module below the model itself, that module is one fixed operator instead, with a warning.

    Source:
        Ours. The exporters are torch.export and torch.onnx.
    """
    _check_model(model)
    args, named = call_arguments(args)
    kwargs = {**named, **(kwargs or {})}
    check_samples(args, kwargs)
    with training_mode(model):
        seen = _run_once(model, args, kwargs)
        program, opaque, notes = _exported(model, args, kwargs)
    operators = Operators(program, model, roles or RoleTable(), name or type(model).__name__, opaque)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    inside = tuple(f"{path}{end}" for path in opaque for end in "./")
    _compare(operators.graph, tuple(name for name in seen if not name.startswith(inside)))
    graph = _through_onnx(program, operators, parameter_names(model), onnx_path)
    return CapturedModel(graph=graph, program=program, calls=MappingProxyType(operators.calls), notes=notes)


def capture(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    roles: RoleTable | None = None,
    name: str | None = None,
    onnx_path: str | os.PathLike[str] | None = None,
) -> OpGraph:
    """Return the operator graph of one training forward pass, with the arguments and errors of `capture_model`."""
    return capture_model(model, args, kwargs, roles=roles, name=name, onnx_path=onnx_path).graph


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"cannot capture a {type(model).__name__}: a torch.nn.Module is needed")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ModelError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: master weights must be float32, "
                "use model.float() before capture"
            )
        if parameter.device.type == "meta":
            raise ModelError(f"parameter {name!r} is on the meta device: give the model its weights before capture")


def _run_once(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Run one forward pass and return the names of its operators of adjustable kinds, in order."""
    seen: list[str] = []

    def note(call: OperatorCall) -> Any:
        if ROLE_TABLE.get(call.op_type) is Role.ADJUSTABLE:
            seen.append(call.name)
        return call.run()

    with (
        torch.no_grad(),
        without_recomputation(),
        model_unchanged(model),
        locating(model, "the forward pass failed"),
        intercept(model, note),
    ):
        model(*args, **kwargs)
    return tuple(seen)


def _exported(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, OpaqueModule], tuple[str, ...]]:
    """The flat exported program, the modules that are one operator each, because they cannot be exported, and notes.

    With such a module all others of its class are kept in one piece, like the experts of every layer.
    """
    opaque: dict[str, OpaqueModule] = {}
    notes: list[str] = []

    def run() -> None:
        with torch.no_grad(), model_unchanged(model), locating(model, "the forward pass failed"):
            model(*args, **kwargs)

    while True:
        try:
            with model_unchanged(model), in_one_piece(opaque):  # tracing replaces buffers that the forward pass assigns
                program = export_program(model, args, kwargs)
            flatten(program)
            path, reason = sized_by_data(program), "sizes inside depend on the data"
            if not path or path in opaque:
                return program, opaque, tuple(notes)
        except LocatedError as failure:
            path, reason = failure.path, failure.reason
            if not path or path in opaque:
                raise
        path, seen = _in_one_piece(model, path, run)
        opaque = {old: entry for old, entry in opaque.items() if not old.startswith(tuple(f"{p}." for p in seen))}
        opaque |= seen
        notes.append(
            f"{describe_module(path, model.get_submodule(path))} is one operator in FP32, as "
            f"{first_few([repr(p) for p in seen])}: torch.export cannot look inside ({reason})"
        )


def _in_one_piece(model: nn.Module, path: str, run: Callable[[], None]) -> tuple[str, dict[str, OpaqueModule]]:
    """Observe a module and the others of its class, or the nearest module around it that takes no packed sequence."""
    while True:
        module = model.get_submodule(path)
        paths = tuple(other for other, found in model.named_modules() if type(found) is type(module))
        nested = any(one.startswith(f"{other}.") for one in paths for other in paths)
        try:
            return path, observe(model, (path,) if nested else paths, run)
        except PackedModuleError as failure:
            path = failure.path.rpartition(".")[0]
            if not path:
                raise


def _compare(graph: OpGraph, seen: tuple[str, ...]) -> None:
    """Refuse a graph whose operators of adjustable kinds are not those that ran.

    Other kinds are not compared: the export shows the inner operations of some torch functions.
    """
    captured = tuple(operator.name for operator in graph if ROLE_TABLE.get(operator.op_type) is Role.ADJUSTABLE)
    if captured == seen:
        return
    position = next(
        (i for i, (left, right) in enumerate(zip(captured, seen, strict=False)) if left != right),
        min(len(captured), len(seen)),
    )
    exported, ran = (names[position] if position < len(names) else "nothing more" for names in (captured, seen))
    raise ModelError(
        f"the exported model is not the one that runs: operator {position} is {exported!r} in the export and {ran!r} "
        "at run time; the forward pass must do the same on every call, whatever its data and mode"
    )


def _through_onnx(
    program: Any, operators: Operators, names: Mapping[str, str], path: str | os.PathLike[str] | None
) -> OpGraph:
    """Export to ONNX and read the file back, which checks its nodes against the operators.

    Tied parameters, which the exporter stores once under any of their names, have the one in ``names`` as in the graph.

    Without a path, a model that ONNX has no form for keeps the graph of the exported program.
    """
    try:
        onnx_program = export_onnx(program)
    except ModelError as failure:
        if path is not None:
            raise
        _LOGGER.info("the graph is taken from torch.export alone, without a second look through ONNX: %s", failure)
        return operators.graph
    model = onnx_program.model
    model.metadata_props[GRAPH_KEY] = json.dumps(graph_to_json(operators.graph), separators=(",", ":"))
    owners = _owners(onnx_program.exported_program, operators)
    for node in model.graph:
        node.metadata_props[OPERATOR_KEY] = owners[_called(node)]
    for weight in list(model.graph.initializers.values()):
        weight.name = names.get(weight.name, weight.name)
    with tempfile.TemporaryDirectory(prefix="qsync-opt-") as folder:
        if path is not None:
            return read_onnx(save_onnx(onnx_program, Path(path)))
        # Reading skips the weights, so none are written.
        file = Path(folder) / "model.onnx"
        onnx_program.save(file, include_initializers=False, keep_initializers_as_inputs=True)
        return read_onnx(file)


def _owners(decomposed: Any, operators: Operators) -> dict[str, str]:
    """Map each call of the translated program to its operator."""
    owners: dict[str, str] = {}
    for node in decomposed.graph.nodes:
        if node.op != "call_function":
            continue
        origin = node.meta.get("from_node")
        names = [node.name]
        while origin:
            names.append(origin[-1].name)
            origin = origin[-1].from_node
        # The innermost origin is the node of the program before decomposition.
        owner = next((operators.by_node[name] for name in reversed(names) if name in operators.by_node), None)
        if owner is None:
            raise ModelError(
                f"the ONNX exporter made call {node.name!r} ({node.target}) out of no operator of the model"
            )
        owners[node.name] = owner
    return owners


def _called(node: Any) -> str:
    text = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    call = re.match(r"%(\w+)", text)
    if call is None:
        raise ModelError(f"the ONNX exporter left node {node.name!r} ({node.op_type}) without the call it stems from")
    return call[1]
