"""Kernels of compiled graphs, charged to operators."""

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.steps import BACKWARD, FORWARD, OPTIMIZER, Change, Kernel, Launch, Range, StepEvents, phase_label
from qsync_opt.steps.compiled import CompiledEvents, HostCall, Scheduled, charge_compiled, match_calls

GELU = Scheduled(True, (), (("gelu", 0.75), ("b", 0.25)))
A = Scheduled(False, ("addmm",), (("a", 1.0),))
B = Scheduled(False, ("mm", "bias_addmm"), (("b", 1.0),))
FREE = Scheduled(False, (), ())
UNKNOWN = Scheduled(True, (), ())


def _calls(*names):
    return [HostCall(10 * i, 10 * i + 8, name, name.startswith("triton")) for i, name in enumerate(names)]


def test_calls_of_libraries_are_matched_by_name_between_fused_kernels():
    calls = _calls("aten::empty", "aten::addmm", "aten::copy_", "triton_a", "qsync_opt::mm")
    assert match_calls([FREE, A, GELU, FREE, B], calls) == [None, A, None, GELU, B]


def test_a_library_call_is_not_sought_beyond_the_next_fused_kernel():
    assert match_calls([GELU, A], _calls("aten::addmm", "triton_a")) == [None, GELU]


def test_two_calls_of_one_name_are_taken_in_order():
    second = Scheduled(False, ("addmm",), (("c", 1.0),))
    assert match_calls([A, second], _calls("aten::addmm", "aten::addmm")) == [A, second]


@pytest.mark.parametrize("names", [[], ["triton_a", "triton_b"]])
def test_another_number_of_fused_kernels_is_refused(names):
    with pytest.raises(ProblemError, match=f"to launch 1 fused kernels and launched {len(names)}"):
        match_calls([A, GELU], _calls(*names))


def _trace(graphs):
    """A forward pass from 0 to 100 and a backward pass from 100 to 200; every call launches a kernel of 40 ns."""
    ranges = [
        Range(0, 100, phase_label(FORWARD)),
        Range(100, 200, phase_label(BACKWARD)),
        Range(200, 230, phase_label(OPTIMIZER)),
    ]
    calls = [
        HostCall(20, 30, "aten::addmm", False),
        HostCall(40, 50, "triton_gelu", True),
        HostCall(60, 70, "aten::mm", False),
        HostCall(120, 130, "aten::mm", False),
        HostCall(150, 160, "triton_gelu", True),
    ]
    outside = [5, 90, 110, 190, 210]
    starts = sorted([call.start + 2 for call in calls] + outside)
    return CompiledEvents(
        StepEvents(
            ranges=ranges,
            nodes=[],
            launches=[Launch(start, start + 1, i) for i, start in enumerate(starts)],
            kernels=[Kernel(1000 + 50 * i, 1040 + 50 * i, i, 7, "k") for i in range(len(starts))],
            changes=[Change(35, 512), Change(65, -128), Change(125, 256), Change(155, -384), Change(205, 16)],
        ),
        graphs,
        calls,
    )


def test_time_and_memory_of_kernels_are_divided_among_their_operators():
    trace = _trace([Range(10, 80, "graph"), Range(115, 170, "graph")])
    ((step, _),) = charge_compiled(trace, [[A, GELU, B]], [[B, UNKNOWN]], ["a", "gelu", "b"])
    device = {key: span.device_ns for key, span in step.spans.items()}
    assert device == {
        (FORWARD, ""): 40,
        (FORWARD, "a"): 40,
        (FORWARD, "gelu"): 30,
        (FORWARD, "b"): 50,
        (FORWARD, "|end"): 40,
        (BACKWARD, ""): 40,
        # A kernel of which nothing is known follows the one before it.
        (BACKWARD, "b"): 80,
        (BACKWARD, "|end"): 40,
        (OPTIMIZER, ""): 40,
    }
    host = {phase: sum(s.host_ns for (p, _), s in step.spans.items() if p == phase) for phase in (FORWARD, BACKWARD)}
    assert host == {FORWARD: 100, BACKWARD: 100}
    # What a kernel writes is allocated before it is launched, after the kernel before; only the peak counts.
    assert step.spans[FORWARD, "gelu"].changes == [512]
    assert step.spans[FORWARD, "b"].changes == [-128]
    assert step.spans[BACKWARD, "b"].changes == [256]
    assert step.spans[OPTIMIZER, ""].changes == [640 - 384 + 16]
    assert step.peak_bytes == 640
    assert step.order == ("a", "gelu", "b")


def test_what_comes_between_two_graphs_follows_the_first():
    trace = _trace([Range(10, 80, "graph"), Range(115, 140, "graph"), Range(145, 170, "graph")])
    with pytest.raises(ProblemError, match="the backward pass ran 2 compiled graphs, but 1 were compiled"):
        charge_compiled(trace, [[A, GELU, B]], [[B, GELU]], [])
    ((step, _),) = charge_compiled(trace, [[A, GELU, B]], [[B], [GELU]], [])
    assert step.spans[BACKWARD, "b"].host_ns == (145 - 115) + round(0.25 * (170 - 145))


@pytest.mark.parametrize("missing", [FORWARD, BACKWARD])
def test_a_trace_without_phases_is_refused(missing):
    trace = _trace([])
    events = StepEvents(ranges=[r for r in trace.events.ranges if r.label != phase_label(missing)], nodes=[])
    with pytest.raises(ProblemError, match=missing):
        charge_compiled(trace._replace(events=events), [], [], [])
