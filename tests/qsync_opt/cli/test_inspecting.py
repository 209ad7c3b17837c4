"""The commands explain, pareto, diff and doctor, and completion."""

import csv
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

import qsync_opt
import qsync_opt.cli.doctor as doctor
from qsync_opt import evaluate, load_plan, uniform_plan
from qsync_opt.cli import COMMANDS
from qsync_opt.errors import ProblemError
from qsync_opt.registry import Kind, entries
from qsync_opt.testing import buckets, diamond, no_memory
from qsync_opt.training import Explainer, overview

COMMAND = [sys.executable, "-c", "import sys; from qsync_opt.cli import main; sys.exit(main())"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A problem, two plans for it, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    problem = diamond().problem
    problem.save(tmp_path / "problem.json")
    uniform_plan(problem, "FP16").save(tmp_path / "low.json")
    uniform_plan(problem, "FP32").save(tmp_path / "high.json")
    return tmp_path


def test_explain_prices_what_evaluate_says(run, files):
    status, out, _ = run("explain", files / "problem.json", files / "low.json", "c", "--json")
    data = json.loads(out)
    assert (status, data["operator"]) == (0, "c")
    raised = data["devices"]["T4"]["next_higher"]
    (found,) = [a for a in data["devices"]["T4"]["alternatives"] if a["precision"] == raised]
    problem = diamond().problem
    plan = load_plan(files / "low.json")
    changed = replace(plan, devices={"T4": {**plan.devices["T4"], "c": "FP32"}})
    before, after = evaluate(problem, plan), evaluate(problem, changed)
    assert found["iteration_change_ns"] == after.iteration_ns - before.iteration_ns == 4000
    assert found["memory_change_kib"] == after.memory_kib["T4"] - before.memory_kib["T4"]
    assert found["pushed"] == [{"operator": "add", "before": "FP16", "after": "FP32"}]


def test_explain_for_people(run, files):
    status, out, _ = run("explain", files / "problem.json", files / "low.json", "c")
    assert status == 0
    assert out.startswith("c (MatMul, adjustable) on T4: FP16\n")
    assert "FP32 would push add from FP16 to FP32" in out
    status, out, _ = run("explain", files / "problem.json", files / "low.json", "ad")  # part of one name only
    assert status == 0
    assert out.startswith("add (Add, dependent) on T4: FP16\n  Follows its inputs 'b' and 'c' into FP16.")


def test_explain_without_an_operator_lists_the_most_telling_ones(run, instance_path, tmp_path):
    problem = qsync_opt.load_problem(instance_path("bertb-time60"))
    plan = qsync_opt.solve(problem, "exact").plan
    plan.save(tmp_path / "plan.json")
    status, out, _ = run("explain", instance_path("bertb-time60"), tmp_path / "plan.json", "--json")
    told = json.loads(out)["devices"]["T4#0"]
    assert status == 0
    evaluation = evaluate(problem, plan)
    assert told["sensitivity"] == evaluation.objective
    table = problem.devices[0].operators
    own = {name: table[name][precision].sensitivity for name, precision in plan.devices["T4#0"].items()}
    ranked = sorted((value for value in own.values() if value), reverse=True)
    assert [each["sensitivity"] for each in told["most_sensitive"]] == ranked[:10]
    assert len(told["most_saving"]) == 10
    ends = []
    for each in told["most_saving"]:
        changed = replace(plan, devices={"T4#0": {**plan.devices["T4#0"], each["operator"]: each["instead"]}})
        device = evaluate(problem, changed).devices["T4#0"]
        ends.append(device.backward_end_ns - evaluation.devices["T4#0"].backward_end_ns)
        assert device.backward_end_ns < evaluation.devices["T4#0"].backward_end_ns
    assert ends == sorted(ends)
    status, out, _ = run("explain", instance_path("bertb-time60"), tmp_path / "plan.json")
    first = told["most_sensitive"][0]
    assert out.splitlines()[3].split()[:2] == [first["operator"], first["precision"]]
    assert "most computing time to save" in out
    status, _, err = run("explain", instance_path("bertb-time60"), tmp_path / "plan.json", "--device", "T5")
    assert (status, err.count("\n")) == (2, 1)


def test_a_small_share_of_the_sensitivity_is_not_shown_as_none(run, files):
    data = json.loads((files / "problem.json").read_text())
    data["devices"][0]["operators"]["a"]["FP16"]["sensitivity"] = 1e-6
    (files / "problem.json").write_text(json.dumps(data))
    status, out, _ = run("explain", files / "problem.json", files / "low.json")
    assert status == 0
    assert [line.split()[:5] for line in out.splitlines()[3:6]] == [
        ["c", "FP16", "4", "67", "%"],
        ["b", "FP16", "2", "33", "%"],
        ["a", "FP16", "1e-6", "under", "1"],
    ]


def test_an_overview_says_that_nothing_stands_out_and_takes_no_count_of_nothing(run, files):
    problem = diamond().problem
    single = {name: {"FP32": costs["FP32"]} for name, costs in problem.devices[0].operators.items()}
    only = replace(problem, devices=(replace(problem.devices[0], operators=single),))
    only.save(files / "problem.json")
    status, out, _ = run("explain", files / "problem.json", files / "high.json")
    assert (status, "no operator adds sensitivity" in out) == (0, True)
    with pytest.raises(ProblemError, match="count is 0"):
        overview(Explainer(only, load_plan(files / "high.json")), "T4", 0)


def test_diff_lists_changes_and_their_cost(run, files):
    arguments = ["diff", files / "low.json", files / "high.json", "--problem", files / "problem.json"]
    status, out, _ = run(*arguments, "--json")
    data = json.loads(out)
    assert (status, data["equal"]) == (0, False)
    assert [(c["operator"], c["decided"]) for c in data["devices"]["T4"]] == [
        ("a", True),
        ("b", True),
        ("c", True),
        ("add", False),
    ]
    assert data["cost"]["first"]["objective"] == 7.0
    assert data["cost"]["second"]["objective"] == 0.0
    status, out, _ = run(*arguments)
    assert "T4: 3 FP16 > FP32; 1 operators follow" in out
    assert "sensitivity     7" in out
    assert run(*arguments, "--exit-code")[0] == 1


def test_diff_of_equal_plans_and_of_plans_for_different_devices(run, files):
    status, out, _ = run("diff", files / "low.json", files / "low.json", "--exit-code")
    assert (status, out) == (0, "T4: no change\n")
    plan = load_plan(files / "low.json")
    replace(plan, problem="elsewhere", devices={"A10": {"a": "FP16"}}).save(files / "other.json")
    status, out, _ = run("diff", files / "low.json", files / "other.json")
    assert status == 0
    assert "the plans are for 'diamond' and 'elsewhere'" in out
    assert "T4: 3 FP16 > -" in out
    assert "A10: 1 - > FP16" in out
    assert "2 of the operators are in one plan only: the plans may be of different models" in out
    replace(plan, devices={"T4": {"x": "FP16"}}).save(files / "other.json")
    status, out, _ = run("diff", files / "low.json", files / "other.json")
    assert "the plans have no operator in common, so they are of different models" in out


def test_a_plan_that_was_edited_as_the_documentation_says_is_taken(run, files):
    data = json.loads((files / "low.json").read_text())
    data["devices"]["T4"]["a"] = "FP32"
    (files / "mine.json").write_text(json.dumps(data))
    status, _, err = run("evaluate", files / "problem.json", files / "mine.json")
    assert status != 0
    assert "remove x-digest if the change was meant" in err
    del data["x-digest"]
    (files / "mine.json").write_text(json.dumps(data))
    status, out, _ = run("diff", files / "low.json", files / "mine.json", "--problem", files / "problem.json")
    assert (status, "T4: 1 FP16 > FP32" in out) == (0, True)


def test_pareto_writes_table_json_csv_svg_and_plans(run, files):
    outputs = ["--csv", files / "f.csv", "--svg", files / "f.svg", "--plans", files / "plans"]
    status, out, err = run("pareto", files / "problem.json", "--whole", "--method", "exact", "--json", *outputs)
    front = json.loads(out)
    assert (status, err) == (0, "")
    # The front of the instance's own list of plans, by time: memory excludes raising all and raising b and c.
    points = [(p["iteration_ns"], p["objective"]) for p in front["points"]]
    assert points == [(17200, 2.0), (14200, 3.0), (10200, 7.0)]
    rows = list(csv.DictReader((files / "f.csv").read_text().splitlines()))
    assert [(int(r["iteration_ns"]), float(r["objective"])) for r in rows] == points
    tree = ElementTree.parse(files / "f.svg")
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}circle")) == 3
    plans = [load_plan(path) for path in sorted((files / "plans").iterdir())]
    assert [evaluate(diamond().problem, plan).iteration_ns for plan in plans] == [17200, 14200, 10200]


def test_pareto_says_that_a_folder_holds_plans_of_another_front(run, files, caplog):
    arguments = ["pareto", files / "problem.json", "--no-cache", "--plans", files / "plans"]
    run(*arguments, "--whole", "--method", "exact")
    assert caplog.text == ""
    run(*arguments, "--points", 1)
    assert "also holds 2 plans that are not of this front, first plan-001.json" in caplog.text
    assert len(list((files / "plans").iterdir())) == 3


def test_pareto_reuses_its_cache(run, files):
    first = json.loads(run("pareto", files / "problem.json", "--points", 4, "--json")[1])
    second = json.loads(run("pareto", files / "problem.json", "--points", 4, "--json")[1])
    assert first["reused_points"] == 0
    assert second["reused_points"] == len(list((files / "cache").rglob("*.json"))) > 0
    assert first["points"] == second["points"]
    anew = json.loads(run("pareto", files / "problem.json", "--points", 4, "--no-cache", "--json")[1])
    assert (anew["reused_points"], anew["points"]) == (0, first["points"])


def test_pareto_trusts_no_cache(run, files, caplog):
    run("pareto", files / "problem.json", "--points", 2)
    for path in (files / "cache").rglob("*.json"):
        data = json.loads(path.read_text())
        if data["measurement"]["point"]:
            data["measurement"]["point"]["objective"] += 1.0
            data.pop("x-digest")  # with it the entry would only be damaged, and be sought again
            path.write_text(json.dumps(data))
    status, _, err = run("pareto", files / "problem.json", "--points", 2)
    assert status == 2
    assert "empty that folder" in err
    for path in (files / "cache").rglob("*.json"):
        data = json.loads(path.read_text())
        data["measurement"] = {"point": {"limit": -1}}
        path.write_text(json.dumps(data))
    assert run("pareto", files / "problem.json", "--points", 2)[0] == 0
    assert "seeking again" in caplog.text


def test_pareto_against_memory(run, files):
    status, out, _ = run("pareto", files / "problem.json", "--against", "memory", "--points", 50, "--json")
    points = json.loads(out)["points"]
    assert status == 0
    assert [point["use"] for point in points] == sorted((p["memory_kib"]["T4"] for p in points), reverse=True)
    assert points[0]["objective"] == 0.0
    assert points[-1]["memory_kib"] == {"T4": 35}


def test_pareto_without_any_plan_exits_3(run, files):
    no_memory().problem.save(files / "problem.json")
    status, out, _ = run("pareto", files / "problem.json")
    assert status == 3
    assert "no plan keeps the limits" in out


def test_pareto_refuses_what_makes_no_sense(run, files):
    for arguments, needle in (
        (["--device", "T4"], "'T4' is for a front against memory"),
        (["--against", "memory", "--whole"], "give a number of points"),
        (["--plans", files / "problem.json"], "cannot make the folder"),
    ):
        status, _, err = run("pareto", files / "problem.json", *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert needle in err


def test_an_interrupted_front_keeps_its_points_and_goes_on(instance_path, tmp_path):
    """Ctrl-C after some points: exit status 130, nothing half-written, and the next run starts from the cache."""
    script = (
        "import sys, qsync_opt.cli.app\n"
        "import qsync_opt.training.pareto as cache\n"
        "real = cache.FrontCache.put\n"
        "def loud(self, *arguments):\n"
        "    real(self, *arguments)\n"
        "    print('kept', file=sys.stderr, flush=True)\n"
        "cache.FrontCache.put = loud\n"
        "sys.exit(qsync_opt.cli.app.main())\n"
    )
    arguments = ["pareto", str(instance_path("bertb-native")), "--points", "2000", "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments, "--csv", str(tmp_path / "f.csv")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for _ in range(3):
        assert process.stderr.readline() == "kept\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=250)
    assert (process.returncode, out) == (130, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("qsync-opt pareto: interrupted; ")
    kept = list((tmp_path / "cache").rglob("*.json"))
    # The interrupt may fall between the writing of a point and its counting.
    assert any(f"; {count} points are kept in" in last for count in (len(kept), len(kept) - 1)), last
    assert not (tmp_path / "f.csv").exists()
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"] == []
    again = [*COMMAND, *arguments[:3], "2", *arguments[4:], "--json"]
    done = subprocess.run(again, capture_output=True, text=True, timeout=250, check=True)
    assert json.loads(done.stdout)["reused_points"] >= 1


def test_doctor_tells_what_is_there(run):
    status, out, _ = run("doctor", "--json")
    data = json.loads(out)
    assert (status, data["healthy"], data["lacking"]) == (0, True, [])
    by_name = {(f["area"], f["name"]): f for f in data["findings"]}
    assert by_name["core", "numpy"]["health"] == "ok"
    assert by_name["device", "cpu"]["precisions"] == ["INT8", "BF16", "FP32"]
    assert "linear" in by_name["device", "cpu"]["kernels"]
    for kind in Kind:
        for name in entries(kind):
            assert (kind.value, name) in by_name
    status, out, _ = run("doctor")
    assert (status, out.splitlines()[-1]) == (0, "healthy")


def test_doctor_names_what_is_missing_without_importing_it(monkeypatch, run):
    real = doctor.importlib.util.find_spec
    hidden = {"torch", "onnxruntime", "pulp"}
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    with monkeypatch.context() as strict:
        strict.setattr(doctor.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
        findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["torch"].health == "missing"
    assert "pip install 'qsync-opt[torch]'" in findings["torch"].advice
    assert (findings["pulp"].health, findings["pulp"].detail) == ("missing", "needs pulp")
    status, out, _ = run("doctor", "--require", "pulp,ortools")
    assert status == 1
    assert out.splitlines()[-2:] == ["required, but not here: pulp", "not healthy"]
    for nothing in ("", " ,"):
        status, out, err = run("doctor", "--require", nothing)
        assert (status, out) == (2, "")
        assert "--require names nothing" in err


def test_doctor_reports_what_is_broken(monkeypatch, run):
    def broken():
        raise ImportError("libcudart.so.13: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "_devices", broken)
    status, out, _ = run("doctor")
    assert status == 1
    assert "BROKEN  torch devices" in out
    assert "ImportError: libcudart.so.13: cannot open shared object file; reinstall it" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("qsync-opt so", ["solve"]),
        ("qsync-opt solve --me", ["--method"]),
        ("qsync-opt solve --method exa", ["exact"]),
        ("qsync-opt solve --solver ", list(entries(Kind.SOLVER))),
        ("qsync-opt pareto --against ", ["latency", "memory"]),
    ],
)
def test_completion_proposes_commands_options_and_registered_names(words, expected):
    position = len(words.split()) if words.endswith(" ") else len(words.split()) - 1
    environment = {"_QSYNC_OPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=250, env={**os.environ, **environment}, check=True
    )
    assert done.stdout.split() == expected


def test_help_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from qsync_opt.cli import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'numpy', 'onnx', 'torch', 'rich', 'yaml', 'matplotlib', 'pandas', 'ortools'} & set(sys.modules)\n"
        "print(len(sys.modules), *sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    loaded, *heavy = done.stderr.split()
    assert heavy == []
    assert int(loaded) < 300


def test_every_command_describes_itself(run):
    for command in COMMANDS:
        status, out, _ = run(command, "--help")
        assert status == 0
        assert out.startswith(f"Usage: qsync-opt {command} [OPTIONS]")


def test_two_devices_need_a_choice(run, files):
    problem = buckets().problem
    second = replace(problem.devices[0], name="A10")
    replace(problem, devices=(problem.devices[0], second)).save(files / "problem.json")
    status, _, err = run("pareto", files / "problem.json", "--against", "memory")
    assert status == 2
    assert "T4, A10" in err
    status, out, _ = run("pareto", files / "problem.json", "--against", "memory", "--device", "A10", "--json")
    assert (status, json.loads(out)["device"]) == (0, "A10")
