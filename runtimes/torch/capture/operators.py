"""Operators of an exported program: names, roles, edges, sizes and calls.

Each call that returns a tensor is an operator, in execution order; so is each floating-point argument of the model, of
kind ``input``, so that casts of inputs have a place.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from qsync_opt.errors import ModelError, first_few
from qsync_opt.model import (
    ATEN_PRODUCTS,
    OPAQUE,
    ROLE_TABLE,
    Operator,
    OpGraph,
    ParameterSpec,
    Role,
    RoleTable,
    TensorSpec,
    base_kind,
    decide_role,
)
from qsync_opt.runtimes.torch.capture.calls import RecordedCall, TensorArgument, count_flops, index_bound
from qsync_opt.runtimes.torch.capture.opaque import OpaqueModule
from qsync_opt.runtimes.torch.capture.program import (
    Dataflow,
    is_floating,
    is_in_place,
    module_path,
    tensor_spec,
    tensors_of,
    unused_calls,
)
from qsync_opt.runtimes.torch.interception import operator_name

INPUT = "input"
"""Kind of the operators for the model's floating-point arguments."""

# Kinds that read only the selected rows or elements of their first argument.
_SELECTING = frozenset({"embedding", "embedding_bag", "index_select", "index", "gather", "take", "take_along_dim"})


class Operators:
    """Operators of a flattened program that a model was exported to.

    Attributes:
        graph: The operators, without ONNX nodes.
        calls: The call of each operator by its name.
        by_node: The operator of each program node.
        unused: Operators of adjustable kinds whose result nobody reads; they are fixed.

    Raises:
        ModelError: A shape or element type cannot be planned, there are no operators, or a role pattern fits none.
    """

    def __init__(
        self,
        program: Any,
        model: nn.Module,
        roles: RoleTable,
        name: str,
        opaque: Mapping[str, OpaqueModule] = MappingProxyType({}),
    ) -> None:
        """Read the program; ``opaque`` are the modules by path that are one operator each."""
        self._opaque = opaque
        self._names = {id(parameter): key for key, parameter in model.named_parameters()}
        self.calls: dict[str, RecordedCall] = {}
        self.by_node: dict[str, str] = {}
        self._operators: list[Operator] = []
        self.unused: list[str] = []
        self._unknown: set[str] = set()
        self._unread = unused_calls(program)
        self._roles = roles
        self._flow = Dataflow(program, model)
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._flops: dict[str, int] = {}
        first = {id(module): path for path, module in model.named_modules()}
        self._paths = {path: first[id(module)] for path, module in model.named_modules(remove_duplicate=False)}
        for node in program.graph.nodes:
            self._read(node)
        if all(operator.op_type == INPUT for operator in self._operators):
            raise ModelError(f"model {name!r} does nothing: its forward pass has no tensor operation to plan")
        parameters = tuple(
            ParameterSpec(
                name=key,
                spec=TensorSpec(shape=tuple(parameter.shape), dtype=str(parameter.dtype).removeprefix("torch.")),
            )
            for key, parameter in model.named_parameters()
            if parameter.requires_grad
        )
        self.graph = OpGraph(name=name, operators=tuple(self._operators), parameters=parameters)
        roles.check_patterns(tuple(operator.name for operator in self.graph))
        if self._unknown:
            warnings.warn(
                f"operations unknown to the role table are kept in FP32: {', '.join(sorted(self._unknown))}; "
                "RoleTable(by_type={...}) gives them a role",
                stacklevel=4,
            )
        if self.unused:
            warnings.warn(
                f"nothing reads the result of {first_few([repr(name) for name in self.unused])}: kept in FP32, as its "
                "precision does not matter; a model without that part would save its time",
                stacklevel=4,
            )

    def _read(self, node: fx.Node) -> None:
        """Read the next node; one without a tensor result (an assertion, a size) is no operator."""
        tensors = tensors_of(node)
        if node.op == "call_function" and tensors:
            kind = _kind(node)
            path = module_path(node)
            path = self._paths.get(path, path)
            self._add(node, kind, path, self._name(path, kind))
            self._flow.advance(node)
            if kind == OPAQUE and self._opaque[str(node.args[1])].parameters():
                self._flow.add_gradient(node)
        elif node.op == "placeholder" and tensors and self._flow.state(node) is None and is_floating(tensors[0]):
            self._add(node, INPUT, "", self._name(INPUT, node.name))

    def _name(self, path: str, suffix: str) -> str:
        self._occurrences[path, suffix] += 1
        return operator_name(path, suffix, self._occurrences[path, suffix] - 1)

    def _add(self, node: fx.Node, kind: str, path: str, name: str) -> None:
        call = self._call(node, kind)
        # getitem reads one tensor of its tuple.
        reads = call.args[0][call.args[1] : call.args[1] + 1] if kind == "getitem" else tuple(call.tensors())
        outputs = tuple(tensor_spec(tensor, node) for tensor in tensors_of(node))
        role = self._role(node, kind, name, outputs)
        if role is Role.ADJUSTABLE and node in self._unread:
            role = Role.FIXED
            self.unused.append(name)
        signature = call.signature(kind)
        trained = [str(read.state) for read in reads if read.is_parameter and read.requires_gradient]
        num_bytes = _count_bytes(kind, reads, outputs, call.is_view)
        if isinstance(call.target, OpaqueModule):
            inside = call.target.parameters()
            trained += [self._names[id(parameter)] for parameter in inside]
            num_bytes += sum(parameter.numel() * parameter.element_size() for parameter in inside)
        self._operators.append(
            Operator(
                name=name,
                op_type=kind,
                module=path,
                role=role,
                inputs=self._inputs(node, role),
                input_specs=tuple(read.spec for read in reads),
                output_specs=outputs,
                parameters=tuple(dict.fromkeys(trained)),
                onnx_nodes=(),
                flops=self._count_flops(name, kind, signature, call),
                num_bytes=num_bytes,
                signature=signature,
            )
        )
        self.calls[name] = call
        self.by_node[node.name] = name

    def _call(self, node: fx.Node, kind: str) -> RecordedCall:
        if node.op == "placeholder":
            return RecordedCall(target=torch.empty_like, args=(self._flow.argument(node),), is_view=True)
        assert callable(node.target)
        if kind == OPAQUE:
            entry = self._opaque[str(node.args[1])]
            pairs = zip(self._flow.reads(node), entry.bounds, strict=True)
            described = tuple(self._flow.argument(read, bound) for read, bound in pairs)
            return RecordedCall(target=entry, args=(described, ""))
        tensors = tuple(tensor for read in self._flow.reads(node) for tensor in tensors_of(read))
        upper = index_bound(base_kind(kind), tensors)

        def describe(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._flow.argument(value, upper) if tensors_of(value) else value.meta.get("val")
            if isinstance(value, (list, tuple)):
                return tuple(describe(item) for item in value)
            return value

        args = [describe(argument) for argument in node.args]
        if base_kind(kind) == "embedding_bag" and isinstance(args[2], TensorArgument):
            args[2] = replace(args[2], upper=math.prod(args[1].spec.shape), rising=True)
        return RecordedCall(
            target=node.target,
            args=tuple(args),
            kwargs={key: describe(argument) for key, argument in node.kwargs.items()},
            is_view=self._flow.shares_memory(node),
        )

    def _role(self, node: fx.Node, kind: str, name: str, outputs: Sequence[TensorSpec]) -> Role:
        listed = self._roles.lookup(name, kind)
        reads = [] if node.op == "placeholder" else self._floating_reads(node)
        activations = [read for read in reads if self._flow.state(read) is None]
        if listed is Role.ADJUSTABLE and not _is_real_product(kind, reads):
            listed = Role.FIXED
        delivers_floating = any(spec.is_floating for spec in outputs)
        if listed is None and (delivers_floating or activations) and kind != OPAQUE:
            self._unknown.add(kind)
        # An operator that writes into an activation keeps its format, whatever else it reads.
        keeps_format = is_in_place(node) and bool(activations) and reads[0] is activations[0]
        return decide_role(
            listed,
            delivers_floating=delivers_floating,
            reads_floating=bool(activations),
            reads_state=not keeps_format
            and any(tensors_of(read)[0].dim() > 0 for read in reads if read not in activations),
            casts_to_full=any(_is_floating_type(value) for value in (*node.args, *node.kwargs.values())),
        )

    def _floating_reads(self, node: fx.Node) -> list[fx.Node]:
        """Nodes of the floating-point tensors that a call reads, once per argument."""
        reads = self._flow.reads(node)
        if node.target is operator.getitem:
            return [read for read in reads if is_floating(tensors_of(read)[int(node.args[1])])]  # type: ignore[arg-type]
        return [read for read in reads if any(map(is_floating, tensors_of(read)))]

    def _inputs(self, node: fx.Node, role: Role) -> tuple[str, ...]:
        if node.op == "placeholder":
            return ()
        reads = [read for read in self._floating_reads(node) if self._flow.state(read) is None]
        if role is Role.DEPENDENT:
            # 0-dim operands follow the others by type promotion, empty ones (the start of a cache) by the runtime.
            deciding = [read for read in reads if tensors_of(read)[0].dim() > 0 and tensors_of(read)[0].numel() > 0]
            reads = deciding or reads
        return tuple(self.by_node[self._flow.source(read).name] for read in reads)

    def _count_flops(self, name: str, kind: str, signature: str, call: RecordedCall) -> int:
        if isinstance(call.target, OpaqueModule):
            return call.target.flops
        if base_kind(kind) in ROLE_TABLE and base_kind(kind) not in ATEN_PRODUCTS:
            return 0
        if signature not in self._flops:
            self._flops[signature] = count_flops(name, call)
        return self._flops[signature]


def _is_real_product(kind: str, reads: Sequence[fx.Node]) -> bool:
    """Whether an operator of an adjustable kind can run in several precisions: on real operands, an einsum on two."""
    is_complex = any(tensor.is_complex() for read in reads for tensor in tensors_of(read))
    return not is_complex and (kind != "einsum" or len(reads) == 2)


def _kind(node: fx.Node) -> str:
    """Kind of a call: the name of its ATen operator, after the namespace for those of other libraries."""
    if node.target is operator.getitem:
        return "getitem"
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ModelError(
            f"the exported program calls {node.target}, which is no tensor operation: {node.format_node()}"
        )
    namespace, _, name = node.target._schema.name.partition("::")
    return name if namespace == "aten" else f"{namespace}.{name}"


def _is_floating_type(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point


def _count_bytes(kind: str, reads: Sequence[TensorArgument], outputs: Sequence[TensorSpec], is_view: bool) -> int:
    """Bytes that one forward pass reads and writes; a tensor passed twice is read once."""
    written = sum(spec.num_bytes for spec in outputs)
    if is_view or kind == "getitem":
        return 0
    if base_kind(kind) in _SELECTING:
        return 2 * written + sum(read.spec.num_bytes for read in reads if not read.spec.is_floating)
    return written + sum(read.spec.num_bytes for read in reads)
