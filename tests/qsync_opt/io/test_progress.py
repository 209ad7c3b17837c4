"""Bars go to a terminal's standard error, to a function, or nowhere."""

import signal
import sys
import threading

import pytest

from qsync_opt.io import delayed_interrupts, reporting, waiting
from qsync_opt.io.progress import lasting_interrupts


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """As in a shell's foreground; a job in the background starts with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def swallowed():
    """Ctrl-C that some code in between does not pass on."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_swallowed_interrupt_comes_back_with_the_next_report():
    reports = []
    with pytest.raises(KeyboardInterrupt), reporting(lambda *call: reports.append(call), "front") as report:
        report(1, 3, "x")
        swallowed()
        report(2, 3, "x")
    assert reports == [(1, 3, "x")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_swallowed_interrupt_comes_back_at_the_end_of_waiting():
    with pytest.raises(KeyboardInterrupt), waiting(False, "solving"):
        swallowed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_and_other_threads_are_left_alone():
    caught = []
    before = signal.signal(signal.SIGINT, lambda *arguments: caught.append(1))
    try:
        with lasting_interrupts() as check:
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [1]
    handlers = []

    def work():
        with lasting_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_held_interrupt_arrives_when_the_block_has_ended():
    passed = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupts():
        signal.raise_signal(signal.SIGINT)
        passed.append("inside")
    assert passed == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_held_changes_nothing():
    with delayed_interrupts():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_was_held_reaches_the_handler_of_the_caller():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with delayed_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
