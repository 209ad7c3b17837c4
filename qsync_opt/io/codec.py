"""Typed values from JSON data and back, by the type hints of dataclasses (`decode`, `encode`) or key by key (`Fields`).

Every value is checked for kind and range, unknown keys are refused, and errors name the place in the file.

The codec is ours and not msgspec's, whose errors name neither the value nor what to do about it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io.json_files import EXTENSION_PREFIX, kind_name

LARGEST_INTEGER = 2**63 - 1
"""Largest integer of a file: every reader must be able to hold it."""

T = TypeVar("T")


def near_match(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty text.

    Source: ours.
    """
    by_lower = {str(candidate).lower(): str(candidate) for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


def are_plain_names(names: Iterable[object]) -> bool:
    """Whether all names surely pass `check_name`; fast for thousands, and False for some that would pass."""
    try:
        text = "\n".join(["", *names, ""])  # type: ignore[list-item]
    except TypeError:
        return False
    return text.isascii() and "\n\n" not in text and "\n" + EXTENSION_PREFIX not in text


def check_name(name: object, what: str, *, error: type[QSyncError] = ProblemError) -> None:
    """Refuse names that files cannot hold: not a text, empty, not encodable, or beginning like an extension key."""
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
            self.fail(f"{kind_name(data)} stands where an object is needed")
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
        raise error(f"{place} is {kind_name(value)}, but it must be a list")
    return value


def _texts(values: Any, place: str, error: type[QSyncError]) -> tuple[str, ...]:
    for value in _list(values, place, error):
        if not isinstance(value, str):
            raise error(f"{place} holds {value!r}, but it must be a list of texts")
    return tuple(values)


def _object(value: Any, place: str, error: type[QSyncError]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise error(f"{place} is {kind_name(value)}, but it must be an object")
    return value


def _finite(value: float) -> bool:
    """Whether a number is finite as a float, which a large integer is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
