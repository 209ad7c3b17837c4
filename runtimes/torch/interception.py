"""Which operator is running? Names every torch-level call of a forward pass as the capture names it.

A call is named ``<module path>/<operation>``; a second call of the same operation under the same path in one forward
pass gets the suffix ``_1``, a third ``_2`` and so on, so that a module called twice and a module that calls the same
function twice are told apart by one rule. ``capture`` derives the same names from the exported program and checks
that both sides agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

# torch function -> the name of the ATen operator it becomes under torch.export. Only these are reported to a handler.
_FUNCTION_NAMES: dict[Any, str] = {}


def _register(name: str, *functions: Any) -> None:
    for function in functions:
        _FUNCTION_NAMES[function] = name


_register("linear", F.linear)
_register("conv1d", F.conv1d, torch.conv1d)
_register("conv2d", F.conv2d, torch.conv2d)
_register("conv3d", F.conv3d, torch.conv3d)
_register("conv_transpose1d", F.conv_transpose1d, torch.conv_transpose1d)
_register("conv_transpose2d", F.conv_transpose2d, torch.conv_transpose2d)
_register("conv_transpose3d", F.conv_transpose3d, torch.conv_transpose3d)
_register("matmul", torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__)
_register("mm", torch.mm, torch.Tensor.mm)
_register("bmm", torch.bmm, torch.Tensor.bmm)
_register("addmm", torch.addmm, torch.Tensor.addmm)
_register("baddbmm", torch.baddbmm, torch.Tensor.baddbmm)
_register("einsum", torch.einsum, torch.functional.einsum)
_register("scaled_dot_product_attention", F.scaled_dot_product_attention)
_register("embedding", F.embedding, torch.embedding)
_register("layer_norm", F.layer_norm, torch.layer_norm)
_register("rms_norm", F.rms_norm, torch.rms_norm)
_register("group_norm", F.group_norm, torch.group_norm)
_register("instance_norm", F.instance_norm, torch.instance_norm)
_register("batch_norm", F.batch_norm, torch.batch_norm)
_register("softmax", F.softmax, torch.softmax, torch.Tensor.softmax)
_register("log_softmax", F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax)
_register("cross_entropy_loss", F.cross_entropy)
_register("nll_loss_nd", F.nll_loss)
_register("mse_loss", F.mse_loss)


def intercepted_kinds() -> frozenset[str]:
    """Kinds of operators that are reported; all others run unseen."""
    return frozenset(_FUNCTION_NAMES.values())


# Python functions that call operators of their own; they are entered instead of being treated as one operator.
_COMPOSITES: frozenset[Any] = frozenset({F.multi_head_attention_forward})


def _never_overridden(*_: Any) -> bool:
    return False


def _enterable(function: FunctionType) -> FunctionType:
    """Copy a torch Python function so that it does not dispatch to the mode again, while the calls inside it do."""
    names = {
        name: _never_overridden
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ENTERED: dict[Any, FunctionType] = {function: _enterable(function) for function in _COMPOSITES}


def operator_name(module: str, op_type: str, occurrence: int) -> str:
    """Name of an operator: module path, operation, and which occurrence under that path (0 for the first)."""
    base = f"{module}/{op_type}" if module else op_type
    return base if occurrence == 0 else f"{base}_{occurrence}"


@dataclass(slots=True)
class OperatorCall:
    """One call of a named operator; ``run`` executes it, by default with its own arguments."""

    name: str
    op_type: str
    module: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the torch function; without arguments, with those of the call."""
        if args or kwargs:
            return self.function(*args, **kwargs)
        return self.function(*self.args, **self.kwargs)


Handler = Callable[[OperatorCall], Any]


class _Mode(TorchFunctionMode):
    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self._interception = interception

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op_type = _FUNCTION_NAMES.get(func)
        if op_type is not None:
            return self._interception.call(op_type, func, args, kwargs)
        entered = _ENTERED.get(func)
        if entered is not None:
            with self:
                return entered(*args, **kwargs)
        return func(*args, **kwargs)


class Interception:
    """Reports every named operator of a model's forward passes to a handler, until it is removed.

    Hooks on the modules keep the path of the running module; a torch function mode, active only inside the model's
    own forward pass, sees the calls. Nothing of the model changes: not its class, parameters, or ``state_dict``.
    Shared modules report under the first path that ``named_modules`` gives them.
    """

    def __init__(self, model: nn.Module, handler: Handler) -> None:
        self._handler = handler
        self._path: list[str] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._modes: list[contextlib.ExitStack] = []
        self._handles: list[Any] = []
        self.seen: list[str] = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not self._path:
                self._counts.clear()
                self.seen.clear()
                stack = contextlib.ExitStack()
                stack.enter_context(_Mode(self))
                self._modes.append(stack)
            self._path.append(path)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._path:
            return
        self._path.pop()
        if not self._path:
            self._modes.pop().close()

    def call(self, op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Name one call and hand it to the handler."""
        module = self._path[-1] if self._path else ""
        key = (module, op_type)
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        name = operator_name(module, op_type, occurrence)
        self.seen.append(name)
        return self._handler(
            OperatorCall(name=name, op_type=op_type, module=module, function=function, args=args, kwargs=kwargs)
        )

    def remove(self) -> None:
        """Take the hooks off again; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@contextlib.contextmanager
def intercepted(model: nn.Module, handler: Handler) -> Iterator[Interception]:
    """Intercept a model's operators inside a ``with`` block."""
    interception = Interception(model, handler)
    try:
        yield interception
    finally:
        interception.remove()
