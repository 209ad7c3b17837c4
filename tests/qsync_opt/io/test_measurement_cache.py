import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.io import MeasurementCache

ENVIRONMENT = {"device": "test", "threads": 1}


def test_what_was_put_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = MeasurementCache(tmp_path, ENVIRONMENT)
    assert first.get("linear") is None
    first.put("linear", {"ns": 5})
    assert MeasurementCache(tmp_path, ENVIRONMENT).get("linear") == {"ns": 5}


def test_another_environment_shares_nothing(tmp_path: Path) -> None:
    MeasurementCache(tmp_path, ENVIRONMENT).put("linear", {"ns": 5})
    assert MeasurementCache(tmp_path, {**ENVIRONMENT, "threads": 2}).get("linear") is None


def test_without_a_folder_measurements_live_with_the_object() -> None:
    cache = MeasurementCache(None, ENVIRONMENT)
    cache.put("linear", {"ns": 5})
    assert cache.get("linear") == {"ns": 5}
    assert MeasurementCache(None, ENVIRONMENT).get("linear") is None


@pytest.mark.parametrize("text", ["{", '{"format": "qsync-measurement/2"}', "[]"])
def test_a_broken_file_is_named_and_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    MeasurementCache(tmp_path, ENVIRONMENT).put("linear", {"ns": 5})
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert MeasurementCache(tmp_path, ENVIRONMENT).get("linear") is None
    assert str(path) in caplog.text


def test_a_file_under_a_foreign_name_is_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = MeasurementCache(tmp_path, ENVIRONMENT)
    cache.put("linear", {"ns": 5})
    (linear,) = tmp_path.rglob("*.json")
    cache.put("matmul", {"ns": 7})
    (matmul,) = set(tmp_path.rglob("*.json")) - {linear}
    matmul.write_text(linear.read_text())
    with caplog.at_level(logging.WARNING):
        assert MeasurementCache(tmp_path, ENVIRONMENT).get("matmul") is None
    assert "another measurement" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemError, match="cannot make the folder"):
        MeasurementCache(tmp_path / "file", ENVIRONMENT)
    for name in ("a" * 300, "a\0b"):
        with pytest.raises(ProblemError, match="cannot make the folder"):
            MeasurementCache(tmp_path / name, ENVIRONMENT)


WRITER = """
import sys
from qsync_opt.io import MeasurementCache

environment = {"device": "test", "threads": 1}
cache = MeasurementCache(sys.argv[1], environment)
for i in range(100):
    cache.put(f"key {i % 10}", {"writer": int(sys.argv[2]), "i": i})
    assert MeasurementCache(sys.argv[1], environment).get(f"key {i % 10}") is not None
"""


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(seed)]) for seed in (1, 2)]
    assert [writer.wait(timeout=250) for writer in writers] == [0, 0]
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 10
    for path in files:
        assert json.loads(path.read_text())["measurement"]["writer"] in (1, 2)
    assert not list(tmp_path.rglob("*.tmp"))
