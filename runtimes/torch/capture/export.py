"""Export of PyTorch models to programs of torch.export and to ONNX, in training mode and with static shapes.

The exporters print nothing. A failure names the exporter's reason and the module in which it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import math
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from onnxscript import ir, opset18
from torch import nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from qsync_opt.errors import ModelError

# The operators' own annotations know neither plain numbers nor constants of the intermediate representation.
op: Any = opset18


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """ONNX form of softmax(Q Kᵀ · scale + mask) V; Q (..., H, L, E), K (..., G, S, E), V (..., G, S, F), G divides H.

    Source:
        The equivalent code in the documentation of ``torch.nn.functional.scaled_dot_product_attention``; ours is
        that grouped heads are repeated by Expand and that dropout stays in training mode.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention takes either attn_mask or is_causal, not both")
    length, embedding = _sizes(query)[-2:]
    source_length = _sizes(key)[-2]
    axes = list(range(len(_sizes(key))))
    if enable_gqa:
        key, value = (_repeat_heads(tensor, _sizes(query)[-3]) for tensor in (key, value))
    factor = 1.0 / math.sqrt(embedding) if scale is None else scale
    transposed = op.Transpose(key, perm=[*axes[:-2], axes[-1], axes[-2]])
    scores = op.MatMul(op.Mul(query, _scalar(factor, query)), transposed)
    if is_causal:
        attn_mask = op.Constant(value=ir.tensor(np.tri(length, source_length, dtype=np.bool_)))
        scores = op.Where(attn_mask, scores, _lowest(query))
    elif attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
        scores = op.Where(attn_mask, scores, _lowest(query))
    elif attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    weights = op.Softmax(scores, axis=-1)
    if dropout_p:
        training = op.Constant(value=ir.tensor(np.array(True)))
        ratio = op.Constant(value=ir.tensor(np.array(dropout_p, dtype=np.float32)))
        weights, _ = op.Dropout(weights, ratio, training)
    return op.MatMul(weights, value)


def _sizes(tensor: Any) -> list[int]:
    return [int(size) for size in tensor.shape]


def _scalar(number: float, like: Any) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=like.dtype))


def _lowest(like: Any) -> Any:
    # The lowest finite number instead of -inf, so that a row that attends to nothing gives no NaN.
    return _scalar(float(like.dtype.min), like)


def _repeat_heads(tensor: Any, heads: int) -> Any:
    """Repeat each of the G heads of (..., G, S, E) until there are ``heads``."""
    *batch, groups, length, width = _sizes(tensor)
    if groups == heads:
        return tensor
    shapes = ([*batch, groups, 1, length, width], [*batch, groups, heads // groups, length, width])
    single, repeated = (op.Constant(value_ints=shape) for shape in shapes)
    final = op.Constant(value_ints=[*batch, heads, length, width])
    return op.Reshape(op.Expand(op.Reshape(tensor, single), repeated), final)


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_FAILED_NODE = re.compile(r"translating node %(\w+)(.*)", re.DOTALL)
_NODE = re.compile(r"%(\w+)")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings, log lines and prints."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # On failure torch.export prints the graph so far to standard error.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode into training mode; one in training mode is left as it is."""
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def describe_module(path: str, module: nn.Module | type | str) -> str:
    """A module for messages, as ``module 'encoder.0' (TransformerEncoderLayer)``."""
    kind = module if isinstance(module, str) else (module if isinstance(module, type) else type(module)).__name__
    kind = kind.rsplit(".", 1)[-1]
    return f"module {path!r} ({kind})" if path else f"the model itself ({kind})"


@contextlib.contextmanager
def locating(model: nn.Module, what: str) -> Iterator[None]:
    """Turn an exception of a forward pass inside the block into a ModelError that names the module it came from."""
    running = [("", "the model's forward")]  # modules that were entered and not left
    handles: list[Any] = []

    def enter(path: str, where: str, *_: Any) -> None:
        running.append((path, where))

    def leave(*_: Any) -> None:
        running.pop()

    for path, module in model.named_modules():
        hook = functools.partial(enter, path, describe_module(path, module))
        handles.append(module.register_forward_pre_hook(hook, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        path, where = running[-1]
        reason, (remedy, may_be_opaque) = f"{_reason(error)}{_place(error)}", _remedy(model, where, error)
        note = reason + remedy if remedy == _EXPERTS else reason
        raise LocatedError(f"{what} in {where}: {reason}{remedy}", path if may_be_opaque else "", note) from error
    finally:
        for handle in handles:
            handle.remove()


def _reason(error: BaseException) -> str:
    """The first line of the innermost explicit cause of ``error``, with its type."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in _ESCAPES.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_OWN_FILES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def _place(error: BaseException) -> str:
    """File and line of the model's code that an exception came from, as an addition to its reason, else nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OWN_FILES)]
    inside = [frame for frame in frames if not frame.filename.startswith("<") and "qsync_opt" not in frame.filename]
    return f" (at {inside[-1].filename}:{inside[-1].lineno}: {inside[-1].line})" if inside else ""


_EXPERTS = (
    "; experts that are chosen by branches cannot be captured: of Transformers' models "
    'model.set_experts_implementation("batched_mm") computes them without'
)


_GRADIENTS = (
    "; a forward pass that takes gradients itself (torch.autograd.grad, such as forces from an energy) cannot be "
    "captured: take them in the loss function (loss=), from what the model returns"
)


class LocatedError(ModelError):
    """A forward pass failed: ``path`` is the module that may be kept in one piece, "" if none; ``reason`` says why."""

    def __init__(self, text: str, path: str, reason: str) -> None:
        """Keep path and reason beside the text."""
        super().__init__(text)
        self.path, self.reason = path, reason


def _remedy(model: nn.Module, where: str, error: BaseException) -> tuple[str, bool]:
    """What to do about a forward pass that depends on the data, else "", and whether its module may be opaque."""
    text = f"{type(error).__name__} {error}"
    if "does not require grad and does not have a grad_fn" in text:
        return _GRADIENTS, True
    known = ("DataDependent", "data-dependent", "DynamicOutputShape", "PendingUnbacked", "unbacked")
    if not any(word in text for word in known):
        return "", True
    config = getattr(model, "config", None)
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    if getattr(config, "layerdrop", 0) and any("skip" in line or "drop" in line for line in lines):
        return "; layers that are skipped at random cannot be captured: set model.config.layerdrop = 0", False
    if "Experts" in where or any("expert" in line.lower() for line in lines):
        return _EXPERTS, True
    return (
        "; what depends on the data cannot be captured: take .item(), .tolist(), nonzero() and branches on tensors "
        "out of the forward pass (torch.where instead of a branch), move them into a module of their own, which then "
        "stays in FP32, or call this part, such as the loss, outside of the model"
    ), True


# Tensor methods that may return their own tensor.
_MAY_RETURN_SELF = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "flatten", "ravel", "cpu", "cuda"}
)


class _SeparateIdentities(TorchFunctionMode):
    """Makes ``y = x.float()`` another tensor than ``x`` during tracing, even if it converts nothing.

    The tracer identifies tensors by object. Without this, every later use of ``x`` would seem to read the conversion,
    which is wrong under a plan, where ``x`` may have 16 bits. ``flatten`` removes the aliases.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MAY_RETURN_SELF and args and isinstance(args[0], torch.Tensor):
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _tensors_only(model: nn.Module, args: Any, output: Any) -> list[torch.Tensor]:
    """Forward hook: the tensors of an output, without containers unknown to torch.export (caches)."""
    tensors = _tensors_of(output)
    if not tensors and output is not None:
        raise ModelError(
            f"the model returns a {type(output).__name__} in which no tensor is found: return a tensor, or tensors in "
            "tuples, lists, dictionaries or data classes"
        )
    return tensors


def _tensors_of(output: Any) -> list[torch.Tensor]:
    tensors = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += _tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, Distribution):  # its parameters, and those of distributions inside it
            tensors += _tensors_of(list(vars(leaf).values()))
    return tensors


def export_program(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the ``torch.export.ExportedProgram`` of ``model`` in its present mode, at the level of torch operations.

    Raises:
        ModelError: The model cannot be exported; the text has the reason and the module where it stopped.
    """
    with _quiet(), locating(model, "torch.export stopped"), contextlib.ExitStack() as stack:
        stack.callback(model.register_forward_hook(_tensors_only).remove)
        with _SeparateIdentities(), _one_tf32_setting(), _unchecked_distributions():
            return torch.export.export(model, args, dict(kwargs), strict=False)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Do not check the parameters of distributions: that depends on their values, and changes nothing if they hold."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def _one_tf32_setting() -> Iterator[None]:
    """Let torch's exporters read one TF32 setting of cuDNN, and restore the settings of its parts afterwards.

    torch refuses to read it as a whole if the parts were set separately, and exporting loses their settings. The value
    does not matter to the exported program.
    """
    backends: Any = torch.backends
    parts = (backends.cudnn.conv, backends.cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    try:
        _ = backends.cudnn.allow_tf32
    except RuntimeError:
        backends.cudnn.allow_tf32 = before[0] == "tf32"
    try:
        yield
    finally:
        for part, precision in zip(parts, before, strict=True):
            if part.fp32_precision != precision:
                part.fp32_precision = precision


_CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})


def export_onnx(program: Any) -> Any:
    """Return the ``torch.onnx.ONNXProgram`` of an exported program, without optimizations, which would fuse operators.

    Raises:
        ModelError: An operation has no translation, or one with branches or loops only; the text has the exporter's
            reason, the module and the line of the model's code.
    """
    onnx_program = _translated(program)
    functions = {(function.domain, function.name): function for function in onnx_program.model.functions.values()}
    for node in onnx_program.model.graph:
        inside = functions.get((node.domain, node.op_type), [])
        if node.op_type in _CONTROL_FLOW or any(inner.op_type in _CONTROL_FLOW for inner in inside):
            call = node.metadata_props.get("pkg.torch.onnx.fx_node", "")
            nodes = {f"%{n.name}": n for n in onnx_program.exported_program.graph.nodes}
            origin = nodes.get(call.split(" ", 1)[0])
            raise ModelError(
                f"the ONNX form of {_where_of(origin)} has branches ({node.op_type}), which cannot be planned"
                f"{line_of(origin)}"
            )
    return onnx_program


def _translated(program: Any) -> Any:
    try:
        with _quiet(), _one_tf32_setting():
            return torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=False,
                custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: _attention},
            )
    except Exception as error:
        node = _failed_node(program, error)
        raise ModelError(f"the ONNX exporter stopped in {_where_of(node)}: {_reason(error)}{line_of(node)}") from error


def _where_of(node: Any) -> str:
    """The module of a node of the program."""
    stack = None if node is None else node.meta.get("nn_module_stack")
    return describe_module(*list(stack.values())[-1]) if stack else "the model"


def line_of(node: Any) -> str:
    """File and line of the model's code that a node stems from, as an addition to a reason, else nothing."""
    trace = "" if node is None else node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', trace)
    own = [line for line in lines if not line[0].startswith(_OWN_FILES)]
    return f" (at {own[-1][0]}:{own[-1][1]}: {own[-1][2]})" if own else ""


def _failed_node(program: Any, error: BaseException) -> Any:
    """The node that the exporter's messages name, None if they name none."""
    nodes = {node.name: node for node in program.graph.nodes}
    cause: BaseException | None = error
    while cause is not None:
        failed = _FAILED_NODE.search(str(cause))
        if failed is not None:
            # Decomposition renames nodes: a missing one is searched among the users of its arguments.
            arguments = (nodes[name] for name in _NODE.findall(failed[2]) if name in nodes)
            users = (user for argument in arguments for user in argument.users)
            node = nodes.get(failed[1]) or nodes.get(failed[1].lstrip("_")) or next(users, None)
            if node is not None and node.meta.get("nn_module_stack"):
                return node
        cause = cause.__cause__
    return None


def save_onnx(onnx_program: Any, path: Path) -> Path:
    """Write an ONNX program to ``path``, large weights to ``<path>.data``; whole or not at all.

    Raises:
        ModelError: The folder cannot be written to.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            with _quiet():
                onnx_program.save(Path(folder) / path.name)
            # The weights first: the model refers to their file by name.
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
                file.replace(path.parent / file.name)
    except OSError as error:
        raise ModelError(f"cannot write ONNX file {path}: {error.strerror or error}") from error
    return path
