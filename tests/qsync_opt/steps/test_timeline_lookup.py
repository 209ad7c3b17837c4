"""Memory timelines are taken from the recorded plan around whose operator most is the same."""

import json
import random
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.steps import Case, CaseCost, RecordedTimelines, StepCosts, StepFlow, StepPredictor
from qsync_opt.steps.memory import TimelineLookup
from qsync_opt.testing import random_step_costs, residual_graph


def _cases(precisions):
    return tuple(Case("op", precision, ("FP32",)) for precision in precisions)


def _timelines(*sizes):
    return tuple(((0, 0, size), (1, 0, -size)) for size in sizes)


def _costs(cases):
    return [CaseCost(output="FP32", samples=1, timeline=((0, 0, -1),)) for _ in cases]


def _found(recorded, precisions):
    cases = _cases(precisions)
    return TimelineLookup(recorded, [()] * len(cases)).timelines(cases, _costs(cases))


def test_a_recorded_plan_has_its_own_timelines():
    generator = random.Random(0)
    recorded = []
    for _ in range(4):
        precisions = [generator.choice("ab") for _ in range(20)]
        recorded.append(RecordedTimelines(_cases(precisions), _timelines(*generator.sample(range(1, 1000), 20))))
    for plan in recorded:
        lookup = TimelineLookup(recorded, [()] * len(plan.cases))
        assert lookup.timelines(plan.cases, _costs(plan.cases)) == list(plan.timelines)
        assert lookup.recorded(list(plan.cases))
        assert not lookup.recorded(plan.cases[:-1])


def test_neighbours_alike_go_before_the_same_place():
    recorded = [
        RecordedTimelines(_cases("aab"), _timelines(1, 2, 3)),
        RecordedTimelines(_cases("bac"), _timelines(4, 5, 6)),
    ]
    assert _found(recorded, "bac")[1] == _timelines(5)[0]
    assert _found(recorded, "aab")[1] == _timelines(2)[0]


def test_a_difference_nearby_weighs_more_than_one_far_away():
    recorded = []
    for size, place in ((1, 9), (2, 5), (3, 11)):
        precisions = ["a"] * 20
        precisions[10], precisions[place] = "c", "b"
        recorded.append(RecordedTimelines(_cases(precisions), _timelines(*[size] * 20)))
    asked = ["a"] * 20
    asked[10] = "c"
    assert _found(recorded, asked)[10] == _timelines(2)[0]
    far = [RecordedTimelines(_cases("b" + "a" * 9 + "c" + "a" * 9), _timelines(*[4] * 20)), *recorded]
    assert _found(far, asked)[10] == _timelines(3)[0]  # equally alike: the mean of 2 and 4


def test_the_same_place_goes_before_another_with_the_same_neighbours():
    long = RecordedTimelines(_cases("a" * 40), _timelines(*range(1, 41)))
    assert _found([long], "a" * 40)[20] == _timelines(21)[0]


def test_of_places_equally_alike_those_of_the_plan_that_is_more_alike_count():
    first, second = ["a"] * 40, ["a"] * 40
    first[30], second[35] = "b", "b"
    recorded = [
        RecordedTimelines(_cases(first), _timelines(*range(40))),
        RecordedTimelines(_cases(second), _timelines(*range(40, 80))),
    ]
    assert _found(recorded, first)[5] == _timelines(5)[0]
    assert _found(recorded, second)[5] == _timelines(45)[0]


def test_places_equally_alike_count_alike():
    recorded = [RecordedTimelines(_cases("ab"), _timelines(10, 1)), RecordedTimelines(_cases("ac"), _timelines(30, 1))]
    assert _found(recorded, "aa")[0] == _timelines(20)[0]


def test_operators_that_read_the_result_go_before_neighbours():
    """Whoever reads it, wherever that is; a lookup that knows of no readers goes by neighbours."""
    users = ((4,), (), (), (), ())
    recorded = [
        RecordedTimelines(_cases("aaaab"), _timelines(1, 0, 0, 0, 0)),
        RecordedTimelines(_cases("abbbc"), _timelines(2, 0, 0, 0, 0)),
    ]
    cases = _cases("aaaac")
    assert TimelineLookup(recorded, users).timelines(cases, _costs(cases))[0] == _timelines(2)[0]
    assert TimelineLookup(recorded, [()] * 5).timelines(cases, _costs(cases))[0] == _timelines(1)[0]


def test_readers_far_away_are_not_mixed_up():
    """Two plans that differ in a reader alone, far from what it reads."""
    users = ((30,), *[()] * 39)
    plans = [["a"] * 40 for _ in range(2)]
    plans[1][30] = "b"
    recorded = [RecordedTimelines(_cases(plan), _timelines(*[k] * 40)) for k, plan in enumerate(plans, 1)]
    lookup = TimelineLookup(recorded, users)
    for k, plan in enumerate(plans, 1):
        assert lookup.timelines(_cases(plan), _costs(_cases(plan)))[0] == _timelines(k)[0]


def test_a_case_that_was_never_recorded_has_the_timeline_of_its_cost():
    recorded = [RecordedTimelines(_cases("ab"), _timelines(10, 1))]
    assert _found(recorded, "ad")[1] == ((0, 0, -1),)


def test_recorded_timelines_come_back_from_their_file():
    graph = residual_graph()
    cases = _cases("ab")
    costs = replace(random_step_costs(graph, ["FP32"]), timelines=(RecordedTimelines(cases, _timelines(10, 1)),))
    data = json.loads(json.dumps(costs.to_json()))
    assert StepCosts.from_json(data, "costs") == costs
    for wrong in ("x", [["op|a|FP32"]], [[1, []]], [["op|a|FP32", [[0, 0]]]]):
        with pytest.raises(ProblemError, match=r"costs: courses\[0\]"):
            StepCosts.from_json(data | {"courses": [wrong]}, "costs")


def _peaks(mean, recorded):
    """Bytes beyond those between steps of a recorded plan, and of one that differs in one operator."""
    graph = residual_graph()
    costs = random_step_costs(graph, ["FP32", "BF16"])
    cases = {case: replace(cost, timeline=((0, 0, mean),)) for case, cost in costs.cases.items()}
    costs = replace(costs, cases=cases, graphs=1, phase_peaks=dict.fromkeys(costs.phase_peaks, 0))
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    plan = dict.fromkeys(names, "FP32")
    step = StepPredictor(graph, costs).plan(plan)
    flow = StepFlow(graph, costs.half_format)
    own = tuple(flow.case(i, plan.get(o.name, ""), step.formats) for i, o in enumerate(graph))
    known = replace(costs, timelines=(RecordedTimelines(own, (((0, 0, recorded),),) * len(own)),))
    predictor = StepPredictor(graph, known)
    steps = [predictor.plan(plan), predictor.plan(plan | {names[-1]: "BF16"})]
    return [predictor.memory(step).peak_bytes - costs.resident_bytes for step in steps], len(graph)


def test_a_recorded_plan_has_its_own_peak_and_others_the_larger_estimate():
    (own, other), count = _peaks(100, 10)
    assert (own, other) == (10 * count, 100 * count)
    (own, other), count = _peaks(10, 100)
    assert own == 100 * count
    assert 10 * count < other < own


@pytest.mark.parametrize("held", [False, True])
def test_a_copy_takes_memory_only_where_the_operator_did_not_have_the_tensor_itself(held):
    graph = residual_graph()
    costs = random_step_costs(graph, ["FP32", "BF16"])
    flow = StepFlow(graph, costs.half_format)
    position = next(i for i, o in enumerate(graph) if o.role is Role.ADJUSTABLE and len(flow.inputs[i]) == 1)
    source = graph.operators[flow.inputs[position][0]]
    size = 4 * source.output_elements
    met, new = (Case(flow.signature(position), "FP32", (form,)) for form in ("FP32", "BF16"))
    timeline = ((0, 0, size if held else size - 1), (1, 0, 1))
    cases = {case: replace(cost, timeline=timeline) for case, cost in costs.cases.items()}
    missing = {case for case in cases if case.signature == met.signature and case.precision == "FP32" and case != met}
    predictor = StepPredictor(graph, replace(costs, cases={c: v for c, v in cases.items() if c not in missing}))
    found = predictor.cost(position, new).timeline
    assert found == (timeline if held else (*timeline, (0, 0, size), (1, 1, -size)))
