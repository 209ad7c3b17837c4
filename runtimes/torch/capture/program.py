"""How does an exported program become one flat list of calls?

torch.export keeps regions under ``no_grad`` and ``autocast`` as nested graphs. They are inlined, so that their calls
are operators like all others; what they mean for gradients is kept in the nodes' metadata. The aliases that tracing
put in are taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.capture.export import describe_module

NO_GRADIENT = "qsync_opt.no_gradient"
"""Metadata key of nodes that run where gradients are disabled."""


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that a node runs in, as in ``named_modules``; "" is the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def where(node: fx.Node) -> str:
    """Describe the module a node runs in, for messages."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "the model itself"
    path, kind = list(stack.values())[-1]
    return describe_module(path, kind)


def flatten(program: Any) -> None:
    """Inline the nested regions of an exported program and drop its aliases, in place.

    Raises:
        ModelError: A region cannot be part of a straight forward pass (cond, scan, ...) or enables autocast.
    """
    graph_module = program.graph_module
    graph = graph_module.graph
    while region := next((n for n in graph.nodes if _is_region(n)), None):
        _inline(program, graph_module, region)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.alias.default:
            _substitute(program, node, node.args[0])
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def _region_parts(node: fx.Node) -> tuple[fx.Node, Sequence[Any], bool]:
    """Return a region's nested graph, its operands and whether gradients are disabled inside."""
    kind = str(node.target)
    match kind, node.args:
        case "wrap_with_set_grad_enabled", (bool(enabled), fx.Node() as body, *operands):
            return body, operands, not enabled
        case "wrap_with_autocast", (device, dtype, bool(enabled), _, fx.Node() as body, *operands):
            if enabled:
                raise ModelError(
                    f"{where(node)} enables autocast ({device}, {dtype}) in its forward: precisions are set by the "
                    "plan alone, take the autocast block out"
                )
            return body, operands, False
        case "tag_activation_checkpoint", (fx.Node() as body, *operands):
            return body, operands, False
    raise ModelError(
        f"{where(node)} contains {kind}: only a forward pass without control flow and custom regions can be planned, "
        "rewrite it with plain tensor operations"
    )


def _inline(program: Any, graph_module: fx.GraphModule, region: fx.Node) -> None:
    graph = graph_module.graph
    body_node, operands, no_gradient = _region_parts(region)
    no_gradient = no_gradient or bool(region.meta.get(NO_GRADIENT))
    body = graph_module.get_submodule(str(body_node.target))
    assert isinstance(body, fx.GraphModule)
    values: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    results: Any = ()
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
        else:
            values[node] = _copy(graph_module, body, node, values, region, no_gradient)
    _replace(program, region, results)
    graph.erase_node(region)
    if not body_node.users:
        graph.erase_node(body_node)


def _copy(
    graph_module: fx.GraphModule,
    body: fx.GraphModule,
    node: fx.Node,
    values: Mapping[fx.Node, Any],
    region: fx.Node,
    no_gradient: bool,
) -> fx.Node:
    graph = graph_module.graph
    with graph.inserting_before(region):
        copy = graph.node_copy(node, values.__getitem__)
    if no_gradient:
        copy.meta[NO_GRADIENT] = True
    if node.op == "get_attr":
        # A nested region's own graph moves up under a name that is free here.
        name = f"{region.name}_{str(node.target).replace('.', '_')}"
        graph_module.add_module(name, body.get_submodule(str(node.target)))
        copy.target = name
    return copy


def _replace(program: Any, region: fx.Node, results: Any) -> None:
    """Let the users of a region's results use the inlined nodes instead."""
    if isinstance(results, fx.Node):
        _substitute(program, region, results)
        return
    for user in list(region.users):
        _substitute(program, user, results[user.args[1]])
        user.graph.erase_node(user)


def _substitute(program: Any, old: fx.Node, new: Any) -> None:
    """Put ``new`` in the place of ``old`` everywhere, the program's signature included."""
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)
