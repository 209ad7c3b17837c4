"""How every file of this package is read and written: checked JSON in, whole files out.

Reading never trusts a file: each value is checked for kind and range, keys that nobody asked for are refused, and the
error names the place. Keys that begin with ``x-`` are free for users: they are set apart on reading and put back on
writing. Writing goes to a temporary file that is then renamed, so a reader never meets half a file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io.files import check_writable as check_writable
from qsync_opt.io.files import read_text
from qsync_opt.io.files import write_text as write_text

EXTENSION_PREFIX = "x-"
"""Keys that begin with this are kept and never interpreted."""

DIGEST_KEY = "x-digest"
"""Key of the digest that some of our files carry of themselves; it may be left out."""

LARGEST_INTEGER = 2**63 - 1
"""Integers beyond this are refused: every reader of a file must be able to hold them."""

LARGEST_JSON_BYTES = 256 * 2**20
"""Larger files are refused: what is parsed takes several times the memory, and no file of ours comes near."""

DEEPEST_JSON = 200
"""Files with more lists and objects in one another are refused: Python could not even show them in an error."""

Extras = Mapping[tuple[str, ...], Any]
"""Extension keys by their path; an element of a list is addressed by its ``name`` where it has one, else by number."""


def near_match(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty text.

    Source: ours.
    """
    by_lower = {str(candidate).lower(): str(candidate) for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


def read_json(
    path: str | os.PathLike[str],
    formats: Iterable[str],
    *,
    error: type[QSyncError] = ProblemError,
    again: str = "write it again",
) -> Any:
    """Read a JSON object from ``path`` and check its ``"format"`` key.

    Args:
        path: The file.
        formats: Versions that the caller understands, such as ``"qsync-problem/1"``.
        error: Kind of error to raise.
        again: What to do about a damaged file.

    Returns:
        The object, extension keys included and ``"format"`` left in.

    Raises:
        QSyncError: Of kind ``error``: missing, unreadable or truncated file, not an object, a key that stands twice,
            NaN or infinity, or another format version.

    Source: ours.
    """
    text = read_text(path, "JSON", LARGEST_JSON_BYTES, error=error)
    return parse_json(text, formats, where=os.fspath(path), error=error, again=again)


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
                raise error(f"{where}: the key {key!r} stands twice in one object; keys and names must be unique")
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
        raise error(f"{where}: the file holds {_kind(data)}, but a JSON object is needed")
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
    """Whether lists and objects stand in one another in more than so many levels."""
    level = [data]
    for _ in range(levels):
        parts = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for part in parts for child in part if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _digest(data: Any) -> str:
    """Of JSON data as it is parsed, whatever its layout in the file."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _check_digest(data: dict[str, Any], where: str, error: type[QSyncError], again: str) -> None:
    """Take the digest out of what was parsed, and refuse data that is not what it was made of."""
    stated = data.pop(DIGEST_KEY, None)
    try:
        fits = stated is None or stated == _digest(data)
    except (RecursionError, ValueError) as failure:  # nested as deep as parses, or a number of too many digits
        raise error(f"{where}: not usable JSON ({failure})") from failure
    if not fits:
        raise error(
            f"{where}: {DIGEST_KEY} is {stated!r}, but that is not the digest of what the file holds: it was damaged "
            f"or changed after it was written; {again}, or remove {DIGEST_KEY} if the change was meant"
        )


def write_json(
    path: str | os.PathLike[str], data: Any, *, digest: bool = False, error: type[QSyncError] = ProblemError
) -> None:
    """Write ``data`` as JSON to ``path``: to a temporary file beside it, then renamed.

    Args:
        path: The file.
        data: What it is to hold.
        digest: Add a digest of the data (``x-digest``), which `read_json` compares: a bit that turns over on a disk or
            on the way would else make another number of the same form.
        error: Kind of error to raise.

    Raises:
        QSyncError: Of kind ``error``: the folder cannot be written, or ``data`` holds NaN, infinity or another value
            that JSON has no form for; nothing is left behind.

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
    """Put extension keys back where `split_extras` found them (in place) and return ``data``.

    A key whose place no longer exists (its operator was removed, say) is left out with it.

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


def are_plain_names(names: Iterable[object]) -> bool:
    """True for most names that `check_name` lets pass, and never where it refuses one; quick for thousands."""
    try:
        text = "\n".join(["", *names, ""])  # type: ignore[list-item]
    except TypeError:
        return False
    return text.isascii() and "\n\n" not in text and "\n" + EXTENSION_PREFIX not in text


def check_name(name: object, what: str, *, error: type[QSyncError] = ProblemError) -> None:
    """Refuse names that files cannot carry: not a text, empty, not encodable, or beginning like an extension key."""
    if not isinstance(name, str) or not name:
        raise error(f"{what} is {name!r}, but a name must be a text that is not empty")
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise error(f"{what} is {name!r}, but a name must not hold half of a surrogate pair")
    if name.startswith(EXTENSION_PREFIX):
        raise error(f"{what} is {name!r}, but names must not begin with {EXTENSION_PREFIX!r} (kept for extension keys)")


def check_integer(value: object, what: str, *, minimum: int = 0, error: type[QSyncError] = ProblemError) -> None:
    """Refuse anything but an integer of at least ``minimum`` and of 64 bits; ``what`` names the value with its unit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise error(f"{what} is {value!r}, but it must be an integer of at least {minimum}")
    if value > LARGEST_INTEGER:
        raise error(f"{what} is {value!r}, but it must be at most 2**63 - 1")


def check_number(value: object, what: str, *, minimum: float = 0.0, error: type[QSyncError] = ProblemError) -> None:
    """Refuse anything but a finite number of at least ``minimum``; ``what`` names the value with its unit."""
    # The comparison is with math.isfinite last: an integer too large for a float must not pass for a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or value < minimum:
        raise error(f"{what} is {value!r}, but it must be a finite number of at least {minimum:g}")


class Fields:
    """The keys of one JSON object, taken one by one; `finish` refuses those that nobody took.

    ``where`` names the object in errors, such as ``"devices 'T4'"``.

    Source: ours.
    """

    def __init__(self, data: object, where: str, *, error: type[QSyncError] = ProblemError) -> None:
        self.where = where
        self.error = error
        if not isinstance(data, dict):
            self.fail(f"{_kind(data)} stands where an object is needed")
        self._data: dict[str, Any] = data
        self._taken: set[str] = set()

    def fail(self, text: str) -> NoReturn:
        """Raise the caller's kind of error, naming this object."""
        raise self.error(f"{self.where}: {text}")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def take(self, key: str) -> Any:
        """Return the value of a key that must be there, whatever its kind."""
        self._taken.add(key)
        if key not in self._data:
            self.fail(f"the key {key!r} is missing; add it")
        return self._data[key]

    def take_or(self, key: str, default: Any) -> Any:
        """Return the value of ``key``, or ``default`` if it is not there."""
        self._taken.add(key)
        return self._data.get(key, default)

    def version(self, allowed: str) -> None:
        """Refuse any ``"format"`` but ``allowed``."""
        found = self.take("format")
        if found != allowed:
            self.fail(f"format is {found!r}, but allowed is {allowed!r}")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        value = self.take(key)
        if not isinstance(value, str) or not value:
            self.fail(f"{key} is {value!r}, but it must be a text that is not empty")
        return value

    def flag(self, key: str) -> bool:
        """Return a truth value; false if there is none."""
        value = self.take_or(key, False)
        if not isinstance(value, bool):
            self.fail(f"{key} is {value!r}, but allowed are true and false")
        return value

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """Return an integer of at least ``minimum``."""
        value = self.take(key)
        check_integer(value, f"{self.where}: {key}", minimum=minimum, error=self.error)
        return int(value)

    def number(self, key: str, *, minimum: float = 0.0) -> float:
        """Return a finite number of at least ``minimum``."""
        value = self.take(key)
        check_number(value, f"{self.where}: {key}", minimum=minimum, error=self.error)
        return float(value)

    def sequence(self, key: str) -> list[Any]:
        """Return a list."""
        value = self.take(key)
        if not isinstance(value, list):
            self.fail(f"{key} is {_kind(value)}, but it must be a list")
        return value

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """Return a list of integers of at least ``minimum`` as a tuple."""
        values = self.sequence(key)
        for i, value in enumerate(values):
            check_integer(value, f"{self.where}: {key}[{i}]", minimum=minimum, error=self.error)
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts as a tuple."""
        values = self.sequence(key)
        for value in values:
            if not isinstance(value, str):
                self.fail(f"{key} holds {value!r}, but it must be a list of texts")
        return tuple(values)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object whose keys are names."""
        value = self.take(key)
        if not isinstance(value, dict):
            self.fail(f"{key} is {_kind(value)}, but it must be an object")
        return value

    def children(self, key: str) -> Iterator[tuple[str, Fields]]:
        """Yield name and fields of each object in the object at ``key``."""
        for name, value in self.mapping(key).items():
            yield name, Fields(value, f"{self.where}: {key} {name!r}", error=self.error)

    def finish(self) -> None:
        """Refuse the keys that were not taken (extension keys excepted)."""
        for key in self._data:
            # A key of a YAML file may be a number.
            if key not in self._taken and not str(key).startswith(EXTENSION_PREFIX):
                self.fail(
                    f"unknown key {key!r}{near_match(str(key), self._taken)}; allowed are "
                    f"{', '.join(sorted(self._taken))} and keys that begin with {EXTENSION_PREFIX!r}"
                )


def _address(element: Any, index: int) -> str:
    """Step of a path to an element of a list: its name where it has one, so that paths survive reordering."""
    name = element.get("name") if isinstance(element, dict) else None
    return name if isinstance(name, str) else str(index)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


_KINDS: Mapping[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "a number")
