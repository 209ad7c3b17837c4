"""Checked reading and writing of the package's JSON files, by the type hints of dataclasses or key by key.

Every value of a file is checked for kind and range, unknown keys are refused, and errors name the place. Keys that
begin with ``x-`` are free for users: `split_extras` sets them apart on reading, `merge_extras` puts them back.

The codec is ours and not msgspec's, whose errors name neither the value nor what to do about it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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

T = TypeVar("T")

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
    """The keys of one JSON object, taken one by one; `finish` refuses those that were not taken.

    For objects that no dataclass describes (see `decode`). ``where`` names the object in errors, such as
    ``"devices 'T4'"``.

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
        version = self.take("format")
        if version != allowed:
            self.fail(f"format is {version!r}, but allowed is {allowed!r}")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        return _text(self.take(key), f"{self.where}: {key}", self.error)

    def flag(self, key: str) -> bool:
        """Return a truth value; false if there is none."""
        return _flag(self.take_or(key, False), f"{self.where}: {key}", self.error)

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
        return _list(self.take(key), f"{self.where}: {key}", self.error)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """Return a list of integers of at least ``minimum`` as a tuple."""
        values = self.sequence(key)
        for i, value in enumerate(values):
            check_integer(value, f"{self.where}: {key}[{i}]", minimum=minimum, error=self.error)
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts as a tuple."""
        return _texts(self.take(key), f"{self.where}: {key}", self.error)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object whose keys are names."""
        return _object(self.take(key), f"{self.where}: {key}", self.error)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Json:
    """How a field of a dataclass stands in JSON, where its type does not say all: ``Annotated[int, Json(minimum=1)]``.

    Attributes:
        key: Its key; empty: the name of the field.
        minimum: Of integers and numbers.
        empty: Texts may be empty.
        optional: The key may be missing; the field then has its default.
        omitted: Optional, and not written where the field has its default.
        stored: False: not in the file at all; whoever calls `decode` gives it.
        checked: False: values of a mapping are taken as they are, because the class checks them.
        read: Makes the value from JSON data and the place that names it in errors, instead of what the type says.
        write: The inverse of ``read``.
    """

    key: str = ""
    minimum: int = 0
    empty: bool = False
    optional: bool = False
    omitted: bool = False
    stored: bool = True
    checked: bool = True
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], Any] | None = None


def decode(
    cls: type[T],
    data: object,
    where: str,
    *,
    version: str | None = None,
    error: type[QSyncError] = ProblemError,
    **others: Any,
) -> T:
    """Build a dataclass from a JSON object, checked by its type hints (see `Json`).

    Fields may be integers, numbers, texts, truth values, enumerations, dataclasses, ``None`` besides any of these,
    tuples of them (``tuple[X, ...]``) and mappings from names to them; anything else (``Any``, other unions) is taken
    as it is. Every key must be there, whether or not the field has a default, unless it is marked as optional.

    Args:
        cls: The dataclass.
        data: The JSON object.
        where: Names the object in errors.
        version: The only allowed value of the key ``"format"``; None: the object has no such key.
        error: Kind of error to raise.
        others: Fields that are not in the file.

    Raises:
        QSyncError: Of kind ``error``: an unknown, missing or unusable key; the text names its place.

    Source: ours.
    """
    fields = Fields(data, where, error=error)
    if version is not None:
        fields.version(version)
    for entry in _layout(cls):
        if entry.is_optional and entry.key not in fields:
            fields.take_or(entry.key, None)
        else:
            others[entry.name] = entry.read(fields.take(entry.key), f"{where}: {entry.key}", error)
    value = cls(**others)
    fields.finish()
    return value


def encode(value: Any, *, version: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a dataclass, the inverse of `decode`; ``version`` is written as ``"format"``."""
    data: dict[str, Any] = {} if version is None else {"format": version}
    for entry in _layout(type(value)):
        item = getattr(value, entry.name)
        if not entry.is_omitted or item != entry.default:
            data[entry.key] = entry.write(item)
    return data


def check_fields(value: Any, what: str, *, error: type[QSyncError] = ProblemError) -> None:
    """Refuse integers, numbers and truth values of a dataclass that `decode` would refuse; ``what`` names it."""
    for entry in _layout(type(value)):
        if entry.is_number:
            entry.read(getattr(value, entry.name), f"{what}: {entry.name}", error)


def freeze(value: Any, *names: str, depth: int = 1) -> None:
    """Replace mappings of a frozen dataclass by read-only copies; ``depth`` 2: those in them too."""

    def copy(mapping: Mapping[Any, Any], depth: int) -> Mapping[Any, Any]:
        if depth == 1:
            return MappingProxyType(dict(mapping))
        return MappingProxyType({key: copy(item, depth - 1) for key, item in mapping.items()})

    for name in names:
        object.__setattr__(value, name, copy(getattr(value, name), depth))


_Read = Callable[[Any, str, type[QSyncError]], Any]
"""Checks and converts a JSON value, given the place that names it in errors."""
_Write = Callable[[Any], Any]
_Conversion = tuple[_Read, _Write]


class _Entry(NamedTuple):
    """One field of a dataclass, how it is read and written, and its default (`MISSING` if it has none)."""

    name: str
    key: str
    read: _Read
    write: _Write
    is_optional: bool
    is_omitted: bool
    is_number: bool
    default: Any


def _fields_in_file(cls: type) -> tuple[_Entry, ...]:
    hints = get_type_hints(cls, include_extras=True)
    entries = []
    for field in dataclasses.fields(cls):
        hint, how = _unpack(hints[field.name])
        if not (how.stored and field.init):
            continue
        read, write = _conversion(hint, how)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        entries.append(
            _Entry(
                name=field.name,
                key=how.key or field.name,
                read=read,
                write=write,
                is_optional=how.optional or how.omitted,
                is_omitted=how.omitted,
                is_number=how.read is None and {hint, *get_args(hint)} <= {int, float, bool, NoneType},
                default=default,
            )
        )
    return tuple(entries)


_layout: Callable[[type], tuple[_Entry, ...]] = functools.cache(_fields_in_file)


def _unpack(hint: Any, how: Json = Json()) -> tuple[Any, Json]:
    """A type without its annotation, and the annotation."""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        how = next((note for note in notes if isinstance(note, Json)), how)
    return hint, how


def _conversion(hint: Any, how: Json) -> _Conversion:
    """How values of a type are read and written."""
    if (custom := how.read) is not None:
        return lambda value, place, error: custom(value, place), how.write or _same
    if scalar := _scalar(hint, how):
        return scalar, _same
    if dataclasses.is_dataclass(hint):
        cls = cast("type", hint)
        return lambda value, place, error: decode(cls, value, place, error=error), encode
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        read, write = _conversion(*_unpack(next(a for a in arguments if a is not NoneType), how))
        return (
            lambda value, place, error: None if value is None else read(value, place, error),
            lambda value: None if value is None else write(value),
        )
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_conversion(arguments[0], how)
    if origin in (dict, Mapping):
        return _mapping_conversion(arguments[1], how)
    return (lambda value, place, error: value), _same


def _scalar(hint: Any, how: Json) -> _Read | None:
    if hint is bool:
        return _flag
    if hint is str:
        return _any_text if how.empty else _text
    if hint is int:

        def integer(value: Any, place: str, error: type[QSyncError]) -> int:
            check_integer(value, place, minimum=how.minimum, error=error)
            return int(value)

        return integer
    if hint is float:

        def number(value: Any, place: str, error: type[QSyncError]) -> float:
            check_number(value, place, minimum=how.minimum, error=error)
            return float(value)

        return number
    if isinstance(hint, type) and issubclass(hint, enum.Enum):

        def member(value: Any, place: str, error: type[QSyncError]) -> Any:
            try:
                return hint(value)
            except ValueError:
                allowed = ", ".join(str(choice.value) for choice in hint)
                raise error(f"{place} is {value!r}, but allowed are {allowed}") from None

        return member
    return None


def _tuple_conversion(hint: Any, how: Json) -> _Conversion:
    hint, how = _unpack(hint, how)
    if hint is str:
        return _texts, list
    read, write = _conversion(hint, how)
    has_name = dataclasses.is_dataclass(hint) and any(field.name == "name" for field in dataclasses.fields(hint))

    def read_all(values: Any, place: str, error: type[QSyncError]) -> tuple[Any, ...]:
        elements = []
        for i, value in enumerate(_list(values, place, error)):
            name = value.get("name") if has_name and isinstance(value, dict) else None
            named = f" {name!r}" if isinstance(name, str) and name else ""
            elements.append(read(value, f"{place}[{i}]{named}", error))
        return tuple(elements)

    return read_all, list if write is _same else lambda values: [write(value) for value in values]


def _mapping_conversion(hint: Any, how: Json) -> _Conversion:
    hint, inner = _unpack(hint, how)
    read, write = _conversion(hint, inner)
    separator = "{}: {}" if _scalar(hint, inner) else "{} {!r}"

    def read_all(values: Any, place: str, error: type[QSyncError]) -> dict[str, Any]:
        items = _object(values, place, error).items()
        return {name: read(value, separator.format(place, name), error) for name, value in items}

    def write_all(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: write(value) for name, value in values.items()}

    return read_all if how.checked else _object, dict if write is _same else write_all


def _same(value: Any) -> Any:
    return value


def _text(value: Any, place: str, error: type[QSyncError]) -> str:
    if not isinstance(value, str) or not value:
        raise error(f"{place} is {value!r}, but it must be a text that is not empty")
    return value


def _any_text(value: Any, place: str, error: type[QSyncError]) -> str:
    if not isinstance(value, str):
        raise error(f"{place} is {value!r}, but it must be a text")
    return value


def _flag(value: Any, place: str, error: type[QSyncError]) -> bool:
    if not isinstance(value, bool):
        raise error(f"{place} is {value!r}, but allowed are true and false")
    return value


def _list(value: Any, place: str, error: type[QSyncError]) -> list[Any]:
    if not isinstance(value, list):
        raise error(f"{place} is {_kind(value)}, but it must be a list")
    return value


def _texts(values: Any, place: str, error: type[QSyncError]) -> tuple[str, ...]:
    for value in _list(values, place, error):
        if not isinstance(value, str):
            raise error(f"{place} holds {value!r}, but it must be a list of texts")
    return tuple(values)


def _object(value: Any, place: str, error: type[QSyncError]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise error(f"{place} is {_kind(value)}, but it must be an object")
    return value


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
