from dataclasses import replace

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.testing import buckets, diamond, shared_casts
from qsync_opt.training import Communication, Plan, evaluate, load_problem

RECORDED = (
    "tiny",
    "tiny-shared",
    "bertb-fp8",
    "bertb-native",
    "bertb-time60",
    "bertb-wide",
    "bertl-mix",
    "resnet50-both30",
    "resnet50-copy",
    "resnet50-time30",
)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_optimal_plans_have_their_recorded_objective(instance_path, name):
    problem = load_problem(instance_path(name))
    found = evaluate(problem, Plan(problem=problem.name, devices=problem.optimum.devices))
    assert found.objective == pytest.approx(problem.optimum.objective, rel=1e-12)
    assert found.feasible, found.violations


# The hand derivation is in the docstring of `diamond`: raised operators, ns, KiB, objective.
@pytest.mark.parametrize(
    ("raised", "time_ns", "memory_kib", "objective"),
    [
        ("", 10200, 35, 7),
        ("c", 14200, 49, 3),
        ("b", 14200, 49, 5),
        ("a", 15200, 41 + 2 + 2 + 4, 6),
        ("bc", 17200, 59, 1),
        ("ac", 17200, 57, 2),
        ("ab", 17200, 57, 4),
        ("abc", 18200, 61, 0),
    ],
)
def test_every_plan_of_the_diamond(raised, time_ns, memory_kib, objective):
    problem = diamond().problem
    plan = Plan(problem="p", devices={"T4": {name: "FP32" if name in raised else "FP16" for name in "abc"}})
    found = evaluate(problem, plan)
    assert (found.iteration_ns, found.memory_kib, found.objective) == (time_ns, {"T4": memory_kib}, objective)
    assert found.iteration_ns == time_ns
    assert found.memory_bytes == {"T4": memory_kib * 1024}
    assert found.feasible == (memory_kib <= 58)


def test_violations_say_what_and_by_how_much():
    problem = replace(diamond().problem, latency_limit_ns=18199)
    found = evaluate(problem, Plan(problem="p", devices={"T4": dict.fromkeys("abc", "FP32")}))
    assert found.violations == (
        "memory of 'T4': 61 KiB, but the limit is 58 KiB",
        "iteration time: 18200 ns, but the limit is 18199 ns",
    )
    assert found.to_json()["feasible"] is False


def test_buckets_wait_for_gradients_peers_and_each_other():
    problem = buckets().problem
    plan = Plan(problem="p", devices={"T4": {"a": "FP16", "b": "FP16"}})
    found = evaluate(problem, plan)
    assert found.devices["T4"].bucket_ready_ns == (4000, 6000)
    assert found.bucket_start_ns == (4000, 9000)
    assert found.iteration_ns == 10000
    late = replace(problem, communication=Communication(allreduce_ns=(5000, 1000), peer_ready_ns=(4500, 9900)))
    assert evaluate(late, plan).bucket_start_ns == (4500, 9900)
    # Without communication the end of backward counts.
    alone = replace(problem, communication=Communication(allreduce_ns=(0, 0), peer_ready_ns=(0, 0)), optimizer_ns=7)
    assert evaluate(alone, plan).iteration_ns == 6007


def test_a_bucket_of_no_operator_waits_for_peers_only():
    problem = buckets().problem
    communication = Communication(allreduce_ns=(0, 0, 10), peer_ready_ns=(0, 0, 0))
    plan = Plan(problem="p", devices={"T4": {"a": "FP16", "b": "FP16"}})
    found = evaluate(replace(problem, communication=communication), plan)
    assert found.devices["T4"].bucket_ready_ns == (4000, 6000, 0)
    assert found.bucket_start_ns == (4000, 6000, 6000)


@pytest.mark.parametrize(("sharing", "time_ns", "memory_kib"), [("producer", 7600, 14), ("edge", 9600, 22)])
def test_shared_casts_are_paid_once(sharing, time_ns, memory_kib):
    problem = replace(shared_casts().problem, cast_sharing=sharing)
    found = evaluate(problem, Plan(problem="p", devices={"T4": {"a": "FP16"}}))
    assert (found.iteration_ns, found.memory_kib["T4"]) == (time_ns, memory_kib)


def test_timeline_pieces_add_up():
    problem = diamond().problem
    device = evaluate(problem, Plan(problem="p", devices={"T4": {"a": "FP16", "b": "FP32", "c": "FP16"}})).devices["T4"]
    by_name = {time.name: time for time in device.operators}
    assert [(c.source, c.target, c.producer, c.charged_to) for c in by_name["b"].forward_casts] == [
        ("FP16", "FP32", "a", "b")
    ]
    assert [(c.source, c.target, c.consumer, c.charged_to) for c in by_name["c"].backward_casts] == [
        ("FP32", "FP16", "add", "c")
    ]
    assert device.forward_end_ns == sum(time.forward_total_ns for time in device.operators)
    assert device.backward_end_ns - device.forward_end_ns == sum(time.backward_total_ns for time in device.operators)


@pytest.mark.parametrize("given", [None, "plan.json", {"T4": {}}])
def test_what_is_no_plan_is_refused(given):
    with pytest.raises(ProblemError, match=rf"plan is a {type(given).__name__}, but a Plan is needed: solution\.plan"):
        evaluate(diamond().problem, given)
