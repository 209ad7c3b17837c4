"""Exported programs as one flat list of calls, and the dataflow between these.

torch.export keeps regions under ``no_grad`` and ``autocast`` as nested graphs. They are inlined, with their effect on
gradients in the nodes' metadata, and the aliases that tracing inserted are removed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.export.graph_signature import InputKind

from qsync_opt.errors import ModelError
from qsync_opt.model import DTYPE_BYTES, TensorSpec
from qsync_opt.runtimes.torch.capture.calls import TensorArgument
from qsync_opt.runtimes.torch.capture.export import LocatedError, describe_module, line_of

NO_GRADIENT = "qsync_opt.no_gradient"
"""Metadata key of nodes that run where gradients are disabled."""


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that a node runs in, "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return describe_module(*list(stack.values())[-1]) if stack else "the model itself"


def flatten(program: Any) -> None:
    """Inline the nested regions of an exported program and remove its aliases, in place.

    Raises:
        ModelError: A region has control flow (cond, scan, ...) or enables autocast.
        LocatedError: A module uses a transform of ``torch.func``.
    """
    graph_module = program.graph_module
    graph = graph_module.graph
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__module__", "").startswith("torch._functorch"):
            reason = "it uses a transform of torch.func (vmap, grad, jvp, ...)"
            raise LocatedError(
                f"{_where(node)} cannot be captured: {reason}; write it with batched products, or move this part "
                "into a module of its own, which then stays in FP32",
                module_path(node),
                reason,
            )
    while region := next((n for n in graph.nodes if _is_region(n)), None):
        _inline(program, region)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.alias.default:
            _substitute(program, node, node.args[0])
            graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def _region_parts(node: fx.Node) -> tuple[fx.Node, Sequence[Any], bool]:
    """A region's nested graph, its operands and whether gradients are disabled inside."""
    kind = str(node.target)
    match kind, node.args:
        case "wrap_with_set_grad_enabled", (bool(enabled), fx.Node() as body, *operands):
            return body, operands, not enabled
        case "wrap_with_autocast", (device, dtype, bool(enabled), _, fx.Node() as body, *operands):
            if enabled:
                raise ModelError(
                    f"{_where(node)} enables autocast ({device}, {dtype}) in its forward: precisions are set by the "
                    "plan alone, take the autocast block out"
                )
            return body, operands, False
        case "tag_activation_checkpoint", (fx.Node() as body, *operands):
            return body, operands, False
    raise ModelError(
        f"{_where(node)} contains {kind}: only a forward pass without control flow and custom regions can be planned, "
        "rewrite it with plain tensor operations"
    )


def _inline(program: Any, region: fx.Node) -> None:
    graph_module, graph = program.graph_module, program.graph_module.graph
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
            continue
        if node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
            continue
        with graph.inserting_before(region):
            copy = values[node] = graph.node_copy(node, values.__getitem__)
        if no_gradient:
            copy.meta[NO_GRADIENT] = True
        if node.op == "get_attr":  # the graph of a region inside this one moves up, under a free name
            copy.target = name = f"{region.name}_{str(node.target).replace('.', '_')}"
            graph_module.add_module(name, body.get_submodule(str(node.target)))
    if isinstance(results, fx.Node):
        _substitute(program, region, results)
    else:
        for user in list(region.users):
            _substitute(program, user, results[user.args[1]])
            user.graph.erase_node(user)
    graph.erase_node(region)
    if not body_node.users:
        graph.erase_node(body_node)


def _substitute(program: Any, old: fx.Node, new: Any) -> None:
    """Replace ``old`` by ``new`` everywhere, also in the program's signature."""
    old.replace_all_uses_with(new)
    program.graph_signature.replace_all_uses(old.name, new.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A parameter, buffer or constant of the model, under the first name that the model has for it."""

    name: str
    is_parameter: bool
    requires_gradient: bool


def sized_by_data(program: Any) -> str:
    """Path of the innermost module around the first tensors whose size depends on the data, "" if there is none.

    It is a module that takes and returns tensors of fixed sizes only.
    """
    sized = {
        node
        for node in program.graph.nodes
        if any(not isinstance(size, int) for tensor in tensors_of(node) for size in tensor.shape)
    }
    path = module_path(next((node for node in program.graph.nodes if node in sized), program.graph.output_node()))

    def inside(node: fx.Node) -> bool:
        return f"{module_path(node)}.".startswith(f"{path}.")

    while path and any(inside(node) and not all(map(inside, node.users)) for node in sized):
        path = path.rpartition(".")[0]
    return path


def tensor_spec(tensor: torch.Tensor, node: fx.Node) -> TensorSpec:
    """Shape and type of a tensor that ``node`` returns.

    Raises:
        ModelError: A size depends on the data, or the element type is not supported.
    """
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not all(isinstance(size, int) for size in shape):
        raise ModelError(
            f"{_where(node)} yields a tensor {node.name!r} of shape {list(map(str, shape))}{line_of(node)}, "
            "which depends on the data: only models with fixed shapes can be planned; give rows the weight 0 instead "
            "of selecting others (x[mask], nonzero, unique), or move this into a module of its own that returns fixed "
            "shapes, which then stays in FP32, or, such as a loss, out of the model"
        )
    if dtype not in DTYPE_BYTES:
        raise ModelError(
            f"{_where(node)} yields {node.name!r} of element type {dtype}: allowed are {', '.join(DTYPE_BYTES)}"
        )
    return TensorSpec(shape=shape, dtype=dtype)


def tensors_of(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors that a node returns, without data."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(item for item in values if isinstance(item, torch.Tensor))


def is_floating(tensor: torch.Tensor) -> bool:
    """Whether the precision of a tensor matters, as ``TensorSpec.is_floating``."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_in_place(node: fx.Node) -> bool:
    """Whether a call writes into its first argument."""
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and first.alias_info.is_write


class Dataflow:
    """Reads, writes and gradients of an exported program, followed node by node in execution order."""

    def __init__(self, program: Any, model: nn.Module | None) -> None:
        self._states = {} if model is None else _states(program, model)
        self._gradients: set[fx.Node] = set()
        self._roots: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, fx.Node] = {}
        self._order = {node: position for position, node in enumerate(program.graph.nodes)}

    def state(self, node: fx.Node) -> State | None:
        """The parameter or buffer that a node is, None for an activation and for one that was overwritten."""
        return self._states.get(node.name) if self.source(node) is node else None

    def source(self, node: fx.Node) -> fx.Node:
        """The node that last wrote the tensor of ``node``."""
        writer = self._writers.get(self._roots.get(node, node), node)
        return writer if self._order[writer] > self._order[node] else node

    def reads(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes whose tensors a call reads, once per argument, in argument order."""
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node) and tensors_of(leaf))

    def requires_gradient(self, node: fx.Node) -> bool:
        """Whether backward flows into the tensor of ``node``."""
        state = self.state(node)
        return state.requires_gradient if state else self.source(node) in self._gradients

    def shares_memory(self, node: fx.Node) -> bool:
        """Whether a call's result is a view of its first argument."""
        schema = getattr(node.target, "_schema", None)
        if node.target is not operator.getitem and (
            schema is None or all(r.alias_info is None for r in schema.returns)
        ):
            return False
        first = next(iter(self.reads(node)), None)
        if first is None or is_in_place(node):
            return False
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_of(first)}
        return all(tensor.untyped_storage()._cdata in storages for tensor in tensors_of(node))

    def advance(self, node: fx.Node) -> None:
        """Follow the effects of a call: views, writes, gradients."""
        reads = self.reads(node)
        detached = node.meta.get(NO_GRADIENT) or "detach" in str(node.target)
        # None flows through integers, such as the indices of topk.
        floating = [read for read in reads if any(map(is_floating, tensors_of(read)))]
        if not detached and any(map(self.requires_gradient, floating)):
            self._gradients.add(node)
        if not reads:
            return
        root = self._roots.get(reads[0], reads[0])
        if is_in_place(node):
            self._roots[node] = root
            self._writers[root] = node
        elif self.shares_memory(node):
            self._roots[node] = root

    def add_gradient(self, node: fx.Node) -> None:
        """Note that backward flows into the tensor of a node although it reads none that needs a gradient."""
        self._gradients.add(node)

    def argument(self, node: fx.Node, upper: int | None = None) -> Any:
        """The result of a node as an argument; a tuple if it returns several tensors."""
        state = self.state(node)
        gradient = self.requires_gradient(node)

        def describe(tensor: torch.Tensor) -> TensorArgument:
            spec = tensor_spec(tensor, node)
            return TensorArgument(
                spec=spec,
                stride=tuple(int(step) for step in tensor.stride()),
                state=state.name if state else None,
                is_parameter=state is not None and state.is_parameter,
                requires_gradient=gradient and spec.is_floating,
                upper=None if spec.is_floating else upper,
            )

        described = tuple(describe(tensor) for tensor in tensors_of(node))
        return described if isinstance(node.meta["val"], (list, tuple)) else described[0]


def unused_calls(program: Any) -> frozenset[fx.Node]:
    """The calls whose results reach neither what the model returns nor its buffers, such as a pooler that nobody reads.

    A call that writes into a tensor is used if any reader of the tensor is.
    """
    roots: dict[fx.Node, fx.Node] = {}
    writers: dict[fx.Node, list[fx.Node]] = {}
    flow = Dataflow(program, None)
    waiting: list[fx.Node] = [program.graph.output_node()]
    for node in program.graph.nodes:
        reads = flow.reads(node) if node.op == "call_function" else ()
        if reads and (is_in_place(node) or flow.shares_memory(node)):
            roots[node] = roots.get(reads[0], reads[0])
            if is_in_place(node):
                writers.setdefault(roots[node], []).append(node)
                if roots[node].op == "placeholder":
                    waiting.append(node)
    used: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in used:
            used.add(node)
            waiting += [*node.all_input_nodes, *writers.get(roots.get(node, node), ())]
    return frozenset(node for node in program.graph.nodes if node.op == "call_function" and node not in used)


def parameter_names(model: nn.Module) -> dict[str, str]:
    """The name of ``named_parameters`` by any name that a parameter has: tied ones have several."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _states(program: Any, model: nn.Module) -> dict[str, State]:
    """Placeholder name to state; tied parameters have their name of ``named_parameters``."""
    names, parameters = parameter_names(model), dict(model.named_parameters())
    states: dict[str, State] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            name = names[spec.target]
            states[spec.arg.name] = State(
                name=name, is_parameter=True, requires_gradient=parameters[name].requires_grad
            )
        elif spec.kind is not InputKind.USER_INPUT:
            states[spec.arg.name] = State(name=str(spec.target), is_parameter=False, requires_gradient=False)
    return states
