"""Recorded calls of operators, which can be run again on random tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qsync_opt.errors import ModelError
from qsync_opt.io import freeze
from qsync_opt.model import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArgument:
    """A tensor argument without its data.

    ``stride`` is in elements. ``state`` is the name of the parameter (``is_parameter``, trainable or not) or buffer,
    None for an activation. ``requires_gradient`` says whether backward flows into it. ``upper`` is the exclusive bound
    of an index's values, None if any value will do; ``rising``: they are places where bags begin, the first at 0.
    """

    spec: TensorSpec
    stride: tuple[int, ...]
    state: str | None = None
    is_parameter: bool = False
    requires_gradient: bool = False
    upper: int | None = None
    rising: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Element type of torch."""
        return getattr(torch, self.spec.dtype)  # type: ignore[no-any-return]

    def meta(self) -> torch.Tensor:
        """Return a tensor of this shape, type and stride on the meta device."""
        return torch.empty_strided(self.spec.shape, self.stride, dtype=self.dtype, device="meta")

    def random(self, device: torch.device | str, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return a tensor of this shape, type and stride with random values: normal numbers or valid indices.

        Masks are True everywhere: an attention row that attends to nothing has no finite result.
        """
        if self.spec.is_floating:
            # One flat storage seen through the strides, so that expanded dimensions (stride 0) stay expanded.
            last = sum((size - 1) * step for size, step in zip(self.spec.shape, self.stride, strict=True))
            storage = torch.randn(max(last + 1, 0), generator=generator, device=device).to(self.dtype)
            return storage.as_strided(self.spec.shape, self.stride).detach().requires_grad_(self.requires_gradient)
        if self.dtype is torch.bool:
            return torch.ones(self.spec.shape, dtype=torch.bool, device=device)
        high = 1 if self.upper is None else self.upper
        if self.rising:
            count = math.prod(self.spec.shape)
            return torch.arange(count, dtype=self.dtype, device=device) * high // max(1, count)
        return torch.randint(high, self.spec.shape, generator=generator, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of the captured forward pass.

    ``target`` is the ATen overload (or ``operator.getitem``); tensors in ``args`` and ``kwargs``, also inside lists,
    are ``TensorArgument``. ``is_view``: the result shares an argument's memory, so that no data moves.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_view: bool = False

    def __post_init__(self) -> None:
        freeze(self, "kwargs")

    def tensors(self) -> Iterator[TensorArgument]:
        """All tensor arguments, in argument order."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return (leaf for leaf in leaves if isinstance(leaf, TensorArgument))

    def build(
        self, make: Callable[[TensorArgument], Any], device: torch.device | str | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with ``make`` applied to every tensor, for a call on ``device``."""
        args, kwargs = pytree.tree_map_only(TensorArgument, make, (self.args, dict(self.kwargs)))
        if device is not None and "device" in kwargs:
            kwargs["device"] = torch.device(device)
        return args, kwargs

    def description(self) -> str:
        """Text that is equal for two calls exactly if they do the same work on the same kinds of tensors."""
        args, kwargs = self.build(_describe)
        return json.dumps([str(self.target), args, kwargs], default=str, sort_keys=True)

    def signature(self, op_type: str) -> str:
        """Digest of ``description`` after the kind of operator."""
        return f"{op_type}:{hashlib.sha256(self.description().encode()).hexdigest()[:24]}"


def _describe(argument: TensorArgument) -> list[Any]:
    kind = "activation" if argument.state is None else "parameter" if argument.is_parameter else "buffer"
    return [argument.spec.dtype, argument.spec.shape, argument.stride, kind, argument.requires_gradient]


def index_bound(op_type: str, tensors: tuple[torch.Tensor, ...]) -> int | None:
    """Exclusive bound of the integer arguments of an operator from all its tensors, None if it takes no index."""
    shape = next((tensor.shape for tensor in tensors if tensor.is_floating_point()), None)
    if shape is None:
        return None
    match op_type:
        case "embedding" | "embedding_bag":
            return shape[0]
        case "cross_entropy_loss" | "nll_loss" | "nll_loss_nd" | "nll_loss2d":
            return shape[1] if len(shape) > 1 else shape[0]
        case "gather" | "index" | "index_select" | "take_along_dim" | "take" | "scatter" | "scatter_add" | "index_add":
            return min(shape, default=1)
    return None


def count_flops(name: str, call: RecordedCall) -> int:
    """Forward floating-point operations of a call's products and convolutions, two for a multiply-add of real numbers.

    A multiply-add of complex numbers is four of real ones.

    The call runs on the meta device under torch's own counter, extended by the products that it leaves out.

    Raises:
        ModelError: The call cannot run on tensors without data.
    """
    args, kwargs = call.build(TensorArgument.meta, "meta")
    try:
        # The kernel of fused attention depends on the device, and the counter does not know all of them.
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False, custom_mapping=_OTHER_PRODUCTS) as counter,
        ):
            call.target(*args, **kwargs)
    except RuntimeError as error:
        raise ModelError(f"the operations of {name!r} cannot be counted: {error}") from error
    is_complex = any(tensor.spec.dtype.startswith("complex") for tensor in call.tensors())
    return int(counter.get_total_flops()) * (4 if is_complex else 1)


def _trilinear(a: Any, b: Any, c: Any, a_new: Any, b_new: Any, c_new: Any, *_: Any, **__: Any) -> int:
    """Each operand gets new dimensions of size 1; all are multiplied and summed."""
    shapes = [list(shape) for shape in (a, b, c)]
    for shape, new in zip(shapes, (a_new, b_new, c_new), strict=True):
        for position in sorted(new):
            shape.insert(position, 1)
    return 2 * math.prod(int(max(sizes)) for sizes in zip(*shapes, strict=True))


_OTHER_PRODUCTS: dict[Any, Any] = {
    torch.ops.aten.mv: lambda a_shape, *_, **__: 2 * a_shape[0] * a_shape[1],
    torch.ops.aten.addmv: lambda c_shape, a_shape, *_, **__: 2 * a_shape[0] * a_shape[1],
    torch.ops.aten.dot: lambda a_shape, *_, **__: 2 * a_shape[0],
    torch.ops.aten.vdot: lambda a_shape, *_, **__: 2 * a_shape[0],
    torch.ops.aten._trilinear: _trilinear,
}
