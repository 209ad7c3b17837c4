"""Functions of torch that refuse tensors of unlike floating types: under a plan their operands are made alike.

Most functions promote their operands, so that what follows planned operators computes with whatever arrives. These do
not. Of those that return a new tensor the operands get the type that torch's promotion would give; those that write
into their first operand keep its type, and the others get that one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)

_PROMOTED = frozenset(
    {
        torch.lerp, Tensor.lerp, F.grid_sample, torch.grid_sampler, torch.heaviside, Tensor.heaviside,
        torch.isclose, Tensor.isclose, torch.allclose, Tensor.allclose, torch.cross, Tensor.cross, torch.linalg.cross,
        torch.linalg.vecdot, torch.meshgrid, torch.cartesian_prod, torch.sparse.mm, torch.spmm, torch.dsmm,
    }
)  # fmt: skip
_WRITING = frozenset(
    {
        Tensor.__setitem__, Tensor.index_put_, torch.index_put_, Tensor.index_add_, Tensor.index_copy_,
        Tensor.index_reduce_, Tensor.scatter_, Tensor.scatter_add_, Tensor.scatter_reduce_, Tensor.masked_scatter_,
        Tensor.put_, Tensor.lerp_, Tensor.addmm_, Tensor.baddbmm_, Tensor.addbmm_, Tensor.addmv_, torch.addmv_,
        Tensor.addr_,
    }
)  # fmt: skip
UNLIKE = _PROMOTED | _WRITING
"""The functions; `alike` makes their arguments fit."""


def _floating(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() else []
    return [tensor for value in values for tensor in _floating(value)] if type(values) in (tuple, list) else []


def _cast(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() and values.dtype is not dtype else values
    return type(values)(_cast(value, dtype) for value in values) if type(values) in (tuple, list) else values


def alike(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of one of the functions `UNLIKE` with one floating type, if 16 bits are among several.

    Args:
        function: To be called.
        args: Its positional arguments.
        kwargs: Its arguments by name.
    """
    dtypes = {tensor.dtype for tensor in _floating([*args, *kwargs.values()])}
    if len(dtypes) < 2 or dtypes.isdisjoint(_HALF):  # without 16 bits the call is the script's own affair
        return args, kwargs
    if function in _WRITING:
        target = args[0].dtype
        if not target.is_floating_point:
            return args, kwargs
    else:
        target = functools.reduce(torch.promote_types, dtypes)
    return _cast(args, target), {name: _cast(value, target) for name, value in kwargs.items()}
