"""From an ONNX file and a cluster file to a plan: estimates are labelled wherever they go."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from qsync_opt import (
    Role,
    collect_statistics,
    evaluate,
    load_cluster,
    load_plan,
    load_problem,
    read_onnx,
    registry,
    save_statistics,
    sensitivities,
)
from qsync_opt.cluster import DeviceType
from qsync_opt.costs import ESTIMATES_KEY, estimate_lines
from qsync_opt.gradients import (
    BucketStatistics,
    GradientCosts,
    Moments,
    RecordedReductions,
    SchemeTimes,
    communication_problem,
    predicted_reductions,
    training_part,
)
from qsync_opt.sensitivity import FROM_FORMATS, FROM_WEIGHTS
from qsync_opt.testing import make_profile
from qsync_opt.training import replay

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = """\
name: two
devices:
  - {name: A100, count: 2, role: fixed, memory: 40 GiB, precisions: [FP32]}
  - {name: small, hardware: T4, count: 2, memory: 1 GiB, precisions: [INT8, FP16, FP32]}
network: {latency: 20 us, bandwidth: 10 Gbit/s, source: assumed}
"""


@pytest.fixture
def files(tmp_path):
    source = np.random.default_rng(0)
    sizes = (256, 512, 512, 64)
    nodes, weights, value = [], [], "x"
    for layer, (width, after) in enumerate(itertools.pairwise(sizes)):
        weights.append(numpy_helper.from_array(source.standard_normal((width, after), np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"h{layer}"], name=f"fc{layer}"))
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"], name=f"relu{layer}"))
        value = f"r{layer}"
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1024, sizes[0]))],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, (1024, sizes[-1]))],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "mlp.onnx")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def gradient_costs(buckets, path):
    """A file in which BF16 halves the time of FP32 and 8 bits quarter it, at rising variance."""
    moments = Moments(square=1.0, block_square=20.0, block_absolute=3.0, bucket_square=90.0, bucket_absolute=8.0)
    bucket = BucketStatistics(elements=400_000, local=moments, mean=moments.scaled(0.3), noise=2.0)
    times = {"FP32": (10_000, 2_000_000), "BF16": (10_000, 1_000_000), "sum8": (10_000, 500_000)}
    costs = GradientCosts(
        statistics=(bucket,) * buckets, times=SchemeTimes(workers=4, elements=(1000, 400_000), times_ns=times)
    )
    costs.save(path)
    return costs


def test_learned_costs_of_a_measured_card_and_of_another_one(run, files):
    (files / "cards.yaml").write_text(CLUSTER.replace("name: A100", "name: H200"))
    status, out, _ = run("plan", files / "mlp.onnx", files / "cards.yaml", "--costs", "learned")
    assert status == 0
    notes = {line.split()[3]: line for line in out.splitlines() if line.startswith("note: costs of")}
    assert set(notes) == {"H200", "small"}
    for name, line in notes.items():
        counts = re.search(r"learned from times on NVIDIA H200.* \((\d+) learned, 1 roofline(.*)\)", line)
        learned, unlike = int(counts[1]), int((re.search(r"; (\d+) learned ones unlike", counts[2]) or [0, 0])[1])
        assert learned > 0
        assert unlike < learned if name == "H200" else unlike == learned


def test_precisions_and_schemes_in_one_plan(run, files):
    model, cluster = files / "mlp.onnx", files / "cluster.yaml"
    base = ("plan", model, cluster, "--save-problem", files / "training.json", "--json")
    assert run(*base)[0] == 0
    training = load_problem(files / "training.json")
    buckets = len(training.communication.allreduce_ns)
    costs = gradient_costs(buckets, files / "costs.json")
    joint, chosen = files / "joint.json", files / "both.json"
    outputs = ("--save-problem", joint, "--output", chosen, "--latency-limit", "8 ms")
    status, out, err = run("plan", model, cluster, "--compress", files / "costs.json", *outputs, "--json")
    assert (status, err) == (0, "")
    printed = json.loads(out)
    assert set(printed["schemes"]) == {f"b{k}" for k in range(buckets)}
    loaded = load_problem(joint)
    limited = dataclasses.replace(training, latency_limit_ns=8_000_000)
    assert loaded == costs.joint(limited)
    assert evaluate(loaded, load_plan(chosen)).objective == pytest.approx(printed["objective"])
    status, out, _ = run("plan", model, cluster, "--compress", files / "costs.json", *outputs)
    assert status == 0 and f"{buckets} buckets" in out
    # The other commands show both parts.
    status, out, _ = run("explain", joint, chosen, "--json")
    shown = json.loads(out)["buckets"]
    assert [each["scheme"] for each in shown] == list(printed["schemes"].values())
    assert all(each["start_ns"] >= each["ready_ns"] for each in shown)
    status, out, _ = run("explain", joint, chosen)
    assert status == 0 and "gradient buckets, in the order of reduction" in out
    status, out, _ = run("compare", joint, "--methods", "greedy,exact", "--json")
    greedy, exact = json.loads(out)
    assert status == 0 and exact["termination"] == "optimal" and greedy["objective"] >= exact["objective"] * (1 - 1e-6)
    page = files / "page.html"
    assert run("report", joint, chosen, "--output", page, "--front", "none")[0] == 0
    assert "Schemes of the gradient buckets" in page.read_text()
    assert "Takes, measured" not in page.read_text()
    step = predicted_reductions(communication_problem(loaded, load_plan(chosen).precisions), load_plan(chosen).schemes)
    record = RecordedReductions(workers=4, elements=(400_000,) * buckets, steps=(step,))
    record.save(files / "recorded.json")
    measured = ("--recorded", files / "recorded.json")
    assert run("report", joint, chosen, "--output", page, "--front", "none", *measured)[0] == 0
    assert "Takes, measured" in page.read_text()
    status, out, _ = run("explain", joint, chosen, *measured)
    assert status == 0 and "as predicted" in out and "as measured" in out
    status, out, err = run("explain", files / "training.json", files / "both.json", *measured)
    assert (status, out) == (2, "") and "has no schemes of buckets" in err
    events = replay(training_part(loaded, load_plan(chosen)), load_plan(chosen).precisions).events
    names = [event.name for event in events if event.kind == "all-reduce"]
    assert f"all-reduce 0 ({printed['schemes']['b0']})" in names


def test_costs_of_other_buckets_are_refused(run, files):
    gradient_costs(9, files / "costs.json")
    status, out, err = run("plan", files / "mlp.onnx", files / "cluster.yaml", "--compress", files / "costs.json")
    assert (status, out) == (2, "") and "9 buckets have statistics, but problem 'mlp' reduces" in err
    status, out, err = run("explain", files / "costs.json", files / "costs.json")
    assert (status, out) == (2, "") and err.count("\n") == 1


def test_a_plan_its_problem_and_their_labels(run, files):
    outputs = ["--output", files / "plan.json", "--save-problem", files / "problem.json"]
    status, out, err = run("plan", files / "mlp.onnx", files / "cluster.yaml", "--json", *outputs)
    printed = json.loads(out)
    assert (status, err) == (0, "")
    problem, plan = load_problem(files / "problem.json"), load_plan(files / "plan.json")
    note = {
        "costs": {
            "A100": "roofline from the NVIDIA A100 data sheet (40 GB; the 80 GB card has 2039 GB/s)",
            "small": "roofline from the NVIDIA T4 data sheet",
        },
        "sensitivity": FROM_WEIGHTS,
    }
    assert printed["estimates"] == problem.extras[ESTIMATES_KEY,] == plan.extras[ESTIMATES_KEY,] == note
    found = evaluate(problem, plan)
    assert found.feasible
    assert (found.objective, found.iteration_ns) == (printed["objective"], printed["iteration_ns"])
    assert "from estimates" in repr(problem)
    assert "from estimates" in repr(plan)


def test_everything_that_shows_an_estimate_says_so(run, files, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    problem, plan = files / "problem.json", files / "plan.json"
    commands = (
        ["plan", files / "mlp.onnx", files / "cluster.yaml", "--output", plan, "--save-problem", problem],
        ["solve", problem],
        ["evaluate", problem, plan],
        ["explain", problem, plan, "fc1"],
        ["pareto", problem, "--points", 2],
        ["diff", plan, plan, "--problem", problem],
    )
    for command in commands:
        status, out, _ = run(*command)
        assert status == 0
        assert f"note: sensitivities are estimates: {FROM_WEIGHTS}" in out, command[0]
        assert "note: costs of small are estimates: roofline" in out, command[0]


def test_measured_profiles_carry_no_label(run, files):
    graph = read_onnx(files / "mlp.onnx")
    make_profile(graph).save(files / "measured.json")
    measured = CLUSTER.replace("hardware: T4", "profile: measured.json").replace("FP16", "BF16")
    (files / "cluster.yaml").write_text(measured)
    status, out, _ = run("plan", files / "mlp.onnx", files / "cluster.yaml", "--json", "--indicator", "formats")
    assert status == 0
    assert list(json.loads(out)["estimates"]["costs"]) == ["A100"]
    assert json.loads(out)["estimates"]["sensitivity"] == FROM_FORMATS


def test_limits_and_slack(run, files):
    base = ["plan", files / "mlp.onnx", files / "cluster.yaml", "--json"]
    tight = json.loads(run(*base)[1])
    loose = json.loads(run(*base, "--slack", "1.0")[1])
    assert loose["objective"] < tight["objective"]
    given = json.loads(run(*base, "--latency-limit", "10 ms")[1])
    assert given["objective"] == 0.0  # room for FP32 everywhere
    status, out, _ = run(*base, "--latency-limit", "1 us")
    assert status == 3
    assert "latency" in json.loads(out)["reason"]


def test_statistics_are_weighed_as_the_indicator_names_it(run, files):
    graph = read_onnx(files / "mlp.onnx")
    make_profile(graph).save(files / "measured.json")
    measured = CLUSTER.replace("hardware: T4", "profile: measured.json").replace("FP16", "BF16")
    (files / "cluster.yaml").write_text(measured)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    found = collect_statistics(
        model, [(torch.randn(16, 8),)], step=lambda m, b: m(*b).square().mean(), probes=1, adaptive_probes=1
    )
    operators = (dataclasses.replace(part, name=f"fc{i}") for i, part in enumerate(found.operators))
    found = dataclasses.replace(found, operators=tuple(operators), model_fingerprint=None)
    save_statistics(found, files / "statistics.json")
    formats = make_profile(graph).formats
    base = ["plan", files / "mlp.onnx", files / "cluster.yaml", "--json", "--statistics", files / "statistics.json"]
    objectives = {}
    for kind in ("", "probed", "progress", "fisher"):
        command = [*base, "--save-problem", files / "problem.json", *(["--indicator", kind] if kind else [])]
        assert run(*command)[0] == 0
        (device,) = [d for d in load_problem(files / "problem.json").devices if d.name == "small"]
        expected = sensitivities(graph, found, formats, kind=kind or None)
        objectives[kind] = {name: device.operators[name]["INT8"].sensitivity / device.count for name in expected}
        assert objectives[kind] == pytest.approx({name: row["INT8"] for name, row in expected.items()})
    assert objectives[""] == objectives["probed"] != objectives["progress"] != objectives["fisher"]
    status, _, err = run(*base, "--indicator", "hessian")
    assert status != 0
    assert "curvature_probes" in err


@pytest.fixture
def counted(files):
    """Statistics of the model over four batches, in a file."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    batches = [(torch.randn(16, 8),) for _ in range(4)]
    found = collect_statistics(model, batches, step=lambda m, b: m(*b).square().mean(), probes=1)
    operators = (dataclasses.replace(part, name=f"fc{i}") for i, part in enumerate(found.operators))
    found = dataclasses.replace(found, operators=tuple(operators), model_fingerprint=None)
    save_statistics(found, files / "statistics.json")
    return found


def test_an_indicator_that_is_named_beside_statistics_is_the_one_used(run, files, counted, monkeypatch, request):
    """No name is passed over: another package's indicator gets the statistics, a misspelt one is refused."""
    seen = []

    class Own:
        estimate = "of my own"

        def sensitivities(self, graph, knowledge, device_formats):
            seen.append(knowledge)
            table = {o.name: {"INT8": 3.0, "BF16": 1.0, "FP16": 1.0} for o in graph.by_role(Role.ADJUSTABLE)}
            del table["fc1"]["INT8"]  # which it must not get
            return table

    monkeypatch.setattr(Own, "create", Own, raising=False)
    monkeypatch.setitem(sys.modules, "elsewhere", Own)
    entry = registry.Entry(name="own", target="elsewhere:create", features=frozenset(), origin="elsewhere")
    monkeypatch.setattr(registry, "_foreign", lambda kind, system: [entry] if kind is registry.Kind.INDICATOR else [])
    request.addfinalizer(registry.entries.cache_clear)
    registry.entries.cache_clear()
    base = ["plan", files / "mlp.onnx", files / "cluster.yaml", "--json", "--statistics", files / "statistics.json"]
    status, out, _ = run(*base, "--indicator", "own")
    assert status == 0
    assert json.loads(out)["estimates"]["sensitivity"] == "of my own"
    assert seen[0].statistics == counted
    assert set(seen[0].weights)
    run(*base, "--indicator", "own", "--save-problem", files / "problem.json")
    device = load_problem(files / "problem.json").devices[0]
    assert [sorted(device.operators[name]) for name in ("fc0", "fc1")] == [["FP16", "FP32", "INT8"], ["FP16", "FP32"]]
    assert device.operators["fc0"]["INT8"].sensitivity == 3.0 * device.count
    status, out, _ = run(*base, "--indicator", "weights")
    assert json.loads(out)["estimates"]["sensitivity"] == FROM_WEIGHTS
    status, _, err = run(*base, "--indicator", "fischer")
    assert status == 2
    assert "unknown indicator 'fischer'; did you mean 'fisher'?" in err
    status, _, err = run(*base[:-2], "--indicator", "fisher")
    assert status == 2
    assert "the indicator 'fisher' needs statistics" in err
    assert "--statistics FILE" in err


@pytest.mark.parametrize("method", ["exact", "greedy"])
def test_the_fastest_plan_under_a_share_of_the_gradients_noise(run, files, counted, method):
    base = ["plan", files / "mlp.onnx", files / "cluster.yaml", "--statistics", files / "statistics.json"]
    base += ["--method", method, "--save-problem", files / "problem.json", "--output", files / "plan.json"]
    cluster, graph = load_cluster(files / "cluster.yaml"), read_onnx(files / "mlp.onnx")
    times = []
    for budget in (1e-7, 1e-4, 1e3):
        status, out, _ = run(*base, "--noise-budget", budget, "--json")
        assert status == 0
        found = json.loads(out)
        problem, plan = load_problem(files / "problem.json"), load_plan(files / "plan.json")
        assert found["objective"] <= budget
        assert evaluate(problem, plan).feasible
        assert found["iteration_ns"] == problem.latency_limit_ns
        times.append(found["iteration_ns"])
        # The budget is a share of the averaged gradient's own variance.
        added = 0.0
        for device in cluster.planned:
            formats = {d.name: d for d in problem.devices}[device.name].precisions
            table = sensitivities(graph, counted, formats)
            chosen = plan.devices[device.name]
            added += device.count * sum(table[name].get(chosen[name], 0.0) for name in table)
        workers = cluster.num_workers
        share = (added / workers**2) / (counted.gradient_noise.variance / workers)
        assert found["objective"] == pytest.approx(share)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert "(budget 1e-07)" in run(*base, "--noise-budget", "1e-7")[1]


def test_a_noise_budget_that_means_nothing_is_refused(run, files, counted):
    base = ["plan", files / "mlp.onnx", files / "cluster.yaml"]
    with_statistics = [*base, "--statistics", files / "statistics.json"]
    for arguments, needle in (
        ([*base, "--noise-budget", "0.05"], "give --statistics FILE"),
        ([*with_statistics, "--noise-budget", "0.05", "--indicator", "fisher"], "units of squared loss"),
        ([*with_statistics, "--noise-budget", "-1"], "--noise-budget is -1.0"),
        ([*with_statistics, "--noise-budget", "0.05", "--slack", "0.1"], "--slack does not go with --noise-budget"),
    ):
        status, _, err = run(*arguments)
        assert status == 2
        assert needle in err
    save_statistics(dataclasses.replace(counted, gradient_noise=None), files / "statistics.json")
    status, _, err = run(*with_statistics, "--noise-budget", "0.05")
    assert status == 2
    assert "two different batches or more" in err


def test_estimate_lines_ignore_foreign_notes():
    assert estimate_lines({}) == ()
    assert estimate_lines({(ESTIMATES_KEY,): "a text of somebody else"}) == ()


def test_hardware_in_the_cluster_file(files):
    cluster = load_cluster(files / "cluster.yaml")
    assert [device.hardware for device in cluster.devices] == [None, "T4"]
    with pytest.raises(Exception, match="hardware is 3"):
        DeviceType(name="x", count=1, memory_limit_bytes=1, precisions=("FP32",), hardware=3)


def test_resnet50_is_planned_without_torch(tmp_path):
    """The example's model and cluster, as a process of its own in which torch cannot be loaded."""
    model = tmp_path / "resnet50.onnx"
    example = ROOT / "examples" / "plan_onnx_file"
    subprocess.run([sys.executable, str(example / "resnet50.py"), str(model)], check=True, timeout=250)
    script = "import sys\nsys.modules['torch'] = None\nfrom qsync_opt.cli import main\nsys.exit(main())\n"
    command = [sys.executable, "-c", script, "plan", str(model), str(example / "cluster.yaml"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["point"] == "feasible"
