"""Run a model without leaving a trace: what a forward or backward pass changes is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients and the random state back as they were; gradients are None within the block.

    A buffer gets back its tensor as well as its values: a forward pass may write to it or assign another one.
    """
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    held = [buffer.detach() for *_, buffer in buffers if buffer is not None]
    values = [torch.empty_like(buffer) for buffer in held]
    _copy(values, held)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with torch.random.fork_rng(devices=sorted(devices, key=lambda d: d.index or 0)):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer in buffers:
                    module._buffers[name] = buffer
                _copy(held, values)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Many small tensors in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)
