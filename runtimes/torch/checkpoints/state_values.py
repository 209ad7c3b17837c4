"""State of optimizers, schedulers and such, split into JSON and tensors: what a file can hold without pickle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io.codec import LARGEST_INTEGER

_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT = "$tensor", "$tuple", "$items", "$counter", "$float"
_MARKS = frozenset({_TENSOR, _TUPLE, _ITEMS, _COUNTER, _FLOAT})
DEEPEST = 50
"""Levels of lists and dictionaries in one another that are kept; deeper state comes from no optimizer."""
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def split_state(value: Any, place: str, tensors: dict[str, Tensor], levels: int = DEEPEST) -> Any:
    """The JSON form of nested state; its tensors go to ``tensors`` under names that begin with ``place``.

    Args:
        value: Dictionaries, lists and tuples of tensors, numbers, texts, truth values and None.
        place: Where the value stands, with dots.
        tensors: Gets the tensors, which are not copied.
        levels: How many levels are left.

    Raises:
        ModelError: Something that has no form in JSON; the text says where.
    """
    if not levels:
        raise ModelError(f"the state at {place[:200]!r} is nested in more than {DEEPEST} levels; leave it out")
    if isinstance(value, Tensor):
        tensors[place] = value.detach()
        return {_TENSOR: place}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if abs(value) > LARGEST_INTEGER:
            raise ModelError(f"the state at {place!r} is {value}: a checkpoint holds integers of 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        parts = [split_state(part, f"{place}.{i}", tensors, levels - 1) for i, part in enumerate(value)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ModelError(f"the state at {place!r} has the key {key!r}: texts and integers can be kept")
        entries = {key: split_state(part, f"{place}.{key}", tensors, levels - 1) for key, part in value.items()}
        if isinstance(value, Counter):  # milestones of MultiStepLR, which asks for more than a dictionary can do
            return {_COUNTER: [[key, part] for key, part in entries.items()]}
        plain = all(isinstance(key, str) for key in entries) and not _MARKS & entries.keys()
        return entries if plain else {_ITEMS: [[key, part] for key, part in entries.items()]}
    raise ModelError(
        f"the state at {place!r} is a {type(value).__name__}, which a checkpoint cannot hold: tensors, numbers, texts, "
        "lists, tuples and dictionaries can be; leave it out of state_dict()"
    )


def join_state(data: Any, tensors: Mapping[str, Tensor], where: str = "checkpoint", levels: int = DEEPEST + 4) -> Any:
    """The inverse of `split_state`.

    Raises:
        ProblemError: ``data`` is not what `split_state` makes, or names a tensor that is not there.
    """

    def fail() -> NoReturn:
        raise ProblemError(f"{where}: state that is not as this package writes it; give a checkpoint that it wrote")

    def inner(part: Any) -> Any:
        return join_state(part, tensors, where, levels - 1)

    if not levels or (isinstance(data, float) and not math.isfinite(data)):  # a number like 1e999
        fail()
    if isinstance(data, list):
        return [inner(part) for part in data]
    if not isinstance(data, dict):
        return data
    marks = _MARKS & data.keys()
    if not marks:
        return {key: inner(part) for key, part in data.items()}
    if len(data) != 1:
        fail()
    mark, held = next(iter(data.items()))
    if mark == _TENSOR:
        if not isinstance(held, str) or held not in tensors:
            raise ProblemError(f"{where}: the tensor {held!r} is missing; give a whole checkpoint")
        return tensors[held]
    if mark == _FLOAT:
        return _FLOATS[held] if isinstance(held, str) and held in _FLOATS else fail()
    if not isinstance(held, list):
        fail()
    if mark == _TUPLE:
        return tuple(inner(part) for part in held)
    for pair in held:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str | int):
            fail()
    entries = {key: inner(part) for key, part in held}
    return Counter(entries) if mark == _COUNTER else entries


def tensors_named(data: Any, levels: int = 3 * DEEPEST + 4) -> list[str]:
    """Names of the tensors that `join_state` will ask for.

    Raises:
        ProblemError: It is nested deeper than `split_state` makes it.
    """
    if not levels:
        raise ProblemError(
            f"the state of a checkpoint is nested in more than {DEEPEST} levels: it is not of this package"
        )
    if isinstance(data, list):
        return [name for part in data for name in tensors_named(part, levels - 1)]
    if not isinstance(data, dict):
        return []
    if set(data) == {_TENSOR}:
        return [str(data[_TENSOR])]
    return [name for part in data.values() for name in tensors_named(part, levels - 1)]
