"""Linear layers with packed weights, read by the target and, at a lower activation precision, by its draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.weight_only import PackedWeight, linear, pack


class PackedLinear(torch.nn.Module):
    """A linear layer with a packed weight; ``activation_bits`` may be switched at any time (`activations`)."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, *, reproducible: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias
        self.activation_bits = 16
        self.reproducible = reproducible

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        return linear(x, self.packed, self.bias, activation_bits=self.activation_bits, reproducible=self.reproducible)


def pack_linears(
    model: torch.nn.Module,
    bits: int = 4,
    group: int | None = 128,
    *,
    keep: Callable[[str], bool] = lambda name: name.endswith("lm_head"),
    reproducible: bool = False,
) -> int:
    """Replace the linear layers of a model by packed ones, in place; it can then only infer.

    Args:
        model: The model.
        bits: 4 or 8.
        group: Inputs per scale; None: all.
        keep: Which layers stay, by name; the head by default.
        reproducible: As `qsync_opt.kernels.weight_only.linear` says.

    Returns:
        How many layers were replaced.

    Raises:
        UnsupportedError: Unusable bits or group, or there is no layer to replace.
    """
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and not keep(name)
    }
    for name, layer in layers.items():
        bias = None if layer.bias is None else layer.bias.detach()
        model.set_submodule(name, PackedLinear(pack(layer.weight, bits, group), bias, reproducible=reproducible))
    if not layers:
        raise UnsupportedError("the model has no linear layer to pack; give one that has, or keep fewer")
    return len(layers)


@contextlib.contextmanager
def activations(model: torch.nn.Module, bits: int) -> Iterator[None]:
    """Run the packed layers of a model with activations of 8 or 16 bits inside the context."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    before = [layer.activation_bits for layer in layers]
    for layer in layers:
        layer.activation_bits = bits
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.activation_bits = old
