"""Options of the 8-bit operators: rounding, scales, random stream and implementation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError

_ALLOWED: dict[str, tuple[str, ...]] = {
    "rounding": ("stochastic", "nearest"),
    "activation_granularity": ("tensor", "row"),
    "weight_granularity": ("tensor", "channel"),
    "half_format": ("BF16", "FP16"),
    "backward": ("half", "eight"),
    "weights": ("call", "step"),
    "backend": ("auto", "compiled", "reference"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Rounding, scaling and random stream of the 8-bit operators.

    Attributes:
        rounding: ``"stochastic"`` (unbiased: the expectation of the rounded value is the value) or ``"nearest"``
            (ties to even: half the squared error, but biased).
        activation_granularity: One scale for the whole ``"tensor"``, or one per ``"row"`` (per sample for
            convolutions).
        weight_granularity: One scale for the whole ``"tensor"``, or one per output ``"channel"``.
        half_format: 16-bit format of the results and of the backward pass of 8-bit operators, ``"BF16"`` or ``"FP16"``.
        seed: Key of the random stream, any integer of 64 bits.
        offset: Position in the stream; raised per step by a caller that needs new noise per step.
        backward: Products of the backward pass in ``"half"`` (the 16-bit format) or in ``"eight"`` bits: the gradient
            of the result is rounded stochastically, whatever ``rounding`` says, and scaled per tensor. Batches of
            products run theirs in 16 bits; both gradients of a convolution are computed from the codes of the
            gradient, :mod:`~qsync_opt.kernels.autograd.convolutions` says which of them by integer kernels.
        weights: Quantize the weight of a product or convolution in every ``"call"``, or once per ``"step"``: its codes
            are kept until it is written to in place (a write through ``weight.data`` is not seen), with the noise of
            the call that computed them.
        backend: ``"compiled"`` demands integer (or FP8) hardware products and refuses where there are none,
            ``"reference"`` demands the plain PyTorch ones, ``"auto"`` takes the compiled where they exist.
        step: One int64 on the operator's device that is mixed into the random stream: raised in place between steps, it
            gives replays of a compiled or captured graph noise of their own. None: ``offset`` alone decides.

    Raises:
        UnsupportedError: A field holds a value outside its list.
    """

    rounding: str = "stochastic"
    activation_granularity: str = "tensor"
    weight_granularity: str = "channel"
    half_format: str = "BF16"
    seed: int = 0
    offset: int = 0
    backward: str = "half"
    weights: str = "call"
    backend: str = "auto"
    step: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UnsupportedError(f"kernel option {name}={value!r}: allowed are {', '.join(allowed)}")
        for name in ("seed", "offset"):
            if not isinstance(getattr(self, name), int):
                raise UnsupportedError(f"kernel option {name}={getattr(self, name)!r}: an integer is needed")

    @property
    def half_dtype(self) -> torch.dtype:
        """Element type of the 16-bit format."""
        return torch.bfloat16 if self.half_format == "BF16" else torch.float16

    def at(self, *, seed: int, offset: int) -> KernelOptions:
        """The same options at another place of the random stream."""
        if torch.compiler.is_compiling() or type(seed) is not int or type(offset) is not int:
            return replace(self, seed=seed, offset=offset)
        # Once per operator and pass: nothing of the rest is checked anew.
        moved = object.__new__(KernelOptions)
        for name in _FIELDS:
            _set(moved, name, getattr(self, name))
        _set(moved, "seed", seed)
        _set(moved, "offset", offset)
        return moved

    def nearest(self) -> KernelOptions:
        """The same options with rounding to nearest."""
        return self if self.rounding == "nearest" else replace(self, rounding="nearest")


_FIELDS = tuple(entry.name for entry in fields(KernelOptions) if entry.name not in ("seed", "offset"))
_set = object.__setattr__
