"""From a model to a plan that chooses the format of each operator's backward pass."""

import pytest
import torch
from torch import nn

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.kernels import ops
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.execution import apply, undo
from qsync_opt.runtimes.torch.profiling import operator_menu, profile
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import sensitivities
from qsync_opt.training import build_problem, evaluate, solve, uniform_plan

PRECISIONS = ("INT8-BWD8", "INT8", "BF16", "FP32")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 8, 3), nn.Linear(288, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.conv(x).flatten(1)))).square().mean()


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 3, 8, 8)
    captured = capture_model(model, (x,))
    costs = profile(captured, "cpu", precisions=PRECISIONS, progress=False, repeats=2, name="here")
    statistics = collect_statistics(model, [(x,)], graph=captured.graph)
    table = sensitivities(captured.graph, statistics, costs.formats)
    return model, x, captured.graph, costs, table


def _problem(measured, limit_ns=10**12):
    _, _, graph, costs, table = measured
    device = DeviceType(name="here", count=1, memory_limit_bytes=2**30, precisions=PRECISIONS)
    cluster = Cluster(
        name="one", devices=(device,), network=Network(latency_s=0.0, bandwidth_bytes_per_s=1e9, source="none")
    )
    return build_problem(graph, {"here": costs}, table, cluster, latency_limit_ns=limit_ns)


def test_both_are_choices_with_a_time_a_memory_and_a_variance_each(measured):
    _, _, _, costs, table = measured
    assert list(costs.formats) == list(PRECISIONS)
    for name in ("conv/conv2d", "up/linear", "down/linear"):
        own = costs.cost(name)
        assert list(own) == list(PRECISIONS)
        assert own["INT8-BWD8"].backward_ns > 0
        assert table[name]["INT8-BWD8"] > table[name]["INT8"] > table[name]["FP32"] == 0
    up = costs.cost("up/linear")
    # The same codes; those of an 8-bit backward pass are transposed, and the weight has one scale.
    assert up["INT8"].saved_bytes - up["INT8-BWD8"].saved_bytes == 4 * (64 - 1)
    assert {"FP32>INT8-BWD8", "BF16>INT8-BWD8"} <= set(costs.casts)


def test_methods_agree_and_the_plan_runs(measured):
    model, x, graph, _, _ = measured
    problem = _problem(measured)
    assert list(problem.formats) == list(PRECISIONS)
    fastest = min(
        evaluate(problem, solve(problem, "exact").plan).iteration_ns,
        *(evaluate(problem, uniform_plan(problem, precision)).iteration_ns for precision in PRECISIONS),
    )
    tight = _problem(measured, limit_ns=fastest)
    exact, ilp, greedy = (solve(tight, method) for method in ("exact", "ilp", "greedy"))
    assert ilp.objective == pytest.approx(exact.objective)
    assert greedy.objective >= exact.objective * (1 - 1e-9)
    assert greedy.bound <= exact.objective * (1 + 1e-9)
    plan = uniform_plan(problem, "INT8-BWD8").devices["here"]
    apply(model, {name: plan[name] for name in ("conv/conv2d", "up/linear", "down/linear")}, graph=graph)
    model(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    undo(model)


def test_menus_by_default_and_by_name(measured, monkeypatch):
    _, _, graph, _, _ = measured
    cpu = torch.device("cpu")
    by_name = operator_menu(graph, cpu, PRECISIONS, everything=True)
    assert set(by_name.values()) == {PRECISIONS}
    assert set(operator_menu(graph, cpu, PRECISIONS, everything=False).values()) == {("INT8", "BF16", "FP32")}
    # A card, as far as this needs one.
    monkeypatch.setattr(ops, "known_device", lambda _: torch.device("cuda"))
    for name in ("default_precisions", "device_precisions"):
        monkeypatch.setattr(ops, name, lambda _: PRECISIONS)
    menu = operator_menu(graph, cpu, PRECISIONS, everything=False)
    assert menu["up/linear"] == PRECISIONS
    assert menu["conv/conv2d"] == ("BF16", "FP32")
