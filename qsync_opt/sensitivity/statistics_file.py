"""How statistics are written to and read from a file: JSON, format ``qsync-statistics/3``, every value checked."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import parse_json, read_json, write_json
from qsync_opt.sensitivity.statistics import ModelStatistics

FORMAT = "qsync-statistics/3"


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Build what the type hint says from parsed JSON, refusing everything that does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(arguments[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProblemError(f"{where} is {_kind(value)}: a list is needed")
        return tuple(_decode(arguments[0], item, f"{where}[{position}]") for position, item in enumerate(value))
    if origin is not None:
        if not isinstance(value, dict):
            raise ProblemError(f"{where} is {_kind(value)}: an object is needed")
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        if value not in list(hint):
            raise ProblemError(f"{where} is {value!r}: allowed are {', '.join(hint)}")
        return hint(value)
    wanted = (int, float) if hint is float else hint
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ProblemError(f"{where} is {_kind(value)}: {hint.__name__} is needed")
    return value


def _decode_dataclass(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ProblemError(f"{where} is {_kind(value)}: an object is needed")
    hints = typing.get_type_hints(hint)
    fields = {field.name: field for field in dataclasses.fields(hint) if field.init}
    for key in value:
        if key not in fields:
            raise ProblemError(f"{where} has unknown key {key!r}: allowed are {', '.join(fields)}")
    for key in fields:
        if key not in value:
            raise ProblemError(f"{where} lacks key {key!r}: the file is incomplete, collect the statistics again")
    try:
        return hint(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})
    except ProblemError as error:
        if str(error).startswith(where):
            raise
        raise ProblemError(f"{where}: {error}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def statistics_to_json(statistics: ModelStatistics) -> str:
    """The statistics as JSON text."""
    return json.dumps({"format": FORMAT, **_encode(statistics)}, indent=1, allow_nan=False)


def _from_data(data: dict[str, Any], where: str) -> ModelStatistics:
    statistics: ModelStatistics = _decode_dataclass(
        ModelStatistics, {key: item for key, item in data.items() if key != "format"}, where
    )
    return statistics


def statistics_from_json(text: str, *, source: str = "statistics") -> ModelStatistics:
    """Read statistics from JSON text.

    Args:
        text: What ``statistics_to_json`` wrote.
        source: Name of the file for error texts.

    Raises:
        ProblemError: Not JSON, another format, an unknown or missing key, a value that is not finite or negative.
    """
    return _from_data(parse_json(text, (FORMAT,), where=source), source)


def save_statistics(statistics: ModelStatistics, path: str | os.PathLike[str]) -> None:
    """Write statistics to ``path``, complete or not at all.

    Raises:
        ProblemError: The folder cannot be written.
    """
    write_json(path, {"format": FORMAT, **_encode(statistics)}, digest=True)


def load_statistics(path: str | os.PathLike[str]) -> ModelStatistics:
    """Read statistics from ``path``.

    Raises:
        ProblemError: The file is missing or holds anything but valid statistics.
    """
    return _from_data(read_json(path, (FORMAT,)), os.fspath(path))
