"""A registered system is mounted under its name, and its commands are loaded when one of them is run."""

import sys
import types
from dataclasses import dataclass

import pytest
import typer

from qsync_opt.errors import ProblemError, UnsupportedError


@dataclass(frozen=True)
class FakeSystem:
    name: str
    description: str
    commands: str | None


@pytest.fixture
def fake(monkeypatch):
    """A system whose commands are in the module ``parcels``, and one without commands."""
    systems = {
        "parcels": FakeSystem("parcels", "the size of every parcel", "parcels:commands"),
        "silent": FakeSystem("silent", "no commands", None),
    }
    registry = types.ModuleType("qsync_opt.systems")
    registry.systems = lambda: systems
    monkeypatch.setitem(sys.modules, "qsync_opt.systems", registry)
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

    monkeypatch.setattr(sys.modules["qsync_opt.systems"], "systems", claimed_twice)
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
