"""Compiling a model whose blocks repeat: ``torch.compile`` generates the code of equal blocks once.

Every call of a marked block is a nested region of the one graph of a pass (``torch.compiler.nested_compile_region``).
Regions that trace to the same graph are differentiated, scheduled and generated once; what differs between blocks
(parameters, the place in the random stream) is an input. Blocks under different precisions are different graphs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from qsync_opt.errors import QSyncError, first_line
from qsync_opt.runtimes.torch.interception.forwards import Forward

_LOGGER = logging.getLogger(__name__)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules to compile as regions: none inside another, each with an equal one elsewhere in the model.

    Blocks are equal if their classes, own settings as they print, and the shapes and types of their parameters and
    buffers are, all the way down. Among nested choices (layers, or the two towers that hold them) the one is taken that
    leaves the fewest modules to compile. A model without repeated blocks, or whose root alone has modules, has none.

    Source:
        Ours.
    """
    prints: dict[nn.Module, Any] = {}
    sizes: dict[nn.Module, int] = {}

    def describe(module: nn.Module) -> Any:
        if module not in prints:
            own = [
                (name, tensor.shape, tensor.dtype, tensor.requires_grad)
                for tensors in (module._parameters, module._buffers)
                for name, tensor in tensors.items()
                if tensor is not None
            ]
            children = [(name, describe(child)) for name, child in module._modules.items() if child is not None]
            prints[module] = (type(module), module.extra_repr(), module.training, tuple(own), tuple(children))
            sizes[module] = 1 + sum(sizes[child] for child in module._modules.values() if child is not None)
        return prints[module]

    describe(model)
    counts = Counter(prints.values())

    def choose(path: str, module: nn.Module) -> tuple[float, list[str]]:
        """What is left to compile of a module, and the regions inside of it."""
        work, regions = 1.0, []
        for name, child in module._modules.items():
            if child is not None:
                below, own = choose(f"{path}.{name}" if path else name, child)
                work += below
                regions += own
        count = counts[prints[module]]
        if count > 1 and sizes[module] > 1 and not isinstance(module, _CONTAINERS) and sizes[module] / count < work:
            return sizes[module] / count, [path]
        return work, regions

    return tuple(dict.fromkeys(choose("", model)[1]))


class CompiledByBlocks:
    """Calls a model compiled with its repeated blocks as regions; set as ``_compiled_call_impl`` of the model.

    Regions need a pass that is one graph. If torch cannot compile it so, the model is compiled as a whole from then on,
    with a warning. Nothing has run by then, because a pass of one graph is compiled before any of it runs.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], **options: Any) -> None:
        """Mark the blocks at ``paths``, whose ``forward`` is shadowed; ``options`` are those of ``torch.compile``."""
        self._model, self._options = model, options
        self._blocks: list[Forward] = [model.get_submodule(path).__dict__["forward"] for path in paths]
        for block in self._blocks:
            block.repeats = True
        self._whole = not paths
        self._run: Callable[..., Any] = torch.compile(model._call_impl, fullgraph=not self._whole, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self._whole:
            return self._run(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except (TorchDynamoException, QSyncError) as failure:  # of the latter, what is no region's fault comes again
            reason = first_line(getattr(failure, "inner_exception", failure))
        _LOGGER.warning("the model is compiled as a whole, because its blocks cannot be compiled once each: %s", reason)
        self._whole = True
        for block in self._blocks:
            block.repeats = False
        self._run = torch.compile(self._model._call_impl, **self._options)
        return self._run(*args, **kwargs)
