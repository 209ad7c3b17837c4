"""Compiling a model whose blocks repeat: ``torch.compile`` generates the code of equal blocks once.

Every call of a marked block is a nested region of the one graph of a pass (``torch.compiler.nested_compile_region``).
Regions that trace to the same graph are differentiated, scheduled and generated once; what differs between blocks
(parameters, the place in the random stream) is an input. Blocks under different precisions are different graphs.

Where a model checkpoints its blocks' activations, a region is a block with its recomputation. Whatever a plan notes of
a pass while it is traced is noted once, and not once more for the recomputation.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_opt.errors import QSyncError, UnsupportedError, first_line
from qsync_opt.runtimes.torch.interception.forwards import Forward
from qsync_opt.runtimes.torch.interception.masks import simplify_masks
from qsync_opt.runtimes.torch.interception.randomness import DrawsError, WithoutRandomness
from qsync_opt.runtimes.torch.support import first_device

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
    return _divided(model)[0]


def share_to_compile(model: nn.Module) -> float:
    """Share of a model's modules that are left to compile where each kind of `repeated_blocks` is compiled once."""
    return _divided(model)[1]


def _divided(model: nn.Module) -> tuple[tuple[str, ...], float]:
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

    left, regions = choose("", model)
    return tuple(dict.fromkeys(regions)), left / sizes[model]


class _Announcing:
    """In place of a layer's own function that checkpoints: says which block it is about to pass, somehow wrapped."""

    def __init__(self, block: Forward, checkpoint: Callable[..., Any]) -> None:
        self.block, self.checkpoint = block, checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.block.interception.announced = self.block
        return self.checkpoint(function, *args, **kwargs)


_CHECKPOINTS = "_gradient_checkpointing_func"
"""With what a layer of transformers checkpoints itself, where that is enabled."""


def _size(value: Any) -> int:
    """A traced number, or the one that it was for the pass that was traced."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def _like(value: Any) -> Any:
    """An input of a traced graph anew, for the mode of fake tensors that is active."""
    if not isinstance(value, torch.Tensor):
        return _size(value)
    shape, strides = [*map(_size, value.shape)], [*map(_size, value.stride())]
    made = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _draws_again(region: Any) -> bool:
    """Whether a traced region recomputes what draws random numbers."""
    for node in region.graph.nodes:
        if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
            continue
        recomputed = region.get_submodule(node.args[0].target)
        traced = [own.meta["example_value"] for own in recomputed.graph.nodes if own.op == "placeholder"]
        with detect_fake_mode() or FakeTensorMode():
            inputs = [_like(value) for value in traced]
            try:
                with WithoutRandomness():
                    recomputed(*inputs)
            except DrawsError:
                return True
    return False


_WITHOUT_REUSE = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Inductor's options that have every tensor written to memory of its own, which costs nothing but a call of the
allocator: torch (2.11 and 2.13) overlooks that what a region keeps for its backward pass may be its input, and would
write over it; gradients were wrong by half, and nothing said so."""


def _generate(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Generate the code of a graph, with regions where their recomputation is the same.

    Inductor gives a region other random numbers when it is computed again, so that gradients would be wrong.

    Raises:
        UnsupportedError: A region recomputes what draws random numbers.
    """
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    for name in dict.fromkeys(node.args[0].target for node in calls):
        if _draws_again(graph.get_submodule(name)):
            raise UnsupportedError("they draw random numbers, as dropout does, and their activations are checkpointed")
    simplify_masks(graph)
    options = {"config_patches": _WITHOUT_REUSE} if calls else {}
    run: Callable[..., Any] = lookup_backend("inductor")(graph, inputs, **options)
    return run


class CompiledByBlocks:
    """Calls a model compiled with its repeated blocks as regions; set as ``_compiled_call_impl`` of the model.

    Regions need a pass that is one graph. If torch cannot compile it so, the model is compiled as a whole from then on,
    with a warning. Nothing has run by then, because a pass of one graph is compiled before any of it runs.
    """

    def __init__(
        self, model: nn.Module, paths: Sequence[str], autocast: torch.dtype | None = None, **options: Any
    ) -> None:
        """Mark the blocks at ``paths``, whose ``forward`` is shadowed.

        Args:
            model: The model.
            paths: As `repeated_blocks` finds them.
            autocast: The type in which the model autocasts itself during a pass, if it does.
            options: Those of ``torch.compile``.
        """
        self._model, self._autocast, self._options = model, autocast, options
        self._blocks: list[Forward] = [model.get_submodule(path).__dict__["forward"] for path in paths]
        self._announcing: dict[str, _Announcing] = {}
        self._mark(bool(paths))
        self._whole = not paths
        self._run: Callable[..., Any] = self._compiled()

    def _mark(self, repeats: bool) -> None:
        for block in self._blocks:
            block.repeats = block.interception.regional = repeats

    def _compiled(self) -> Callable[..., Any]:
        run = torch.compile(self._model._call_impl, fullgraph=not self._whole, backend=_generate, **self._options)
        watched: Callable[..., Any] = dynamo.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)(run)
        return watched

    @contextlib.contextmanager
    def _announcements(self) -> Iterator[None]:
        """Within the block, layers that checkpoint themselves announce it."""
        found = [(block, own) for block in self._blocks if (own := block.module.__dict__.get(_CHECKPOINTS)) is not None]
        for block, own in found:
            known = self._announcing.get(block.path)
            if known is None or known.checkpoint is not own:
                known = self._announcing[block.path] = _Announcing(block, own)
            block.module.__dict__[_CHECKPOINTS] = known
        try:
            yield
        finally:
            for block, own in found:
                block.module.__dict__[_CHECKPOINTS] = own

    @contextlib.contextmanager
    def _autocast_by_default(self) -> Iterator[None]:
        """Have autocast regions be of the model's own type wherever they name none.

        Torch 2.11 differentiates a region once the model has left its autocast context, but as if it were still in one:
        both passes of a block would be computed in whatever type the process has as default, FP16 on a card.
        """
        kind = first_device(self._model).type
        if self._autocast is None or torch.is_autocast_enabled(kind):  # the plan refuses another type itself
            yield
            return
        before = torch.get_autocast_dtype(kind)
        torch.set_autocast_dtype(kind, self._autocast)
        try:
            yield
        finally:
            torch.set_autocast_dtype(kind, before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self._whole:
            return self._run(*args, **kwargs)
        try:
            with self._announcements(), self._autocast_by_default():
                return self._run(*args, **kwargs)
        except (TorchDynamoException, QSyncError) as failure:  # of the latter, what is no region's fault comes again
            reason = first_line(getattr(failure, "inner_exception", failure))
        _LOGGER.warning("the model is compiled as a whole, because its blocks cannot be compiled once each: %s", reason)
        self._whole = True
        self._mark(False)
        self._run = self._compiled()
        return self._run(*args, **kwargs)
