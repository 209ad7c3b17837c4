"""Which forms of execution modes are timed at all, by what was timed before; times here are set, not measured."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.job import FORMS, ExecutionMode
from qsync_opt.runtimes.torch.job import passes as job_passes

LAUNCHED, CAPTURED, COMPILED, CAPTURED_COMPILED = FORMS


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


def timing(model=None):
    example = SimpleNamespace(model=model or nn.Linear(1, 1))
    return job_passes._Timing(example, None, None, 0, False)


def choose(given, slack=0.0, model=None, until=float("inf"), limit=float("inf")):
    return timing(model).in_other_forms(given, until, slack, limit)


def uncompiled(**names):
    return [mode for mode in modes(**names) if not mode.compiled]


def test_capturing_a_mode_that_waits_for_no_host_saves_no_more_than_of_a_faster_one(tried):
    tried.times = {"a, captured": 990, "b, captured": 1190, "c_, captured": 1000}
    results = choose(uncompiled(b=1200, a=1000, c_=1150))
    assert tried == ["a, captured", "c_, captured"]  # b would need 1185; c_ is of the other kind
    assert [mode.pass_ns for mode in results if mode.form == CAPTURED] == [0, 990, 1000]
    assert next(mode for mode in results if mode.label == "b, captured").needed_bytes is None


def test_modes_that_wait_for_their_host_are_all_captured(tried):
    tried.times = {"a, captured": 400, "b, captured": 500, "c, captured": 900}
    choose(uncompiled(a=1000, b=1050, c=1800))
    assert tried == ["a, captured", "b, captured"]  # c would need 900, more than 8 % above 400


def test_what_torch_carries_out_and_waits_for_its_host_is_captured_whatever_another_mode_saved(tried):
    """TF32 beside autocast, whose casts the host has to launch."""
    tried.times = {"a, captured": 1140, "b, captured": 980, "d_, captured": 1100}
    given = [
        replace(m, waits_for_host=m.form == LAUNCHED and m.name != "a") for m in uncompiled(a=1200, b=1500, d_=1500)
    ]
    results = choose(given)
    assert tried == ["a, captured", "b, captured", "d_, captured"]
    assert next(mode for mode in results if mode.label == "b, captured").pass_ns == 980


def test_nothing_is_captured_when_the_time_is_over(tried):
    results = choose(uncompiled(a=1000, b=1050), until=0.0)
    assert not tried
    assert all(mode.pass_ns == 0 and mode.needed_bytes is None for mode in results if mode.form == CAPTURED)
    assert [mode.pass_ns for mode in results if mode.form == LAUNCHED] == [1000, 1050]


@pytest.mark.parametrize("slack", [0.5, None])
def test_what_may_be_slower_is_not_dropped(tried, slack):
    tried.times = {"a, captured": 990, "b, captured": 1190}
    choose(uncompiled(a=1000, b=1200), slack)
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


def test_what_torch_carries_out_is_compiled_before_others_are_captured_and_says_what_they_have_to_reach(tried):
    tried.times = {
        "a, captured": 900, "a, compiled, captured": 500, "a, compiled": 600,
        "b_, captured": 800, "b_, compiled, captured": 700,
    }  # fmt: skip
    choose(modes(a=1000, b_=1100, d_=1300))
    # Of b_ capturing saved 300, so that of d_ it saves 450 at most, and 850 is more than 8 % above 500.
    assert tried == ["a, captured", "a, compiled, captured", "b_, captured", "b_, compiled, captured", "a, compiled"]


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


@pytest.mark.parametrize("launched_ns", [0, 1000])
def test_where_no_launched_mode_keeps_the_limit_those_that_need_least_are_compiled(tried, launched_ns):
    """Whether launched passes ran out of memory, and have no time, or ran where nothing enforces the limit."""
    each = [
        ("FP32", "FP32", None, 400),
        ("BF16 autocast", "BF16", "BF16", 300),
        ("FP16 autocast", "FP16", "FP16", 290),
        ("INT8", "INT8", None, 250),
        ("FP8", "FP8", None, 260),
        ("plan", "BF16", None, 270),
    ]
    launched = [
        ExecutionMode(
            name=name,
            precisions={"a/linear": precision},
            autocast=autocast,
            pass_ns=launched_ns,
            needed_bytes=200 if launched_ns else None,
        )
        for name, precision, autocast, _ in each
    ]
    predicted = (num_bytes for *_, num_bytes in each)
    given = [*launched]
    given += [replace(m, compiled=True, pass_ns=0, needed_bytes=n) for m, n in zip(launched, predicted, strict=True)]
    tried.times = {f"{name}, compiled": 900 for name, *_ in each}
    choose(given, limit=100)
    assert tried == ["BF16 autocast, compiled", "INT8, compiled", "plan, compiled"]
    tried.clear()
    if launched_ns:
        choose(given, limit=200)
        assert "FP32, compiled" in tried  # the limit is kept: those that are fast are compiled


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_autocast_that_ran_out_of_memory_is_compiled_beside_slower_modes_that_fit(tried, refused, waits):
    """Captured too if the others wait for their host."""
    tried.times = {"a, compiled, captured": 500, "a, compiled": 510, "b_, captured": 990, "b_, compiled": 800}
    given = [replace(mode, needed_bytes=None) if mode.label == "a" else mode for mode in modes(a=0, b_=1000)]
    given = [replace(mode, waits_for_host=waits) if mode.label == "b_" else mode for mode in given]
    own = timing()
    own.refused.update({"a"} if refused else ())
    results = own.in_other_forms(given, float("inf"), 0.0)
    wanted = "a, compiled, captured" if waits else "a, compiled"
    assert (next((label for label in tried if label.startswith("a")), None) == wanted) is not refused
    assert (wanted in [mode.label for mode in results if mode.pass_ns]) is not refused


def test_compiled_passes_are_launched_where_captured_ones_do_not_keep_the_limit(tried):
    tried.times = {"a, captured": 900, "a, compiled, captured": 500, "a, compiled": 510}
    given = [replace(mode, needed_bytes=200 if mode.form == CAPTURED_COMPILED else 80) for mode in modes(a=1000)]
    results = choose(given, limit=100)
    assert tried == ["a, captured", "a, compiled, captured", "a, compiled"]
    assert {mode.label: mode.fits(100) for mode in results}["a, compiled"]


def layers():
    """A model of which a tenth is left to compile where its layers are compiled once."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(12)))


@pytest.fixture
def clock(monkeypatch):
    """Seconds that have passed: 5 in every mode compiled by blocks, 20 in others."""
    now = [0.0]
    monkeypatch.setattr(job_passes.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("whole_ns", "builds", "taken"),
    [(700, ["by blocks", ""], ""), (900, ["by blocks", ""], "by blocks")],
)
def test_the_faster_build_of_the_first_mode_is_that_of_the_next(tried, whole_ns, builds, taken):
    tried.times = {
        "a, compiled": whole_ns, "a, compiled, by blocks": 800, "b, compiled": 750, "b, compiled, by blocks": 750
    }  # fmt: skip
    given = [mode for mode in modes(a=1000, b=1000) if not mode.captured]
    results = choose(given, model=layers())
    labels = [", ".join(filter(None, ("a, compiled", build))) for build in builds]
    assert tried == [*labels, ", ".join(filter(None, ("b, compiled", taken)))]
    assert [mode.regional for mode in results if mode.compiled] == [bool(taken)] * 2


def test_of_two_builds_the_one_that_keeps_the_memory_limit_is_taken(tried):
    tried.times = {"a, compiled": 700, "a, compiled, by blocks": 800}
    tried.prepare = lambda mode: replace(type(tried).prepare(tried, mode), needed_bytes=100 if mode.regional else 200)
    given = [replace(mode, needed_bytes=300) for mode in modes(a=1000) if not mode.captured]
    results = choose(given, model=layers(), limit=150)
    assert tried == ["a, compiled, by blocks", "a, compiled"]
    assert [(mode.label, mode.pass_ns) for mode in results if mode.compiled and not mode.captured] == [
        ("a, compiled, by blocks", 800)
    ]


def test_blocks_are_compiled_where_the_whole_would_take_longer_than_is_left(tried, clock, caplog):
    def prepare(mode):
        clock[0] += 5 if mode.regional else 20
        return Tried.prepare(tried, mode)

    Tried = type(tried)
    tried.prepare = prepare
    tried.times = {f"{name}, compiled, by blocks": 800 for name in "ab"}
    given = [mode for mode in modes(a=1000, b=1000) if not mode.captured]
    with caplog.at_level("INFO"):
        results = choose(given, model=layers(), until=12)
    assert tried == ["a, compiled, by blocks", "b, compiled, by blocks"]
    assert [mode.label for mode in results if mode.compiled and mode.pass_ns] == tried
    assert "a, compiled is not timed: planning_seconds would not suffice" in caplog.text


def test_a_model_whose_blocks_torch_refuses_is_compiled_once_and_not_by_blocks(tried):
    tried.times = {"a, compiled": 800, "b, compiled": 790}
    tried.prepare = lambda mode: type(tried).prepare(tried, replace(mode, regional=False))
    results = choose([mode for mode in modes(a=1000, b=1000) if not mode.captured], model=layers())
    assert tried == ["a, compiled", "b, compiled"]
    assert [mode.pass_ns for mode in results if mode.compiled] == [800, 790]


def test_a_model_that_repeats_a_few_blocks_is_compiled_as_a_whole(tried):
    tried.times = {"a, compiled": 800}
    given = [mode for mode in modes(a=1000) if not mode.captured]
    choose(given, model=nn.Sequential(*layers()[:6]))
    assert tried == ["a, compiled"]


@pytest.mark.parametrize(("unsteady", "is_said"), [(1.0, False), (1.3, True)])
def test_passes_that_do_not_settle_say_that_the_machine_is_busy(monkeypatch, caplog, unsteady, is_said):
    times_ns = itertools.cycle([100.0 * unsteady**k for k in range(job_passes._ROUNDS)])
    monkeypatch.setattr(job_passes, "carried_out", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(job_passes._Timing, "_pass_ns", lambda self, passes, scaled: (1, next(times_ns), 1.0))
    own = timing()
    own.example.device = torch.device("cpu")
    results = own.in_turn(modes(a=0)[:1])
    assert [mode.pass_ns for mode in results] == [round(100 * unsteady ** (job_passes._ROUNDS // 2))]
    assert (
        "the machine is busy: rounds of 1 of 1 measurements disagree, those of 'passes of a'" in caplog.text
    ) is is_said


@pytest.mark.parametrize(("last_ns", "waits", "taken"), [(500, True, True), (595, True, False), (500, False, False)])
def test_passes_that_wait_for_their_host_are_tried_channels_last_when_captured(tried, last_ns, waits, taken):
    tried.times = {"a, captured": 600, "a, captured, channels last": last_ns}
    tried.times |= {f"a, compiled{form}{how}": 400 for form in ("", ", captured") for how in ("", ", channels last")}
    given = [replace(mode, waits_for_host=waits and mode.form == LAUNCHED) for mode in modes(a=1000)]
    results = choose(given, model=nn.Sequential(nn.Conv2d(2, 2, 3)))
    assert ("a, captured, channels last" in tried) is waits
    assert {mode.form for mode in results if mode.channels_last} == (set(FORMS[1:]) if taken else set())


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_memory_like_the_optimizers_state_has_its_size_for_every_parameter(copies):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5).requires_grad_(False))
    like = replace(timing(model), state_bytes=copies * 4 * 9 + 8)._like_state()  # and the counts of steps
    assert sorted(t.numel() for t in like) == sorted([6, 3] * copies)


def test_weights_lie_channels_last_where_that_is_faster(monkeypatch):
    after = {"a": 900, "b": 999, "c": 100}
    monkeypatch.setattr(
        job_passes._Timing,
        "in_turn",
        lambda self, given: [replace(mode, pass_ns=after[mode.name]) for mode in given if mode.channels_last],
    )
    given = [*modes(a=1000, b=1000, c=1600), ExecutionMode(name="FP32", precisions={"a/linear": "FP32"}, pass_ns=1000)]
    results = timing(nn.Conv2d(2, 2, 3)).in_best_format(given)
    assert {mode.name for mode in results if mode.channels_last} == {"a"}
    assert [mode.pass_ns for mode in results if mode.form == LAUNCHED] == [900, 1000, 1600, 1000]
    assert [mode.label for mode in results if mode.name == "a"] == [
        f"{mode.label}, channels last" for mode in given if mode.name == "a"
    ]
    assert timing(nn.Conv1d(2, 2, 3)).in_best_format(given) == given
