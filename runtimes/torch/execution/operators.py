"""How operators run: in which precisions, fixed ones in FP32, planned ones with decisions made once for all passes.

Results equal those of `qsync_opt.kernels.ops.execute` bit for bit; unusual calls (another device, an argument by name,
a list of tensors) are handed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.kernels import CONVOLUTIONS, KernelOptions, backend, ops
from qsync_opt.kernels.autograd import float_modes, linear
from qsync_opt.numerics import PrecisionFormats, formats_for, number_format
from qsync_opt.runtimes.torch.interception import OperatorCall, Run
from qsync_opt.runtimes.torch.support import HALF

_SOFTMAXES = (F.softmax, F.log_softmax)


def device_formats(device: torch.device | str) -> dict[str, PrecisionFormats]:
    """Precisions that plans choose from on a device by default, with their border formats, coarsest first.

    ``cpu``: INT8, BF16, FP32. ``cuda`` by compute capability: 7.0 FP16, FP32; 7.5 also INT8 with either backward pass;
    8.0 also BF16 and TF32; 8.9 also FP8 with either.

    Raises:
        UnsupportedError: The device is neither, or is not there.
    """
    return formats_for(backend.default_precisions(device), backend.half_format(device))


def operator_precisions(op_type: str, device: torch.device | str) -> tuple[str, ...]:
    """Precisions that plans choose from by default for a kind of operator; fixed and unknown kinds: FP32 alone."""
    return ops.default_precisions_of(op_type, device)


def lifted(values: Any) -> Any:
    """Arguments of a call with 16-bit tensors cast to FP32."""
    if isinstance(values, Tensor):
        return values.float() if values.dtype in HALF else values
    if isinstance(values, PackedSequence):
        return values.float() if values.data.dtype in HALF else values
    if type(values) in (tuple, list):
        return type(values)(lifted(value) for value in values)
    return values


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
    """``F.cross_entropy`` of classes with the cast fused into its softmax; None for calls of another form."""
    if target.is_floating_point() or label_smoothing or size_average is not None or reduce is not None:
        return None
    logarithms = F.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=torch.float32)
    return F.nll_loss(logarithms, target, lifted(weight), ignore_index=ignore_index, reduction=reduction)


def run_fixed(call: OperatorCall) -> Any:
    """Run a fixed operator in FP32."""
    first = call.args[0] if call.args else None
    if isinstance(first, Tensor) and first.dtype in HALF:
        if call.function in _SOFTMAXES and "dtype" not in call.kwargs and len(call.args) < 4:
            return call.function(*call.args, **{**call.kwargs, "dtype": torch.float32})
        if call.function is F.cross_entropy:
            result = _cross_entropy(*call.args, **call.kwargs)
            if result is not None:
                return result
    kwargs = {name: lifted(value) for name, value in call.kwargs.items()}
    out = call.kwargs.get("out")
    if isinstance(out, Tensor) and out.dtype in HALF:  # not into the cast copy
        del kwargs["out"]
        result = call.function(*lifted(call.args), **kwargs)
        return out.resize_(result.shape).copy_(result)
    return call.function(*lifted(call.args), **kwargs)


_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}


def refuse_autocast(name: str, precision: str) -> NoReturn:
    """Refuse an operator that runs under ``torch.autocast``."""
    raise NotReadyError(
        f"operator {name!r} runs under torch.autocast, which would override its precision "
        f"{precision}: leave autocast while a plan is applied"
    )


def refuse_transforms(name: str) -> None:
    """Refuse transforms of ``torch.func``, which cannot transform the 8-bit kernels of operator ``name``."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            f"the model runs inside a transform of torch.func (vmap, grad, jvp, ...), which the kernels of operator "
            f"{name!r} in 8 bits cannot be put through: keep INT8 and FP8 out of the plan (precisions=('FP32', 'BF16'))"
        )


def fixed(name: str, op_type: str) -> Run:
    """A fixed operator, in FP32."""

    def run(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for value in args:
            if isinstance(value, Tensor):
                if value.dtype in HALF:
                    break
            elif isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
                break
        else:
            if not kwargs:
                return function(*args)
        return run_fixed(OperatorCall(name, op_type, "", function, args, kwargs))

    return run


def floating(name: str, op_type: str, precision: str, device: torch.device) -> Run:
    """An operator in FP32, TF32, BF16 or FP16 on the device of its model."""
    dtype = _DTYPES.get(precision, torch.float32)
    kind, on_cuda = device.type, device.type == "cuda"
    takes_mode = on_cuda and op_type in ops.TF32_OPERATORS and dtype is torch.float32
    family = "conv" if op_type in CONVOLUTIONS else "matmul"
    uncast = ops.uncast_types(dtype)
    general = precision == "TF32" or op_type in ("embedding", "einsum")
    general = general or ops.in_half_values(op_type, precision, device)
    ops.require(op_type, precision, device)

    def run(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_autocast_enabled(kind):
            refuse_autocast(name, precision)
        first = args[0] if args else None
        if general or kwargs or not isinstance(first, Tensor) or first.is_cuda is not on_cuda:
            return ops.execute(op_type, precision, function, args, kwargs)
        if takes_mode and float_modes.current_mode(family) != "ieee":
            return ops.execute(op_type, precision, function, args, kwargs)
        return function(
            *[
                value.to(dtype)
                if isinstance(value, Tensor) and value.dtype not in uncast and value.is_floating_point()
                else value
                for value in args
            ]
        )

    return run


def eight_bits(
    name: str, op_type: str, precision: str, device: torch.device, options: Callable[[], KernelOptions]
) -> Run:
    """An operator in 8 bits with the kernel options of each call, which hold what the precision implies."""
    kind, on_cuda, operands = device.type, device.type == "cuda", number_format(precision).operands
    ops.require(op_type, precision, device)
    is_linear = op_type == "linear"

    def run(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_autocast_enabled(kind):
            refuse_autocast(name, precision)
        if is_linear and ops.is_plain_linear(op_type, args, kwargs):
            x = args[0]
            if x.is_cuda is on_cuda and x.is_floating_point():
                return linear(x, args[1], args[2] if len(args) > 2 else None, operands, options())
        return ops.execute(op_type, precision, function, args, kwargs, options())

    return run
