"""How does a PyTorch model become an exported program and an ONNX model, with failures a user can act on?

Training mode, static shapes, no output of the exporters' own. A failure carries the exporter's reason and the module
in which it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from onnxscript import ir, opset18
from torch import nn
from torch.overrides import TorchFunctionMode

from qsync_opt.errors import ModelError

# The operators' own annotations know neither plain numbers nor constants of the intermediate representation.
op: Any = opset18


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the table of own translations for ``torch.onnx.export``."""
    return {torch.ops.aten.scaled_dot_product_attention.default: attention}


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Write softmax(Q Kᵀ · scale + mask) V in ONNX; Q (..., H, L, E), K (..., G, S, E), V (..., G, S, F), G divides H.

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
    # The least finite number instead of -inf, so that a row that attends to nothing gives no NaN.
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
def quiet() -> Iterator[None]:
    """Keep the exporters' warnings, log lines and prints from the user; the settings are restored afterwards."""
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
    """Put a model that is in evaluation mode into training mode; a model in training mode is left as it is."""
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


class _Whereabouts:
    """Knows in which module a forward pass stopped: the deepest one entered and not left."""

    def __init__(self, model: nn.Module) -> None:
        self._stack: list[str] = []
        self._handles: list[Any] = []
        for path, module in model.named_modules():
            where = describe_module(path, module)
            self._handles.append(module.register_forward_pre_hook(self._enter(where), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave))

    def _enter(self, where: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(where)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __str__(self) -> str:
        return self._stack[-1] if self._stack else "the model's forward"

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def describe_module(path: str, module: nn.Module | type | str) -> str:
    """Return ``module 'encoder.0' (TransformerEncoderLayer)`` for messages."""
    kind = module if isinstance(module, str) else (module if isinstance(module, type) else type(module)).__name__
    kind = kind.rsplit(".", 1)[-1]
    return f"module {path!r} ({kind})" if path else f"the model itself ({kind})"


@contextlib.contextmanager
def locating(model: nn.Module, what: str) -> Iterator[None]:
    """Turn an exception of a forward pass inside the block into a ModelError that names the module it came from."""
    whereabouts = _Whereabouts(model)
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what} in {whereabouts}: {reason_of(error)}") from error
    finally:
        whereabouts.remove()


def reason_of(error: BaseException) -> str:
    """Return the first line of the innermost explicit cause of ``error``, with its kind."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in _ESCAPES.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Tensor methods that return their own tensor when there is nothing to do.
_MAY_RETURN_SELF = frozenset(
    {"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "flatten", "ravel", "cpu", "cuda"}
)


class _SeparateIdentities(TorchFunctionMode):
    """Lets ``y = x.float()`` be another tensor than ``x`` during tracing, even where it changes nothing.

    The tracer knows tensors by identity. Without this, every later use of ``x`` would seem to read the conversion,
    although under a plan, where ``x`` may be in 16 bit, it does not. ``flatten`` takes the aliases out again.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _MAY_RETURN_SELF and args and isinstance(args[0], torch.Tensor):
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _tensors_only(model: nn.Module, args: Any, output: Any) -> list[torch.Tensor]:
    """Forward hook: the tensors of an output, without containers that torch.export does not know (caches)."""
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
    return tensors


@contextlib.contextmanager
def _tensor_outputs(model: nn.Module) -> Iterator[None]:
    handle = model.register_forward_hook(_tensors_only)
    try:
        yield
    finally:
        handle.remove()


def export_program(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the ``torch.export.ExportedProgram`` of ``model`` as it stands, at the level of torch operations.

    Raises:
        ModelError: The model cannot be exported; the text has the reason and the module where it stopped.
    """
    with (
        quiet(),
        locating(model, "torch.export stopped"),
        _tensor_outputs(model),
        _SeparateIdentities(),
        _one_tf32_setting(),
    ):
        return torch.export.export(model, args, dict(kwargs), strict=False)


@contextlib.contextmanager
def _one_tf32_setting() -> Iterator[None]:
    """Give torch's exporters one TF32 setting of cuDNN to read, and the settings of its parts back afterwards.

    torch refuses to read it as a whole where its parts were set by themselves, and exporting loses what they were set
    to. What is read decides nothing about the exported program.
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


def export_onnx(program: Any) -> Any:
    """Return the ``torch.onnx.ONNXProgram`` of an exported program, without graph optimizations.

    Optimizations would fold operators into each other, and every ONNX node should lead back to one operator.

    Raises:
        ModelError: An operation has no translation; the text has the exporter's reason and the module.
    """
    try:
        with quiet(), _one_tf32_setting():
            return torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=False,
                custom_translation_table=translations(),
            )
    except Exception as error:
        where = _module_of_failure(program, error)
        raise ModelError(f"the ONNX exporter stopped in {where}: {reason_of(error)}") from error


def _module_of_failure(program: Any, error: BaseException) -> str:
    """Find the module of the node that the exporter's messages name."""
    nodes = {node.name: node for node in program.graph.nodes}
    cause: BaseException | None = error
    while cause is not None:
        failed = _FAILED_NODE.search(str(cause))
        if failed is not None:
            # Decomposition renames nodes: one that the program lacks is looked for among the users of its arguments.
            arguments = (nodes[name] for name in _NODE.findall(failed[2]) if name in nodes)
            users = (user for argument in arguments for user in argument.users)
            found = nodes.get(failed[1]) or nodes.get(failed[1].lstrip("_")) or next(users, None)
            stack = found.meta.get("nn_module_stack") if found is not None else None
            if stack:
                path, kind = list(stack.values())[-1]
                return describe_module(path, kind)
        cause = cause.__cause__
    return "the model"


def save_onnx(onnx_program: Any, path: Path) -> Path:
    """Write an ONNX program to ``path``, large weights to ``<path>.data`` beside it; whole or not at all.

    Raises:
        ModelError: The folder cannot be written to.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            with quiet():
                onnx_program.save(Path(folder) / path.name)
            # The file of weights first: the model refers to it by name.
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == path.name):
                file.replace(path.parent / file.name)
    except OSError as error:
        raise ModelError(f"cannot write ONNX file {path}: {error.strerror or error}") from error
    return path
