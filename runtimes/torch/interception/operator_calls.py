"""One call of a named operator, and who runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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

    @property
    def writes(self) -> bool:
        """Whether an element-wise operator writes into its input: ``relu_``, or ``relu`` told to with ``inplace``."""
        return (
            self.op_type.endswith("_") or self.kwargs.get("inplace") is True or any(x is True for x in self.args[1:2])
        )

    @property
    def traced_name(self) -> str:
        """Name in a captured graph, where what writes into its input is an operator of its own (``relu_``)."""
        if not self.writes or self.op_type.endswith("_"):
            return self.name
        path, slash, last = self.name.rpartition("/")
        return f"{path}{slash}{self.op_type}_{last.removeprefix(self.op_type)}"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the torch function; without arguments, with those of the call."""
        if args or kwargs:
            return self.function(*args, **kwargs)
        return self.function(*self.args, **self.kwargs)


Handler = Callable[[OperatorCall], Any]


class Replays(Protocol):
    """Passes of the root module that were captured."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a pass, ``NotImplemented`` if it must run as usual."""
        ...

    def forget(self) -> None:
        """Something that was captured as a constant has changed."""
        ...


# Runs one operator: torch function, positional and keyword arguments of the call.
Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
