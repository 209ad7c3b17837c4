import json
import random
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.gradients import Plan, RecordedReductions, ReductionModel, SchemeTimes, fit_reductions
from qsync_opt.model import OpGraph, Role
from qsync_opt.steps import (
    Case,
    StepCosts,
    StepFlow,
    StepPredictor,
    Work,
    cluster_step,
    load_step_costs,
    network_tails,
    slowed_segments,
    worker_step,
)
from qsync_opt.testing import make_graph, make_operator, random_graph, random_step_costs, residual_graph, stacked_graph

PRECISIONS = ("INT8", "BF16", "TF32", "FP32")


def random_choices(source: random.Random, graph: OpGraph) -> dict[str, str]:
    return {operator.name: source.choice(PRECISIONS) for operator in graph.by_role(Role.ADJUSTABLE)}


def random_borders(source: random.Random, graph: OpGraph) -> list[int]:
    return sorted(source.sample(range(len(graph)), min(3, len(graph))), reverse=True)


@pytest.mark.parametrize("seed", range(10))
def test_a_change_gives_what_the_whole_plan_gives(seed):
    source = random.Random(seed)
    graph = random_graph(source)
    predictor = StepPredictor(graph, random_step_costs(graph, PRECISIONS, seed=seed), random_borders(source, graph))
    plan = random_choices(source, graph)
    step = predictor.plan(plan)
    for _ in range(10 if plan else 0):
        name, precision = source.choice(list(plan)), source.choice(PRECISIONS)
        predictor.change(step, name, precision)
        plan[name] = precision
        whole = predictor.plan(plan)
        assert (step.formats, step.costs, step.host_ns, step.device_ns) == (
            whole.formats,
            whole.costs,
            whole.host_ns,
            whole.device_ns,
        )
    assert sum(work.host for work in predictor.segments_of(step)) == step.host_ns
    assert [work.device for work in predictor.segments_of(step)] == step.device_ns


@pytest.mark.parametrize("seed", range(10))
def test_the_closed_form_is_the_limit_of_steps_played_one_by_one(seed):
    source = random.Random(seed)
    graph = stacked_graph(2)
    borders = random_borders(source, graph)
    allreduce = [source.randrange(1_000, 400_000) for _ in borders]
    segments = list(range(len(borders)))
    tails = network_tails(allreduce, segments)
    steady, workers = [], []
    for k in range(3):
        slowed = slowed_segments(allreduce, segments, len(borders) + 1, 0.4 * k)
        predictor = StepPredictor(graph, random_step_costs(graph, PRECISIONS, seed=100 * seed + k), borders, slowed)
        step = predictor.plan(random_choices(source, graph))
        steady.append(predictor.steady_ns(step, tails))
        workers.append(worker_step(str(k), predictor, step))
    played = cluster_step(workers, allreduce, segments, steps=60)
    assert played.iteration_ns == max(steady)
    assert played.latency_ns >= max(steady) - max(worker.finish.host + worker.optimizer.host for worker in workers)


def test_a_change_of_what_is_not_there_is_refused_and_changes_nothing():
    for names in (["a"], ["a", "b"]):
        graph = make_graph([make_operator(name, inputs=names[:i]) for i, name in enumerate(names)])
        predictor = StepPredictor(graph, random_step_costs(graph, ("BF16", "FP32")))
        step = predictor.plan(dict.fromkeys(names, "FP32"))
        with pytest.raises(ProblemError, match="'nowhere' is not in model"):
            predictor.change(step, "nowhere", "BF16")
        with pytest.raises(ProblemError):
            predictor.change(step, "a", "INT8")
        assert step == predictor.plan(dict.fromkeys(names, "FP32"))


def test_all_reduces_slow_down_what_is_computed_beside_them():
    graph = stacked_graph(2)
    borders = [len(graph) - 1, len(graph) // 2, 1]
    costs = random_step_costs(graph, PRECISIONS, seed=3)
    assert slowed_segments([100, 200, 400], [0, 1, 2], 4, 0.5) == (0, 50, 100, 0)  # nothing is left beside the last
    assert slowed_segments([100, 200, 400], [0, 0, 2], 4, 1.0) == (0, 300, 0, 0)
    assert slowed_segments([], [], 1, 1.0) == (0,)
    plan = dict.fromkeys((operator.name for operator in graph.by_role(Role.ADJUSTABLE)), "BF16")
    alone, beside = (StepPredictor(graph, costs, borders, slowed) for slowed in ((), (0, 50_000, 100_000, 0)))
    steps = [predictor.plan(plan) for predictor in (alone, beside)]
    assert sum(steps[1].device_ns) - sum(steps[0].device_ns) == 150_000
    assert sum(work.device for work in beside.segments_of(steps[1])) == sum(steps[1].device_ns)
    assert beside.captured_ns(steps[1]) == alone.captured_ns(steps[0])  # captured passes hide no all-reduce
    for wrong in ((1, 2), (0, -1, 0, 0)):
        with pytest.raises(ProblemError, match=r"4 numbers from 0 are needed"):
            StepPredictor(graph, costs, borders, wrong)


def test_each_bucket_slows_the_segment_after_it_down_by_its_own_share():
    assert slowed_segments([100, 200, 300], [0, 1, 2], 4, [0.5, 0.1, 0.9]) == (0, 50, 20, 0)
    assert slowed_segments([100, 200], [0, 1], 3, 0.5) == slowed_segments([100, 200], [0, 1], 3, [0.5, 0.5])
    with pytest.raises(ProblemError, match="1 shares were given for 2 all-reduces"):
        slowed_segments([100, 200], [0, 1], 3, [0.5])


@pytest.mark.parametrize("names", [("FP32",) * 3, ("sum8",) * 3, ("sum8", "FP32", "sum8")])
def test_a_gradient_plan_is_played_as_its_reductions_are_predicted_and_recorded(names):
    graph = stacked_graph(2)
    borders, elements, after = [len(graph) - 1, len(graph) // 2, 0], (1000, 500, 250), (0, 1, 2)
    costs = on_the_device_alone(random_step_costs(graph, PRECISIONS, seed=3))
    choices = dict.fromkeys((operator.name for operator in graph.by_role(Role.ADJUSTABLE)), "BF16")
    times = SchemeTimes(
        workers=2,
        elements=(250, 500, 1000),
        times_ns={"FP32": (1_000, 2_000, 4_000), "sum8": (800, 900, 1_100)},
        slowdowns={"FP32": 0.25, "sum8": 0.5},
    )
    plan = Plan(schemes={f"b{k}": name for k, name in enumerate(names)})
    allreduce, shares = times.network(plan, elements)
    slowed = slowed_segments(allreduce, after, len(borders) + 1, shares)
    predictor = StepPredictor(graph, costs, borders, slowed)
    played = cluster_step([worker_step("0", predictor, predictor.plan(choices))], allreduce, after, steps=1)
    lanes = {what: (start, end) for stream, what, start, end in played.lanes["0"] if stream == "communication"}

    alone = StepPredictor(graph, costs, borders)
    step = alone.plan(choices)
    segments = [work.device for work in alone.segments_of(step)][: len(borders)]
    segments[0] += alone.lead_of(step).device
    assert min(segments[1:]) > max(allreduce)  # each reduction ends beside the segment after it
    model = ReductionModel.of_times(times, elements, segments)
    predicted = model.predict(plan)
    assert [(each.start_ns, each.end_ns) for each in predicted] == [lanes[f"all-reduce {k}"] for k in range(3)]

    records = [
        RecordedReductions(workers=2, elements=elements, steps=(model.predict(model.single(name)),) * 2)
        for name in ("FP32", "sum8")
    ]
    fitted = fit_reductions(records)
    assert fitted.times_ns == model.times_ns
    assert fitted.predict(plan)[-1].end_ns == pytest.approx(predicted[-1].end_ns, rel=0.001)
    with pytest.raises(ProblemError, match="3 buckets have sizes and 2 a time up to them"):
        ReductionModel.of_times(times, elements, segments[:2])


def on_the_device_alone(costs: StepCosts) -> StepCosts:
    """The costs with a host that takes no time."""

    def free(work: Work) -> Work:
        return Work(0, work.device + 1000, work.device + 1000)

    cases = {
        case: replace(cost, forward=free(cost.forward), backward=free(cost.backward))
        for case, cost in costs.cases.items()
    }
    return replace(costs, cases=cases, phases={label: free(work) for label, work in costs.phases.items()})


def brute_force_peak(predictor: StepPredictor, step) -> int:
    """Walk through all moments and count, at each, every result that somebody still needs."""
    graph, costs = predictor.graph, step.costs
    held = predictor.costs.held
    position = {operator.name: i for i, operator in enumerate(graph)}
    count = len(graph)
    death = []
    for i, operator in enumerate(graph):
        end = position.get(held.get(operator.name, ""))
        last = 2 * count if end is None else end
        for j, cost in enumerate(costs):
            keeps = any(position[graph.operators[j].inputs[k]] == i for k in cost.saves_inputs)
            if (keeps or (j == i and cost.saves_output)) and end is not None:
                last = max(last, 2 * count - 1 - j)
        death.append(last)
    peak = 0
    for moment in range(2 * count):
        present = predictor.costs.resident_bytes
        # Results of forward that were made before this moment and are needed at it or later.
        done = range(min(moment, count))
        for i in done:
            present += costs[i].forward_net_bytes - (costs[i].result_bytes if death[i] < moment else 0)
        for m in range(count, moment):
            present += costs[2 * count - 1 - m].backward_net_bytes
        here = moment if moment < count else 2 * count - 1 - moment
        high = costs[here].forward_peak_bytes if moment < count else costs[here].backward_peak_bytes
        peak = max(peak, present + high)
    return max(peak, predictor.costs.resident_bytes)


@pytest.mark.parametrize("seed", range(15))
def test_memory_is_what_counting_every_moment_gives(seed):
    source = random.Random(seed)
    graph = random_graph(source)
    predictor = StepPredictor(graph, random_step_costs(graph, PRECISIONS, seed=seed))
    step = predictor.plan(random_choices(source, graph))
    assert predictor.memory(step).peak_bytes == brute_force_peak(predictor, step)


@pytest.mark.parametrize("seed", range(10))
def test_results_are_held_as_long_as_the_program_holds_them(seed):
    """Not longer than it runs itself, until any operator behind it, or until after the step."""
    source = random.Random(seed)
    graph = random_graph(source)
    names = [operator.name for operator in graph]
    held = {name: source.choice([name, *names[i:], ""]) for i, name in enumerate(names)}
    costs = replace(random_step_costs(graph, PRECISIONS, seed=seed), held=held | {names[0]: names[0]})
    predictor = StepPredictor(graph, costs)
    step = predictor.plan(random_choices(source, graph))
    assert predictor.memory(step).peak_bytes == brute_force_peak(predictor, step)


def phases_alone(**peaks):
    """Predicted memory of a step whose operators take none."""
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    nothing = {
        case: replace(cost, result_bytes=0, forward_net_bytes=0, forward_peak_bytes=0, backward_net_bytes=0,
                      backward_peak_bytes=0)
        for case, cost in costs.cases.items()
    }  # fmt: skip
    peaks = {**costs.phase_peaks, **{label.replace("_end", "|end"): size for label, size in peaks.items()}}
    predictor = StepPredictor(graph, replace(costs, cases=nothing, phase_peaks=peaks, resident_bytes=1000))
    found = predictor.memory(predictor.plan({operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)}))
    return found.peak_bytes, found.phase, found.operator


@pytest.mark.parametrize(
    ("peaks", "peak_bytes", "phase"),
    [
        ({}, 1000, "forward"),
        ({"copies": 10}, 1010, "copies"),
        ({"copies": 10, "forward_end": 20}, 1030, "forward"),
        ({"forward_end": 20, "backward": 30}, 1030, "forward"),
        ({"forward_end": 20, "backward_end": 30}, 1030, "backward"),
        ({"backward_end": 30, "clip": 40}, 1040, "clip"),
        ({"clip": 40, "optimizer": 50}, 1050, "optimizer"),
        ({"clip": 50, "optimizer": 40}, 1050, "clip"),
        ({"copies": 10, "optimizer": 40}, 1050, "optimizer"),
    ],
)
def test_memory_of_phases_outside_of_operators_counts(peaks, peak_bytes, phase):
    assert phases_alone(**peaks) == (peak_bytes, phase, "")


@pytest.mark.parametrize(
    ("peaks", "micro_batches", "peak_bytes", "phase"),
    [
        ({}, 1, 1000 + 70, "backward"),
        ({"forward": 1, "forward_end": 2, "backward": 4, "backward_end": 8}, 1, 1000 + 70 + 15, "backward"),
        ({"optimizer": 70}, 1, 1000 + 70, "backward"),
        ({"optimizer": 71}, 1, 1000 + 71, "optimizer"),
        ({"optimizer": 71, "clip": 75}, 1, 1000 + 75, "optimizer"),
        ({"optimizer": 71}, 2, 1000 + 70 + 400, "backward"),
        ({"optimizer": 471}, 2, 1000 + 471, "optimizer"),
    ],
)
def test_memory_of_a_compiled_step_is_that_of_its_passes_or_of_the_optimizer(peaks, micro_batches, peak_bytes, phase):
    """Operators take 10 and 60 bytes at the peak of the passes; the only weight has 100 elements of FP32."""
    graph = make_graph([make_operator("a"), make_operator("b", inputs=["a"], parameters=["w"])], {"w": 100})
    costs = random_step_costs(graph, ("FP32",))
    cases = {}
    for case, cost in costs.cases.items():
        forward, backward = (50, 10) if case.inputs else (4, 6)
        cases[case] = replace(cost, forward_net_bytes=forward, backward_net_bytes=backward)
    peaks = {**costs.phase_peaks, **{label.replace("_end", "|end"): size for label, size in peaks.items()}}
    costs = replace(costs, cases=cases, phase_peaks=peaks, resident_bytes=1000, graphs=1)
    predictor = StepPredictor(graph, costs, micro_batches=micro_batches)
    found = predictor.memory(predictor.plan({"a": "FP32", "b": "FP32"}))
    assert (found.peak_bytes, found.phase) == (peak_bytes, phase)
    assert found.operator == ("b" if phase == "backward" else "")


def test_micro_batches_that_leave_nothing_behind_free_nothing():
    graph = make_graph([make_operator("a", parameters=["w"])], {"w": 100})
    costs = random_step_costs(graph, ("FP32",))
    sizes = ("result_bytes", "forward_net_bytes", "forward_peak_bytes", "backward_net_bytes", "backward_peak_bytes")
    cases = {case: replace(cost, **dict.fromkeys(sizes, 0)) for case, cost in costs.cases.items()}
    peaks = {**costs.phase_peaks, "optimizer": 50}
    predictor = StepPredictor(
        graph, replace(costs, cases=cases, phase_peaks=peaks, resident_bytes=1000), micro_batches=3
    )
    assert predictor.memory(predictor.plan({"a": "FP32"})).peak_bytes == 1050


def test_views_live_in_the_result_that_they_show():
    """To keep a view for the backward pass is to keep the result behind it."""
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    names = [operator.name for operator in graph]
    view = next(i for i, operator in enumerate(graph) if operator.inputs)
    signature = StepFlow(graph, "BF16").signature(view)
    peaks = []
    for roots, inputs, output in (({names[view]: graph.operators[view].inputs[0]}, (), True), ({}, (0,), False)):
        cases = {
            case: replace(cost, saves_inputs=inputs, saves_output=output, result_bytes=0)
            if case.signature == signature
            else replace(cost, saves_inputs=(), saves_output=False, forward_peak_bytes=0, backward_peak_bytes=10**6)
            for case, cost in costs.cases.items()
        }
        held = dict.fromkeys(names, names[-1])
        predictor = StepPredictor(graph, replace(costs, cases=cases, roots=roots, held=held))
        step = predictor.plan({operator.name: "FP32" for operator in graph.by_role(Role.ADJUSTABLE)})
        peaks.append(predictor.memory(step).peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_case_never_met_is_the_nearest_one_with_casts():
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    flow = StepFlow(graph, "BF16")
    position = next(i for i, o in enumerate(graph) if o.role is Role.ADJUSTABLE and len(flow.inputs[i]) == 1)
    missing = Case(flow.signature(position), "BF16", ("FP32",))
    near = Case(flow.signature(position), "BF16", ("BF16",))
    known = {
        case: cost
        for case, cost in costs.cases.items()
        if case != missing and case != missing._replace(inputs=("FP16",))
    }
    predictor = StepPredictor(graph, replace(costs, cases=known))
    found, before = predictor.cost(position, missing), known[near]
    elements = graph.operators[flow.inputs[position][0]].output_elements
    assert found.forward.device == before.forward.device + costs.casts["FP32>BF16"].ns(elements)
    assert found.forward.host == before.forward.host + costs.cast_host_ns
    assert found.samples == 0 and 0 not in found.saves_inputs
    assert found.forward_net_bytes == before.forward_net_bytes + 2 * elements


def test_a_sum_never_met_in_these_formats_is_one_that_delivers_the_same():
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    position = graph.index("residual")
    signature = StepFlow(graph, "BF16").signature(position)
    alike = {(a, b): Case(signature, "", (a, b)) for a in ("BF16", "FP32") for b in ("BF16", "FP32")}
    others = {case: cost for case, cost in costs.cases.items() if case.signature != signature}
    known = {case: costs.cases[case] for case in (alike["BF16", "BF16"], alike["FP32", "FP32"])}
    predictor = StepPredictor(graph, replace(costs, cases={**others, **known}))
    for inputs in (("BF16", "FP32"), ("FP32", "BF16")):
        found, wide = predictor.cost(position, alike[inputs]), known[alike["FP32", "FP32"]]
        assert (found.output, found.result_bytes) == ("FP32", wide.result_bytes)
        assert found.forward == wide.forward  # the kernel reads both formats
        elements = graph.operators[graph.index("embed")].output_elements
        assert found.backward.device == wide.backward.device + costs.casts["BF16>FP32"].ns(elements)


def test_what_follows_a_format_that_was_never_met_grows_with_its_width():
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    position = graph.index("gelu")
    signature = StepFlow(graph, "BF16").signature(position)
    half = Case(signature, "", ("BF16",))
    known = {case: cost for case, cost in costs.cases.items() if case.signature != signature} | {
        half: costs.cases[half]
    }
    predictor = StepPredictor(graph, replace(costs, cases=known))
    wide, other = (predictor.cost(position, half._replace(inputs=(name,))) for name in ("FP32", "FP16"))
    assert (wide.output, wide.result_bytes) == ("FP32", 2 * known[half].result_bytes)
    assert wide.backward.device == 2 * known[half].backward.device  # no cast: it delivers what it is given
    assert (other.output, other.result_bytes, other.backward) == (
        "FP16",
        known[half].result_bytes,
        known[half].backward,
    )


def test_what_cannot_be_predicted_is_refused(tmp_path):
    graph = residual_graph()
    costs = random_step_costs(graph, PRECISIONS)
    predictor = StepPredictor(graph, costs)
    plan = random_choices(random.Random(0), graph)
    name = next(iter(plan))
    with pytest.raises(ProblemError, match=r"never recorded in FP16.*INT8"):
        predictor.plan(plan | {name: "FP16"})
    with pytest.raises(ProblemError, match="leaves out adjustable operator"):
        predictor.plan({})
    with pytest.raises(ProblemError, match="not of"):
        StepPredictor(stacked_graph(1), costs)
    with pytest.raises(ProblemError, match="falling positions"):
        StepPredictor(graph, costs, [1, 2])
    path = tmp_path / "costs.json"
    costs.save(path)
    assert load_step_costs(path) == costs
    data = costs.to_json()
    data["phases"]["forward"] = [1, 2]
    with pytest.raises(ProblemError, match="host, device, lag"):
        StepCosts.from_json(data, "here")
    with pytest.raises(ProblemError, match="waits is 'no', but allowed are true and false"):
        StepCosts.from_json(costs.to_json() | {"waits": "no"}, "here")


def _first_case(data):
    return next(iter(data["cases"].values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: _first_case(d).update(saves_output="no"), "saves_output is 'no', but allowed are true and false"),
        (lambda d: _first_case(d).update(saves_output=1), "saves_output is 1, but allowed are true and false"),
        (lambda d: _first_case(d).pop("saves_output"), "key 'saves_output' is missing"),
        (
            lambda d: _first_case(d).update(forward_net_bytes="12"),
            "forward_net_bytes is '12', but it must be an integer",
        ),
        (
            lambda d: _first_case(d).update(backward_net_bytes=1.5),
            "backward_net_bytes is 1.5, but it must be an integer",
        ),
        (lambda d: _first_case(d).update(backward_net_bytes=-(2**62) - 1), "backward_net_bytes is -46116"),
        (lambda d: _first_case(d).update(output=None), "output is None, but it must be a text"),
        (lambda d: d["cases"].update(odd={}), "'odd' is no case; 'signature|precision|formats of inputs' is needed"),
        (lambda d: d["phase_peaks"].update(forward=-1), "phase_peaks: forward is -1"),
        (lambda d: d.update(roots={"a": 1}), "roots: a is 1, but it must be a text"),
        (lambda d: d.update(held={"a": None}), "held: a is None, but it must be a text"),
        (
            lambda d: d.update(
                checks=[dict(plan="a", predicted_ns=1, measured_ns=0, predicted_bytes=0, measured_bytes=0)]
            ),
            r"checks\[0\]: measured_ns is 0, but it must be an integer of at least 1",
        ),
    ],
)
def test_step_costs_are_checked_field_by_field(change, message):
    data = json.loads(json.dumps(random_step_costs(stacked_graph(1), PRECISIONS, seed=1).to_json()))
    assert StepCosts.from_json(data, "here").to_json() == data
    change(data)
    with pytest.raises(ProblemError, match=message):
        StepCosts.from_json(data, "here")


def test_an_input_that_arrives_in_another_format_gets_another_gradient(tmp_path):
    """A residual addition hands one gradient to both inputs; a cast one is new, the old one goes an operator later."""
    graph = residual_graph()
    costs = random_step_costs(graph, ("BF16", "FP32"), seed=1)
    position = graph.index("residual")
    elements = graph["embed"].output_elements
    signature = StepFlow(graph, "BF16").signature(position)
    alike = Case(signature, "", ("FP32", "FP32"))
    base = costs.cases[alike]
    costs = replace(costs, cases={c: cost for c, cost in costs.cases.items() if c.signature != signature or c == alike})
    predictor = StepPredictor(graph, costs)
    made = predictor.cost(position, Case(signature, "", ("BF16", "FP32")))
    assert made.backward_net_bytes == base.backward_net_bytes + 2 * elements
    assert made.backward_late_bytes == -4 * elements
    # All of it narrower: what is handed on is as narrow as what came, and nothing is cast.
    narrow = predictor.cost(position, Case(signature, "", ("BF16", "BF16")))
    assert narrow.backward_net_bytes == round(base.backward_net_bytes / 2)
    assert narrow.backward_late_bytes == 0
    plan = {o.name: "FP32" for o in graph.by_role(Role.ADJUSTABLE)} | {"embed": "BF16"}
    step = predictor.plan(plan)
    assert step.costs[position] == made
    # Given back by the operator behind it: nothing before that has less, nothing after it has more.
    late = replace(made, backward_late_bytes=0, backward_net_bytes=made.backward_net_bytes + made.backward_late_bytes)
    at_once = replace(step, costs=[late if k == position else cost for k, cost in enumerate(step.costs)])
    assert predictor.memory(step).peak_bytes >= predictor.memory(at_once).peak_bytes
    behind = step.costs[position - 1]
    high = replace(behind, backward_peak_bytes=10**9)
    peaks = [
        predictor.memory(replace(s, costs=[high if k == position - 1 else c for k, c in enumerate(s.costs)])).peak_bytes
        for s in (step, at_once)
    ]
    assert peaks[0] - peaks[1] == 4 * elements
    saved = replace(costs, cases={**costs.cases, Case(signature, "", ("BF16", "FP32")): made})
    saved.save(tmp_path / "costs.json")
    assert load_step_costs(tmp_path / "costs.json") == saved
