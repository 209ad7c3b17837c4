import random
from dataclasses import replace

import pytest

from qsync_opt.formulations.training import peers_ns, segments
from qsync_opt.formulations.training.ilp import Choice, Product, build_assignment, read_back
from qsync_opt.model import Role
from qsync_opt.testing import INSTANCES, buckets, chain, diamond, random_plan, random_problem, shared_casts
from qsync_opt.training import Communication, evaluate_device, iteration_time, propagate


def _check(problem, device, choices):
    """The collapsed assignment and the independent evaluation agree in every number."""
    assignment = build_assignment(problem, device)
    states = assignment.states(choices)
    load_R = assignment.load_R(states)
    found = evaluate_device(problem, device, propagate(problem, device, choices))
    assert load_R[0] == found.memory_kib
    assert load_R[1:].sum() == found.backward_end_ns
    assert assignment.cost(states) == pytest.approx(found.sensitivity, rel=1e-12, abs=1e-300)
    _, iteration_ns = iteration_time(problem, (found,))
    prefixes = [int(load_R[1 : s + 2].sum()) + tail for s, tail in enumerate(segments(problem).tail_ns)]
    assert max([peers_ns(problem), *prefixes]) == iteration_ns
    excess = [limit.name for limit, value in assignment.excess(states).items() if value > 0]
    assert ("memory" in excess) == (found.memory_kib > device.memory_limit_kib)
    in_time = max(prefixes) <= problem.latency_limit_ns
    assert any(name.startswith("time") for name in excess) == (not in_time)


@pytest.mark.parametrize("make", INSTANCES, ids=lambda make: make.__name__)
def test_instances_agree_with_the_evaluator(make):
    source = random.Random(1)
    problem = make().problem
    for _ in range(10):
        for device in problem.devices:
            _check(problem, device, random_plan(source, problem).devices[device.name])


@pytest.mark.parametrize("seed", range(60))
def test_random_problems_agree_with_the_evaluator(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=12)
    for _ in range(5):
        plan = random_plan(source, problem)
        for device in problem.devices:
            _check(problem, device, plan.devices[device.name])


def test_dependent_chains_add_no_node():
    problem = chain().problem
    follower = replace(problem.operators[1], role=Role.DEPENDENT)
    problem = replace(problem, operators=(problem.operators[0], follower, problem.operators[2]))
    nodes = build_assignment(problem, problem.devices[0]).nodes
    assert [node.name for node in nodes if isinstance(node, Choice)] == ["a", "c"]


def test_a_join_of_one_source_with_itself_adds_no_node():
    problem = diamond().problem
    operators = list(problem.operators)
    operators[1] = replace(operators[1], role=Role.DEPENDENT)
    operators[2] = replace(operators[2], role=Role.DEPENDENT)
    problem = replace(problem, operators=tuple(operators))
    assert [node.name for node in build_assignment(problem, problem.devices[0]).nodes] == ["a"]


def test_a_join_is_a_product_of_its_two_sources_and_carries_their_casts():
    assignment = build_assignment(diamond().problem, diamond().problem.devices[0])
    products = [node for node in assignment.nodes if isinstance(node, Product)]
    # add, a-b and a-c; the edges b-add and c-add are folded into add.
    assert {node.name for node in products} == {"a|b", "a|c", "add#3"}


def test_free_casts_leave_no_products():
    assignment = build_assignment(chain().problem, chain().problem.devices[0])
    assert all(isinstance(node, Choice) for node in assignment.nodes)


def test_shared_casts_of_fixed_users_fold_into_the_producer():
    assignment = build_assignment(shared_casts().problem, shared_casts().problem.devices[0])
    assert assignment.shared == ()
    assert len(assignment.nodes) == 1


def test_operators_without_a_choice_are_read_back():
    problem = chain().problem
    device = problem.devices[0]
    tables = {**device.operators, "b": {"FP32": device.operators["b"]["FP32"]}}
    device = replace(device, operators=tables)
    assert read_back(problem, device, {"a": "FP16", "c": "FP32"}) == {"a": "FP16", "b": "FP32", "c": "FP32"}


def test_segments_drop_closings_that_a_later_one_implies():
    problem = buckets().problem
    assert segments(problem).tail_ns == (6000, 1000, 0)
    assert segments(problem).segment == (1, 0)
    # Without communication only the end of backward is left.
    quiet = replace(problem, communication=Communication(allreduce_ns=(0, 0), peer_ready_ns=(0, 0)))
    assert segments(quiet).tail_ns == (0,)
    # Bucket 0 waits for the earliest operator: its closing comes last, and both all-reduces follow it.
    operators = (replace(problem.operators[0], bucket=0), replace(problem.operators[1], bucket=1))
    assert segments(replace(problem, operators=operators)).tail_ns == (6000, 0)


def test_peers_alone():
    communication = Communication(allreduce_ns=(5, 7), peer_ready_ns=(100, 103))
    assert peers_ns(replace(buckets().problem, communication=communication, optimizer_ns=1)) == 113
    assert peers_ns(replace(chain().problem, optimizer_ns=9)) == 9
