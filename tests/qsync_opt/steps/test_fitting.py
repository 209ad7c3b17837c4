"""Time on the host: what a profiler lengthens is scaled back to what the same phase took untraced."""

import random
from dataclasses import replace

import pytest

from qsync_opt.costs import DeviceIdentity
from qsync_opt.model import Role
from qsync_opt.steps import (
    BACKWARD,
    BEGIN,
    FORWARD,
    Span,
    StepPredictor,
    StepSample,
    StepSpans,
    fit_step_costs,
    kernel_paces,
)
from qsync_opt.testing import stacked_graph

DEVICE = DeviceIdentity(name="gpu", kind="cuda", threads=1, versions={})


def sample(name, graph, precision, *, traced, blocked, measured):
    """A step whose forward pass took ``traced`` (and waited for ``blocked``) on the host, untraced ``measured``."""
    spans = StepSpans(
        spans={(FORWARD, BEGIN): Span(host_ns=traced, blocked_ns=blocked), (BACKWARD, BEGIN): Span(host_ns=1_000)},
        order=(),
        other_streams=(),
        gap_ns=0.0,
        latency_ns=0.0,
        start_ns=0,
        end_ns=0,
    )
    return StepSample(
        name=name,
        precisions={operator.name: precision for operator in graph.by_role(Role.ADJUSTABLE)},
        outputs={},
        spans=spans,
        memory=spans,
        kept={},
        host_ns={FORWARD: measured, BACKWARD: 1_000.0},
        iteration_ns=measured,
        resident_bytes=0,
        peak_bytes=0,
    )


def forward_host_ns(graph, *samples):
    return fit_step_costs(graph, samples, DEVICE, half_format="BF16").phases["forward"].host


def test_a_phase_is_scaled_to_what_it_took_untraced():
    graph = stacked_graph(1)
    assert forward_host_ns(graph, sample("a", graph, "FP32", traced=30_000, blocked=0, measured=10_000.0)) == 10_000


def test_a_short_wait_leaves_the_scale_to_the_phase_itself():
    graph = stacked_graph(1)
    waited = sample("a", graph, "FP32", traced=30_000, blocked=300, measured=10_000.0)
    other = sample("b", graph, "FP32", traced=30_000, blocked=0, measured=30_000.0)
    assert forward_host_ns(graph, waited) == 10_000
    assert forward_host_ns(graph, waited, other) == 20_000  # the mean of the two


def test_a_phase_that_waited_long_takes_the_scale_that_it_has_elsewhere():
    graph = stacked_graph(1)
    waited = sample("a", graph, "FP32", traced=40_000, blocked=40_000, measured=90_000.0)
    other = sample("b", graph, "FP32", traced=40_000, blocked=0, measured=20_000.0)
    assert forward_host_ns(graph, waited, other) == 20_000
    # Nothing is known of the phase anywhere: the scale of the others, here of the backward pass.
    assert forward_host_ns(graph, waited) == 40_000


@pytest.mark.parametrize(("resting", "share"), [(0.0, 1.0), (5_500.0, 0.5), (20_000.0, 1.0)])
def test_what_a_plan_of_fp32_alone_takes_when_it_stands_aside(resting, share):
    graph = stacked_graph(1)
    fine = replace(sample("a", graph, "FP32", traced=30_000, blocked=0, measured=10_000.0), resting_ns=resting)
    assert fit_step_costs(graph, [fine], DEVICE, half_format="BF16").resting_share == share


def test_the_gap_between_kernels_is_that_of_untraced_steps_which_the_device_paces():
    graph = stacked_graph(1)

    def with_kernels(name, iteration_ns):
        found = sample(name, graph, "FP32", traced=30_000, blocked=0, measured=10_000.0)
        span = Span(host_ns=30_000, kernels=[(100 * k, 10_000, "k") for k in range(10)])
        spans = replace(found.spans, spans={**found.spans.spans, (FORWARD, BEGIN): span}, gap_ns=1_200.0)
        return replace(found, spans=spans, iteration_ns=iteration_ns)

    def device_ns(*samples):
        return fit_step_costs(graph, samples, DEVICE, half_format="BF16").phases["forward"].device

    paced_by_device, paced_by_host = with_kernels("a", 102_500.0), with_kernels("b", 11_000.0)
    assert device_ns(paced_by_device) == 10 * (10_000 + 250)
    assert device_ns(paced_by_device, paced_by_host) == 10 * (10_000 + 250)  # the other has no gap of its own
    assert device_ns(paced_by_host) == 10 * (10_000 + 1_200)
    # Never more than was seen, nor less than nothing.
    assert device_ns(with_kernels("a", 200_000.0)) == 10 * (10_000 + 1_200)
    assert device_ns(with_kernels("a", 90_000.0)) == 10 * 10_000


def test_the_latency_of_a_launch_is_scaled_as_the_host_is():
    """A launch is work of the host: a profiler lengthens it as it lengthens the rest of the phase."""
    graph = stacked_graph(1)
    plain = sample("a", graph, "FP32", traced=30_000, blocked=0, measured=10_000.0)
    span = Span(host_ns=30_000, kernels=[(6_000, 500, "first"), (9_000, 700, "second")])
    spans = replace(plain.spans, spans={**plain.spans.spans, (FORWARD, BEGIN): span}, latency_ns=3_000.0)
    work = fit_step_costs(graph, [replace(plain, spans=spans)], DEVICE, half_format="BF16").phases["forward"]
    # The second kernel begins at (9000 + 3000) / 3 on an idle device.
    assert work.host == 10_000
    assert work.device == 1_200
    assert work.lag == 4_000 + 700


def test_kernels_are_scaled_to_steps_that_the_device_paced():
    graph = stacked_graph(1)
    plain = sample("a", graph, "FP32", traced=10_000, blocked=0, measured=10_000.0)
    kernels = {(BACKWARD, BEGIN): Span(host_ns=1_000, kernels=[(0, 60_000, "one"), (0, 40_000, "two")])}
    spans = replace(plain.spans, spans={**plain.spans.spans, **kernels})
    device, host = (replace(plain, spans=spans, iteration_ns=taken) for taken in (104_000.0, 12_000.0))
    assert kernel_paces([device], {"a": 101_000}) == {"a": pytest.approx(1.03)}
    assert kernel_paces([device], {"a": 105_000}) == {"a": pytest.approx(0.99)}
    assert kernel_paces([device], {"a": 10_000}) == {}  # something else took that long
    assert kernel_paces([host], {"a": 101_000}) == {}
    assert kernel_paces([plain], {"a": 101_000}) == {}
    costs = fit_step_costs(graph, [device], DEVICE, half_format="BF16", paces={"a": 1.03})
    assert costs.phases["backward"].device == 103_000


def simulated(host_ns, kernels, host, device):
    """Kernel by kernel: each starts when it was launched and the one before is done."""
    for offset, duration in kernels:
        device = max(device, host + offset) + duration
    return host + host_ns, device


@pytest.mark.parametrize("seed", range(10))
def test_work_on_two_queues_is_exact_to_the_kernel(seed):
    """Of one stretch, and of the two that clipping and the optimizer's step are together."""
    source, graph = random.Random(seed), stacked_graph(1)
    plain = sample("a", graph, "FP32", traced=1_000, blocked=0, measured=1_000.0)
    stretches = {}
    for phase in ("clip", "optimizer", "zero_grad"):
        offsets = sorted(source.randrange(900) for _ in range(source.randrange(4)))
        stretches[phase] = [(offset, source.randrange(1, 900)) for offset in offsets]
    added = {(p, BEGIN): Span(host_ns=1_000, kernels=[(*k, "k") for k in v]) for p, v in stretches.items()}
    measured = {**plain.host_ns, **dict.fromkeys(stretches, 1_000.0)}
    spans = replace(plain.spans, spans={**plain.spans.spans, **added})
    costs = fit_step_costs(graph, [replace(plain, spans=spans, host_ns=measured)], DEVICE, half_format="BF16")
    for host, device in ((0, 0), (0, 5_000), (3_000, 10)):
        for phase, kernels in stretches.items():
            assert costs.phases[phase].run(host, device) == simulated(1_000, kernels, host, device)
        whole = StepPredictor(graph, costs).optimizer.run(host, device)
        for kernels in stretches.values():
            host, device = simulated(1_000, kernels, host, device)
        assert whole == (host, device)
    assert costs.phases["forward"].run(1_000, 5) == (2_000, 5)  # without kernels the device does not wait
