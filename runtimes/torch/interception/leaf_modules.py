"""Modules of torch that are one operator: what they call, with which arguments.

Only where the class's own ``forward`` runs: of a subclass that overrides it nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One module.

    Attributes:
        function: The torch function that its ``forward`` calls.
        op_type: Name of the operator: adjustable if ``arguments`` is there, else always fixed; None for one that the
            plan leaves alone unless a user's role says otherwise.
        arguments: Of the function for an input; None where ``forward`` itself is called.
    """

    function: Any
    op_type: str | None = None
    arguments: Callable[[Tensor], tuple[Any, ...]] | None = None


def _linear(module: Any) -> Leaf:
    # Looked up in every call: wrappers replace parameters, and hooks may compute them.
    parameters = module._parameters

    def arguments(x: Tensor) -> tuple[Any, ...]:
        weight = parameters.get("weight")
        return x, module.weight if weight is None else weight, module.bias

    return Leaf(F.linear, "linear", arguments)


def _embedding(module: nn.Embedding) -> Leaf:
    def arguments(index: Tensor) -> tuple[Any, ...]:
        scaled, sparse = module.scale_grad_by_freq, module.sparse
        return index, module.weight, module.padding_idx, module.max_norm, module.norm_type, scaled, sparse

    return Leaf(F.embedding, "embedding", arguments)


def _convolution(module: Any) -> Leaf | None:
    dims = len(module.kernel_size)

    def arguments(x: Tensor) -> tuple[Any, ...]:
        geometry = (module.stride, module.padding, module.dilation, module.groups)
        return (x, module.weight, module.bias, *geometry)

    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return Leaf(function, f"conv{dims}d", arguments) if module.padding_mode == "zeros" else None


_ADJUSTABLE: dict[Any, Callable[[Any], Leaf | None]] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}
_OTHERS: dict[Any, Leaf] = {
    nn.LayerNorm.forward: Leaf(F.layer_norm, "layer_norm"),
    nn.RMSNorm.forward: Leaf(F.rms_norm, "rms_norm"),
    nn.GroupNorm.forward: Leaf(F.group_norm, "group_norm"),
    nn.BatchNorm2d.forward: Leaf(F.batch_norm, "batch_norm"),
    nn.Dropout.forward: Leaf(F.dropout),
    nn.GELU.forward: Leaf(F.gelu),
    nn.ReLU.forward: Leaf(F.relu),
    nn.SiLU.forward: Leaf(F.silu),
    nn.MaxPool2d.forward: Leaf(F.max_pool2d),
}


def leaf_of(module: nn.Module) -> Leaf | None:
    """What a module is, None if it is not one operator of torch."""
    if next(module.children(), None) is not None:  # a parametrization, with operators of its own
        return None
    forward = type(module).forward
    if forward in _ADJUSTABLE:
        return _ADJUSTABLE[forward](module)
    return _OTHERS.get(forward)
