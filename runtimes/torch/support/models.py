"""The model itself, below the wrappers that training puts around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def plain_name(name: str) -> str:
    """Name of a parameter or buffer as the plain model has it, without what compiling a submodule puts into it."""
    return name.replace(f"{_COMPILED}.", "")
