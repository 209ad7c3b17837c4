"""Bars go to a terminal's standard error, to a function, or nowhere."""

import sys

import pytest

from qsync_opt.progress import reporting, waiting


class Terminal:
    """Standard error of a terminal that keeps what is written."""

    encoding = "utf-8"

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard error a terminal; within the test, because pytest puts its own there before it starts."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")

    def become():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return become


def test_a_terminal_gets_a_bar_with_the_count(terminal):
    stream = terminal()
    with reporting(None, "front") as report:
        report(3, 7, "points")
    assert "front" in stream.text
    assert "3/7" in stream.text
    assert "points" in stream.text


def test_a_terminal_sees_waiting_and_its_limit(terminal):
    stream = terminal()
    with waiting(None, "solving", 60.0):
        pass
    assert "solving" in stream.text
    assert "of at most 60 s" in stream.text


def test_quiet_gets_nothing(terminal):
    stream = terminal()
    with reporting(False, "front") as report, waiting(False, "solving"):
        report(1, 2, "x")
    assert stream.text == ""


def test_no_terminal_gets_nothing(capfd):
    with reporting(None, "front") as report, waiting(None, "solving"):
        report(1, 2, "x")
    assert capfd.readouterr() == ("", "")


def test_a_closed_standard_error_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with reporting(None, "front") as report, waiting(None, "solving"):
        report(1, 2, "x")


def test_a_function_is_told():
    told = []
    with reporting(lambda *call: told.append(call), "front") as report:
        report(1, 2, "x")
    assert told == [(1, 2, "x")]
