"""The evaluation against a second one, written from the text of the problem format alone; they share no code."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.testing import random_plan, random_problem
from qsync_opt.training import evaluate


def _precisions(file, device, plan):
    ranks = {name: rank for rank, name in enumerate(file["formats"])}
    found = {}
    for operator in file["operators"]:
        table = sorted(device["operators"][operator["name"]], key=ranks.get)
        if operator["role"] == "adjustable":
            found[operator["name"]] = plan[operator["name"]]
        elif operator["role"] == "fixed":
            (found[operator["name"]],) = table
        elif not operator["inputs"]:
            found[operator["name"]] = table[0]
        else:
            r = max(ranks[device["precisions"][found[u]]["output"]] for u in operator["inputs"])
            enough = [x for x in table if ranks[x] >= r]
            found[operator["name"]] = enough[0] if enough else table[-1]
    return found


def _device(file, device, plan):
    """Sum of memory in KiB, R_k by bucket, R_end, and the sensitivity of one device."""
    x = _precisions(file, device, plan)
    operators = {operator["name"]: operator for operator in file["operators"]}
    producer = file.get("cast_sharing", "edge") == "producer"

    def border(name, which):
        return device["precisions"][x[name]][which]

    def cast(a, b, n):
        if a == b:
            return 0
        cost = device["casts"][f"{a}>{b}"]
        return cost["base_ns"] + cost["ns_per_mi_elements"] * n // 2**20

    cost = {name: device["operators"][name][x[name]] for name in operators}
    forward_ns = {name: cost[name]["forward_ns"] for name in operators}
    backward_ns = {name: cost[name]["backward_ns"] for name in operators}
    memory_kib = sum(cost[name]["memory_kib"] for name in operators)
    edges = [(u, v) for v in operators for u in operators[v]["inputs"]]
    counted = set()
    for u, v in edges:
        n = operators[u]["output_elements"]
        backward_ns[u] += cast(border(v, "gradient_output"), border(u, "gradient_input"), n)
        if producer and (u, x[v]) in counted:
            continue
        counted.add((u, x[v]))
        forward_ns[v] += cast(border(u, "output"), x[v], n)
        if border(u, "output") != x[v]:
            memory_kib += (n * file["formats"][x[v]] + 1023) // 1024
    clock = sum(forward_ns.values())
    ready = {}
    for name in reversed(operators):
        clock += backward_ns[name]
        ready[operators[name]["bucket"]] = clock
    return memory_kib, ready, clock, sum(cost[name]["sensitivity"] for name in operators)


def _evaluation(file, plan):
    memory, ready, end, sensitivity = {}, {}, {}, {}
    for device in file["devices"]:
        name = device["name"]
        memory[name], ready[name], end[name], sensitivity[name] = _device(file, device, plan["devices"][name])
    done = 0
    allreduce, peers = file["communication"]["allreduce_ns"], file["communication"]["peer_ready_ns"]
    for k in range(len(allreduce)):
        done = max(done, peers[k], *(times.get(k, 0) for times in ready.values())) + allreduce[k]
    time_ns = max(done, *end.values()) + file["optimizer_ns"]
    feasible = time_ns <= file["latency_limit_ns"] and all(
        memory[device["name"]] <= device["memory_limit_kib"] for device in file["devices"]
    )
    return memory, time_ns, sensitivity, feasible


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=600)
def test_the_evaluation_is_what_the_format_says(seed):
    source = random.Random(seed)
    problem = random_problem(source, max_operators=12, max_devices=3)
    plan = random_plan(source, problem)
    memory, time_ns, sensitivity, feasible = _evaluation(
        json.loads(json.dumps(problem.to_json())), json.loads(json.dumps(plan.to_json()))
    )
    found = evaluate(problem, plan)
    assert found.memory_kib == memory
    assert found.memory_bytes == {name: 1024 * kib for name, kib in memory.items()}
    assert found.iteration_ns == time_ns
    assert found.sensitivity == pytest.approx(sensitivity, rel=1e-12)
    assert found.objective == pytest.approx(sum(sensitivity.values()), rel=1e-12)
    assert found.feasible is feasible
