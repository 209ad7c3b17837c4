"""Outputs of models: their tensors, their loss, and their 16-bit parts in FP32."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ModelError

HALF = (torch.bfloat16, torch.float16)
"""The 16-bit floating types."""


def model_loss(output: Any) -> Tensor | None:
    """The loss that a model returns: its output, or the entry ``loss`` in it, or the first of a tuple.

    Returns:
        A scalar tensor, None if there is none that gradients flow into (where gradients are enabled).
    """
    for value in (_named_loss(output), _first(output)):
        if isinstance(value, Tensor) and value.numel() == 1 and _is_differentiable(value):
            return value.reshape(())
    return None


def _is_differentiable(tensor: Tensor) -> bool:
    """Whether gradients flow into a tensor; without gradients, whether they could."""
    return tensor.is_floating_point() and (tensor.requires_grad or not torch.is_grad_enabled())


def default_loss(output: Any) -> Tensor:
    """The scalar to differentiate if no loss function is given (see `TrainingExample`).

    Raises:
        ModelError: The output holds no floating-point tensor with a gradient.
    """
    loss = model_loss(output)
    if loss is not None:
        return loss
    tensors = list(filter(_is_differentiable, tensors_in(output)))
    if not tensors:
        raise ModelError(
            "the model's output has no floating-point tensor that gradients flow into; give a loss function"
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def full_precision(output: Any) -> Any:
    """A model's output with its 16-bit tensors in FP32, also those in tuples, lists, mappings and data classes.

    If the model returns its own loss, nothing is changed: nobody needs the rest, which may be large.
    """
    loss, first = _named_loss(output), _first(output)
    if isinstance(loss, Tensor) or (isinstance(first, Tensor) and not first.dim()):
        return output
    return _lifted(output)


def _named_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, also in tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, tuple | list):
        parts = [_lifted(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value) if entry.init}
        changed = {name: lifted for name, part in fields.items() if (lifted := _lifted(part)) is not part}
        return dataclasses.replace(value, **changed) if changed else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _lifted(part)) for key, part in value.items())
    if isinstance(value, MutableMapping):  # of another class, which may hold more than its entries
        changed = {key: lifted for key, part in value.items() if (lifted := _lifted(part)) is not part}
        result = copy.copy(value) if changed else value
        for key, part in changed.items():
            result[key] = part
        return result
    return value
