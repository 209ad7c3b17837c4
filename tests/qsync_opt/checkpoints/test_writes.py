import json
import math
from pathlib import Path

import pytest

from qsync_opt.checkpoints import Part, Piece, Plan, Problem, Writer, best_interval
from qsync_opt.cli import main
from qsync_opt.errors import ProblemError
from qsync_opt.systems import evaluate, load_plan, load_problem

DATA = Path(__file__).resolve().parents[2] / "data" / "systems"
EXAMPLE = {
    "format": "qsync-writes/1",
    "name": "tiny",
    "hosts": {"h0": 2.0e9},
    "writers": {"r0": {"host": "h0", "bytes_per_s": 1.5e9}, "r1": {"host": "h0", "bytes_per_s": 1.5e9}},
    "pieces": [{"name": "w", "row_bytes": 4096, "rows": 1000, "writers": ["r0", "r1"]}],
    "optimum": None,
}


def _plan(*parts):
    return Plan(writes={"w": tuple(Part(writer=w, begin=b, end=e) for w, b, e in parts)})


def test_seconds_are_those_of_the_slowest_writer_or_host():
    problem = Problem.from_json(EXAMPLE)
    balanced = evaluate(problem, _plan(("r0", 0, 600), ("r1", 600, 1000)))
    assert balanced.objective == pytest.approx(4096 * 1000 / 2.0e9)  # the host
    assert balanced.writer_bytes == {"r0": 4096 * 600, "r1": 4096 * 400}
    assert evaluate(problem, _plan(("r1", 0, 1000))).objective == pytest.approx(4096 * 1000 / 1.5e9)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([], "end at row 0, but it has 1000 rows"),
        ([("r0", 0, 600)], "end at row 600"),
        ([("r0", 0, 600), ("r1", 601, 1000)], "rows 600 to 601 are written by nobody"),
        ([("r0", 0, 600), ("r1", 500, 1000)], "rows 500 to 600 are written twice"),
        ([("r0", 0, 1001)], "end at row 1001"),
    ],
)
def test_rows_that_are_not_written_once_break_the_plan(parts, fault):
    evaluation = evaluate(Problem.from_json(EXAMPLE), _plan(*parts))
    assert not evaluation.feasible
    assert fault in evaluation.violations[0]


def test_a_writer_that_does_not_hold_a_piece_breaks_the_plan():
    data = json.loads(json.dumps(EXAMPLE))
    data["pieces"][0]["writers"] = ["r0"]
    assert "'r1' writes rows that it does not hold" in str(
        evaluate(Problem.from_json(data), _plan(("r1", 0, 1000))).violations
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d["writers"]["r0"].update(host="h1"), "host is 'h1'"),
        (lambda d: d["writers"]["r0"].update(bytes_per_s=0), "above 0"),
        (lambda d: d["hosts"].update(h0=-1.0), "at least 0"),
        (lambda d: d["pieces"][0].update(writers=["r9"]), "'r9'"),
        (lambda d: d["pieces"][0].update(writers=["r0", "r0"]), "names one twice"),
        (lambda d: d["pieces"][0].update(rows=0), "at least 1"),
        (lambda d: d["pieces"].append(d["pieces"][0]), "used 2 times"),
        (lambda d: d["pieces"][0].update(rows=2**42), "at most 2\\*\\*53"),
        (lambda d: d.update(rows=3), "unknown key 'rows'"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, capsys, change, text):
    data = json.loads(json.dumps(EXAMPLE))
    change(data)
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProblemError, match=text):
        load_problem(path)
    assert main(["checkpoints", "solve", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_files_come_back_as_they_were(tmp_path):
    for path in DATA.glob("writes-*.json"):
        problem = load_problem(path)
        problem.save(tmp_path / "again.json")
        again = load_problem(tmp_path / "again.json")
        assert (again.pieces, again.writers, again.hosts) == (problem.pieces, problem.writers, problem.hosts)
    plan = _plan(("r0", 0, 600), ("r1", 600, 1000))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").writes == plan.writes


def test_commands_solve_and_evaluate(tmp_path, capsys):
    problem, plan = str(DATA / "writes-public-0.json"), str(tmp_path / "plan.json")
    assert main(["checkpoints", "solve", problem, "--method", "exact", "--output", plan, "--json"]) == 0
    solved = json.loads(capsys.readouterr().out)
    assert solved["termination"] == "optimal"
    assert main(["checkpoints", "evaluate", problem, plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objective"] == solved["objective"]


def test_a_piece_that_nobody_holds_is_infeasible(tmp_path, capsys):
    data = json.loads(json.dumps(EXAMPLE))
    data["pieces"][0]["writers"] = []
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(data))
    for method in ("default", "exact", "ilp", "exhaustive"):
        assert main(["checkpoints", "solve", str(path), "--method", method, "--json"]) == 3
        assert "'w'" in json.loads(capsys.readouterr().out)["reason"]


def test_the_best_interval_loses_least():
    costs = {"stall_s": 0.2, "durable_s": 3.0, "load_s": 20.0, "failures_per_day": 10.0}
    best = best_interval(**costs)
    per_s = costs["failures_per_day"] / 86400

    def lost(interval_s):
        return costs["stall_s"] / interval_s + (interval_s / 2 + costs["durable_s"] + costs["load_s"]) * per_s

    assert best.lost_share == pytest.approx(lost(best.interval_s))
    assert all(best.lost_share <= lost(best.interval_s * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    slow = best_interval(**{**costs, "durable_s": 500.0})
    assert (slow.interval_s, slow.limited_by_durable) == (500.0, True)
    assert math.isinf(best_interval(**{**costs, "failures_per_day": 0.0}).interval_s)
    with pytest.raises(ProblemError, match="stall in seconds is -1"):
        best_interval(**{**costs, "stall_s": -1.0})


def test_commands_for_folders(tmp_path, capsys):
    arguments = [
        "checkpoints",
        "interval",
        "--stall",
        "0.1",
        "--durable",
        "2",
        "--load",
        "5",
        "--failures-per-day",
        "4",
    ]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["interval_s"] == pytest.approx(math.sqrt(2 * 0.1 * 86400 / 4))
    assert main(arguments) == 0
    assert "save every 65.7 s" in capsys.readouterr().out
    assert main(["checkpoints", "list", str(tmp_path)]) == 0
    assert "has no checkpoint" in capsys.readouterr().out
    assert main(["checkpoints", "verify", str(tmp_path)]) == 2
    assert main(["checkpoints", "list", str(tmp_path / "missing")]) == 2


def test_a_writer_in_code_is_checked_too():
    with pytest.raises(ProblemError, match="above 0 bytes per second"):
        Problem(
            name="x",
            hosts={"h": 1.0},
            writers={"r": Writer(host="h", bytes_per_s=0.0)},
            pieces=(Piece(name="w", row_bytes=1, rows=1, writers=("r",)),),
        )
