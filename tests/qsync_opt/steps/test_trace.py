from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.steps import Change, Kernel, Launch, Node, Range, StepEvents, charge_step, operator_label, phase_label


def step() -> StepEvents:
    """Two operators: a (nodes 0 and 1) and b (node 2); a's backward adds up a gradient; one other stream."""
    return StepEvents(
        ranges=[
            Range(0, 100, phase_label("forward")),
            Range(10, 30, operator_label("a", 0)),
            Range(40, 90, operator_label("b", 2)),
            Range(110, 200, phase_label("backward")),
            Range(205, 230, phase_label("optimizer")),
            Range(232, 240, phase_label("zero_grad")),
        ],
        nodes=[Node(120, 130, 2), Node(135, 150, 1), Node(150, 160, -1), Node(165, 180, 0)],
        launches=[Launch(15, 17, 1), Launch(45, 47, 2), Launch(122, 124, 3), Launch(152, 154, 4), Launch(155, 157, 5)],
        kernels=[
            Kernel(20, 28, 1, 7, "forward of a"),
            Kernel(50, 60, 2, 7, "forward of b"),
            Kernel(126, 140, 3, 7, "backward of b"),
            Kernel(160, 170, 4, 7, "sum"),
            Kernel(161, 190, 5, 9, "all-reduce"),
        ],
        changes=[Change(16, 1000), Change(46, 500), Change(125, 300), Change(140, -1000)],
    )


def test_every_moment_of_the_host_is_charged_once():
    (spans,) = charge_step(step())
    assert spans.order == ("a", "b")
    assert sum(span.host_ns for span in spans.spans.values()) == spans.end_ns - spans.start_ns
    hosts = {key: span.host_ns for key, span in spans.spans.items()}
    assert hosts["forward", ""] == 10
    assert hosts["forward", "a"] == 30
    assert hosts["forward", "b"] == 60
    assert hosts["forward", "|end"] == 10
    # Nodes belong to the operator that was running when they were made; those without a number follow the one before.
    assert hosts["backward", "b"] == 15
    assert hosts["backward", "a"] == 45
    assert hosts["backward", "|end"] == 20 + 5


def test_what_begins_in_a_pass_belongs_to_it_whenever_it_ends():
    """The end of an operator's range may lie behind that of the pass, and a node may begin before the next one does."""
    events = step()
    late = [Range(40, 105, operator_label("b", 2)) if r.start == 40 else r for r in events.ranges]
    early = [Node(101, 115, 0), *events.nodes]
    (spans,) = charge_step(replace(events, ranges=late, nodes=early))
    (plain,) = charge_step(events)
    assert spans.order == ("a", "b")
    assert {key: span.host_ns for key, span in spans.spans.items()} == {
        key: span.host_ns for key, span in plain.spans.items()
    }


def test_kernels_follow_their_launch_and_other_streams_are_apart():
    (spans,) = charge_step(step())
    assert spans.spans["forward", "a"].kernels == [(5, 8, "forward of a")]
    # The second window of a begins 15 ns into its backward pass.
    assert spans.spans["backward", "a"].kernels == [(17, 10, "sum")]
    assert [kernel.name for kernel in spans.other_streams] == ["all-reduce"]
    assert spans.spans["backward", "a"].changes == [-1000]
    assert spans.peak_bytes == 1800


def test_waiting_for_room_in_the_queue_is_no_work():
    events = step()
    blocked = [launch if launch.correlation != 3 else Launch(122, 128, 3) for launch in events.launches]
    blocked += [Launch(170, 171, k) for k in range(10, 20)]  # the usual launch takes 1 ns
    blocked = [launch._replace(end=launch.start + 1) if launch.correlation != 3 else launch for launch in blocked]
    waiting = [launch._replace(end=launch.start + 90) if launch.correlation == 3 else launch for launch in blocked]
    nodes = [Node(120, 220, 2), Node(225, 230, 0)]
    ranges = [r for r in events.ranges if r.label != phase_label("backward")]
    ranges = [r for r in ranges if r.start < 110] + [Range(110, 240, phase_label("backward"))]
    late = StepEvents(ranges=ranges, nodes=nodes, launches=sorted(waiting), kernels=events.kernels)
    (spans,) = charge_step(late)
    assert spans.spans["backward", "b"].blocked_ns == 89
    assert spans.spans["backward", "b"].host_ns == 225 - 120 - 89


@pytest.mark.parametrize(("time", "waits"), [(25, True), (160, True), (105, True), (210, False), (260, False)])
def test_a_host_that_waits_for_its_device_within_a_pass_is_noted(time, waits):
    (found,) = charge_step(replace(step(), waits=[time]))
    assert found.waits is waits


def test_several_steps_and_none():
    events = step()
    shifted = [Range(r.start + 1000, r.end + 1000, r.label) for r in events.ranges]
    twice = StepEvents(
        ranges=[*events.ranges, *shifted],
        nodes=[*events.nodes, *(n._replace(start=n.start + 1000, end=n.end + 1000) for n in events.nodes)],
    )
    first, second = charge_step(twice)
    assert {k: s.host_ns for k, s in second.spans.items() if k[0] != "zero_grad"} == {
        k: s.host_ns for k, s in first.spans.items() if k[0] != "zero_grad"
    }
    with pytest.raises(ProblemError, match="step_labels"):
        charge_step(StepEvents(ranges=[], nodes=[]))
    with pytest.raises(ProblemError, match="backward"):
        charge_step(StepEvents(ranges=[Range(0, 5, phase_label("forward"))], nodes=[]))


def test_copies_and_clipping_are_phases_and_copies_belong_to_the_step_behind_them():
    events = step()
    more = [Range(-40, -5, phase_label("copies")), Range(201, 204, phase_label("clip"))]
    later = [Range(r.start + 1000, r.end + 1000, r.label) for r in (*events.ranges, *more)]
    nodes = [*events.nodes, *(Node(n.start + 1000, n.end + 1000, n.sequence) for n in events.nodes)]
    first, second = charge_step(replace(events, ranges=sorted([*events.ranges, *more, *later]), nodes=nodes))
    for spans in (first, second):
        assert spans.spans["copies", ""].host_ns == 40  # up to the forward pass
        assert spans.spans["clip", ""].host_ns == 4  # up to the optimizer
        assert spans.spans["backward", "|end"].host_ns == 20 + 1
    assert (first.start_ns, second.start_ns) == (-40, 960)
    assert first.end_ns == second.start_ns
