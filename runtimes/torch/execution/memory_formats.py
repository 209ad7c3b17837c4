"""Weights of convolutions laid out channels last: their results are then too, and copies between layouts are spared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def image_weights(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with four dimensions, as two-dimensional convolutions have them, that do not lie channels last."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.dim() == 4 and not parameter.is_contiguous(memory_format=torch.channels_last)
    ]


class ChannelsLast:
    """The weights of a model laid out channels last in place, until `restore`; parameters stay the same objects.

    Convolutions on cards and CPUs compute channels last if their weight lies so, whatever their input, and what follows
    keeps the layout of its input.
    """

    def __init__(self, model: nn.Module) -> None:
        """Lay out the weights, and gradients that there are."""
        self._before = [(weight, weight.stride()) for weight in image_weights(model)]
        with torch.no_grad():
            for weight, _ in self._before:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                if weight.grad is not None:
                    weight.grad = weight.grad.contiguous(memory_format=torch.channels_last)

    def restore(self) -> None:
        """Lay out weights and gradients as before."""
        with torch.no_grad():
            for weight, strides in self._before:
                weight.data = _strided(weight.data, strides)
                if weight.grad is not None:
                    weight.grad = _strided(weight.grad, strides)


def _strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
