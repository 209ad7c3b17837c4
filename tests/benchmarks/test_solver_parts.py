"""Several runs of the solver benchmark take every measurement once, and their parts make one file."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, FOLDER)
try:
    from solvers_parts import Share, joined, write_part
finally:
    sys.path.remove(FOLDER)

JOBS = [{"title": title, "runs": [{"label": "exact"}]} for title in ("one", "two", "three")]
ENVIRONMENT = {
    "revision": "abc", "cpu": "some", "cores": 4, "python": "3.11", "versions": {}, "date": "2026-01-01",
    "cores_used": 1, "load_before": 0.5, "seconds": 2.0,
    "command": ["python", "solvers.py", "quality", "--cores", "3", "--share", "x"],
}  # fmt: skip


def _part(path, *jobs, **changes):
    write_part(path, "quality", {**ENVIRONMENT, **changes}, [{"job": job, "took": path.name} for job in jobs])
    return path


def test_every_measurement_is_taken_once(tmp_path):
    first, second = Share(tmp_path / "taken"), Share(tmp_path / "taken")
    assert [first.take("quality", JOBS[0]), second.take("quality", JOBS[0])] == [True, False]
    assert second.take("general", JOBS[0])
    assert second.take("quality", JOBS[1])
    assert not first.take("quality", JOBS[1])


def test_parts_make_one_section_in_the_order_of_its_jobs(tmp_path):
    parts = [_part(tmp_path / "a.json", JOBS[2], seconds=5.0), _part(tmp_path / "b.json", JOBS[0])]
    section, missing = joined(parts, "quality", JOBS)
    assert [record["job"]["title"] for record in section["records"]] == ["one", "three"]
    assert missing == ["two exact"]
    described = section["environment"]
    assert (described["runs"], described["cores_used"], described["seconds"]) == (2, 2, 5.0)
    assert described["command"] == ["python", "solvers.py", "quality"]
    assert joined(parts, "general", JOBS) == (None, [])


def test_a_part_keeps_its_other_sections(tmp_path):
    path = _part(tmp_path / "a.json", JOBS[0])
    write_part(path, "general", ENVIRONMENT, [])
    assert set(json.loads(path.read_text())["sections"]) == {"quality", "general"}


def test_parts_of_different_revisions_are_refused(tmp_path):
    parts = [_part(tmp_path / "a.json", JOBS[0]), _part(tmp_path / "b.json", JOBS[1], revision="def")]
    with pytest.raises(SystemExit, match="differ in revision"):
        joined(parts, "quality", JOBS)


def test_what_is_no_part_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(SystemExit, match="has format 'other'"):
        joined([path], "quality", JOBS)
