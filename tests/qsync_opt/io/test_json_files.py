import json
import os
import stat

import pytest

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.io import (
    Fields,
    check_integer,
    check_number,
    check_writable,
    merge_extras,
    read_json,
    split_extras,
    write_json,
    write_text,
)


def _write(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_what_it_wrote(tmp_path):
    data = {"format": "f/1", "list": [1, 2.5, "ä"]}
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json", ["f/1"]) == data


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('{"format": "f/1", "a": ', "truncated"),
        ("", "truncated"),
        ('{"format": "f/1", "a": NaN}', "NaN"),
        ('{"format": "f/1", "a": [-Infinity]}', "-Infinity"),
        ('{"format": "f/1", "a": 1, "a": 2}', "'a' is repeated"),
        ('{"format": "f/2"}', "format is 'f/2', but allowed is 'f/1'"),
        ("{}", "format is None"),
        ("[1]", "list"),
        ("3", "number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "f/1", "a": ' + "[" * 200 + "]" * 200 + "}", "nested too deeply: at most 200 levels are read"),
        ('{"format": "f/1", "a": ' + "9" * 5000 + "}", "not usable JSON"),
    ],
)
def test_bad_files_get_one_line_that_names_the_file(tmp_path, text, needle):
    path = _write(tmp_path, text)
    with pytest.raises(ProblemError) as caught:
        read_json(path, ["f/1"])
    assert needle in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_directory_and_binary(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_json(tmp_path / "none.json", ["f/1"], error=ModelError)
    with pytest.raises(ProblemError, match="cannot read"):
        read_json(tmp_path, ["f/1"])
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="not UTF-8"):
        read_json(tmp_path / "b", ["f/1"])


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = _write(tmp_path, "old")
    with pytest.raises(ProblemError, match="cannot write"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(ProblemError, match="cannot write"):
        write_json(path, {"a": object()})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_write_into_missing_folder_is_refused_before_and_after(tmp_path):
    target = tmp_path / "none" / "a.json"
    with pytest.raises(ProblemError, match="cannot write"):
        write_json(target, {})
    with pytest.raises(ProblemError, match="existing folder"):
        check_writable(target)
    with pytest.raises(ProblemError, match="existing folder"):
        check_writable(tmp_path)
    check_writable(tmp_path / "a.json")


def test_written_files_have_ordinary_permissions(tmp_path):
    write_json(tmp_path / "a.json", {})
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o666 & ~mask


def test_extension_keys_survive_reordering_and_go_with_their_place():
    data = {"x-top": 1, "list": [{"name": "a", "x-a": 2}, {"name": "b", "x-b": 3}, [4]], "map": {"k": {"x-k": 5}}}
    clean, extras = split_extras(data)
    assert clean == {"list": [{"name": "a"}, {"name": "b"}, [4]], "map": {"k": {}}}
    clean["list"].reverse()
    merged = merge_extras(clean, extras)
    assert merged["list"][1:] == [{"name": "b", "x-b": 3}, {"name": "a", "x-a": 2}]
    assert merged["x-top"] == 1
    assert merged["map"] == {"k": {"x-k": 5}}
    del data["list"][0]
    without = merge_extras(split_extras(data)[0], extras)
    assert "x-a" not in json.dumps(without)


def test_fields_refuse_unknown_keys_with_the_nearest_one():
    fields = Fields({"alpha": 1, "alpha_": 2, "x-free": 3}, "thing")
    assert fields.integer("alpha") == 1
    with pytest.raises(ProblemError, match=r"thing: unknown key 'alpha_'; did you mean 'alpha'\?; allowed are alpha"):
        fields.finish()


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_names_that_no_file_can_have_are_refused(tmp_path, name):
    for action in (check_writable, lambda path: write_json(path, {}), lambda path: read_json(path, ["f/1"])):
        with pytest.raises(ProblemError, match=r"cannot (read|write)"):
            action(tmp_path / name)


def test_what_is_no_ordinary_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for action in (check_writable, lambda path: write_json(path, {})):
        with pytest.raises(ProblemError, match="cannot write"):
            action(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_stays_a_link(tmp_path):
    path = _write(tmp_path, "old")
    (tmp_path / "link").symlink_to(path)
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads(path.read_text()) == {"a": 1}


def test_texts_that_no_file_can_hold_are_refused(tmp_path):
    with pytest.raises(ProblemError, match="cannot write"):
        write_text(tmp_path / "a", "\ud800")
    assert os.listdir(tmp_path) == []


def test_integers_have_64_bits():
    check_integer(2**63 - 1, "n")
    with pytest.raises(ProblemError, match=r"n is 9223372036854775808, but it must be at most 2\*\*63 - 1"):
        check_integer(2**63, "n")


@pytest.mark.parametrize("value", [True, 1.0, -1, "1", None, [1]])
def test_integers_are_checked(value):
    with pytest.raises(ProblemError, match="must be an integer of at least 0"):
        check_integer(value, "n")


@pytest.mark.parametrize("value", [True, -0.5, float("nan"), float("inf"), "1", None, 10**400])
def test_numbers_are_checked(value):
    with pytest.raises(ProblemError, match="must be a finite number of at least 0"):
        check_number(value, "n")


@pytest.mark.parametrize(
    ("call", "needle"),
    [
        (lambda f: f.text("none"), "the key 'none' is missing"),
        (lambda f: f.text("empty"), "empty is ''"),
        (lambda f: f.sequence("map"), "map is an object, but it must be a list"),
        (lambda f: f.mapping("list"), "list is a list, but it must be an object"),
    ],
)
def test_fields_name_place_and_kind(call, needle):
    fields = Fields({"empty": "", "map": {"k": 1}, "list": [1]}, "thing")
    with pytest.raises(ProblemError) as caught:
        call(fields)
    assert needle in str(caught.value)
