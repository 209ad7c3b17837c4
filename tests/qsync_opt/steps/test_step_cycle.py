"""Steps of several micro-batches, with copies from the host's memory and clipped gradients, against simple counting."""

import random
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.steps import (
    NOTHING,
    StepPredictor,
    Work,
    cluster_step,
    cluster_timeline,
    network_tails,
    slowed_segments,
    worker_step,
)
from qsync_opt.testing import random_graph, random_step_costs, residual_graph, stacked_graph
from qsync_opt.training import trace_json

PRECISIONS = ("INT8", "BF16", "FP32")


def _costs(graph, seed, *, extra=True):
    costs = random_step_costs(graph, PRECISIONS, seed=seed)
    if not extra:
        return costs
    source = random.Random(seed)
    added = {label: Work(source.randrange(9_000), n := source.randrange(300_000), n) for label in ("copies", "clip")}
    peaks = dict(costs.phase_peaks) | {"copies": 4096, "clip": 512 * source.randrange(900), "optimizer": 512}
    return replace(costs, phases={**costs.phases, **added}, phase_peaks=peaks)


def _plan(source, graph):
    return {operator.name: source.choice(PRECISIONS) for operator in graph.by_role(Role.ADJUSTABLE)}


def played(predictors, steps, allreduce, after, slowed, micro_batches, count):
    """Ends of some steps, every operator, copy and all-reduce played by itself."""
    free, network, ends = [[0, 0] for _ in predictors], 0, [0]

    def run(w, work):
        host, device = free[w]
        free[w] = [host + work.host, max(device + work.device, host + work.lag)]

    for _ in range(count):
        ready = [[] for _ in predictors]
        for w, (predictor, step) in enumerate(zip(predictors, steps, strict=True)):
            phases = predictor.costs.phases
            for micro in range(micro_batches):
                run(w, phases.get("copies", NOTHING))
                run(w, phases["forward"])
                for cost in step.costs:
                    run(w, cost.forward)
                run(w, phases["forward|end"])
                run(w, phases["backward"])
                segments = {position: k for k, position in enumerate(predictor._borders)} | {-1: len(after)}
                for position in range(len(step.costs) - 1, -1, -1):
                    run(w, step.costs[position].backward)
                    if micro == micro_batches - 1 and position in segments:
                        free[w][1] += slowed[w][segments[position]]
                        ready[w].append(free[w][1])
                if micro < micro_batches - 1:
                    run(w, phases["backward|end"])
        for duration, segment in zip(allreduce, after, strict=True):
            network = max(network, *(times[segment] for times in ready)) + duration
        for w, predictor in enumerate(predictors):
            phases = predictor.costs.phases
            free[w][1] = max(free[w][1], network)
            for label in ("backward|end", "clip", "optimizer", "zero_grad"):
                run(w, phases.get(label, NOTHING))
        ends.append(max(max(pair) for pair in free))
    return ends


@pytest.mark.parametrize("seed", range(24))
def test_steps_of_micro_batches_are_what_playing_them_piece_by_piece_gives(seed):
    source = random.Random(seed)
    graph = stacked_graph(1) if seed % 2 else residual_graph()
    micro_batches = source.choice([1, 1, 2, 3, 4])
    borders = sorted(source.sample(range(len(graph)), source.randint(1, 3)), reverse=True)
    allreduce = [source.randrange(source.choice([10, 400_000, 4_000_000])) for _ in borders]
    after = list(range(len(borders)))
    tails = network_tails(allreduce, after)
    predictors, steps, slowed = [], [], []
    for w in range(source.randint(1, 3)):
        slowed.append(slowed_segments(allreduce, after, len(borders) + 1, source.random()))
        costs = _costs(graph, 10 * seed + w, extra=source.random() < 0.7)
        predictors.append(StepPredictor(graph, costs, borders, slowed[-1], micro_batches=micro_batches))
        steps.append(predictors[-1].plan(_plan(source, graph)))
    ends = played(predictors, steps, allreduce, after, slowed, micro_batches, 60)
    workers = [worker_step(str(w), p, s) for w, (p, s) in enumerate(zip(predictors, steps, strict=True))]
    found = cluster_step(workers, allreduce, after, steps=60)
    assert found.iteration_ns == ends[-1] - ends[-2]
    assert found.latency_ns == ends[1]
    assert found.iteration_ns == max(p.steady_ns(s, tails) for p, s in zip(predictors, steps, strict=True))
    # A host that waits in every step begins each on an idle device.
    predictor, step = predictors[0], steps[0]
    waiting = StepPredictor(
        graph, replace(predictor.costs, waits=True), borders, slowed[0], micro_batches=micro_batches
    )
    alone = played([predictor], [step], allreduce, after, slowed[:1], micro_batches, 1)
    assert waiting.steady_ns(step, tails) == alone[1]


def peak_by_counting(predictor, step, micro_batches):
    """Bytes in use, moment by moment; from the second pass on, gradients are added to those that are there."""
    graph, costs, peaks = predictor.graph, step.costs, predictor.costs.phase_peaks
    position = {operator.name: i for i, operator in enumerate(graph)}
    held = predictor.costs.held
    count = len(graph)
    release = {}
    for i, operator in enumerate(graph):
        keepers = [
            j for j, user in enumerate(graph) if any(user.inputs[k] == operator.name for k in costs[j].saves_inputs)
        ]
        keepers += [i] if costs[i].saves_output else []
        end = position.get(held.get(operator.name, ""))
        if end is not None:
            release.setdefault(2 * count - 1 - min(keepers) if keepers else end, []).append(i)
    completes = {}
    for i, operator in reversed(list(enumerate(graph))):
        completes |= dict.fromkeys(operator.parameters, i)
    sizes = {parameter.name: parameter.spec.num_bytes for parameter in graph.parameters}
    own = [sum(sizes[name] for name, k in completes.items() if k == i) for i in range(count)]
    start = now = peak = predictor.costs.resident_bytes + peaks.get("copies", 0)
    for micro in range(micro_batches):
        left = max(0, now - start)
        for moment in range(2 * count):
            i = moment if moment < count else 2 * count - 1 - moment
            high, net = (
                (costs[i].forward_peak_bytes, costs[i].forward_net_bytes)
                if moment < count
                else (costs[i].backward_peak_bytes, costs[i].backward_net_bytes)
            )
            peak = max(peak, now + high)
            now += net - sum(costs[r].result_bytes for r in release.get(moment, ()))
            if micro and moment >= count and sum(own):
                now -= left * own[i] // sum(own)
        if not micro:
            grown = now
    assert micro_batches < 2 or abs(now - grown) <= (micro_batches - 1) * (count + abs(min(0, grown - start)))
    return max(peak, now + max(peaks.get("clip", 0), peaks["optimizer"]))


@pytest.mark.parametrize("seed", range(24))
def test_memory_of_micro_batches_is_what_counting_every_moment_gives(seed):
    source = random.Random(seed)
    graph = random_graph(source) if seed % 3 else stacked_graph(2)
    for micro_batches in (1, 2):
        predictor = StepPredictor(graph, _costs(graph, seed, extra=seed % 2 == 0), micro_batches=micro_batches)
        step = predictor.plan(_plan(source, graph))
        assert predictor.memory(step).peak_bytes == peak_by_counting(predictor, step, micro_batches)


def test_passes_that_are_captured_count_once_per_micro_batch():
    graph = residual_graph()
    costs = _costs(graph, 1)
    one, three = (StepPredictor(graph, costs, micro_batches=n) for n in (1, 3))
    step = one.plan(_plan(random.Random(0), graph))
    phases = costs.phases
    work = phases["copies"].device + sum(step.device_ns) + phases["backward|end"].device
    assert three.captured_ns(step) - one.captured_ns(step) == 2 * work
    assert three.captured_ns(step, [(0, 77)]) - three.captured_ns(step) == 77


def test_a_bucket_behind_a_segment_that_is_not_there_and_no_micro_batch_are_refused():
    graph = residual_graph()
    predictor = StepPredictor(graph, _costs(graph, 1))
    with pytest.raises(ProblemError, match="after segment 3, but there are 1"):
        predictor.steady_ns(predictor.plan(_plan(random.Random(0), graph)), [(3, 10)])
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ProblemError, match="micro_batches"):
            StepPredictor(graph, _costs(graph, 1), micro_batches=wrong)


def test_a_cluster_has_a_lane_per_worker_and_stream():
    graph = residual_graph()
    source = random.Random(4)
    workers = []
    for name in ("slow", "fast"):
        predictor = StepPredictor(graph, _costs(graph, len(name) + len(workers)), [4, 1], micro_batches=2)
        workers.append(worker_step(name, predictor, predictor.plan(_plan(source, graph))))
    played = cluster_step(workers, [300_000, 90_000], [0, 1])
    timeline = cluster_timeline(played)
    assert min(event.start_ns for event in timeline.events) == 0
    assert {(event.worker, event.stream) for event in timeline.events} == {
        (worker, stream) for worker in ("slow", "fast") for stream in ("host", "compute", "communication")
    }
    reduced = [
        [(e.start_ns, e.end_ns) for e in timeline.events if (e.worker, e.stream) == (w, "communication")]
        for w in ("slow", "fast")
    ]
    assert reduced[0] == reduced[1]  # it starts on all when the last one is ready
    assert [end - start for start, end in reduced[0]] == [300_000, 90_000]
    rows = trace_json(timeline)["traceEvents"]
    lanes = [row for row in rows if row.get("name") == "thread_name"]
    assert len(lanes) == 6
    assert cluster_timeline(replace(played, lanes={})).events == ()


@pytest.mark.parametrize(
    ("allreduce", "after", "told"),
    [
        ([10], [0, 1], "1 all-reduces are ready after segments"),
        ([10, 10], [0, 9], "there are 3 segments"),
        ([10, 10], [-1, 0], "give one segment from 0"),
        ([-10, 10], [0, 1], "all-reduce in nanoseconds is -10"),
        ([float("nan"), 10], [0, 1], "all-reduce in nanoseconds is nan"),
        ([1.5, 10], [0, 1], "all-reduce in nanoseconds is 1.5"),
    ],
)
def test_buckets_that_make_no_sense_are_named(allreduce, after, told):
    graph = residual_graph()
    predictor = StepPredictor(graph, _costs(graph, 1), [4, 1])
    worker = worker_step("w", predictor, predictor.plan(_plan(random.Random(0), graph)))
    with pytest.raises(ProblemError, match=told):
        cluster_step([worker], allreduce, after)
    with pytest.raises(ProblemError, match=told):
        slowed_segments(allreduce, after, 3, 0.5)
    if "there are 3" not in told:
        with pytest.raises(ProblemError, match=told):
            network_tails(allreduce, after)


def test_workers_and_steps_that_make_no_sense_are_named():
    graph = residual_graph()
    predictor = StepPredictor(graph, _costs(graph, 1))
    worker = worker_step("w", predictor, predictor.plan(_plan(random.Random(0), graph)))
    with pytest.raises(ProblemError, match="a name of its own"):
        cluster_step([worker, worker])
    with pytest.raises(ProblemError, match="steps to play is 0"):
        cluster_step([worker], steps=0)
    for share in (float("nan"), -0.1):
        with pytest.raises(ProblemError, match="share of an all-reduce"):
            slowed_segments([10], [0], 1, share)
