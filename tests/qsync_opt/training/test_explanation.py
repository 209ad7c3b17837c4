import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role
from qsync_opt.testing import buckets, chain, operator, random_plan, random_problem, shared_casts
from qsync_opt.training import Explainer, Plan, evaluate


def _plan(problem, **choices):
    return Plan(problem=problem.name, devices={device.name: choices for device in problem.devices})


def _changed(plan, device, name, precision):
    devices = {key: dict(value) for key, value in plan.devices.items()}
    devices[device][name] = precision
    return replace(plan, devices=devices)


def _casts(device):
    return Counter(c for o in device.operators for c in (*o.forward_casts, *o.backward_casts))


@pytest.mark.parametrize("seed", range(150))
def test_every_change_is_what_evaluating_the_changed_plan_gives(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=9)
    plan = random_plan(source, problem)
    explainer = Explainer(problem, plan)
    before = evaluate(problem, plan)
    resolved = plan.resolve(problem)
    for device in problem.devices:
        for node in problem.operators:
            found = explainer.explain(node.name, device.name)
            assert found.precision == resolved[device.name][node.name]
            assert bool(found.alternatives) <= (node.role is Role.ADJUSTABLE)
            if node.role is not Role.ADJUSTABLE:
                continue
            assert {a.precision for a in found.alternatives} == set(device.operators[node.name]) - {found.precision}
            for alternative in found.alternatives:
                changed = _changed(plan, device.name, node.name, alternative.precision)
                after, new = evaluate(problem, changed), changed.resolve(problem)
                one, two = before.devices[device.name], after.devices[device.name]
                assert alternative.iteration_change_ns == after.iteration_ns - before.iteration_ns
                assert alternative.compute_change_ns == two.backward_end_ns - one.backward_end_ns
                assert alternative.memory_change_kib == two.memory_kib - one.memory_kib
                assert alternative.sensitivity_change == pytest.approx(after.objective - before.objective, abs=1e-9)
                assert alternative.feasible == after.feasible
                assert len(alternative.broken) == len(after.violations)
                assert {(p.operator, p.before, p.after) for p in alternative.pushed} == {
                    (name, precision, new[device.name][name])
                    for name, precision in resolved[device.name].items()
                    if new[device.name][name] != precision and name != node.name
                }
                removed, added = Counter(alternative.removed_casts), Counter(alternative.added_casts)
                assert removed <= _casts(one)
                assert _casts(one) - removed + added == _casts(two)


def test_the_exchange_of_a_chain_by_hand():
    # INT8 chain: forward and backward per operator and precision are in `chain`'s docstring; limits 15000 ns, 50 KiB.
    problem = chain().problem
    explainer = Explainer(problem, _plan(problem, a="FP32", b="FP32", c="FP16"))
    raised = explainer.explain("c", "T4")
    assert (raised.next_higher.precision, raised.next_lower) == ("FP32", None)
    assert raised.next_higher.iteration_change_ns == 3000
    assert raised.next_higher.memory_change_kib == 10
    assert [(b.device, b.value, b.limit) for b in raised.next_higher.broken] == [("T4", 60, 50), (None, 18000, 15000)]
    assert "breaks the memory limit of T4, 50 KiB, by 10 KiB and the latency limit of 15 µs by 3 µs" in raised.reason
    assert "FP16 is the lowest that it has" in raised.reason


def test_a_change_that_is_better_within_all_limits_is_said_to_be():
    problem = chain().problem
    found = Explainer(problem, _plan(problem, a="FP16", b="FP16", c="FP16")).explain("a", "T4")
    assert found.reason.startswith("FP32 would be better within all limits: sensitivity −")


def test_roles_give_their_own_reasons():
    problem = shared_casts().problem
    explainer = Explainer(problem, _plan(problem, a="FP16"))
    assert explainer.explain("x", "T4").reason == "Fixed: it always runs in FP32 on T4."
    one = explainer.explain("a", "T4").next_higher
    assert len(one.removed_casts) == 4  # one shared forward cast, three backward casts
    assert one.added_casts == ()


def test_a_dependent_operator_names_the_inputs_that_decide():
    base = buckets().problem
    tables = {name: dict(table) for name, table in base.devices[0].operators.items()}
    tables["sum"] = {p: replace(c, sensitivity=0.0) for p, c in tables["a"].items()}
    device = replace(base.devices[0], operators=tables)
    problem = replace(
        base,
        operators=(*base.operators, operator("sum", ["a", "b"], role=Role.DEPENDENT)),
        devices=(device,),
    )
    explainer = Explainer(problem, _plan(problem, a="FP16", b="FP32"))
    found = explainer.explain("sum", "T4")
    assert (found.precision, found.decided_by, found.alternatives) == ("FP32", ("b",), ())
    assert found.reason == "Follows its input 'b' into FP32."
    lowered = explainer.explain("b", "T4").next_lower
    assert [(p.operator, p.before, p.after) for p in lowered.pushed] == [("sum", "FP32", "FP16")]


def test_json_holds_plain_data():
    problem = shared_casts().problem
    found = Explainer(problem, _plan(problem, a="FP16")).explain("a", "T4")
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["format"] == "qsync-explanation/1"
    assert data["next_higher"] == "FP32"
    assert data["alternatives"][0]["removed_casts"][0]["duration_ns"] == 1000


def test_unknown_names_are_refused_with_the_nearest():
    problem = chain().problem
    explainer = Explainer(problem, _plan(problem, a="FP16", b="FP16", c="FP16"))
    with pytest.raises(ProblemError, match="no device type 'T5'; it has T4"):
        explainer.explain("a", "T5")
    with pytest.raises(ProblemError, match="no operator 'aa'; did you mean 'a'"):
        explainer.explain("aa", "T4")
