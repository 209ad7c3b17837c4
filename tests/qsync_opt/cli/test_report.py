import json
import os

import pytest

from qsync_opt.cli import main
from qsync_opt.testing import chain


@pytest.fixture
def files(tmp_path, tmp_path_factory, monkeypatch):
    """A problem file and the file of its best plan, in the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    chain().problem.save("problem.json")
    main(["solve", "problem.json", "--output", "plan.json"])
    return tmp_path


def test_report_writes_one_page(run, files):
    status, out, err = run("report", "problem.json", "plan.json")
    assert (status, err) == (0, "")
    assert out.startswith("report.html: 3 operators, ")
    text = (files / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "From problem.json and plan.json, 20" in text


@pytest.mark.parametrize("front", ["greedy", "exact", "none"])
def test_json_is_one_object(run, files, front):
    status, out, _ = run("report", "problem.json", "plan.json", "--output", "r.html", "--front", front, "--json")
    found = json.loads(out)
    assert status == 0
    assert found.pop("seconds") >= 0
    assert found == {
        "report": "r.html",
        "bytes": (files / "r.html").stat().st_size,
        "operators": 3,
        "front": front,
        "feasible": True,
    }


def test_a_plan_that_breaks_limits_is_reported_with_status_3(run, files):
    plan = {"format": "qsync-plan/1", "problem": "chain", "devices": {"T4": dict.fromkeys("abc", "FP32")}}
    (files / "plan.json").write_text(json.dumps(plan))
    status, out, _ = run("report", "problem.json", "plan.json")
    assert status == 3
    assert "violated: memory of 'T4': 60 KiB" in out
    assert "The plan is not feasible" in (files / "report.html").read_text()


def test_measurements_are_shown(run, files):
    measured = {"format": "qsync-measured/1", "source": "a T4", "iteration_ns": 16000}
    (files / "m.json").write_text(json.dumps(measured))
    status, _, _ = run("report", "problem.json", "plan.json", "--measured", "m.json")
    assert status == 0
    assert "Measured: a T4." in (files / "report.html").read_text()


def test_points_of_fronts_are_kept_in_the_named_folder_or_nowhere(run, files):
    run("report", "problem.json", "plan.json", "--cache", "kept")
    kept = sorted(path.name for path in (files / "kept").rglob("*") if path.is_file())
    assert kept
    run("report", "problem.json", "plan.json", "--cache", "kept", "--out", "again.html")
    assert sorted(path.name for path in (files / "kept").rglob("*") if path.is_file()) == kept
    run("report", "problem.json", "plan.json", "--cache", "none", "--no-cache")
    assert not (files / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["problem.json"], "missing argument 'PLAN'"),
        (["none.json", "plan.json"], "none.json"),
        (["problem.json", "problem.json"], "format is 'qsync-problem/1', but allowed is 'qsync-plan/1'"),
        (["problem.json", "plan.json", "--front", "best"], "front is 'best', but allowed are greedy, exact, none"),
        (["problem.json", "plan.json", "--out", "no/r.html"], "cannot write 'no/r.html'"),
        (["problem.json", "plan.json", "--measured", "plan.json"], "allowed is 'qsync-measured/1'"),
    ],
)
def test_unusable_input_exits_2_with_one_line_and_writes_nothing(run, files, arguments, needle):
    status, out, err = run("report", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert needle in err
    assert sorted(os.listdir(files)) == ["plan.json", "problem.json"]
