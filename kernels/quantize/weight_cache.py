"""Codes of a weight, computed once per step and not once per call: kept until the weight changes or is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing as is_capturing

_Codes = TypeVar("_Codes")
# Per weight, by its identity: a weak reference to it, the version it had, and what was computed from that version.
_ENTRIES: dict[int, tuple[weakref.ref[Tensor], tuple[int, int], dict[Hashable, Any]]] = {}


def once_per_version(weight: Tensor, facts: Hashable, make: Callable[[], _Codes]) -> _Codes:
    """What ``make`` computes from a weight, computed anew only when the weight was written to.

    A write is seen by the version counter that torch keeps per tensor (every in-place operation raises it, those of
    optimizers too) and by the address of the data. Writes through ``weight.data`` of unchanged address are not seen.
    While a graph is traced or captured nothing is kept or looked up: it must hold the computation itself, because the
    weight will change between its runs.

    Args:
        weight: A parameter, or a view of one.
        facts: All else that the result depends on, besides the geometry of the view.
        make: Computes the result; it must not hold a reference to the weight.
    """
    if torch.compiler.is_compiling() or (weight.is_cuda and is_capturing()):
        return make()
    base = weight._base if weight._base is not None else weight
    if base.is_inference():
        return make()
    version = (base._version, base.data_ptr())
    identity = id(base)
    known = _ENTRIES.get(identity)
    if known is None or known[0]() is not base or known[1] != version:
        known = (weakref.ref(base, lambda _: _ENTRIES.pop(identity, None)), version, {})
        _ENTRIES[identity] = known
    place = (facts, weight.shape, weight.stride(), weight.storage_offset())
    if place not in known[2]:
        known[2][place] = make()
    result: _Codes = known[2][place]
    return result


def forget_weights() -> None:
    """Free everything that is kept."""
    _ENTRIES.clear()


def kept_bytes() -> int:
    """Bytes of the codes and scales that are kept now."""
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, _, made in _ENTRIES.values()
        for value in made.values()
        for tensor in value
        if isinstance(tensor, Tensor)
    }
    return sum(tensors.values())
