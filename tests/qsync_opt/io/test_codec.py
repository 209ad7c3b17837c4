"""Dataclasses from JSON objects and back, by their type hints."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io import Json, Name, check_fields, decode, encode, freeze


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    size: Annotated[int, Json(minimum=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    kind: Annotated[str, Json(key="type")]
    note: Annotated[str, Json(empty=True)] = ""
    weight: float
    is_ready: bool = False
    colour: Colour = Colour.RED
    part: Part
    spare: Part | None = None
    limit: int | None = None
    shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    by_name: Mapping[str, Part] = field(default_factory=dict)
    table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    options: Mapping[Name, Name] = field(default_factory=dict)
    point: Annotated[complex, Json(read=lambda data, place: complex(*data), write=lambda z: [z.real, z.imag])] = 0j
    anything: Any = None
    later: Annotated[int, Json(optional=True)] = 7
    seldom: Annotated[tuple[int, ...], Json(omitted=True)] = ()
    extras: Annotated[Mapping[str, Any], Json(stored=False)] = field(default_factory=dict)


WHOLE = Whole(
    kind="box",
    weight=1.5,
    part=Part(name="a", size=1),
    spare=Part(name="b", size=2),
    shape=(2, 3),
    labels=("x", ""),
    parts=(Part(name="c", size=3),),
    counts={"n": 4},
    by_name={"d": Part(name="d", size=5)},
    table={"row": {"column": 0.5}},
    options={"o": "p"},
    point=1 + 2j,
    anything=[None],
)


def test_a_dataclass_survives_its_json() -> None:
    data = encode(WHOLE, version="whole/1")
    assert decode(Whole, data, "w", version="whole/1") == WHOLE
    assert list(data)[:3] == ["format", "type", "note"]
    assert data["part"] == {"name": "a", "size": 1}
    assert data["colour"] == "red"
    assert data["point"] == [1.0, 2.0]
    assert data["later"] == 7
    assert not {"seldom", "extras"} & data.keys()


def test_keys_may_be_missing_only_where_that_is_said() -> None:
    data = encode(WHOLE)
    del data["later"]
    assert decode(Whole, data, "w").later == 7
    del data["counts"]
    with pytest.raises(ProblemError, match=r"^w: the key 'counts' is missing; add it$"):
        decode(Whole, data, "w")


def test_fields_that_are_not_stored_come_from_the_caller() -> None:
    assert decode(Whole, encode(WHOLE), "w", extras={"x-a": 1}).extras == {"x-a": 1}
    with pytest.raises(ProblemError, match="unknown key 'extras'"):
        decode(Whole, {**encode(WHOLE), "extras": {}}, "w")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("type", "", "w: type is '', but it must be a text that is not empty"),
        ("note", 1, "w: note is 1, but it must be a text"),
        ("weight", -1, "w: weight is -1, but it must be a finite number of at least 0"),
        ("is_ready", 1, "w: is_ready is 1, but allowed are true and false"),
        ("colour", ["red"], "w: colour is ['red'], but allowed are red, blue"),
        ("part", None, "w: part is null, but it must be an object"),
        ("part", {"name": "a", "size": 0}, "w: part: size is 0, but it must be an integer of at least 1"),
        ("spare", {"name": "a"}, "w: spare: the key 'size' is missing; add it"),
        ("limit", 1.5, "w: limit is 1.5, but it must be an integer of at least 0"),
        ("shape", {}, "w: shape is an object, but it must be a list"),
        ("shape", [1, -1], "w: shape[1] is -1, but it must be an integer of at least 0"),
        ("labels", ["a", 1], "w: labels holds 1, but it must be a list of texts"),
        ("parts", [{"name": "c", "size": 0}], "w: parts[0] 'c': size is 0, but it must be an integer of at least 1"),
        ("parts", [{"size": 1}], "w: parts[0]: the key 'name' is missing; add it"),
        ("counts", [], "w: counts is a list, but it must be an object"),
        ("counts", {"n": True}, "w: counts: n is True, but it must be an integer of at least 0"),
        ("by_name", {"d": 3}, "w: by_name 'd' is a number, but it must be an object"),
        ("table", {"r": {"c": "1"}}, "w: table 'r': c is '1', but it must be a finite number of at least 0"),
    ],
)
def test_errors_name_place_value_and_what_is_allowed(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        decode(Whole, {**encode(WHOLE), key: value}, "w", error=ModelError)
    assert str(caught.value) == message


def test_unknown_keys_and_other_versions_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"unknown key 'size_'; did you mean 'size'\?; allowed are name, size and"):
        decode(Part, {"name": "a", "size": 1, "x-free": 1, "size_": 2}, "p")
    with pytest.raises(ProblemError, match="p: format is 'part/2', but allowed is 'part/1'"):
        decode(Part, {"format": "part/2", "name": "a", "size": 1}, "p", version="part/1")


def test_a_dataclass_checks_its_numbers_as_its_file_is_checked() -> None:
    check_fields(WHOLE, "whole")
    with pytest.raises(ProblemError, match="whole: size is 0, but it must be an integer of at least 1"):
        check_fields(Part(name="a", size=0), "whole")


def test_frozen_mappings_are_copies() -> None:
    table = {"row": {"column": 0.5}}
    whole = Whole(kind="box", weight=1, part=WHOLE.part, table=table, counts={})
    freeze(whole, "counts")
    freeze(whole, "table", depth=2)
    table["row"]["column"] = 2.0
    assert whole.table == {"row": {"column": 0.5}}
    for frozen in (whole.counts, whole.table, whole.table["row"]):
        with pytest.raises(TypeError):
            frozen["a"] = 1  # type: ignore[index]
