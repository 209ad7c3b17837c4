"""Models inside the wrappers of training, and blocks that leave a model unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients and the random state back as they were; gradients are None within the block.

    A buffer gets back its tensor as well as its values: a forward pass may write to it or assign another one. So may
    the forward pass of an embedding with ``max_norm`` write to its table.
    """
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    tensors = [buffer.detach() for *_, buffer in buffers if buffer is not None]
    lookups = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    tensors += [lookup.weight.detach() for lookup in lookups if lookup.max_norm is not None]
    values = [torch.empty_like(tensor) for tensor in tensors]
    if tensors:
        torch._foreach_copy_(values, tensors)
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
                if tensors:
                    torch._foreach_copy_(tensors, values)


_COMPILED = "_orig_mod"


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside ``DistributedDataParallel`` and ``torch.compile``, in any order."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif _COMPILED in model._modules and isinstance(inner := model._modules[_COMPILED], nn.Module):
            model = inner
        else:
            return model


@contextlib.contextmanager
def compiled_in_place(model: nn.Module, call: Callable[..., Any] | None = None, **options: Any) -> Iterator[None]:
    """Call a model compiled within the block: by ``call``, or by ``torch.compile`` with ``options``."""
    before: Any = model._compiled_call_impl
    if call is None:
        model.compile(**options)
    else:
        model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = before


def first_device(model: nn.Module) -> torch.device:
    """The device of a model's first parameter, the CPU without one."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def plain_name(name: str) -> str:
    """Name of a parameter or buffer in the plain model, without the part that compiling a submodule adds."""
    return name.replace(f"{_COMPILED}.", "")
