import json
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.testing import chain, diamond
from qsync_opt.training import Problem, load_problem

INSTANCES = sorted((Path(__file__).resolve().parents[2] / "data" / "instances").glob("*.json"))


@pytest.mark.parametrize("path", INSTANCES, ids=lambda path: path.stem)
def test_every_recorded_problem_survives_a_round_trip(path, tmp_path):
    problem = load_problem(path)
    problem.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
    assert load_problem(tmp_path / "again.json") == problem


def test_extension_keys_are_kept_at_every_level(tiny_data):
    device = tiny_data["devices"][0]
    for part in (
        tiny_data,
        tiny_data["formats"],
        tiny_data["operators"][1],
        tiny_data["communication"],
        tiny_data["optimum"],
        device,
        device["precisions"],
        device["precisions"]["FP16"],
        device["casts"]["FP16>FP32"],
        device["operators"],
        device["operators"]["fc1"],
        device["operators"]["fc1"]["FP16"],
    ):
        part["x-note"] = {"any": ["thing", 1]}
    assert Problem.from_json(tiny_data).to_json() == tiny_data


def _spoil(data, path, value):
    *parents, last = path
    for step in parents:
        data = data[step]
    if value is _DELETE:
        del data[last]
    else:
        data[last] = value


_DELETE = object()
T4 = ("devices", 0)
FC1 = (*T4, "operators", "fc1", "FP16")


@pytest.mark.parametrize(
    ("path", "value", "needle"),
    [
        (("format",), "qsync-problem/2", "format is 'qsync-problem/2'"),
        (("names",), 1, "unknown key 'names'; did you mean 'name'?"),
        (("operators", 1, "inptus"), [], "operators[1] 'fc1': unknown key 'inptus'; did you mean 'inputs'?"),
        ((*FC1, "forward"), 1, "unknown key 'forward'"),
        (("operators",), [], "has no operators; an empty model"),
        (("devices",), [], "devices is empty"),
        (("formats",), {}, "formats is empty"),
        (("formats", "INT8"), 0, "formats: INT8 is 0"),
        (("formats", "A>B"), 1, "'>' separates"),
        (("operators", 2, "name"), "fc1", "'fc1' is named twice"),
        (("operators", 0, "inputs"), ["fc1"], "'embed' reads 'fc1', which comes later"),
        (("operators", 0, "inputs"), ["embed"], "'embed' reads 'embed', which comes later or is itself"),
        (("operators", 1, "inputs"), ["embde"], "'fc1' reads 'embde', which is no operator; did you mean 'embed'?"),
        (("operators", 0, "role"), "free", "role is 'free', but allowed are adjustable, dependent, fixed"),
        (("operators", 0, "output_elements"), -1, "operators[0] 'embed': output_elements is -1"),
        (("operators", 0, "bucket"), 2, "operator 'embed': bucket is 2, but communication has 2 buckets"),
        (("operators", 0, "bucket"), _DELETE, "operators[0] 'embed': the key 'bucket' is missing"),
        (("operators", 0, "name"), "x-embed", "must not begin with 'x-'"),
        (("communication", "peer_ready_ns"), [0], "one value per bucket"),
        (("communication", "allreduce_ns", 0), -5, "allreduce_ns[0] is -5"),
        (("optimizer_ns",), 1.5, "optimizer_ns is 1.5"),
        (("latency_limit_ns",), None, "latency_limit_ns is None"),
        (("latency_limit_ns",), True, "latency_limit_ns is True"),
        (("cast_sharing",), "none", "cast_sharing is 'none', but allowed are 'edge' or 'producer'"),
        (("optimum",), {"objective": 1}, "optimum: the key 'bound' is missing"),
        ((*T4, "name"), "\ud800", "half of a surrogate pair"),
        ((*T4, "memory_limit_kib"), _DELETE, "devices[0] 'T4': the key 'memory_limit_kib' is missing"),
        ((*T4, "count"), 0, "count is 0"),
        (("devices", 1, "name"), "T4", "device 'T4' is named twice"),
        ((*T4, "precisions"), {}, "precisions is empty"),
        ((*T4, "precisions", "FP16", "output"), "FP17", "output of FP16 names the format 'FP17'"),
        ((*T4, "casts", "FP16-INT8"), {"base_ns": 0, "ns_per_mi_elements": 0}, "FROM>TO"),
        ((*T4, "casts", "FP16>FP64"), {"base_ns": 0, "ns_per_mi_elements": 0}, "'FP64', which formats lacks"),
        ((*T4, "casts", "FP16>FP32"), _DELETE, "the cast FP16>FP32 is needed between 'embed' and 'fc1'"),
        ((*T4, "casts", "FP32>INT8"), _DELETE, "the cast FP32>INT8 is needed"),
        ((*T4, "operators", "gelu"), _DELETE, "dependent operator 'gelu' has no table"),
        ((*T4, "operators", "gelu"), {}, "operator 'gelu' has an empty table"),
        ((*T4, "operators", "gone"), {"FP32": None}, "gone"),
        ((*T4, "operators", "fc1", "FP64"), None, "it must be an object"),
        ((*T4, "precisions", "INT8"), _DELETE, "operator 'fc1' has a cost for 'INT8', which the device lacks"),
        ((*FC1, "forward_ns"), float("nan"), "forward_ns is nan"),
        ((*FC1, "backward_ns"), -1, "backward_ns is -1"),
        ((*FC1, "memory_kib"), _DELETE, "operators 'fc1' 'FP16': the key 'memory_kib' is missing"),
        ((*FC1, "sensitivity"), float("inf"), "sensitivity is inf"),
        ((*FC1, "sensitivity"), -0.1, "sensitivity is -0.1"),
        (("optimizer_ns",), 2**63, "optimizer_ns is 9223372036854775808, but it must be at most 2**63 - 1"),
        (("optimizer_ns",), 2**63 - 1, "device 'T4': times in ns add up to 9.2e+18"),
        (("formats", "FP32"), 2**60, "device 'T4': memory in KiB with cast buffers add up to"),
        (("operators", 1, "output_elements"), 2**62, "operator 'fc1': output_elements is 4611686018427387904"),
        ((*FC1, "sensitivity"), 1.7e308, "device 'T4': the sensitivities add up to infinity"),
    ],
)
def test_bad_data_is_refused_with_one_line(tiny_data, path, value, needle):
    _spoil(tiny_data, path, value)
    with pytest.raises(ProblemError) as caught:
        Problem.from_json(tiny_data)
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fixed_operator_has_one_precision(tiny_data):
    tiny_data["devices"][0]["operators"]["loss"]["FP16"] = tiny_data["devices"][0]["operators"]["loss"]["FP32"]
    with pytest.raises(ProblemError, match="fixed operator 'loss' has costs for FP32, FP16"):
        Problem.from_json(tiny_data)


def test_a_table_for_no_operator_is_refused(tiny_data):
    tiny_data["devices"][0]["operators"]["fc9"] = tiny_data["devices"][0]["operators"]["fc1"]
    with pytest.raises(ProblemError, match="a table for 'fc9', which is no operator"):
        Problem.from_json(tiny_data)


def test_errors_name_the_file(tmp_path, tiny_data):
    tiny_data["optimizer_ns"] = -1
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(tiny_data))
    with pytest.raises(ProblemError, match=r"bad\.json: problem: optimizer_ns is -1"):
        load_problem(path)


def test_problems_made_in_code_are_checked_too():
    problem = chain().problem
    with pytest.raises(ProblemError, match="latency_limit_ns is -1"):
        replace(problem, latency_limit_ns=-1)
    with pytest.raises(ProblemError, match="'a' is named twice"):
        replace(problem, operators=(problem.operators[0], problem.operators[0]))


def test_a_cast_that_cannot_happen_is_not_asked_for():
    problem = diamond().problem
    device = problem.devices[0]
    # Nothing in the diamond delivers or wants INT8.
    casts = {pair: cost for pair, cost in device.casts.items() if "INT8" not in pair}
    assert replace(problem, devices=(replace(device, casts=casts),)).devices[0].casts == casts


def test_lookups_suggest_names():
    problem = chain().problem
    assert problem.index("b") == 1
    assert problem.device("T4").name == "T4"
    with pytest.raises(ProblemError, match="has no device type 'T5'; it has T4"):
        problem.device("T5")
    with pytest.raises(ProblemError, match="has no operator 'bb'; did you mean 'b'"):
        problem.index("bb")


def test_cast_time_divides_last():
    cost = chain().problem.devices[0].casts["FP16", "FP32"]
    cost = replace(cost, base_ns=3, ns_per_mi_elements=5)
    assert cost.time_ns(0) == 3
    assert cost.time_ns(2**20 - 1) == 3 + 4
    assert cost.time_ns(2**20) == 3 + 5
