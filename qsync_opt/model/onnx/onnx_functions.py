"""Functions of an ONNX model, written out: the bodies stand in place of the calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import inliner

from qsync_opt.errors import ModelError, first_line

_LARGEST_EXPANSION = 1_000_000


def inline_functions(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a model in which the bodies of its own functions stand in place of their calls.

    Raises:
        ModelError: A function calls itself, or written out there are too many nodes.
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
    except Exception as error:  # whatever a malformed function makes happen inside of the library
        raise ModelError(f"the functions of {where} cannot be written out: {first_line(error)}") from error


def _expanded_nodes(
    nodes: Iterable[onnx.NodeProto],
    bodies: Mapping[tuple[str, str], Iterable[onnx.NodeProto]],
    sizes: dict[tuple[str, str], int],
    callers: tuple[tuple[str, str], ...],
) -> int:
    """How many nodes there are once every call is replaced by what it calls."""
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
