"""Linear layers with packed weights, read by the target and, at a lower activation precision, by its draft."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.weight_only import WIDE, PackedWeight, linear, pack


class PackedLinear(torch.nn.Module):
    """A linear layer with a packed weight; ``activations`` may be switched at any time (`activations`)."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None, *, reproducible: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias
        self.activations = WIDE
        self.reproducible = reproducible

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        return linear(x, self.packed, self.bias, activations=self.activations, reproducible=self.reproducible)


def pack_linears(
    model: torch.nn.Module,
    bits: int = 4,
    group: int | None = 128,
    *,
    keep: Callable[[str], bool] = lambda name: name.endswith("lm_head"),
    rotate: bool = False,
    reproducible: bool = False,
) -> int:
    """Replace the linear layers of a model by packed ones, in place; it can then only infer.

    Args:
        model: The model.
        bits: 4 or 8.
        group: Inputs per scale; None: all.
        keep: Which layers stay, by name; the head by default.
        rotate: Rotate inputs before weights are rounded, which keeps more of drafts at rounded activations.
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
        model.set_submodule(
            name, PackedLinear(pack(layer.weight, bits, group, rotate=rotate), bias, reproducible=reproducible)
        )
    if not layers:
        raise UnsupportedError("the model has no linear layer to pack; give one that has, or keep fewer")
    return len(layers)


@contextlib.contextmanager
def activations(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Run the packed layers of a model with activations A16, A8, F8 or A4 (by name) inside the context."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    before = [layer.activations for layer in layers]
    for layer in layers:
        layer.activations = name
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.activations = old
