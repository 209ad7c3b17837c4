"""Modules that cannot be exported, as one operator each: a plan leaves them as they are, in FP32.

Their forward pass depends on the data (experts that are chosen by branches, ``.item()``, ``nonzero``), or runs code
that torch.export does not follow. While the model is exported, such a module calls an operation of ours that knows the
shapes of its results; the recorded call runs the module itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from qsync_opt.errors import ModelError

_library: Any = torch.library.Library("qsync_opt", "FRAGMENT")  # type: ignore[no-untyped-call]
_exporting: dict[str, OpaqueModule] = {}


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module as an operation on the tensors among its arguments, which returns the tensors of its result.

    Attributes:
        module: The module.
        arguments: Its arguments, with places instead of tensors.
        result: Its result, likewise.
        outputs: Tensors on the meta device like those of the result.
        bounds: For each tensor argument the exclusive bound of its values as they were, None if not integers.
        flops: Floating-point operations of its products, as torch counts them.
    """

    module: nn.Module
    arguments: Any
    result: Any
    outputs: tuple[Tensor, ...]
    bounds: tuple[int | None, ...]
    flops: int

    def __call__(self, tensors: tuple[Tensor, ...], path: str) -> list[Tensor]:
        """Run the module."""
        args, kwargs = _filled(self.arguments, tensors)
        return _tensors(self.module(*args, **kwargs))

    def __str__(self) -> str:
        """Text that is equal for modules that do the same work."""
        sizes = [tuple(parameter.shape) for parameter in self.module.parameters()]
        return f"{type(self.module).__qualname__} {sizes}"

    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters of the module."""
        return tuple(parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def copied(self, device: torch.device) -> OpaqueModule:
        """The same with a copy of the module on a device, to run without changing the model."""
        return replace(self, module=copy.deepcopy(self.module).to(device))


@dataclass(frozen=True, slots=True)
class _Place:
    number: int


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=lambda part: isinstance(part, PackedSequence))


def _placed(value: Any) -> Any:
    """A value with places instead of its tensors."""
    numbers = iter(range(len(_tensors(value))))
    return pytree.tree_map_only(Tensor, lambda _: _Place(next(numbers)), value)


def _filled(value: Any, tensors: Any) -> Any:
    return pytree.tree_map_only(_Place, lambda place: tensors[place.number], value)


def _like_results(tensors: list[Tensor], path: str) -> list[Tensor]:
    return [tensors[0].new_empty(x.shape, dtype=x.dtype) for x in _exporting[path].outputs]


def _refuse(tensors: list[Tensor], path: str) -> list[Tensor]:
    raise ModelError(f"module {path!r} was kept in one piece by capture: run the model, not its exported program")


_library.define("opaque(Tensor[] tensors, str path) -> Tensor[]")
_library.impl("opaque", _like_results, "Meta")
_library.impl("opaque", _refuse, "CPU")
_library.impl("opaque", _refuse, "CUDA")
torch.library.register_autograd("qsync_opt::opaque", lambda ctx, gradients: (None, None), lib=_library)


class PackedModuleError(ModelError):
    """A module takes or returns a packed sequence, whose size depends on the data: only one around it can be kept."""

    def __init__(self, path: str) -> None:
        """Keep the path of the module."""
        super().__init__(
            f"module {path!r} takes or returns a packed sequence, whose size depends on the data: put "
            "pack_padded_sequence, the layer and pad_packed_sequence(total_length=...) into the forward pass of a "
            "module of their own, which then stays in FP32"
        )
        self.path = path


def observe(model: nn.Module, paths: tuple[str, ...], run: Callable[[], Any]) -> dict[str, OpaqueModule]:
    """Run a model and return the modules at some paths as operations, by path; those that do not run are left out.

    Raises:
        ModelError: A module runs several times in a pass, or takes or returns no tensor, or a packed sequence
            (`PackedModuleError`).
    """
    seen: dict[str, OpaqueModule] = {}
    begun: dict[str, int] = {}

    def begin(path: str, *_: Any) -> None:
        begun[path] = counter.get_total_flops()

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if any(isinstance(leaf, PackedSequence) for leaf in _leaves((args, dict(kwargs), result))):
            raise PackedModuleError(path)
        inputs, outputs = _tensors((args, dict(kwargs))), _tensors(result)
        if path in seen or not inputs or not outputs:
            several = "runs several times in one pass" if path in seen else "takes or returns no tensor"
            raise ModelError(f"module {path!r} cannot be kept in one piece: it {several}")
        seen[path] = OpaqueModule(
            module=module,
            arguments=_placed((args, dict(kwargs))),
            result=_placed(result),
            outputs=tuple(torch.empty_like(x, device="meta") for x in outputs),
            bounds=tuple(_bound(x) for x in inputs),
            flops=counter.get_total_flops() - begun[path],
        )

    with contextlib.ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(functools.partial(begin, path)).remove)
            stack.callback(module.register_forward_hook(functools.partial(note, path), with_kwargs=True).remove)
        with FlopCounterMode(display=False) as counter:
            run()
    return seen


def _bound(tensor: Tensor) -> int | None:
    integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return int(tensor.max()) + 1 if integer and tensor.numel() else None


@contextlib.contextmanager
def in_one_piece(opaque: Mapping[str, OpaqueModule]) -> Iterator[None]:
    """Let modules call one operation each within the block, for exporting."""
    before = {path: entry.module.__dict__.get("forward") for path, entry in opaque.items()}

    def forward(path: str, *args: Any, **kwargs: Any) -> Any:
        results = torch.ops.qsync_opt.opaque(_tensors((args, kwargs)), path)
        return _filled(opaque[path].result, results)

    try:
        _exporting.update(opaque)
        for path, entry in opaque.items():
            entry.module.forward = functools.partial(forward, path)
        yield
    finally:
        for path, entry in opaque.items():
            _exporting.pop(path, None)
            entry.module.__dict__.pop("forward", None)
            if before[path] is not None:
                entry.module.__dict__["forward"] = before[path]
