"""JSON files: read with bounds on size and depth, written whole, with a digest and users' own extension keys.

Keys that begin with ``x-`` are free for users: `split_extras` takes them out on reading, `merge_extras` puts them back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io.files import read_text, write_text

T = TypeVar("T")
EXTENSION_PREFIX = "x-"
"""Begins keys that are kept and never interpreted."""

DIGEST_KEY = "x-digest"
"""Key of a file's digest of itself; it may be missing."""

LARGEST_JSON_BYTES = 256 * 2**20
"""Largest file that is read: parsed data takes several times the memory, and the package writes no file near it."""

DEEPEST_JSON = 200
"""Most levels of nested lists and objects: Python cannot even show deeper ones in an error."""

ESTIMATES_KEY = "x-estimates"
"""Top-level extension key of problem and plan files: ``{"costs": {device: text}, "sensitivity": text}``."""
Extras = Mapping[tuple[str, ...], Any]
"""Extension keys by their path; an element of a list is addressed by its ``name`` where it has one, else by number."""


def carried_estimates(extras: Extras) -> dict[tuple[str, ...], Any]:
    """The extension keys of a problem that its plans have too."""
    return {(ESTIMATES_KEY,): extras[ESTIMATES_KEY,]} if (ESTIMATES_KEY,) in extras else {}


def read_json(
    path: str | os.PathLike[str],
    formats: Iterable[str],
    *,
    error: type[QSyncError] = ProblemError,
    again: str = "write it again",
) -> Any:
    """Read a JSON object from a file and check its ``"format"`` key.

    ``formats`` are the accepted versions, such as ``"qsync-problem/1"``; ``again`` says, for errors, what to do about a
    damaged file. The object has its extension keys and ``"format"``.

    Raises:
        QSyncError: Of kind ``error``: missing, unreadable or truncated file, not an object, a repeated key, NaN or
            infinity, or another format version.

    Source: ours.
    """
    text = read_text(path, "JSON", LARGEST_JSON_BYTES, error=error)
    return parse_json(text, formats, where=os.fspath(path), error=error, again=again)


def load_file(path: str | os.PathLike[str], readers: Mapping[str, Callable[[Any], T]]) -> T:
    """Read a JSON file and build what it describes; ``readers`` maps each accepted ``"format"`` to a builder.

    Raises:
        ProblemError: As `read_json` says, or the builder refuses the data; the text names the file.
    """
    data = read_json(path, readers)
    try:
        return readers[data["format"]](data)
    except ProblemError as failure:
        raise ProblemError(f"{os.fspath(path)}: {failure}") from failure


def parse_json(
    text: str,
    formats: Iterable[str],
    *,
    where: str,
    error: type[QSyncError] = ProblemError,
    again: str = "write it again",
) -> Any:
    """Parse a JSON object and check its ``"format"`` key; see `read_json`. ``where`` names the text in errors."""

    def refuse_constant(name: str) -> NoReturn:
        place = re.search(rf"[\[:,]\s*{name}", text)
        line = 1 if place is None else text.count("\n", 0, place.end()) + 1
        raise error(f"{where}: the file holds {name} (line {line}), but every number must be finite; correct it")

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise error(f"{where}: the key {key!r} is repeated in one object; keys and names must be unique")
            result[key] = value
        return result

    try:
        data = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_twice)
    except json.JSONDecodeError as failure:
        raise error(
            f"{where}: not valid JSON at line {failure.lineno}, column {failure.colno} ({failure.msg}); "
            f"the file may be truncated, {again}"
        ) from failure
    except RecursionError as failure:
        raise error(f"{where}: not usable JSON, it is nested too deeply") from failure
    except ValueError as failure:  # an integer with more digits than Python converts
        raise error(f"{where}: not usable JSON ({failure})") from failure
    if not isinstance(data, dict):
        raise error(f"{where}: the file holds {kind_name(data)}, but a JSON object is needed")
    if _is_deeper(data, DEEPEST_JSON):
        raise error(f"{where}: not usable JSON, it is nested too deeply: at most {DEEPEST_JSON} levels are read")
    _check_digest(data, where, error, again)
    allowed = tuple(formats)
    version = data.get("format")
    if version not in allowed:
        kinds = " or ".join(map(repr, allowed))
        raise error(f"{where}: format is {version!r}, but allowed is {kinds}; give a file of that kind")
    return data


def _is_deeper(data: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    level = [data]
    for _ in range(levels):
        parts = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for part in parts for child in part if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _check_digest(data: dict[str, Any], where: str, error: type[QSyncError], again: str) -> None:
    digest = data.pop(DIGEST_KEY, None)
    if digest is not None and digest != _digest(data):
        raise error(
            f"{where}: {DIGEST_KEY} is {digest!r}, but that is not the digest of what the file holds: it was damaged "
            f"or changed after it was written; {again}, or remove {DIGEST_KEY} if the change was meant"
        )


def write_json(
    path: str | os.PathLike[str], data: Any, *, digest: bool = False, error: type[QSyncError] = ProblemError
) -> None:
    """Write ``data`` as JSON to ``path``, whole or not at all.

    ``digest`` adds a digest of the data (``x-digest``) that `read_json` compares, because a flipped bit may leave a
    valid number.

    Raises:
        QSyncError: Of kind ``error``: the folder cannot be written, or ``data`` holds NaN, infinity or another value
            that JSON cannot hold; nothing is left behind.

    Source: ours.
    """
    try:
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        if digest:
            parsed = json.loads(text)
            text = json.dumps({**parsed, DIGEST_KEY: _digest(parsed)}, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as failure:
        raise error(f"cannot write {os.fspath(path)!r}: {failure}") from failure
    write_text(path, text, error=error)


def split_extras(data: Any) -> tuple[Any, dict[tuple[str, ...], Any]]:
    """Return ``data`` without its extension keys (``x-*``, at any depth), and those keys by path.

    Source: ours.
    """
    extras: dict[tuple[str, ...], Any] = {}

    def strip(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [strip(child, (*path, _address(child, i))) for i, child in enumerate(node)]
        if not isinstance(node, dict):
            return node
        result = {}
        for key, value in node.items():
            if key.startswith(EXTENSION_PREFIX):
                extras[(*path, key)] = value
            else:
                result[key] = strip(value, (*path, key))
        return result

    return strip(data, ()), extras


def merge_extras(data: dict[str, Any], extras: Extras) -> dict[str, Any]:
    """Put extension keys back to where `split_extras` took them from (in place) and return ``data``.

    A key whose place no longer exists (because an operator was removed) is dropped.

    Source: ours.
    """
    for path, value in extras.items():
        node: Any = data
        for step in path[:-1]:
            if isinstance(node, list):
                node = next((child for i, child in enumerate(node) if _address(child, i) == step), None)
            else:
                node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[path[-1]] = value
    return data


def _address(element: Any, index: int) -> str:
    """Path step of a list element: its name where it has one, so that paths survive reordering."""
    name = element.get("name") if isinstance(element, dict) else None
    return name if isinstance(name, str) else str(index)


_KINDS: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}


def kind_name(value: object) -> str:
    """The kind of a JSON value, for errors."""
    return "null" if value is None else _KINDS.get(type(value), "a number")
