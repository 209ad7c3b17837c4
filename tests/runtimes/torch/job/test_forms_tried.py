"""Which forms of execution modes are timed at all, by what was timed before; times here are set, not measured."""

from dataclasses import replace

import pytest

from qsync_opt.runtimes.torch.job import FORMS, ExecutionMode
from qsync_opt.runtimes.torch.job import passes as job_passes

LAUNCHED, CAPTURED, COMPILED, _ = FORMS


def modes(**names):
    """Modes by name, those with an underscore at the end run operator by operator."""
    each = [
        ExecutionMode(
            name=name, precisions={"a/linear": "BF16"}, autocast=None if name.endswith("_") else "BF16", pass_ns=ns
        )
        for name, ns in names.items()
    ]
    return [replace(mode, pass_ns=mode.pass_ns * (mode.form == LAUNCHED)) for mode in job_passes.in_forms(each, FORMS)]


@pytest.fixture
def tried(monkeypatch):
    """Labels in the order in which they were prepared and timed; ``times`` are those they then have."""

    class Tried(list):
        def prepare(self, mode):
            self.append(mode.label)
            return replace(mode, pass_ns=self.times[mode.label])

    log = Tried()
    log.times = {}
    monkeypatch.setattr(job_passes._Timing, "once_prepared", lambda self, mode: log.prepare(mode))
    return log


def choose(given, slack=0.0):
    timing = job_passes._Timing(None, None, None, 0, False)
    return timing.compiled_modes(timing.captured_modes(given, slack), float("inf"), slack)


def test_capturing_a_mode_that_waits_for_no_host_saves_no_more_than_of_a_faster_one(tried):
    tried.times = {"a, captured": 990, "b, captured": 1190, "c_, captured": 1000}
    results = job_passes._Timing(None, None, None, 0, False).captured_modes(modes(b=1200, a=1000, c_=1150), 0.0)
    assert tried == ["a, captured", "c_, captured"]  # b would need 1185; c_ is of the other kind
    assert [mode.pass_ns for mode in results if mode.form == CAPTURED] == [0, 990, 1000]
    assert next(mode for mode in results if mode.label == "b, captured").needed_bytes is None


def test_modes_that_wait_for_their_host_are_all_captured(tried):
    tried.times = {"a, captured": 400, "b, captured": 500, "c, captured": 900}
    job_passes._Timing(None, None, None, 0, False).captured_modes(modes(a=1000, b=1050, c=1800), 0.0)
    assert tried == ["a, captured", "b, captured"]  # c would need 900, more than 8 % above 400


@pytest.mark.parametrize("slack", [0.5, None])
def test_what_may_be_slower_is_not_dropped(tried, slack):
    tried.times = {"a, captured": 990, "b, captured": 1190}
    job_passes._Timing(None, None, None, 0, False).captured_modes(modes(a=1000, b=1200), slack)
    assert tried == ["a, captured", "b, captured"]


def test_a_step_that_capturing_does_not_help_is_not_captured_when_compiled(tried):
    tried.times = {"a, captured": 995, "a, compiled": 800, "a, compiled, captured": 790}
    results = choose(modes(a=1000))
    assert tried == ["a, captured", "a, compiled"]
    assert [mode.pass_ns for mode in results] == [1000, 995, 800, 0]


def test_a_step_that_waits_for_its_host_is_compiled_in_both_forms(tried):
    tried.times = {"a, captured": 600, "a, compiled": 700, "a, compiled, captured": 450}
    choose(modes(a=1000))
    assert tried == ["a, captured", "a, compiled, captured", "a, compiled"]


@pytest.mark.parametrize(
    ("slower", "compiled"),
    [
        # 90 % is left of the fastest, so that at least 85 % should be left of others of its kind; 972 would do.
        ({"b": 1140}, ["a, compiled", "b, compiled"]),
        ({"b": 1150}, ["a, compiled"]),
        ({"b_": 1150}, ["a, compiled", "b_, compiled"]),
    ],
)
def test_a_mode_that_compiling_cannot_make_fast_enough_is_not_compiled(tried, slower, compiled):
    tried.times = {"a, compiled": 900, "b, compiled": 1000, "b_, compiled": 1000}
    given = [mode for mode in modes(a=1000, **slower) if not mode.captured]
    results = choose(given)
    assert tried == compiled
    assert [mode.label for mode in results if mode.form == COMPILED and mode.pass_ns] == compiled
