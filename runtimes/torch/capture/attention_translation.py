"""How does scaled_dot_product_attention become ONNX nodes, whatever its rank, mask, heads and dropout?

The exporter's own translation takes four-dimensional operands only and drops nothing in training. This one follows
the definition in torch's documentation term by term, so that every call gives exactly two products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnxscript import ir, opset18

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
