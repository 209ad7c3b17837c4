"""Schedules of compiled graphs: their kernels in order, with the operators of the model that each contains.

While a model is compiled, its operators are annotated (`torch.fx.traceback.annotate`); the annotation follows the nodes
of the graph through autograd, decompositions and fusion. The compiler's scheduler is read when it has finished. Checked
with Inductor of torch 2.11 and 2.13; its internals are no stable interface, so `read_schedules` refuses unknown ones.
"""

from __future__ import annotations

import contextlib
import math
import operator as operators
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.steps.recording import observed_operators
from qsync_opt.steps.compiled import Scheduled

_KEY = "qsync_opt"
_GATHERS = ("embedding", "index", "_unsafe_index", "gather", "index_select")
"""Operations that read only the selected part of their first operand."""
_WITH_SUM = ("addmm", "baddbmm")
"""Products to which their first operand is added."""
_FINISHING = ("add", "convert_element_type", "_to_copy")
"""Operations on a product within its operator."""


@contextlib.contextmanager
def annotated_operators(model: nn.Module, graph: OpGraph) -> Iterator[None]:
    """Annotate the operators of a model while it is compiled; graphs compiled earlier are not used inside."""

    def around(call: OperatorCall, run: Callable[[], Any]) -> Any:
        with torch.fx.traceback.annotate({_KEY: call.name}):
            return run()

    with observed_operators(model, graph, around):
        yield


@contextlib.contextmanager
def collected_schedules() -> Iterator[list[tuple[bool, Any]]]:
    """Collect the schedulers of all graphs compiled inside, and whether each is of a backward pass.

    Graphs are compiled anew; only their kernels come from the cache.
    """
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.virtualized import V

    schedulers: list[tuple[bool, Any]] = []

    def note(nodes: list[Any]) -> list[Any]:
        if nodes:
            schedulers.append((bool(V.graph.is_backward), nodes[0].scheduler))
        return nodes

    graphs: Any = torch._inductor.config
    autograd: Any = torch._functorch.config
    with (
        graphs.patch({"_post_fusion_custom_pass": note, "fx_graph_cache": False, "cpp.enable_kernel_profile": True}),
        autograd.patch(enable_autograd_cache=False),
    ):
        yield schedulers


def read_schedules(
    schedulers: Sequence[tuple[bool, Any]],
) -> tuple[list[list[Scheduled]], list[list[Scheduled]]]:
    """The schedules of the forward and of the backward graphs, in the order in which they run.

    ``DistributedDataParallel`` splits the graph at its buckets; the parts run backward in reverse order. Some versions
    of torch compile both passes of a part together, others a backward pass when it first runs: then all forward graphs
    come first, and the backward ones in running order.

    Raises:
        UnsupportedError: There is none, or not one of each kind for every part; or this version of torch differs.
    """
    try:
        forward = [_entries(running_nodes(scheduler)) for is_backward, scheduler in schedulers if not is_backward]
        backward = [_entries(running_nodes(scheduler)) for is_backward, scheduler in schedulers if is_backward]
    except (AttributeError, TypeError) as failure:
        raise UnsupportedError(
            f"the schedule of the compiler of torch {torch.__version__} cannot be read ({failure}); those of torch "
            "2.11 to 2.13 can be"
        ) from failure
    if not forward or len(forward) != len(backward):
        raise UnsupportedError(
            f"{len(forward)} graphs of the forward and {len(backward)} of the backward pass were compiled in a "
            "training step, but as many of each are needed, one at least; was the model in training mode?"
        )
    kinds = [is_backward for is_backward, _ in schedulers]
    return forward, backward if kinds == sorted(kinds) else backward[::-1]


def running_nodes(scheduler: Any) -> list[Any]:
    """Nodes of a finished scheduler that run something.

    With many rows, a sum over rows (the gradient of a norm's weight) runs in one kernel with a sum along them. The
    scheduler keeps the node of its second stage, marked as removed.
    """
    removed = getattr(scheduler, "removed_ops", ())
    if not removed:
        return list(scheduler.nodes)
    return [node for node in scheduler.nodes if any(part.get_name() not in removed for part in node.get_nodes())]


def _entries(nodes: Sequence[Any]) -> list[Scheduled]:
    entries: list[Scheduled] = []
    kernels = 0
    # Nodes that run nothing do not keep the kernels around them from becoming one.
    running = [node for node in nodes if type(node).__name__ != "NopKernelSchedulerNode"]
    calls = frozenset(_origin_node(part) for node in running for part in node.get_nodes() if _is_call(part))
    for node in running:
        entry = _scheduled(node, calls)
        if entry.fused and kernels and node.get_device().type == "cpu":
            # One C++ function holds everything between two library calls.
            entries[-1] = _together(entries[-1], kernels, entry)
            kernels += 1
            continue
        kernels = int(entry.fused)
        entries.append(entry)
    return entries


def _together(many: Scheduled, count: int, one: Scheduled) -> Scheduled:
    """A fused kernel merged into ``count`` earlier ones, with equal weights."""
    shares = {name: share * count / (count + 1) for name, share in many.shares}
    for name, share in one.shares:
        shares[name] = shares.get(name, 0.0) + share / (count + 1)
    total = sum(shares.values())
    divided = tuple((name, share / total) for name, share in shares.items())
    return Scheduled(True, (), divided, (*many.writes, *one.writes))


def _is_call(part: Any) -> bool:
    return type(part).__name__ == "ExternKernelSchedulerNode"


def _scheduled(node: Any, calls: Collection[Any] = ()) -> Scheduled:
    """An entry of a compiler's schedule; ``calls`` are the nodes of the graph that library calls compute.

    A kernel that only writes for such a call has the call's node among its origins.
    """
    parts = node.get_nodes()
    kinds = {type(part).__name__ for part in parts}
    origins: dict[Any, None] = {}
    for part in parts:
        if part.node is not None:
            origins.update(dict.fromkeys(sorted(part.node.get_origins(), key=str)))
    if "ExternKernelSchedulerNode" in kinds:
        call = node.node
        main = call.get_origin_node()
        name = _label(main) if main is not None else ""
        last = [origin for origin in origins if not any(user in origins for user in origin.users)]
        name = name or next((label for label in map(_label, last) if label), "") or _of_factors(main)
        writes: tuple[tuple[str, int], ...] = ()
        if name and main is not None:
            one = isinstance(main.meta.get("val"), torch.Tensor)
            writes = _writes([main], [main]) if one else tuple((name, size) for size in _sizes(main))
        return Scheduled(False, _names(call), ((name, 1.0),) if name else (), writes)
    nodes = [origin for origin in origins if not _is_view(origin) and origin not in calls]
    own = {part.get_name() for part in parts}
    written = tuple(entry for part in parts for entry in _written(part, own, nodes))
    return Scheduled(True, (), _shares(nodes), written)


def _of_factors(product: Any) -> str:
    """Operator of a product by its factors, if the compiler fused it with a sum that belongs to no operator.

    This happens to gradients of a weight that two operators share: the annotation of the product is lost.
    """
    if product is None or _kind(product) not in _WITH_SUM:
        return ""
    factors = [factor for factor in product.args[1:3] if hasattr(factor, "meta")]
    return next((label for label in map(_label, factors) if label), "")


def _written(part: Any, own: Collection[str], nodes: Sequence[Any]) -> Sequence[tuple[str, int]]:
    """What a part of a fused kernel writes for consumers other than its parts, which are named in ``own``."""
    node = _origin_node(part)
    if node is not None:
        return _writes([node], nodes)
    # A copy for a library call, or an intermediate value.
    users = [user.node for result in part.get_outputs() for user in result.users]
    readers = {_label(_origin_node(user)) for user in users if _is_call(user) and user.get_name() not in own}
    if len(readers) != 1 or "" in readers:
        return ()
    value = part.node
    return ((readers.pop(), math.prod(map(int, value.get_size())) * value.get_dtype().itemsize),)


def _names(call: Any) -> tuple[str, ...]:
    names = []
    overload = getattr(call, "op_overload", None)
    if overload is not None and hasattr(overload, "_schema"):
        names.append(overload._schema.name.rpartition("::")[2])
    kernel = getattr(call, "python_kernel_name", None)
    if kernel:
        pieces = [piece for piece in kernel.split(".") if piece not in ("default", "out")]
        names += [pieces[-1], pieces[-1].removeprefix("bias_")]
    return tuple(dict.fromkeys(names))


def _label(node: Any) -> str:
    """Operator of a node of a graph, "" if it has none."""
    return "" if node is None else str((node.meta.get("custom") or {}).get(_KEY, ""))


def _is_view(node: Any) -> bool:
    target = node.target
    if target is operators.getitem:
        return True
    returns: list[Any] = getattr(getattr(target, "_schema", None), "returns", [])
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _sizes(node: Any) -> list[int]:
    """Bytes of the tensors that a node returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor)]


def _num_bytes(node: Any) -> int:
    return sum(_sizes(node))


def _kind(node: Any) -> str:
    name = str(getattr(getattr(node.target, "_schema", None), "name", ""))
    return name.rpartition("::")[2]


def _source(node: Any) -> Any:
    while node.op == "call_function" and _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: Any) -> Iterator[Any]:
    for user in node.users:
        if user.op == "call_function" and _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _origin_node(part: Any) -> Any:
    """The node of the graph whose result a part of a schedule is, None for an intermediate value."""
    origin = getattr(part.node, "get_origin_node", None)
    return None if origin is None else origin()


def _writes(results: Sequence[Any], nodes: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Results that a kernel writes for others: the operator that reads it if only one does, else its own; and bytes."""
    inside = set(nodes)
    writes = []
    for node in results:
        readers = {
            _label(user) or _label(node) for user in _consumers(node) if user not in inside and user.op != "output"
        }
        if readers or any(user.op == "output" for user in _readers(node)):
            writes.append((readers.pop() if len(readers) == 1 else _label(node), _num_bytes(node)))
    return tuple(writes)


def _consumers(node: Any) -> Iterator[Any]:
    """Readers of a result after the last operation of its own operator, such as adding a bias or a cast."""
    own = _label(node)
    for user in _readers(node):
        if user.op == "call_function" and own and _label(user) == own and _kind(user) in _FINISHING:
            yield from _consumers(user)
        else:
            yield user


def _shares(nodes: Sequence[Any]) -> tuple[tuple[str, float], ...]:
    """Operators of a fused kernel, with their shares of the bytes that it moves."""
    inside = set(nodes)
    moved: dict[str, float] = {}
    known = {label for label in map(_label, nodes) if label}
    read: set[Any] = set()
    for node in nodes:
        own = _label(node)
        most = _num_bytes(node) if _kind(node) in _GATHERS else math.inf
        for shown in node.all_input_nodes:
            source = _source(shown)
            if source not in inside and source not in read:
                read.add(source)
                moved[own] = moved.get(own, 0.0) + min(_num_bytes(shown), _num_bytes(source), most)
        outside = [user for user in _readers(node) if user not in inside]
        if outside:
            readers = dict.fromkeys((_label(user) or own) if user.op != "output" else own for user in outside)
            for label in readers:
                moved[label] = moved.get(label, 0.0) + _num_bytes(node) / len(readers)
    moved.pop("", None)
    total = sum(moved.values())
    if total <= 0.0:
        return tuple((label, 1.0 / len(known)) for label in sorted(known))
    return tuple((label, share / total) for label, share in sorted(moved.items(), key=lambda item: -item[1]))
