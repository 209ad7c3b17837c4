import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.testing import chain, no_memory

COMMAND = [sys.executable, "-c", "import sys; from qsync_opt.cli import main; sys.exit(main())"]


@pytest.fixture
def problem_file(tmp_path):
    path = tmp_path / "chain.json"
    chain().problem.save(path)
    return path


@pytest.mark.parametrize("method", ["greedy", "qsync", "exact", "exhaustive"])
def test_solve_writes_one_json_object_and_a_plan_that_evaluates(run, problem_file, tmp_path, method):
    plan = tmp_path / "plan.json"
    status, out, _ = run("solve", problem_file, "--method", method, "--output", plan, "--json")
    solved = json.loads(out)
    assert status == 0
    assert (solved["objective"], solved["method"], solved["point"]) == (0.25, method, "feasible")
    status, out, _ = run("evaluate", problem_file, plan, "--json")
    evaluated = json.loads(out)
    assert status == 0
    assert evaluated == {
        "objective": 0.25,
        "iteration_ns": 15000,
        "memory_kib": {"T4": 50},
        "sensitivity": {"T4": 0.25},
        "feasible": True,
        "violations": [],
    }
    assert {key: solved[key] for key in ("objective", "iteration_ns", "memory_kib", "sensitivity")} == {
        key: evaluated[key] for key in ("objective", "iteration_ns", "memory_kib", "sensitivity")
    }


def test_infeasible_exits_3_prints_the_object_and_writes_no_plan(run, tmp_path):
    path, plan = tmp_path / "p.json", tmp_path / "plan.json"
    no_memory().problem.save(path)
    status, out, _ = run("solve", path, "--output", plan, "--json")
    solved = json.loads(out)
    assert status == 3
    assert (solved["termination"], solved["point"]) == ("infeasible", "none")
    assert "30 KiB" in solved["reason"]
    assert not plan.exists()
    status, out, _ = run("solve", path)
    assert status == 3
    assert "30 KiB" in out


def test_the_recorded_infeasible_problem(run, instance_path):
    status, out, _ = run("solve", instance_path("resnet50-infeasible"), "--json")
    assert status == 3
    assert "memory limit of device 'T4#0', 2788993 KiB" in json.loads(out)["reason"]
    assert "2850674 KiB" in json.loads(out)["reason"]


def test_an_infeasible_plan_exits_3(run, problem_file, tmp_path):
    plan = {"format": "qsync-plan/1", "problem": "chain", "devices": {"T4": dict.fromkeys("abc", "FP32")}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    status, out, _ = run("evaluate", problem_file, tmp_path / "plan.json", "--json")
    assert status == 3
    assert json.loads(out)["violations"] == [
        "memory of 'T4': 60 KiB, but the limit is 50 KiB",
        "iteration time: 18000 ns, but the limit is 15000 ns",
    ]
    status, out, _ = run("evaluate", problem_file, tmp_path / "plan.json")
    assert status == 3
    assert "violated: memory of 'T4'" in out


def test_compare_prints_one_list_in_the_asked_order(run, problem_file):
    status, out, _ = run("compare", problem_file, "--methods", "exact,greedy", "--time-limit", 60, "--json")
    rows = json.loads(out)
    assert status == 0
    assert [row["method"] for row in rows] == ["exact", "greedy"]
    assert [row["feasible"] for row in rows] == [True, True]
    assert rows[0]["gap"] == 0.0
    assert rows[1]["bound"] <= rows[0]["objective"]


def test_tables_for_people(run, problem_file, instance_path):
    status, out, _ = run("compare", problem_file)
    assert status == 0
    assert out.splitlines()[0].split() == ["method", "ended", "objective", "bound", "gap", "iteration", "seconds"]
    assert "0.25" in out
    status, out, _ = run("solve", problem_file, "--method", "ilp")
    assert "chain: optimal by ilp with ortools" in out
    assert "1 FP16, 2 FP32" in out
    status, out, _ = run("compare", instance_path("resnet50-infeasible"), "--methods", "greedy")
    assert status == 3
    assert "2850674 KiB" in out


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["solve", "none.json"], "none.json"),
        (["solve"], "qsync-opt solve: missing argument 'PROBLEM'; see qsync-opt solve --help"),
        (["slove", "P"], "no such command 'slove'; did you mean 'solve'?; allowed are solve, evaluate, compare, "),
        ([], "qsync-opt: missing command; see qsync-opt --help"),
        (
            ["solve", "P", "--mehtod", "exact"],
            "qsync-opt solve: no such option '--mehtod'; did you mean '--method'?; see qsync-opt solve --help",
        ),
        (["solve", "P", "plan.json"], "(plan.json); see qsync-opt solve --help"),
        (["solve", "P", "--method", "exacts"], "unknown formulation 'exacts'; did you mean 'exact'?"),
        (["solve", "P", "--method", "exact", "--solver", "cbc"], "unknown solver 'cbc'"),
        (["solve", "P", "--method", "exhaustive", "--solver", "pulp"], "lacks a feature: uses a solver"),
        (["solve", "P", "--time-limit", "0"], "time limit is 0.0 s"),
        (["solve", "P", "--time-limit", "soon"], "invalid value for '--time-limit': 'soon' is not a valid"),
        (["solve", "P", "--time-limit"], "qsync-opt solve: option '--time-limit' requires an argument"),
        (["solve", "P", "--gap", "2"], "gap is 2.0"),
        (["pareto", "P", "--against", "latnecy"], "'latnecy'; did you mean 'latency'?; allowed are latency, memory"),
        (["pareto", "P", "--points", "1.5"], "'1.5' is not a valid"),
        (["audit", "t", "--graph", "g", "--costs", "c", "d", "--plan", "p", "--top", "-1"], "--top is -1"),
        (["solve", "P", "--output", "no/such/folder/plan.json"], "no/such/folder/plan.json"),
        (["evaluate", "P", "none.json"], "none.json"),
        (["evaluate", "P", "P"], "format is 'qsync-problem/1', but allowed is 'qsync-plan/1'"),
        (["compare", "P", "--methods", ","], "--methods is empty"),
        (["compare", "P", "--methods", "greedy,best"], "unknown formulation 'best'"),
    ],
)
def test_unusable_input_exits_2_with_one_line(run, problem_file, arguments, needle):
    status, out, err = run(*[problem_file if a == "P" else a for a in arguments])
    assert status == 2
    assert out == ""
    assert needle in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_verbose_stands_before_the_command_or_after_it(problem_file, place):
    arguments = ["solve", str(problem_file), "--method", "exact", "--json"]
    arguments = ["-v", *arguments] if place == "before" else [*arguments, "--verbose"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=True)
    assert json.loads(done.stdout)["objective"] == 0.25
    assert "INFO qsync_opt.training.planner: solving chain by exact\n" in done.stderr
    quiet = [argument for argument in arguments if argument not in ("-v", "--verbose")]
    done = subprocess.run([*COMMAND, *quiet], capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr == ""


def test_a_gap_of_rounding_is_none_for_people_and_exact_in_json(run, instance_path):
    """This instance's optimum and its bound differ in the last bit of a double."""
    arguments = ["solve", instance_path("bertb-native"), "--method", "exact"]
    status, out, _ = run(*arguments)
    assert (status, "gap 0 %)" in out) == (0, True), out
    solved = json.loads(run(*arguments, "--json")[1])
    assert solved["gap"] == max(solved["objective"] - solved["bound"], 0.0) / solved["objective"]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (
            ["solve", "problem.json", "--output", "./problem.json"],
            "cannot write './problem.json': that file is read too",
        ),
        (["solve", "problem.json", "--output", "link.json"], "cannot write 'link.json': that file is read too"),
        (["report", "problem.json", "plan.json", "--output", "plan.json"], "that file is read too"),
        (["pareto", "problem.json", "--csv", "problem.json"], "that file is read too"),
        (["pareto", "problem.json", "--csv", "f", "--svg", "f"], "cannot write 'f': that file is written too"),
        (["plan", "m.onnx", "c.yaml", "--output", "c.yaml"], "that file is read too; give another file name"),
        (["plan", "m.onnx", "c.yaml", "--output", "p", "--save-problem", "p"], "that file is written too"),
        (["solve", "a\0b", "--output", "p"], "embedded null byte"),
    ],
)
def test_no_command_writes_over_what_it_reads(run, problem_file, tmp_path, monkeypatch, arguments, needle):
    monkeypatch.chdir(tmp_path)
    problem_file.rename("problem.json")
    (tmp_path / "link.json").symlink_to("problem.json")
    (tmp_path / "plan.json").write_text("kept")
    (tmp_path / "c.yaml").write_text("kept")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert needle in err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plan_that_a_solve_starts_from_may_be_replaced(run, problem_file, tmp_path):
    plan = tmp_path / "plan.json"
    assert run("solve", problem_file, "--output", plan)[0] == 0
    assert run("solve", problem_file, "--start", plan, "--method", "exact", "--output", plan)[0] == 0
    assert json.loads(plan.read_text())["solution"]["method"] == "exact"


def test_the_help_says_what_it_is_and_where_to_begin(run):
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    out = " ".join(out.split())  # however wide the terminal is
    assert "Precision plans for synchronous data-parallel training" in out
    assert "qsync-opt demo" in out
    assert "torch nor a solver" not in out  # what matters to who imports the package


def test_an_operator_that_no_name_is_like_is_told_with_some_that_are_there(run, problem_file, tmp_path):
    plan = tmp_path / "plan.json"
    assert run("solve", problem_file, "--output", plan)[0] == 0
    status, out, err = run("explain", problem_file, plan, "zzzz")
    assert (status, out) == (2, "")
    assert "has no operator 'zzzz'; adjustable are '" in err
    assert "give a name or a part of one" in err


def test_a_truncated_file_exits_2(run, problem_file):
    problem_file.write_text(problem_file.read_text()[:500])
    status, out, err = run("solve", problem_file, "--json")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "truncated" in err


def test_a_plan_for_another_model_exits_2_and_names_operators(run, instance_path, problem_file, tmp_path):
    assert run("solve", problem_file, "--output", tmp_path / "plan.json")[0] == 0
    status, _, err = run("evaluate", instance_path("tiny"), tmp_path / "plan.json")
    assert status == 2
    assert "has no device type" in err or "'a', 'b', 'c'" in err


def test_an_interrupt_before_the_command_is_known_ends_cleanly(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("qsync_opt.cli.app.command_line", interrupted)
    assert run("solve", "p.json") == (130, "", "qsync-opt: interrupted\n")


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert out.startswith("qsync-opt ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_exits_2_with_one_line(problem_file):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "solve", str(problem_file), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=250,
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [1, 2])
def test_a_closed_stream_does_no_harm(problem_file, closed):
    command = [*COMMAND, "solve", str(problem_file), "--json"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert closed == 1 or json.loads(done.stdout)["objective"] == 0.25


def test_names_beyond_the_terminal_are_written_all_the_same(tmp_path):
    replace(chain().problem, name="äß").save(tmp_path / "p.json")
    done = subprocess.run(
        [*COMMAND, "solve", str(tmp_path / "p.json")],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(r"\xe4\xdf: ")


def test_native_chatter_stays_off_standard_output(problem_file):
    script = (
        "import os, sys, qsync_opt.cli.app, qsync_opt.training.planner as planner\n"
        "real = planner.solve\n"
        "def noisy(*arguments, **options):\n"
        "    os.write(1, b'native note\\n')\n"
        "    return real(*arguments, **options)\n"
        "planner.solve = noisy\n"
        "sys.exit(qsync_opt.cli.app.main())\n"
    )
    arguments = [sys.executable, "-c", script, "solve", str(problem_file), "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=250, check=True)
    assert json.loads(done.stdout)["objective"] == 0.25
    assert "native note" in done.stderr


@pytest.mark.parametrize("solver", ["ortools", "pulp", "scip", "cp-sat"])
def test_each_solver_as_a_process_prints_one_object(problem_file, solver):
    arguments = ["solve", str(problem_file), "--method", "exact", "--solver", solver, "--json"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["termination"] == "optimal"
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("solver", ["ortools", "pulp"])
def test_interrupt_ends_cleanly(instance_path, tmp_path, solver):
    plan = tmp_path / "plan.json"
    script = (
        "import sys, qsync_opt.cli.app\n"
        "from qsync_opt.formulations.training.ilp.solve import run\n"
        "import qsync_opt.formulations.training.ilp.solve as program\n"
        "def loud(*arguments, **options):\n"
        "    print('solving', file=sys.stderr, flush=True)\n"
        "    return run(*arguments, **options)\n"
        "program.run = loud\n"
        "sys.exit(qsync_opt.cli.app.main())\n"
    )
    # This takes seconds, and the interrupt is sent when the native solver is about to start.
    arguments = ["solve", str(instance_path("bertl-mix")), "--method", "ilp", "--solver", solver]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments, "--output", str(plan)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert "solving" in process.stderr.readline()
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "qsync-opt solve: interrupted"
    assert "Traceback" not in err
    assert list(Path(tmp_path).iterdir()) == []


def test_interrupt_while_a_solver_is_loaded_ends_cleanly(problem_file, tmp_path):
    # ortools' native part calls this function while the import machinery loads it, and prints what is raised there.
    script = (
        "import os, signal, sys, google.protobuf.descriptor_pool as pool, qsync_opt.cli.app\n"
        "default = pool.Default\n"
        "def interrupted():\n"
        "    if 'importlib' not in sys._getframe(1).f_code.co_filename:\n"
        "        return default()\n"
        "    pool.Default = default\n"
        "    print('loading', file=sys.stderr, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return default()\n"
        "pool.Default = interrupted\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(qsync_opt.cli.app.main())\n"
    )
    arguments = ["solve", str(problem_file), "--method", "ilp", "--solver", "ortools"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert done.stderr.splitlines() == ["loading", "qsync-opt solve: interrupted"]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (["--steps", "x"], "'x' is not a valid"),
        (["--steps", "3"], "at least 20 steps"),
        (["--seed", "-1"], "--seed is -1: allowed are whole numbers from 0 to 9223372036854775807"),
        (["--seed", "1.5"], "'1.5' is not a valid"),
    ],
)
def test_the_demo_refuses_bad_numbers_in_one_line(arguments, needle, run):
    status, out, err = run("demo", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert needle in err


def test_the_demo_refuses_a_file_as_its_folder(tmp_path, run):
    path = tmp_path / "file"
    path.write_text("keep")
    status, _, err = run("demo", "--output", path)
    assert (status, "must be a folder" in err) == (2, True)
    assert path.read_text() == "keep"


def test_solve_starts_from_a_plan(run, problem_file, tmp_path):
    plan = tmp_path / "plan.json"
    assert run("solve", problem_file, "--output", plan)[0] == 0
    status, out, _ = run("solve", problem_file, "--method", "exact", "--start", plan, "--json")
    assert (status, json.loads(out)["objective"]) == (0, 0.25)
    status, _, err = run("solve", problem_file, "--method", "qsync", "--start", plan)
    assert status == 2
    assert "lacks a feature" in err


def test_solve_ties_operators(run, problem_file, tmp_path):
    plan = tmp_path / "plan.json"
    assert run("solve", problem_file, "--tied", "a,b,c", "--output", plan)[0] == 0
    chosen = json.loads(plan.read_text())["devices"]["T4"]
    assert len(set(chosen.values())) == 1
    assert run("solve", problem_file, "--tied", "blocks")[0] == 0  # there are none, which is no error
    for group, needle in (("a", "names 1 operators; give at least two"), ("a,nowhere", "'nowhere' is no adjustable")):
        status, _, err = run("solve", problem_file, "--tied", group)
        assert status == 2
        assert needle in err


def test_the_least_time_under_a_budget_of_sensitivity(run, problem_file, tmp_path):
    plan = tmp_path / "plan.json"
    status, out, _ = run("solve", problem_file, "--sensitivity-budget", "0.25", "--json", "--output", plan)
    found = json.loads(out)
    assert status == 0
    assert found["termination"] == "optimal"
    assert found["objective"] <= 0.25
    assert found["iteration_ns"] == found["iteration_bound_ns"] == 15000
    assert run("evaluate", problem_file, plan)[0] == 0
    status, out, _ = run("solve", problem_file, "--sensitivity-budget", "0.25")
    assert "(proved least)" in out
    assert "1 FP16, 2 FP32" in out


@pytest.mark.parametrize("method", ["greedy", "exact", "qsync"])
def test_the_method_that_is_named_seeks_the_least_time(run, instance_path, method):
    arguments = ("solve", instance_path("tiny"), "--sensitivity-budget", "0.02", "--json")
    found = json.loads(run(*arguments, "--method", method)[1])
    assert found["method"] == method
    assert found["solver"].startswith("bound and fix" if method == "exact" else f"{method}, not proved")
    assert found["termination"] == ("optimal" if method == "exact" else "feasible")
    status, _, err = run(*arguments, "--method", "greedi")
    assert status == 2
    assert "unknown formulation 'greedi'" in err


def test_a_budget_that_no_plan_keeps_names_the_least(run, tmp_path):
    problem = chain().problem
    device = replace(problem.devices[0], memory_limit_kib=30)  # all in FP16
    path = tmp_path / "p.json"
    replace(problem, devices=(device,)).save(path)
    status, out, _ = run("solve", path, "--sensitivity-budget", "0.1", "--json")
    assert status == 3
    found = json.loads(out)
    assert (found["termination"], found["point"], found["iteration_ns"]) == ("infeasible", "none", None)
    assert "the least that could be met is" in found["reason"]
    status, _, err = run("solve", path, "--sensitivity-budget", "0.1", "--gap", "0.1")
    assert status == 2
    assert "--gap does not go with --sensitivity-budget" in err


def test_a_solver_named_for_the_default_method_is_used(run, problem_file):
    status, out, _ = run("solve", problem_file, "--solver", "ortools", "--json")
    assert status == 0
    assert json.loads(out)["solver"].startswith("ortools")
