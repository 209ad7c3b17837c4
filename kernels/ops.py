"""Execution of one operator at one precision: the only entry of runtimes and profilers to the kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.arguments import CONVOLUTIONS, PRODUCTS, convolution_call, product_call
from qsync_opt.kernels.autograd import Operand, convolution, float_modes, half_values, linear, product, quantize_operand
from qsync_opt.kernels.backend import default_precisions, device_precisions, known_device
from qsync_opt.kernels.matmul import has_half_attention, has_half_units
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.kernels.quantize import (
    PRECISIONS,
    Quantized,
    quantize_fp8,
    quantize_int8,
)
from qsync_opt.numerics import is_eight_bit, number_format

__all__ = [
    "ADJUSTABLE", "KernelOptions", "cast", "default_precisions_of", "eight_bit", "execute", "precisions_of", "supports",
]  # fmt: skip

_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "TF32": torch.float32,
    "FP32": torch.float32,
}
# Attention and einsum have their own backward pass, which cannot be set to TF32; a lookup multiplies nothing.
TF32_OPERATORS = PRODUCTS | CONVOLUTIONS
ADJUSTABLE: frozenset[str] = PRODUCTS | CONVOLUTIONS | {"einsum", "embedding", "scaled_dot_product_attention"}
# Operators of a precision; FP32 runs all of them.
_INT8_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_OPERATORS: dict[str, frozenset[str]] = {
    "INT8-BWD8": (PRODUCTS - {"bmm", "baddbmm"}) | _INT8_CONVOLUTIONS,  # batches run backward in 16 bits in any case
    "INT8": PRODUCTS | _INT8_CONVOLUTIONS,
    "FP8-BWD8": frozenset({"linear", "addmm", "mm"}),
    "FP8": frozenset({"linear", "addmm", "mm"}),
    "BF16": ADJUSTABLE,
    "FP16": ADJUSTABLE,
    "TF32": TF32_OPERATORS,
}
_EIGHT_BITS = convolution, linear, product
_MODES = float_modes.convolution, float_modes.linear, float_modes.product
_HALF_VALUES = half_values.convolution, half_values.linear, half_values.product
_DEFAULTS = KernelOptions()


def precisions_of(op_type: str, device: torch.device | str) -> tuple[str, ...]:
    """Precisions in which an operator of this kind can run on a device, from the coarsest to the finest."""
    return tuple(name for name in device_precisions(device) if name == "FP32" or op_type in _OPERATORS[name])


def default_precisions_of(op_type: str, device: torch.device | str) -> tuple[str, ...]:
    """Those of `precisions_of` that plans choose from by default.

    Convolutions in 8 bits are left out on cards: a training step of them took longer there than in BF16.
    """
    device = known_device(device)
    menu, in_full = default_precisions(device), device.type == "cpu" or op_type not in CONVOLUTIONS
    return tuple(p for p in precisions_of(op_type, device) if p in menu and (in_full or not is_eight_bit(p)))


@functools.cache
def _supports(op_type: str, precision: str, device: torch.device | str) -> bool:
    return precision in precisions_of(op_type, device)


@torch.compiler.assume_constant_result
def supports(op_type: str, precision: str, device: torch.device | str) -> bool:
    """Whether :func:`execute` can run an operator of this kind at a precision on a device."""
    return _supports(op_type, precision, device)


def require(op_type: str, precision: str, device: torch.device) -> None:
    """Raise an UnsupportedError for what :func:`execute` cannot do."""
    if not supports(op_type, precision, device):
        allowed = ", ".join(precisions_of(op_type, device))
        raise UnsupportedError(f"{op_type} cannot run in {precision} on {device}: allowed are {allowed}")


def eight_bit(precision: str, options: KernelOptions) -> tuple[str, KernelOptions]:
    """Format of the operands at an 8-bit precision, and the options with what the precision implies.

    With an 8-bit backward pass weights have one scale, so that one set of codes serves both passes.
    """
    form = number_format(precision)
    if form.eight_bit_backward and (options.backward, options.weight_granularity) != ("eight", "tensor"):
        options = replace(options, backward="eight", weight_granularity="tensor")
    return form.operands, options


def cast(x: Tensor, target: str, options: KernelOptions | None = None) -> Tensor | Quantized | Operand:
    """Cast a value on the edge to an operator that computes in ``target``.

    Args:
        x: Floating tensor.
        target: Precision of the reader.
        options: For 8-bit targets: rounding, activation granularity and random stream.

    Returns:
        A tensor of the format's element type (TF32: FP32); for 8 bits, codes and scales, and with an 8-bit backward
        pass the transposed codes.

    Raises:
        UnsupportedError: Unknown precision.
    """
    if target in _DTYPES:
        return x.to(_DTYPES[target])
    operands, options = eight_bit(target, options or _DEFAULTS)
    if target != operands:
        rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
        codes = PRECISIONS[operands][0].dtype
        return quantize_operand(rows, codes, options.activation_granularity, options, True)
    if target == "INT8":
        return quantize_int8(x, (x.dim() - 1,) if options.activation_granularity == "row" else None, options)
    return quantize_fp8(x, None, options)


def uncast_types(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Floating types of operands that are not cast for a product in ``dtype``; FP64 is not cast down to FP32."""
    return (dtype, torch.float64) if dtype is torch.float32 else (dtype,)


def _cast_all(values: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Cast the floating tensors among the arguments of a call, except those of `uncast_types`."""
    kept = uncast_types(dtype)
    cast_values = []
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype not in kept and value.is_floating_point():
                value = value.to(dtype)
        elif type(value) in (tuple, list):
            value = type(value)(_cast_all(tuple(value), dtype))
        cast_values.append(value)
    return tuple(cast_values)


def _cast_named(values: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(values, _cast_all(tuple(values.values()), dtype), strict=True)) if values else {}


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Device of the first floating tensor among the arguments, None if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.device
        if isinstance(value, (tuple, list)) and (device := _device(tuple(value), {})) is not None:
            return device
    return None


def is_plain_linear(op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is a linear layer written as the modules of torch write it."""
    return op_type == "linear" and not kwargs and 2 <= len(args) <= 3 and args[0].dim() > 1 and args[1].dim() == 2


def _run_float(
    op_type: str, dtype: torch.dtype, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if op_type == "embedding" and dtype is not torch.float32:
        # The rows that are looked up are cast, not the whole table: the same values for less work.
        return function(*args, **kwargs).to(dtype)
    out = kwargs.get("out")
    if out is not None and _cast_all((out,), dtype)[0] is not out:  # the copy would be written to instead of it
        others = {name: value for name, value in kwargs.items() if name != "out"}
        result = function(*_cast_all(args, dtype), **_cast_named(others, dtype))
        return out.resize_(result.shape).copy_(result)
    return function(*_cast_all(args, dtype), **_cast_named(kwargs, dtype))


def in_half_values(op_type: str, precision: str, device: torch.device) -> bool:
    """Whether an operator in 16 bits is computed in FP32 from 16-bit values: where the device has no units for it."""
    if device.type != "cpu" or precision not in ("BF16", "FP16") or op_type == "embedding":
        return False
    has_units = has_half_attention if op_type == "scaled_dot_product_attention" else has_half_units
    return not has_units(device)


def takes_half_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can be computed so: not into ``out=``, not inside a transform of ``torch.func``.

    Those calls run as torch runs 16 bits, slowly but with the same meaning.
    """
    if kwargs.get("out") is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return function is not torch.einsum or isinstance(args[0], str)


def _run_in_half_values(
    op_type: str, dtype: torch.dtype, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    args, kwargs = _cast_all(args, dtype), _cast_named(kwargs, dtype)
    if op_type in TF32_OPERATORS:
        return _run_product(op_type, function, args, kwargs, _HALF_VALUES)
    if op_type == "scaled_dot_product_attention":
        return half_values.attention(*args, **kwargs)
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    return half_values.einsum(equation, tuple(operands))


def _run_product(
    op_type: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    arithmetic: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]],
    *how: Any,
) -> Any:
    """A convolution, linear layer or other product by the ``arithmetic`` of these three, told ``how``."""
    convolve, connect, multiply = arithmetic
    if op_type in CONVOLUTIONS:
        conv = convolution_call(op_type, args, kwargs)
        return conv.restore(convolve(conv.x, conv.weight, conv.bias, conv.geometry, *how))
    if is_plain_linear(op_type, args, kwargs):
        return connect(args[0], args[1], args[2] if len(args) > 2 else None, *how)
    call = product_call(op_type, function, args, kwargs)
    return call.finish(multiply(call.a, call.b, call.bias, *how))


def execute(
    op_type: str,
    precision: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    options: KernelOptions | None = None,
) -> Any:
    """Run one operator at a precision, with gradients.

    Floating arguments may arrive in any format; FP32 weights are cast or quantized here, and their gradients come
    back in FP32.

    Args:
        op_type: ATen name of the operator ("linear", "matmul", "conv2d", ...).
        precision: Format to compute in.
        function: The torch function that was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: For 8-bit precisions; the default rounds stochastically from seed 0.

    Returns:
        The result: FP32 for FP32 and TF32, the 16-bit format itself for BF16 and FP16, ``options.half_format`` for 8
        bits.

    Raises:
        UnsupportedError: The kind of operator cannot run at the precision on the device of its arguments.
    """
    kwargs = kwargs or {}
    device = _device(args, kwargs)
    if device is None:
        return function(*args, **kwargs)
    require(op_type, precision, device)
    if is_eight_bit(precision):
        operands, options = eight_bit(precision, options or _DEFAULTS)
        how = (options,) if op_type in CONVOLUTIONS else (operands, options)
        return _run_product(op_type, function, args, kwargs, _EIGHT_BITS, *how)
    if in_half_values(op_type, precision, device) and takes_half_values(function, args, kwargs):
        return _run_in_half_values(op_type, _DTYPES[precision], function, args, kwargs)
    mode = "tf32" if precision == "TF32" else None
    if precision == "FP32" and device.type == "cuda" and op_type in TF32_OPERATORS:
        family = "conv" if op_type in CONVOLUTIONS else "matmul"
        mode = "ieee" if float_modes.current_mode(family) != "ieee" else None
    if mode is None:
        return _run_float(op_type, _DTYPES[precision], function, args, kwargs)
    args, kwargs = _cast_all(args, torch.float32), _cast_named(kwargs, torch.float32)
    return _run_product(op_type, function, args, kwargs, _MODES, mode)
