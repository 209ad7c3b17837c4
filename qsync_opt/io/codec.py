"""Typed values from JSON data and back, by the type hints of dataclasses (`decode`, `encode`) or key by key (`Fields`).

Every value is checked for kind and range, unknown keys are refused, and errors name the place in the file.

The codec is ours and not msgspec's, whose errors name neither the value nor what to do about it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io.json_files import EXTENSION_PREFIX, kind_name

LARGEST_INTEGER = 2**63 - 1
"""Largest integer of a file: every reader must be able to hold it."""
_LARGEST_FLOAT = sys.float_info.max

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


def near_match(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of ``known``, or an empty text.

    Source: ours.
    """
    by_lower = {str(candidate).lower(): str(candidate) for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]!r}?" if matches else ""


def _are_plain_names(names: Iterable[object]) -> bool:
    """Whether all names surely pass `check_name`; fast for thousands, and False for some that would pass."""
    try:
        text = "\n".join(["", *names, ""])  # type: ignore[list-item]
    except TypeError:
        return False
    return text.isascii() and "\n\n" not in text and "\n" + EXTENSION_PREFIX not in text


def check_name(name: object, what: str, *, error: type[QSyncError] = ProblemError) -> str:
    """Refuse names that files cannot hold: not a text, empty, not encodable, or beginning like an extension key."""
    if not isinstance(name, str) or not name:
        raise error(f"{what} is {name!r}, but a name must be a text that is not empty")
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise error(f"{what} is {name!r}, but a name must not hold half of a surrogate pair")
    if name.startswith(EXTENSION_PREFIX):
        raise error(f"{what} is {name!r}, but names must not begin with {EXTENSION_PREFIX!r} (kept for extension keys)")
    return name


def check_integer(value: object, what: str, *, minimum: int = 0, error: type[QSyncError] = ProblemError) -> int:
    """Refuse anything but an integer of at least ``minimum`` and of 64 bits; ``what`` names the value with its unit."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise error(f"{what} is {value!r}, but it must be an integer of at least {minimum}")
    if value > LARGEST_INTEGER:
        raise error(f"{what} is {value!r}, but it must be at most 2**63 - 1")
    return int(value)


def check_number(value: object, what: str, *, minimum: float = 0.0, error: type[QSyncError] = ProblemError) -> float:
    """Refuse anything but a finite number of at least ``minimum``; ``what`` names the value with its unit."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= _LARGEST_FLOAT:
        raise error(f"{what} is {value!r}, but it must be a finite number of at least {minimum:g}")
    return float(value)


def check_member(kind: type[E], value: object, what: str, *, error: type[QSyncError] = ProblemError) -> E:
    """The member of an enumeration that has this value; ``what`` names the value in errors."""
    try:
        return kind(value)
    except ValueError:
        allowed = [str(member.value) for member in kind]
        near = near_match(value, allowed) if isinstance(value, str) else ""
        raise error(f"{what} is {value!r}, but allowed are {', '.join(allowed)}{near}") from None


class Fields:
    """The keys of a JSON object, read one by one, for objects that no dataclass describes (see `decode`).

    `finish` refuses keys that were not read. ``where`` names the object in errors, such as ``"devices 'T4'"``.

    Source: ours.
    """

    def __init__(self, data: object, where: str, *, error: type[QSyncError] = ProblemError) -> None:
        self.where = where
        self.error = error
        self._data: dict[str, Any] = _object(data, where, error=error)
        self._taken: set[str] = set()

    def fail(self, text: str) -> NoReturn:
        """Raise an error that names this object."""
        raise self.error(f"{self.where}: {text}")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def take(self, key: str) -> Any:
        """Return the value of a required key, of any kind."""
        self._taken.add(key)
        if key not in self._data:
            self.fail(f"the key {key!r} is missing; add it")
        return self._data[key]

    def take_or(self, key: str, default: Any) -> Any:
        """Return the value of an optional key, of any kind."""
        self._taken.add(key)
        return self._data.get(key, default)

    def version(self, allowed: str) -> None:
        """Refuse any ``"format"`` but ``allowed``."""
        version = self.take("format")
        if version != allowed:
            self.fail(f"format is {version!r}, but allowed is {allowed!r}")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        return _text(self.take(key), f"{self.where}: {key}", error=self.error)

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """Return an integer of at least ``minimum``."""
        return check_integer(self.take(key), f"{self.where}: {key}", minimum=minimum, error=self.error)

    def number(self, key: str) -> float:
        """Return a finite number of at least 0."""
        return check_number(self.take(key), f"{self.where}: {key}", error=self.error)

    def sequence(self, key: str) -> list[Any]:
        """Return a list."""
        return list(_list(self.take(key), f"{self.where}: {key}", error=self.error))

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object whose keys are names."""
        return dict(_object(self.take(key), f"{self.where}: {key}", error=self.error))

    def finish(self) -> None:
        """Refuse keys that were not read, except extension keys."""
        for key in self._data:
            # A key of a YAML file may be a number.
            if key not in self._taken and not str(key).startswith(EXTENSION_PREFIX):
                self.fail(
                    f"unknown key {key!r}{near_match(str(key), self._taken)}; allowed are "
                    f"{', '.join(sorted(self._taken))} and keys that begin with {EXTENSION_PREFIX!r}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Json:
    """The JSON form of a dataclass's field beyond its type: ``Annotated[int, Json(minimum=1)]``.

    Attributes:
        key: Key in the object; empty: the name of the field.
        minimum: Of integers and numbers.
        empty: Whether texts may be empty.
        name: Whether texts must pass `check_name`.
        optional: Whether the key may be missing; the field then has its default.
        omitted: Optional, and not written if the field has its default.
        stored: Whether it is in the file; otherwise the caller of `decode` gives it.
        read: Converts JSON data, given its place for errors, instead of the type.
        write: The inverse of ``read``.
    """

    key: str = ""
    minimum: int = 0
    empty: bool = False
    name: bool = False
    optional: bool = False
    omitted: bool = False
    stored: bool = True
    read: Callable[[Any, str], Any] | None = None
    write: Callable[[Any], Any] | None = None


Name = Annotated[str, Json(name=True)]
"""A text that passes `check_name`."""


def decode(
    cls: type[T],
    data: object,
    where: str,
    *,
    version: str | None = None,
    error: type[QSyncError] = ProblemError,
    **others: Any,
) -> T:
    """Build a dataclass from a JSON object, checked by its type hints and `Json` annotations.

    Fields may be integers, numbers, texts, truth values, enumerations and dataclasses, each or None (``X | None``), and
    tuples (``tuple[X, ...]``) and mappings (``Mapping[str, X]``) of them; values of other types are not checked.
    Keys are required even if the field has a default, unless they are marked as optional.

    ``where`` names the object in errors, ``version`` is the allowed value of the key ``"format"`` (None: the object has
    no such key), and ``others`` are the fields that are not stored.

    Raises:
        QSyncError: Of kind ``error``: an unknown, missing or unusable key; the text names its place.

    Source: ours.
    """
    fields = Fields(data, where, error=error)
    if version is not None:
        fields.version(version)
    for entry in _layout(cls):
        if entry.key in fields or not (entry.how.optional or entry.how.omitted):
            others[entry.name] = entry.form.read(fields.take(entry.key), f"{where}: {entry.key}", error=error)
        else:
            fields.take_or(entry.key, None)
    value = cls(**others)
    fields.finish()
    return value


def encode(value: Any, *, version: str | None = None) -> dict[str, Any]:
    """The JSON object of a dataclass, the inverse of `decode`; ``version`` is its ``"format"``."""
    data: dict[str, Any] = {} if version is None else {"format": version}
    for entry in _layout(type(value)):
        item = getattr(value, entry.name)
        if not entry.how.omitted or item != entry.default:
            data[entry.key] = entry.form.write(item) if entry.form.write else item
    return data


def check_fields(value: Any, what: str, *, error: type[QSyncError] = ProblemError) -> None:
    """Check a dataclass as `decode` does, and convert sequences to tuples and values to members of enumerations.

    All fields of numbers, texts, truth values and enumerations are checked, and tuples and mappings of them; ``what``
    names the dataclass in errors.
    """
    for name, read in _checks(type(value)):
        old = getattr(value, name)
        try:
            new = read(old, name, error=error)
        except error:
            break
        if new is not old:
            object.__setattr__(value, name, new)
    else:
        return
    read(old, f"{what}: {name}", error=error)  # raises the error with its place, which only errors need


def freeze(value: Any, *names: str, depth: int = 1) -> None:
    """Replace mappings of a frozen dataclass by read-only copies; ``depth`` 2: mappings of mappings."""
    for name in names:
        mapping = dict(getattr(value, name))
        if depth == 2:
            mapping = {key: MappingProxyType(dict(item)) for key, item in mapping.items()}
        object.__setattr__(value, name, MappingProxyType(mapping))


class _Conversion(NamedTuple):
    """How values of a type are read (given the place that names them in errors) and written.

    ``is_plain``: reading a value that was read before only checks it.
    """

    read: Callable[..., Any]
    write: Callable[[Any], Any] | None = None
    is_plain: bool = True


class _Entry(NamedTuple):
    """One field of a dataclass, and its default (`MISSING` if it has none)."""

    name: str
    key: str
    form: _Conversion
    how: Json
    default: Any


def _fields_in_file(cls: type) -> tuple[_Entry, ...]:
    hints = get_type_hints(cls, include_extras=True)
    entries = []
    for field in dataclasses.fields(cls):
        hint, how = _unpack(hints[field.name])
        if not (how.stored and field.init):
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        entries.append(_Entry(field.name, how.key or field.name, _conversion(hint, how), how, default))
    return tuple(entries)


_layout: Callable[[type], tuple[_Entry, ...]] = functools.cache(_fields_in_file)


def _plain_fields(cls: type) -> tuple[tuple[str, Callable[..., Any]], ...]:
    return tuple((entry.name, entry.form.read) for entry in _layout(cls) if entry.form.is_plain)


_checks: Callable[[type], tuple[tuple[str, Callable[..., Any]], ...]] = functools.cache(_plain_fields)
"""The fields that `check_fields` reads, and how."""


def _unpack(hint: Any, how: Json = Json()) -> tuple[Any, Json]:
    """A type without its annotation, and the annotation."""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        how = next((note for note in notes if isinstance(note, Json)), how)
    return hint, how


def _conversion(hint: Any, how: Json) -> _Conversion:
    hint, how = _unpack(hint, how)
    if (custom := how.read) is not None:
        return _Conversion(lambda value, place, error: custom(value, place), how.write, False)
    if hint is str:
        return _Conversion(check_name if how.name else _any_text if how.empty else _text)
    if hint is int:
        return _Conversion(_integer_of(how.minimum))
    if hint is float:
        return _Conversion(functools.partial(check_number, minimum=how.minimum))
    if hint is bool:
        return _Conversion(_flag)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _Conversion(functools.partial(check_member, hint), lambda member: member.value)
    if dataclasses.is_dataclass(hint):
        return _Conversion(functools.partial(decode, cast("type", hint)), encode, False)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and len(arguments) == 2 and NoneType in arguments:
        read, write, is_plain = _conversion(next(a for a in arguments if a is not NoneType), how)
        return _Conversion(
            lambda value, place, error: None if value is None else read(value, place, error=error),
            write and (lambda value: None if value is None else write(value)),
            is_plain,
        )
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_conversion(arguments[0], how)
    if origin in (dict, Mapping):
        return _mapping_conversion(*arguments)
    return _Conversion(lambda value, place, error: value, None, False)


def _tuple_conversion(hint: Any, how: Json) -> _Conversion:
    hint, how = _unpack(hint, how)
    if hint is str and not how.name:
        return _Conversion(_texts, list)
    read, write, is_plain = _conversion(hint, how)
    has_name = dataclasses.is_dataclass(hint) and any(field.name == "name" for field in dataclasses.fields(hint))

    def read_all(values: Any, place: str, error: type[QSyncError]) -> tuple[Any, ...]:
        elements = []
        for i, value in enumerate(_list(values, place, error=error)):
            name = value.get("name") if has_name and isinstance(value, dict) else None
            named = f" {name!r}" if isinstance(name, str) and name else ""
            elements.append(read(value, f"{place}[{i}]{named}", error=error))
        return tuple(elements)

    def write_all(values: Iterable[Any]) -> list[Any]:
        return [write(value) for value in values] if write else list(values)

    return _Conversion(read_all, write_all, is_plain)


def _mapping_conversion(key: Any, hint: Any) -> _Conversion:
    hint, how = _unpack(hint)
    read, write, is_plain = _conversion(hint, how)
    separator = "{}: {}" if is_plain and get_origin(hint) is None else "{} {!r}"
    has_names = key == Name

    def read_all(values: Any, place: str, error: type[QSyncError]) -> dict[str, Any]:
        values = _object(values, place, error=error)
        if has_names and not _are_plain_names(values):
            for name in values:
                check_name(name, f"{place}: name", error=error)
        if read in (_text, check_name) and _are_plain_names(values.values()):
            return dict(values)
        return {name: read(value, separator.format(place, name), error=error) for name, value in values.items()}

    def write_all(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: write(value) for name, value in values.items()} if write else dict(values)

    return _Conversion(read_all, write_all, is_plain)


def _integer_of(minimum: int) -> Callable[..., int]:
    def read(value: Any, place: str, *, error: type[QSyncError]) -> int:
        if type(value) is int and minimum <= value <= LARGEST_INTEGER:  # nearly always, and thousands of times
            return value
        return check_integer(value, place, minimum=minimum, error=error)

    return read


def _text(value: Any, place: str, *, error: type[QSyncError]) -> str:
    if not isinstance(value, str) or not value:
        raise error(f"{place} is {value!r}, but it must be a text that is not empty")
    return value


def _of_kind(kinds: Any, complaint: str, show: Callable[[Any], str] = repr) -> Callable[..., Any]:
    def read(value: Any, place: str, *, error: type[QSyncError]) -> Any:
        if not isinstance(value, kinds):
            raise error(f"{place} is {show(value)}, but {complaint}")
        return value

    return read


_any_text = _of_kind(str, "it must be a text")
_flag = _of_kind(bool, "allowed are true and false")
_list = _of_kind((list, tuple), "it must be a list", kind_name)
_object = _of_kind((dict, Mapping), "it must be an object", kind_name)


def _texts(values: Any, place: str, *, error: type[QSyncError]) -> tuple[str, ...]:
    if type(values) is not tuple:
        _list(values, place, error=error)
    try:
        "".join(values)  # the fastest check of thousands
    except TypeError:
        value = next(value for value in values if not isinstance(value, str))
        raise error(f"{place} holds {value!r}, but it must be a list of texts") from None
    return tuple(values)
