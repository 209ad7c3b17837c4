"""The torch functions that are operators, and the function modes that report their calls.

Functions that torch promotes no operands for get operands of one floating type here as well, because the operators of
a plan may deliver 16 bits where the script expects FP32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsync_opt.model import ROLE_TABLE, Role
from qsync_opt.runtimes.torch.interception.forwards import checkpointed
from qsync_opt.runtimes.torch.support import HALF, tensors_in

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.interception.interception import Interception

ADJUSTABLE_KINDS, FIXED_KINDS = (
    tuple(kind for kind, own in ROLE_TABLE.items() if own is role and kind.islower() and kind != "input")
    for role in (Role.ADJUSTABLE, Role.FIXED)
)
"""Operators, by ATen name, that a plan may adjust, and that always run in FP32 although torch could in 16 bits."""

# Functions whose ATen name is not their Python name.
_RENAMED: dict[str, tuple[Any, ...]] = {
    "matmul": (Tensor.__matmul__, Tensor.__rmatmul__),
    "cross_entropy_loss": (F.cross_entropy,),
    "nll_loss_nd": (F.nll_loss,),
    "pow": (Tensor.__pow__, Tensor.__rpow__),
    "grid_sampler": (F.grid_sample,),
    "affine_grid_generator": (F.affine_grid,),
    # Only where a captured graph has the kind, which the role table does not know.
    "_upsample_bilinear2d_aa": (F.interpolate,),
    "_upsample_bicubic2d_aa": (F.interpolate,),
}


def functions_named(kind: str) -> tuple[Any, ...]:
    """Every torch function that runs the operator called ``kind``: torch, Tensor, functional, linalg and fft forms."""
    candidates = [getattr(place, kind, None) for place in (torch, Tensor, F, torch._C._VariableFunctions)]
    for prefix, place in (("linalg_", torch.linalg), ("fft_", torch.fft)):
        if kind.startswith(prefix):
            candidates.append(getattr(place, kind.removeprefix(prefix), None))
    return (*(function for function in candidates if callable(function)), *_RENAMED.get(kind, ()))


def function_names(kinds: tuple[str, ...] = ()) -> dict[Any, str]:
    """Map torch functions to operator names: adjustable and fixed operators, and those of ``kinds`` besides."""
    every = (*kinds, *FIXED_KINDS, *ADJUSTABLE_KINDS)
    names = {function: kind for kind in every for function in functions_named(kind)}
    # F.nll_loss becomes nll_loss_nd: the renamed functions come last.
    names.update({function: kind for kind, functions in _RENAMED.items() if kind in every for function in functions})
    return names


def _python_methods(names: Mapping[Any, str]) -> tuple[tuple[Any, str], ...]:
    """The named functions that are tensor methods written in Python, such as ``**``.

    torch.compile does not find these as keys of a dictionary, because it hashes them in two ways; it then guards on
    their absence, which fails at once. Comparing them one by one works.
    """
    methods = {method for method in vars(Tensor).values() if isinstance(method, FunctionType)}
    return tuple((function, kind) for function, kind in names.items() if function in methods)


# Functions that refuse operands of different floating types.
_PROMOTED = frozenset(
    {
        torch.lerp, Tensor.lerp, F.grid_sample, torch.grid_sampler, torch.heaviside, Tensor.heaviside,
        torch.isclose, Tensor.isclose, torch.allclose, Tensor.allclose, torch.cross, Tensor.cross, torch.linalg.cross,
        torch.linalg.vecdot, torch.meshgrid, torch.cartesian_prod, torch.sparse.mm, torch.spmm, torch.dsmm,
    }
)  # fmt: skip
# The same of those that write into their first argument, whose type decides.
_WRITING = frozenset(
    {
        Tensor.__setitem__, Tensor.index_put_, torch.index_put_, Tensor.index_add_, Tensor.index_copy_,
        Tensor.index_reduce_, Tensor.scatter_, Tensor.scatter_add_, Tensor.scatter_reduce_, Tensor.masked_scatter_,
        Tensor.put_, Tensor.lerp_, Tensor.addmm_, Tensor.baddbmm_, Tensor.addbmm_, Tensor.addmv_, torch.addmv_,
        Tensor.addr_,
    }
)  # fmt: skip
_ONE_TYPE = _PROMOTED | _WRITING


def _cast(values: Any, dtype: torch.dtype) -> Any:
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() and values.dtype is not dtype else values
    return type(values)(_cast(value, dtype) for value in values) if type(values) in (tuple, list) else values


def alike(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of a function that refuses several floating types, cast to one if a 16-bit type is among them."""
    tensors = tensors_in((args, tuple(kwargs.values())))
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if len(dtypes) < 2 or dtypes.isdisjoint(HALF):  # without 16 bits the mixture is the script's own
        return args, kwargs
    if function in _WRITING:
        target = args[0].dtype
        if not target.is_floating_point:
            return args, kwargs
    else:
        target = functools.reduce(torch.promote_types, dtypes)
    return _cast(args, target), {name: _cast(value, target) for name, value in kwargs.items()}


_FILLING = {"masked_fill": 2, "masked_fill_": 2, "full_like": 1}
"""Functions, by ATen name, that write a number into a tensor of their first argument's type; the number's position."""
_FILLING_FUNCTIONS = {function: kind for kind in _FILLING for function in functions_named(kind)}


def numbers_in_range(
    kind: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function that may write a number into a tensor of 16 bits, the number in the range of its type.

    What FP32's least number hides from a softmax, the type's own least hides too, and of a row that is hidden whole no
    NaN is made, which an infinity would.
    """
    first = args[0] if args else None
    is_filling = kind in _FILLING and kwargs.get("dtype") is None
    if not (is_filling and isinstance(first, Tensor) and first.dtype in HALF):
        return args, {**kwargs}
    most = torch.finfo(first.dtype).max

    def within(value: Any) -> Any:
        is_finite = isinstance(value, (int, float)) and math.isfinite(value)
        return min(max(value, -most), most) if is_finite else value

    named = {name: within(kwargs[name]) for name in ("value", "fill_value") if name in kwargs}
    return tuple(within(arg) if at == _FILLING[kind] else arg for at, arg in enumerate(args)), {**kwargs, **named}


def _enterable(function: Any) -> FunctionType:
    """Copy a torch Python function so that it does not dispatch to the mode again, while the calls inside it do."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(checks, _never_overridden)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never_overridden(*_: Any) -> bool:
    return False


# Python functions whose inner calls are operators of their own, with the copies to run instead.
_ENTERED: dict[Any, FunctionType] = {F.multi_head_attention_forward: _enterable(F.multi_head_attention_forward)}


class FunctionMode(TorchFunctionMode):
    """Hands the calls of named functions to an interception, and enters functions that call operators of their own."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self._interception = interception
        self.listen(interception.function_names)

    def listen(self, names: dict[Any, str]) -> None:
        """Report these functions from now on."""
        self.names, self.methods = names, _python_methods(names)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op_type = self.names.get(func)
        if op_type is not None:
            return self._interception.call(op_type, func, args, kwargs)
        entered = _ENTERED.get(func)
        if entered is not None:
            with self:
                return entered(*args, **kwargs)
        if func in _ONE_TYPE:
            args, kwargs = alike(func, args, kwargs)
        elif func in _FILLING_FUNCTIONS:
            args, kwargs = numbers_in_range(_FILLING_FUNCTIONS[func], args, kwargs)
        return func(*args, **kwargs)


_CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint


class TracedFunctionMode(FunctionMode):
    """The same while a pass is compiled, see `_python_methods`; of a resting pass only what is checkpointed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _CHECKPOINT:
            return checkpointed(self._interception, func, args, kwargs or {})
        if func is Tensor.unflatten:  # written in Python: torch.compile does not trace its super().unflatten()
            func = torch.unflatten
        if self._interception.resting:
            return func(*args, **(kwargs or {}))
        for method, op_type in self.methods:
            if func is method:
                return self._interception.call(op_type, func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)
