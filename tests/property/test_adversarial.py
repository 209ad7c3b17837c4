"""Problems that try to break the solvers: extreme numbers, ties, symmetry, dense graphs, interrupts, processes."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from qsync_opt import evaluate, solve
from qsync_opt.formulations.assignment import BoundAndFix
from qsync_opt.model import Role
from qsync_opt.testing import random_problem
from qsync_opt.training import Problem, TerminationStatus, fastest

BORDERS = {p: {"output": p, "gradient_input": p, "gradient_output": p} for p in ("FP16", "FP32")}
BORDERS["INT8"] = {"output": "FP16", "gradient_input": "FP16", "gradient_output": "FP16"}
SIZES = {"INT8": 1, "FP16": 2, "FP32": 4}
HOUR_NS = 3_600_000_000_000


def network(
    inputs,
    source,
    *,
    roles=None,
    same=False,
    sharing="edge",
    devices=1,
    latency=0.4,
    memory=0.4,
    buckets=2,
    sensitive=1.0,
):
    """Operators by the lists of their inputs' numbers, at random costs (the same for all, if asked), limits between."""
    roles = roles or {}

    def table(role):
        formats = {"adjustable": list(SIZES), "dependent": ["FP16", "FP32"], "fixed": ["FP32"]}[role]
        scale = sensitive * (1.0 if same else math.exp(2 * source.gauss(0, 1)))
        weight = {"INT8": 1.0, "FP16": 1e-2, "FP32": 0.0}
        return {
            p: {
                "forward_ns": 1000 * SIZES[p] + (0 if same else source.randrange(900)),
                "backward_ns": 2000 * SIZES[p] + (0 if same else source.randrange(1800)),
                "memory_kib": 100 * SIZES[p] + (0 if same else source.randrange(90)),
                "sensitivity": weight[p] * scale if role == "adjustable" else 0.0,
            }
            for p in formats
        }

    operators = [
        {
            "name": f"block.{i}/op", "type": "op", "role": roles.get(i, "adjustable"),
            "inputs": [f"block.{j}/op" for j in own], "output_elements": 2**18,
            "bucket": (buckets * (len(inputs) - 1 - i)) // len(inputs),
        }
        for i, own in enumerate(inputs)
    ]  # fmt: skip
    casts = {f"{a}>{b}": {"base_ns": 300, "ns_per_mi_elements": 2000} for a in SIZES for b in SIZES if a != b}
    data = {
        "format": "qsync-problem/1", "name": "adversarial", "formats": SIZES, "operators": operators,
        "communication": {"allreduce_ns": [500] * buckets, "peer_ready_ns": [0] * buckets}, "optimizer_ns": 10,
        "latency_limit_ns": 2**50, "cast_sharing": sharing, "optimum": None,
        "devices": [
            {
                "name": f"D{d}", "count": 1, "memory_limit_kib": 2**40, "precisions": BORDERS, "casts": casts,
                "operators": {o["name"]: table(o["role"]) for o in operators},
            }
            for d in range(devices)
        ],
    }  # fmt: skip
    problem = Problem.from_json(data)
    low, high = (evaluate(problem, uniform(problem, end)) for end in (min, max))
    data["latency_limit_ns"] = int(low.iteration_ns + latency * (high.iteration_ns - low.iteration_ns))
    for device in data["devices"]:
        least, most = low.memory_kib[device["name"]], high.memory_kib[device["name"]]
        device["memory_limit_kib"] = int(least + memory * (most - least))
    return Problem.from_json(data)


def uniform(problem, end):
    from qsync_opt.training import Plan

    devices = {
        d.name: {o.name: end(d.operators[o.name], key=problem.rank) for o in problem.adjustable}
        for d in problem.devices
    }
    return Plan(problem=problem.name, devices=devices)


def chain_of(count):
    return [[i - 1] if i else [] for i in range(count)]


def rebuilt(problem, change):
    """The problem with every cost changed."""
    devices = tuple(
        replace(
            device,
            operators={
                name: {p: change(name, p, cost) for p, cost in table.items()}
                for name, table in device.operators.items()
            },
        )
        for device in problem.devices
    )
    return replace(problem, devices=devices)


def agrees(problem, reference):
    """Exact is the reference, greedy feasible and near, neither bound is wrong."""
    truth = solve(problem, reference)
    exact, greedy = solve(problem, "exact"), solve(problem, "greedy")
    assert (truth.plan is None) == (exact.plan is None) == (greedy.plan is None)
    if truth.plan is None:
        return
    assert exact.termination is TerminationStatus.OPTIMAL
    assert exact.objective == pytest.approx(truth.objective, rel=1e-6, abs=1e-300)
    for answer in (exact, greedy):
        assert answer.bound <= truth.objective * (1 + 1e-9) + 1e-300
    assert greedy.objective <= 1.03 * truth.objective + 1e-300


@pytest.mark.parametrize("seed", range(15))
def test_sensitivities_of_eighteen_decades(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=9)
    wide = rebuilt(
        problem, lambda _n, _p, cost: replace(cost, sensitivity=source.choice([0.0, 10 ** source.uniform(-12, 6)]))
    )
    agrees(wide, "exhaustive")


@pytest.mark.parametrize("seed", range(8))
def test_times_of_hours_are_exact_to_the_nanosecond(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=6)
    long = rebuilt(
        problem,
        lambda _n, _p, cost: replace(
            cost,
            forward_ns=cost.forward_ns * HOUR_NS // 1000 + source.randrange(3),
            backward_ns=source.randrange(HOUR_NS),
        ),
    )
    free = solve(replace(long, latency_limit_ns=2**60), "exact")
    if free.plan is None:
        return
    agrees(replace(long, latency_limit_ns=free.iteration_ns), "exhaustive")
    agrees(replace(long, latency_limit_ns=free.iteration_ns - 1), "exhaustive")
    found = fastest(long)
    assert found.proved
    below = replace(long, latency_limit_ns=found.iteration_ns - 1)
    assert solve(below, "exhaustive").plan is None
    assert solve(below, "exact").termination is TerminationStatus.INFEASIBLE


def test_five_thousand_identical_operators():
    problem = network(chain_of(5000), random.Random(0), same=True)
    answer = solve(problem, "greedy")
    assert answer.plan is not None
    assert answer.gap <= 0.01


def test_five_thousand_identical_blocks_tied_are_one_choice():
    problem = network(chain_of(5000), random.Random(0), same=True)
    names = tuple(operator.name for operator in problem.adjustable)
    answer = solve(problem, "exact", tied=[names])
    assert answer.termination is TerminationStatus.OPTIMAL
    assert len(set(answer.plan.devices["D0"].values())) == 1


@pytest.mark.parametrize("seed", range(5))
def test_ties_everywhere(seed):
    shape = [[], [0], [0], [1, 2], [3], [3], [4, 5], [6]]
    roles = {3: "dependent", 6: "dependent"}
    agrees(network(shape, random.Random(seed), roles=roles, same=True, latency=0.2 + 0.1 * seed), "exhaustive")


def test_zero_sensitivities():
    problem = rebuilt(network(chain_of(60), random.Random(1)), lambda _n, _p, cost: replace(cost, sensitivity=0.0))
    for method in ("greedy", "exact"):
        answer = solve(problem, method)
        assert (answer.objective, answer.bound, answer.termination) == (0.0, 0.0, TerminationStatus.OPTIMAL)


def test_one_operator_and_none_that_is_adjustable():
    for roles in ({}, {0: "fixed"}):
        problem = network([[]], random.Random(2), roles=roles)
        problem = replace(problem, latency_limit_ns=2**40)
        agrees(problem, "exhaustive")
        assert fastest(problem).proved


def test_dense_concatenation():
    # Every layer reads all before it: no small tables, so bounds come from split nodes.
    shape = [list(range(i)) for i in range(7)]
    for seed in range(3):
        agrees(network(shape, random.Random(seed)), "exhaustive")
        agrees(network(shape, random.Random(seed), sharing="producer"), "exhaustive")
    wide = [list(range(max(0, i - 12), i)) for i in range(60)]
    answer = solve(network(wide, random.Random(3)), "greedy", time_limit_s=1)
    assert answer.plan is not None
    assert answer.bound <= answer.objective


@pytest.mark.parametrize("sharing", ["edge", "producer"])
def test_an_encoder_that_every_decoder_layer_reads(sharing):
    shape = [[], [0], [1], [2]]
    for _ in range(5):
        shape.append([len(shape) - 1, 2])
    agrees(network(shape, random.Random(4), roles={2: "dependent"}, sharing=sharing), "exhaustive")


@pytest.mark.parametrize("seed", range(4))
def test_tied_weights_against_the_best_of_the_tied_plans(seed):
    problem = network([[], [0], [1], [2], [3]], random.Random(seed), latency=0.5)
    tied = [("block.0/op", "block.4/op")]
    answer = solve(problem, "exact", tied=tied)
    # Tied plans by hand: forbid all but one precision of both, and take the best.
    best = math.inf
    for precision in SIZES:
        device = problem.devices[0]
        table = {**device.operators, **{n: {precision: device.operators[n][precision]} for n in tied[0]}}
        held = solve(replace(problem, devices=(replace(device, operators=table),)), "exhaustive")
        best = min(best, math.inf if held.objective is None else held.objective)
    assert answer.objective == pytest.approx(best, rel=1e-8)


def test_several_device_types_add_up():
    problem = network(chain_of(6), random.Random(5), devices=3)
    alone = [solve(replace(problem, devices=(device,)), "exact").objective for device in problem.devices]
    assert solve(problem, "exact").objective == pytest.approx(math.fsum(alone), rel=1e-8)


@pytest.mark.parametrize("calls", [1, 3, 8])
@pytest.mark.parametrize("method", ["greedy", "exact"])
def test_interrupted_anywhere_the_best_known_is_held(monkeypatch, calls, method):
    problem = network(chain_of(120), random.Random(6), devices=2)
    truth = solve(problem, "exact")
    left = [calls]
    plain = BoundAndFix._dual

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(BoundAndFix, "_dual", interrupted)
    answer = solve(problem, method)
    assert answer.termination in (TerminationStatus.TIME_LIMIT, TerminationStatus.OPTIMAL)
    assert (answer.termination is TerminationStatus.OPTIMAL) == (left[0] > 0)
    assert answer.bound is None or answer.bound <= truth.objective * (1 + 1e-9)
    assert answer.objective is None or answer.objective >= truth.objective * (1 - 1e-6)


def test_a_short_time_limit_is_kept(monkeypatch):
    """On a clock that moves with every look at it: the limit comes at the tenth, and the end soon after."""
    problem = network([[i - 1, i - 2] if i > 1 else [] for i in range(600)], random.Random(7))
    for method in ("greedy", "exact"):
        looks = itertools.count()
        with monkeypatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: 0.05 * next(looks))  # noqa: B023
            answer = solve(problem, method, time_limit_s=0.5)
        assert next(looks) < 30
        assert answer.termination is TerminationStatus.TIME_LIMIT
        assert answer.bound <= answer.objective


def test_both_limits_clash_and_each_alone_could_be_met():
    # Low precisions keep copies: the fast plans are the large ones.
    problem = rebuilt(
        network(chain_of(4), random.Random(8)),
        lambda _n, p, cost: replace(cost, memory_kib={"INT8": 500, "FP16": 300, "FP32": 100}[p]),
    )
    device = problem.devices[0]
    roomy = replace(problem, devices=(replace(device, memory_limit_kib=10**6),))
    least = fastest(roomy).iteration_ns
    assert solve(replace(roomy, latency_limit_ns=least), "exact").plan is not None
    small = replace(device, memory_limit_kib=100 * 4)
    assert solve(replace(problem, latency_limit_ns=10**9, devices=(small,)), "exact").plan is not None
    tight = replace(problem, latency_limit_ns=least, devices=(small,))
    answer = solve(tight, "exact")
    assert answer.termination is TerminationStatus.INFEASIBLE
    assert solve(tight, "exhaustive").plan is None
    assert "least value that could be met" in answer.reason
    assert "block." in answer.reason


_REPEAT = """
import json, sys
from qsync_opt import load_problem, solve
problem = load_problem(sys.argv[1])
for method in ("greedy", "exact"):
    answer = solve(problem, method)
    print(json.dumps([answer.objective, answer.bound, {d: dict(c) for d, c in answer.plan.devices.items()}]))
"""


@pytest.mark.slow
def test_the_same_plan_in_every_process(tmp_path):
    path = tmp_path / "problem.json"
    network([[i - 1, i - 3] if i > 2 else [] for i in range(80)], random.Random(9), devices=2).save(path)
    answers = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("2", "1")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, "-c", _REPEAT, str(path)], env=environment, capture_output=True, text=True, check=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(lines) == 2
        assert json.loads(lines[1])[0] <= json.loads(lines[0])[0]
        answers.add("\n".join(lines))
    assert len(answers) == 1


def test_roles_of_the_builder_are_what_they_say():
    problem = network([[], [0], [1]], random.Random(0), roles={1: "dependent", 2: "fixed"})
    assert [operator.role for operator in problem.operators] == [Role.ADJUSTABLE, Role.DEPENDENT, Role.FIXED]
