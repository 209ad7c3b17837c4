"""A registered system is mounted under its name, and its commands are loaded when one of them is run."""

import json
import sys
import types
from dataclasses import replace

import pytest
import typer

import qsync_opt.systems
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.systems import System


@pytest.fixture
def fake(monkeypatch):
    """A system whose commands are in the module ``parcels``, and one without commands."""
    systems = {
        "parcels": System(
            name="parcels", description="the size of every parcel", problem="", commands="parcels:commands"
        ),
        "silent": System(name="silent", description="no commands", problem=""),
    }
    monkeypatch.setattr(qsync_opt.systems, "systems", lambda: systems)
    commands = typer.Typer()

    @commands.command()
    def solve(problem: str) -> int:
        """Choose the sizes."""
        if problem == "bad":
            raise ProblemError("problem 'bad' is\nbad; give a good one")
        print(f"solved {problem}")
        return 3

    module = types.ModuleType("parcels")
    module.commands = commands
    return module


def test_help_lists_a_system_without_loading_it(fake, run):
    status, out, _ = run("--help")
    assert status == 0
    assert "parcels   the size of every parcel" in out
    assert "silent" not in out


def test_systems_that_cannot_be_listed_exit_2_with_one_line(fake, run, monkeypatch):
    def claimed_twice():
        raise UnsupportedError("the system name 'parcels' is claimed twice")

    monkeypatch.setattr(qsync_opt.systems, "systems", claimed_twice)
    assert run("--help") == (2, "", "qsync-opt: the system name 'parcels' is claimed twice\n")


def test_a_command_of_a_system_is_run(fake, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "parcels", fake)
    assert run("parcels", "solve", "p.json") == (3, "solved p.json\n", "")
    assert run("parcels", "solve", "bad") == (2, "", "qsync-opt parcels: problem 'bad' is bad; give a good one\n")
    status, out, err = run("parcels", "solve")
    assert (status, out) == (2, "")
    assert err.endswith("; see qsync-opt parcels solve --help\n")
    assert "'slove'" in run("parcels", "slove")[2]
    assert "did you mean 'parcels'?" in run("parcles")[2]
    status, out, _ = run("parcels", "--help")
    assert (status, "--install-completion" in out) == (0, False)
    assert "the size of every parcel" in out


def test_files_of_a_system_are_solved_and_evaluated_by_shared_commands(run, monkeypatch, tmp_path, instance_path):
    again = replace(qsync_opt.systems.system("training"), name="again", searches={}, runtime=None)
    monkeypatch.setattr(
        qsync_opt.systems, "systems", lambda: {"training": qsync_opt.systems.BUILT_IN[0], "again": again}
    )
    problem, plan = str(instance_path("tiny")), str(tmp_path / "plan.json")
    status, out, _ = run("again", "solve", problem, "--method", "default", "--output", plan, "--json")
    solution = json.loads(out)
    assert (status, solution["point"], solution["method"]) == (0, "feasible", "greedy")
    status, out, _ = run("again", "evaluate", problem, plan, "--json")
    assert (status, json.loads(out)["objective"]) == (0, solution["objective"])
    status, out, _ = run("again", "evaluate", problem, plan)
    assert (status, "feasible" in out) == (0, True)
    status, _, err = run("again", "evaluate", plan, plan)
    assert status == 2 and "'qsync-plan/1'" in err and err.count("\n") == 1
    infeasible = {**json.loads(instance_path("tiny").read_text()), "latency_limit_ns": 1}
    (tmp_path / "tight.json").write_text(json.dumps(infeasible))
    status, out, _ = run("again", "solve", str(tmp_path / "tight.json"))
    assert status == 3 and "infeasible" in out
