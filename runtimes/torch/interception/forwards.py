"""The replacement for each module's ``forward``, and the torch modules that are one operator."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.interception.recomputation import PLAIN_TENSORS

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.interception.interception import Interception


@dataclass(frozen=True, slots=True)
class Leaf:
    """A torch module that is one operator.

    Attributes:
        function: The torch function that its ``forward`` calls.
        op_type: Name of the operator: adjustable if it has ``arguments``, else always fixed; None for one that plans
            leave alone unless a user gives it a role.
        arguments: Of the function, from the module's input; None: ``forward`` itself is called.
    """

    function: Any
    op_type: str | None = None
    arguments: Callable[[Tensor], tuple[Any, ...]] | None = None


def _linear(module: Any) -> Leaf:
    # Looked up in every call: wrappers replace parameters, and hooks may compute them.
    parameters = module._parameters

    def arguments(x: Tensor) -> tuple[Any, ...]:
        weight = parameters.get("weight")
        return x, module.weight if weight is None else weight, module.bias

    return Leaf(F.linear, "linear", arguments)


def _embedding(module: nn.Embedding) -> Leaf:
    def arguments(index: Tensor) -> tuple[Any, ...]:
        scaled, sparse = module.scale_grad_by_freq, module.sparse
        return index, module.weight, module.padding_idx, module.max_norm, module.norm_type, scaled, sparse

    return Leaf(F.embedding, "embedding", arguments)


def _convolution(module: Any) -> Leaf | None:
    dims = len(module.kernel_size)

    def arguments(x: Tensor) -> tuple[Any, ...]:
        geometry = (module.stride, module.padding, module.dilation, module.groups)
        return (x, module.weight, module.bias, *geometry)

    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return Leaf(function, f"conv{dims}d", arguments) if module.padding_mode == "zeros" else None


_ADJUSTABLE: dict[Any, Callable[[Any], Leaf | None]] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}
_OTHERS: dict[Any, Leaf] = {
    nn.LayerNorm.forward: Leaf(F.layer_norm, "layer_norm"),
    nn.RMSNorm.forward: Leaf(F.rms_norm, "rms_norm"),
    nn.GroupNorm.forward: Leaf(F.group_norm, "group_norm"),
    nn.BatchNorm2d.forward: Leaf(F.batch_norm, "batch_norm"),
    nn.Dropout.forward: Leaf(F.dropout),
    nn.GELU.forward: Leaf(F.gelu),
    nn.ReLU.forward: Leaf(F.relu),
    nn.SiLU.forward: Leaf(F.silu),
    nn.MaxPool2d.forward: Leaf(F.max_pool2d),
}


def leaf_of(module: nn.Module) -> Leaf | None:
    """The operator that a module is, None if it is not one operator of torch."""
    if next(module.children(), None) is not None:  # a parametrization, with operators of its own
        return None
    forward = type(module).forward
    if forward in _ADJUSTABLE:
        return _ADJUSTABLE[forward](module)
    return _OTHERS.get(forward)


@torch.compiler.nested_compile_region
def _as_region(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module as a region of the graph that is being compiled."""
    # Torch calls a region from inside the function mode, where the mode is suspended.
    with contextlib.nullcontext() if forward.interception.resting else forward.interception.traced_mode:
        return forward.inner(*args, **kwargs)


def _checkpoint(interception: Interception, checkpoint: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a checkpointed function in the mode, which is suspended where torch runs it."""
    function, *rest = args

    def inside(*args: Any, **kwargs: Any) -> Any:
        with interception.traced_mode:
            return function(*args, **kwargs)

    outer = interception.checkpointing
    interception.checkpointing = True
    result = checkpoint(inside, *rest, **kwargs)
    interception.checkpointing = outer
    return result


@torch.compiler.nested_compile_region
def _checkpoint_as_region(
    interception: Interception, checkpoint: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return _checkpoint(interception, checkpoint, args, kwargs)


def checkpointed(interception: Interception, checkpoint: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``checkpoint(*args, **kwargs)``, torch's operator that recomputes a function, while a pass is compiled.

    A block that repeats is a region together with its recomputation; there are none inside of what is recomputed, where
    torch would not see which random numbers they draw. Which block it is must be known: it is what is passed to
    ``checkpoint``, or was announced.
    """
    block, interception.announced = interception.announced, None
    if block is None and isinstance(args[0], nn.Module):
        block = args[0].__dict__.get("forward")
    if not isinstance(block, Forward) or not block.repeats or interception.checkpointing:
        return _checkpoint(interception, checkpoint, args, kwargs)
    return block.region(_checkpoint_as_region, interception, checkpoint, args, kwargs)


_modes_active: Callable[[], int] = torch._C._len_torch_function_stack


class Forward:
    """Shadows one module's ``forward`` and tells the interception when the module runs; `forward_of` builds it."""

    def __init__(self, interception: Interception, path: str, module: nn.Module) -> None:
        self.interception = interception
        self.path = path
        self.module = module
        self.inner: Callable[..., Any] = module.forward
        # The instance's own attribute, None if forward comes from the class.
        self.shadowed = module.__dict__.get("forward")
        self.recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        self.repeats = False  # whether it is compiled as a region, once for all that are equal
        self.leaf = None if self.shadowed is not None else leaf_of(module)
        # Callers that inspect the signature of forward (as trainers do) see the original.
        functools.update_wrapper(self, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, as a pass of its own or as a part of the running one."""
        interception = self.interception
        if interception.resting:
            if self._is_region():
                return _as_region(self, args, kwargs)
            return self.inner(*args, **kwargs)
        if self.recurrent and interception.recurrent_inputs is not None:
            args = interception.recurrent_inputs(args)
            kwargs = {name: interception.recurrent_inputs(value) for name, value in kwargs.items()}
        if interception.path is None:
            if interception.graphs is not None and not torch.compiler.is_compiling() and not self.path:
                result = interception.graphs.run(args, kwargs)
                if result is not NotImplemented:
                    return result
            return interception.outermost(self, args, kwargs)
        if not torch.compiler.is_compiling() and interception.thread not in (0, get_ident()):
            raise NotReadyError(
                f"module {self.path or 'the root'!r} runs in two threads at once, but a plan follows one pass at a "
                "time: let the threads take turns, and use DistributedDataParallel in place of DataParallel"
            )
        if self.path in interception.opaque_modules:
            return interception.run_opaque(self, args, kwargs)
        leaf = self.leaf
        if (
            leaf is not None
            and not torch.compiler.is_compiling()
            and interception.prepared_pass
            and len(args) == 1
            and not kwargs
            and type(args[0]) in PLAIN_TENSORS
            and _modes_active() == 1
        ):
            return interception.run_leaf(self, leaf, args[0])
        outer = interception.path
        interception.enter(self.path, args)
        try:
            if self._is_region():
                return self.region(_as_region, self, args, kwargs)
            return self.inner(*args, **kwargs)
        finally:
            interception.path = outer

    def _is_region(self) -> bool:
        return self.repeats and torch.compiler.is_compiling() and not self.interception.checkpointing

    def region(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that torch compiles as a region, and that runs this module."""
        interception = self.interception
        if interception.on_region_begin is not None:
            interception.on_region_begin(self.path)
        result = run(*arguments)
        if interception.on_region_end is not None:
            interception.on_region_end()
        return result

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotReadyError(
            f"module {self.path or 'the root'!r} cannot be copied or pickled while its operators are intercepted: "
            "undo the plan first, and apply it to the copy"
        )

    __deepcopy__ = _refuse
    __copy__ = _refuse
    __reduce_ex__ = _refuse


_NUMBER = itertools.count()


def forward_of(interception: Interception, path: str, module: nn.Module) -> Forward:
    """A `Forward` with a code object of its own.

    ``torch.compile`` counts compilations per code object and gives up after 8; with one object for all modules and
    plans, a job that compiles its layers one by one, or changes plans, would soon reach that. It also remembers shapes
    by the object's name: a second model with batches of another size would be compiled for sizes that vary.
    """
    whole = Forward.__call__
    code = whole.__code__.replace(co_name=f"forward {next(_NUMBER)} of {path or type(module).__name__}")
    call = types.FunctionType(code, whole.__globals__, whole.__name__, whole.__defaults__, whole.__closure__)
    call.__kwdefaults__ = whole.__kwdefaults__
    kind: type[Forward] = type("Forward", (Forward,), {"__call__": call, "__doc__": Forward.__doc__})
    return kind(interception, path, module)
