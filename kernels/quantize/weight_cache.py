"""Codes of weights, kept until the weight changes or is freed: computed once per step instead of once per call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing as is_capturing

from qsync_opt.kernels.options import KernelOptions

_Codes = TypeVar("_Codes")
# By id of the weight: a weak reference to it, its version, and what was computed from that version.
_ENTRIES: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[Hashable, Any]]] = {}


def once_per_step(
    weight: Tensor, facts: Hashable, options: KernelOptions, quantize: Callable[[Tensor], _Codes]
) -> _Codes:
    """``quantize(weight)``, computed in every call or only when the weight has changed, as ``options.weights`` says.

    A write is seen by the version counter that torch keeps per tensor (every in-place operation raises it, those of
    optimizers too) and by the address of the data. Writes through ``weight.data`` of unchanged address are not seen.
    While a graph is traced or captured nothing is kept or looked up: it must hold the computation itself, because the
    weight will change between its runs.

    Args:
        weight: A parameter, or a view of one.
        facts: What the result depends on, besides the weight, the geometry of the view and the options.
        options: Rounding, seed and backend, on which the result depends too, and ``weights``.
        quantize: Computes the result, which must not hold a reference to the weight.
    """
    if options.weights == "call" or torch.compiler.is_compiling() or (weight.is_cuda and is_capturing()):
        return quantize(weight)
    base = weight._base if weight._base is not None else weight
    if base.is_inference():
        return quantize(weight)
    version = (base._version, base.data_ptr())
    identity = id(base)
    entry = _ENTRIES.get(identity)
    if entry is None or entry[0]() is not base or entry[1] != version:
        entry = (weakref.ref(base, lambda _: _ENTRIES.pop(identity, None)), version, {})
        _ENTRIES[identity] = entry
    own = (facts, options.rounding, options.seed, options.backend)
    place = (own, weight.shape, weight.stride(), weight.storage_offset())
    if place not in entry[2]:
        entry[2][place] = quantize(weight.detach())
    result: _Codes = entry[2][place]
    return result


def clear_weights() -> None:
    """Free everything that is kept."""
    _ENTRIES.clear()


def cached_bytes() -> int:
    """Bytes of the codes and scales that are kept now."""
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, _, results in _ENTRIES.values()
        for result in results.values()
        for tensor in result
        if isinstance(tensor, Tensor)
    }
    return sum(tensors.values())
