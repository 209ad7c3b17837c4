"""Run fixed operators (normalisation, softmax, losses and such) in FP32, whatever their inputs come in.

A 16-bit input is cast up first. Softmax and its relatives take the type to compute in as an argument: they then read 16
bits and write the gradient in 16 bits, with the same values, and the cast tensor never exists. That matters for the
logits of a language model, often the largest tensor of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from qsync_opt.runtimes.torch.interception.interception import OperatorCall

_HALF = (torch.bfloat16, torch.float16)
_SOFTMAXES = (F.softmax, F.log_softmax)


def lifted(values: Any) -> Any:
    """Cast 16-bit tensors among arguments of a call up to FP32."""
    if isinstance(values, Tensor):
        return values.float() if values.dtype in _HALF else values
    if isinstance(values, PackedSequence):
        return values.float() if values.data.dtype in _HALF else values
    if isinstance(values, (tuple, list)) and type(values) in (tuple, list):
        return type(values)(lifted(value) for value in values)
    return values


def any_half(values: Any) -> bool:
    """Whether a 16-bit tensor is among arguments of a call."""
    if isinstance(values, Tensor):
        return values.dtype in _HALF
    return isinstance(values, (tuple, list)) and any(any_half(value) for value in values)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of classes, its softmax fused with the cast; None if the call is of another form."""
    if target.is_floating_point() or label_smoothing or size_average is not None or reduce is not None:
        return None
    logarithms = F.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=torch.float32)
    return F.nll_loss(logarithms, target, lifted(weight), ignore_index=ignore_index, reduction=reduction)


def run_fixed(call: OperatorCall) -> Any:
    """Result of a fixed operator, computed in FP32 and in FP32."""
    first = call.args[0] if call.args else None
    if isinstance(first, Tensor) and first.dtype in _HALF:
        if call.function in _SOFTMAXES and "dtype" not in call.kwargs and len(call.args) < 4:
            return call.function(*call.args, **{**call.kwargs, "dtype": torch.float32})
        if call.function is F.cross_entropy:
            result = _cross_entropy(*call.args, **call.kwargs)
            if result is not None:
                return result
    kwargs = {name: lifted(value) for name, value in call.kwargs.items()}
    out = call.kwargs.get("out")
    if isinstance(out, Tensor) and out.dtype in _HALF:  # else the cast copy would be written to
        del kwargs["out"]
        result = call.function(*lifted(call.args), **kwargs)
        return out.resize_(result.shape).copy_(result)
    return call.function(*lifted(call.args), **kwargs)
