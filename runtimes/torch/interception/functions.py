"""Who is told of the functions of torch that run? Function modes that pick out the named ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.overrides import TorchFunctionMode

from qsync_opt.runtimes.torch.interception.torch_functions import ENTERED, python_methods
from qsync_opt.runtimes.torch.interception.unlike_types import UNLIKE, alike


class Calls(Protocol):
    """What is told of every call of a named function, and returns its result."""

    function_names: dict[Any, str]

    def call(self, op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call."""


class FunctionMode(TorchFunctionMode):
    """Hands the calls of named functions over, and enters those that call operators of their own."""

    def __init__(self, interception: Calls) -> None:
        super().__init__()
        self._interception = interception
        self.listen(interception.function_names)

    def listen(self, names: dict[Any, str]) -> None:
        """Pick out these functions from now on."""
        self.names, self.methods = names, python_methods(names)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        op_type = self.names.get(func)
        if op_type is not None:
            return self._interception.call(op_type, func, args, kwargs)
        entered = ENTERED.get(func)
        if entered is not None:
            with self:
                return entered(*args, **kwargs)
        if func in UNLIKE:
            args, kwargs = alike(func, args, kwargs)
        return func(*args, **kwargs)


class TracedFunctionMode(FunctionMode):
    """The same while a pass is compiled, where methods written in Python are no keys that torch finds."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for method, op_type in self.methods:
            if func is method:
                return self._interception.call(op_type, func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)
