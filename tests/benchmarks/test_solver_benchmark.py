"""The solver benchmark measures, merges and reports; on tiny problems, so nothing here says how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "solvers.py"
CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))[:4]))
FAMILIES = "decoder,moe"
TINY = f"--sizes 50 --seeds 0 --families {FAMILIES} --time-limit 10 --problems 4 --points 3 --cores {CORES}".split()


def _run(*arguments):
    command = [sys.executable, "-P", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of every section on the smallest sizes."""
    pytest.importorskip("numba")
    pytest.importorskip("ortools")
    pytest.importorskip("pulp")
    pytest.importorskip("matplotlib")
    target = tmp_path_factory.mktemp("solvers")
    others = ("baselines", "general", "front", "memory", "agreement", "--families", "moe")  # one is enough for these
    for more in (("quality",), others):
        ended = _run(*TINY, *more, "--output", target / "solvers.json")
        assert ended.returncode == 0, ended.stderr
    return target


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "solvers.json").read_text())


@pytest.mark.timeout(900)  # measured on a machine that may be busy: the fixture runs with the first test
def test_every_section_is_there_with_its_circumstances(results):
    assert list(results["sections"]) == ["quality", "baselines", "general", "front", "memory", "agreement"]
    for section in results["sections"].values():
        assert section["records"]
        assert not [record["failure"] for record in section["records"] if "failure" in record]
        assert {"date", "cpu", "cores_used", "versions", "command", "revision"} <= set(section["environment"])
        assert section["environment"]["compiled_loops"] is True


def test_every_method_was_run_and_none_is_below_the_optimum(results):
    for beside in results["sections"]["baselines"]["records"]:
        assert set(beside["runs"]) == {"greedy", "exact", "qsync", "ratio", "lp-rounding"}
        assert beside["runs"]["exact"]["termination"] == "optimal"
        optimum = beside["runs"]["exact"]["objective"]
        assert all(run["objective"] >= optimum * (1 - 1e-9) for run in beside["runs"].values())
    general = {run for record in results["sections"]["general"]["records"] for run in record["runs"]}
    assert general == {"CBC", "CP-SAT", "HiGHS", "SCIP", "exact"}
    assert results["report"]["disagreements"] == []


def test_quoted_figures_go_by_size_and_method(results):
    assert {"50 greedy", "50 exact", "50 qsync", "50 ilp-ortools", "50 ilp-pulp"} <= set(results["summary"])
    assert results["summary"]["50 exact"]["cases"] == 6
    assert results["summary"]["50 exact"]["error"]["worst"] == 0.0


def test_times_are_wall_and_processor_times(results):
    for record in results["sections"]["quality"]["records"]:
        for run in record["runs"].values():
            assert run["wall_s"] > 0
            assert run["cpu_s"] > 0


def test_random_problems_were_solved_every_way(results):
    agreement = results["report"]["agreement"]
    assert agreement["problems"] == agreement["feasible"] + agreement["infeasible"] == 4
    assert agreement["disagreements"] == 0


def test_report_has_every_part_and_the_plots_are_reproducible(folder):
    text = (folder / "solvers.md").read_text()
    for title in ("Asked and measured", "Errors, gaps and times", "Beside it", "Fronts", "Checks"):
        assert f"## {title}" in text
    plots = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
    assert set(plots) == {"solvers-gap-time.svg", "solvers-time-size.svg", "solvers-growth.svg"}
    assert _run("--report-only", "--output", folder / "solvers.json").returncode == 0
    assert {path.name: path.read_bytes() for path in folder.glob("*.svg")} == plots
    assert (folder / "solvers.md").read_text() == text


def test_a_section_replaces_only_itself(folder):
    copy = folder / "copy.json"
    copy.write_text((folder / "solvers.json").read_text())
    before = json.loads(copy.read_text())["sections"]
    assert _run("agreement", "--problems", 2, "--output", copy).returncode == 0
    after = json.loads(copy.read_text())["sections"]
    assert after["agreement"]["records"][0]["count"] == 2
    assert {name: after[name] for name in after if name != "agreement"} == {
        name: before[name] for name in before if name != "agreement"
    }


def test_a_problem_is_measured_again_in_its_place(folder):
    copy = folder / "again.json"
    copy.write_text((folder / "solvers.json").read_text())
    before = json.loads(copy.read_text())["sections"]["quality"]["records"]
    title = before[1]["job"]["title"]
    assert _run(*TINY, "quality", "--again", title, "--output", copy).returncode == 0
    after = json.loads(copy.read_text())["sections"]["quality"]["records"]
    assert [record["job"]["title"] for record in after] == [record["job"]["title"] for record in before]
    assert [number for number, record in enumerate(after) if record != before[number]] == [1]
    assert {"date", "revision"} <= set(after[1]["again"])
    assert f"1 of {len(after)} records at" in (folder / "again.md").read_text()
    assert _run(*TINY, "quality", "--again", "nothing", "--output", copy).returncode != 0


@pytest.mark.parametrize("wrong", [("nonsense",), ("--families", "nonsense"), ("--cores", "x")])
def test_wrong_arguments_are_refused_in_one_line(wrong):
    ended = _run(*wrong)
    assert ended.returncode == 2
    assert repr(wrong[-1]) in ended.stderr.splitlines()[-1]
