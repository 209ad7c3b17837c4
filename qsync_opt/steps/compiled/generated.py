"""Peak memory of the code that a compiler generated for a training step, allocation by allocation.

Inductor writes a function ``call`` per pass: it allocates results (``empty_strided_cuda``), gives a result the memory
of one that is no longer needed (``buf7 = buf2; del buf2``), calls kernels, and deletes tensors after their last use.
Its statements, read in order as text, tell the memory in use at any time without being run. The forward pass returns,
besides the model's own results, the tensors that it saved for the backward pass, which deletes them after use.

Nothing here depends on a device. The results of library calls are not in the code: their sizes are arguments.

Source: ours; the rules of the code are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qsync_opt.errors import UnsupportedError
from qsync_opt.steps.memory_timeline import ROUNDED_BYTES

_DTYPES = {
    1: ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"),
    2: ("int16", "uint16", "float16", "bfloat16"),
    4: ("int32", "uint32", "float32"),
    8: ("int64", "uint64", "float64", "complex64"),
}
_ITEM_BYTES = {name: size for size, names in _DTYPES.items() for name in names}
_VIEWS = (".view_dtype", ".as_strided.default", ".permute.default")
"""Ends of the names of library calls that return a view of their first operand; ``.view.`` is in others."""
_SAVED = ""
"""Stands for a name of the tensors that are saved for the backward pass."""
_TANGENT = "tangents_"
"""Prefix of the arguments of the backward pass that are gradients of the model's results."""


class PassCode(NamedTuple):
    """The code of a pass.

    Attributes:
        text: The module that the compiler wrote.
        sizes: Bytes of the results of library calls, by name.
    """

    text: str
    sizes: Mapping[str, int]


class Peak(NamedTuple):
    """Most bytes in use beyond those before the step, with the pass and statement that reach it."""

    peak_bytes: int
    phase: str
    statement: str


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    holders: int = 0


@dataclass(slots=True)
class _Pass:
    """Memory in use while the code of a pass is interpreted."""

    sizes: Mapping[str, int]
    now: int
    peak: int = 0
    statement: str = ""
    names: dict[str, list[_Storage]] = field(default_factory=dict)

    def allocate(self, num_bytes: int, statement: str) -> _Storage:
        storage = _Storage(-(-num_bytes // ROUNDED_BYTES) * ROUNDED_BYTES)
        self.now += storage.num_bytes
        if self.now > self.peak:
            self.peak, self.statement = self.now, statement
        return storage

    def bind(self, name: str, storages: Iterable[_Storage]) -> None:
        new = list(storages)
        for storage in new:
            storage.holders += 1
        self.drop(name)
        self.names[name] = new

    def drop(self, name: str) -> None:
        for storage in self.names.pop(name, ()):
            self.release(storage)

    def release(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.now -= storage.num_bytes


def step_peak(forward: PassCode, backward: PassCode, *, tangents_held: bool) -> Peak:
    """Peak memory of the passes of a step beyond the memory before it, gradients included.

    Args:
        forward: Code of the forward pass. Of the model's results, only the loss is kept.
        backward: Code of the backward pass.
        tangents_held: Whether gradients of the model's results are kept until the end of the backward pass, not only
            until the code has read them.

    Raises:
        UnsupportedError: The code has an unknown form.
    """
    try:
        first = _Pass(forward.sizes, 0)
        inputs = [_Storage(0, 1) for _ in _arguments(forward.text)]  # parameters and the batch exist before
        returned = _interpret(first, forward.text, inputs)
        names, sizes = _arguments(backward.text), _argument_bytes(backward.text)
        tangents = sum(name.startswith(_TANGENT) for name in names)
        saved = returned[len(returned) - (len(names) - tangents) :]
        first.bind(_SAVED, itertools.chain(*saved))
        for name in first.names.keys() - {_SAVED}:
            first.drop(name)
        second = _Pass(backward.sizes, first.now)
        arguments = [storages[0] if storages else _Storage(0, 1) for storages in saved]
        arguments += [second.allocate(sizes.get(name, 0), name) for name in names if name.startswith(_TANGENT)]
        if tangents_held:
            for storage in arguments[len(saved) :]:
                storage.holders += 1
        first.drop(_SAVED)  # the backward pass alone keeps them, once per argument
        _interpret(second, backward.text, arguments)
    except (AttributeError, IndexError, KeyError, SyntaxError, TypeError, ValueError) as failure:
        raise UnsupportedError(
            f"the compiler's code cannot be followed ({type(failure).__name__}: {failure}); that of torch 2.11 to 2.13 "
            "can be"
        ) from failure
    return max(
        (Peak(first.peak, "forward", first.statement), Peak(second.peak, "backward", second.statement)),
        key=lambda peak: peak.peak_bytes,
    )


def _interpret(state: _Pass, text: str, arguments: Sequence[_Storage]) -> list[list[_Storage]]:
    """Interpret the code of a pass; returns the storages of each result."""
    statements = _statements(_function(text, "call").body)
    members = _members(statements)
    state.peak = max(state.peak, state.now)
    returned: list[list[_Storage]] = []
    for statement in statements:
        source = ast.unparse(statement)
        if isinstance(statement, ast.Assign):
            target: Any = statement.targets[0]
            if isinstance(target, ast.Tuple):
                for name, storage in zip(target.elts, arguments, strict=True):
                    state.bind(name.id, [storage])  # type: ignore[attr-defined]
            elif isinstance(target, ast.Name):
                _assign(state, target.id, statement.value, members, source)
        elif isinstance(statement, ast.Delete):
            for deleted in statement.targets:
                if isinstance(deleted, ast.Name):
                    state.drop(deleted.id)
        elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            returned = [_viewed(state, value) for value in statement.value.elts]
    return returned


def _assign(state: _Pass, name: str, value: Any, members: Mapping[str, list[str]], statement: str) -> None:
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        if called.startswith("empty_strided"):
            state.bind(name, [state.allocate(_strided_bytes(value.args[0], value.args[1], value.args[2]), statement)])
        elif called == "reinterpret_tensor" or ".view." in called or called.endswith(_VIEWS):
            state.bind(name, _viewed(state, value.args[0]))
        elif name in state.sizes:
            state.bind(name, [state.allocate(state.sizes[name], statement)])
        else:  # its results get names later, and are allocated here
            state.drop(name)
            for member in members.get(name, ()):
                if member not in state.sizes:
                    raise KeyError(f"size of {member} in {statement}")
                state.bind(f"{name}[{member}]", [state.allocate(state.sizes[member], statement)])
    elif isinstance(value, (ast.Name, ast.Subscript)):
        source = value.value if isinstance(value, ast.Subscript) else value
        member = f"{getattr(source, 'id', '')}[{name}]"
        if member in state.names:
            state.bind(name, state.names[member])
            state.drop(member)
        elif isinstance(value, ast.Name):
            state.bind(name, state.names.get(value.id, ()))


def _viewed(state: _Pass, value: Any) -> list[_Storage]:
    while isinstance(value, ast.Call) and value.args:
        value = value.args[0]
    return list(state.names.get(value.id, ())) if isinstance(value, ast.Name) else []


def _members(statements: Sequence[ast.stmt]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Name, ast.Subscript)):
            value, part = statement.value, statement.targets[0]
            whole = value.value if isinstance(value, ast.Subscript) else value
            if isinstance(whole, ast.Name) and isinstance(part, ast.Name):
                members.setdefault(whole.id, []).append(part.id)
    return members


def _function(text: str, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"no function {name!r}")


def _statements(body: Iterable[ast.stmt]) -> list[ast.stmt]:
    """Statements in execution order, those inside of ``with`` included."""
    flat: list[ast.stmt] = []
    for statement in body:
        flat += _statements(statement.body) if isinstance(statement, ast.With) else [statement]
    return flat


def _arguments(text: str) -> list[str]:
    for statement in _statements(_function(text, "call").body):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            return [name.id for name in statement.targets[0].elts]  # type: ignore[attr-defined]
    raise ValueError("a pass without arguments")


def _argument_bytes(text: str) -> dict[str, int]:
    """Bytes of the arguments, from the compiler's example of them."""
    sizes = {}
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call, name = node.value, node.targets[0]
        if isinstance(name, ast.Name) and ast.unparse(call.func) == "rand_strided":
            dtype = next(word.value for word in call.keywords if word.arg == "dtype")
            sizes[name.id] = _strided_bytes(call.args[0], call.args[1], dtype)
    return sizes


def _strided_bytes(shape: ast.expr, stride: ast.expr, dtype: Any) -> int:
    """Bytes of a tensor's storage."""
    sizes, strides = ast.literal_eval(shape), ast.literal_eval(stride)
    if math.prod(sizes) == 0:
        return 0
    reach = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return int(reach * _ITEM_BYTES[dtype.attr])
