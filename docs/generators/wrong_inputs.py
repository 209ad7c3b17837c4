"""The files that ``error_messages.py`` reads: good ones, and bad ones that differ from a good one in one place each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from qsync_opt import Plan, uniform_plan
from qsync_opt.testing import buckets, diamond

CLUSTER = """\
name: two-kinds
devices:
  - {name: A100, count: 1, role: fixed, memory: 40 GiB, precisions: [FP32]}
  - {name: T4, count: 1, memory: 15 GiB, precisions: [INT8, FP16, FP32]}
network: {latency: 20 us, bandwidth: 10 Gbit/s, source: data sheet}
"""


def write_inputs(folder: Path) -> None:
    """Good files, and bad ones that each differ from a good one in one place."""
    problem = diamond().problem
    problem.save(folder / "problem.json")
    data = problem.to_json()
    plan = uniform_plan(problem, "FP16")
    plan.save(folder / "plan.json")
    (folder / "damaged.json").write_text((folder / "plan.json").read_text().replace("FP16", "FP32", 1))
    buckets().problem.save(folder / "other.json")
    (folder / "truncated.json").write_text((folder / "problem.json").read_text()[:400])
    for name, change in _PROBLEM_CHANGES.items():
        changed = json.loads(json.dumps(data))
        change(changed)
        (folder / name).write_text(json.dumps(changed))
    for name, choices in _PLANS.items():
        changes = {**plan.devices["T4"], **choices}
        Plan(problem="diamond", devices={"T4": {k: v for k, v in changes.items() if v}}).save(folder / name)
    replace(problem, name="two", devices=(problem.devices[0], replace(problem.devices[0], name="A10"))).save(
        folder / "two-devices.json"
    )
    (folder / "cluster.yaml").write_text(CLUSTER)
    for name, (old, new) in _CLUSTERS.items():
        assert old in CLUSTER
        (folder / name).write_text(CLUSTER.replace(old, new))
    onnx.save(_model(8), folder / "model.onnx")
    onnx.save(_model("batch"), folder / "unfixed.onnx")
    (folder / "notes.onnx").write_text("these are notes")


def _model(batch: int | str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="hidden"),
        helper.make_node("Relu", ["h"], ["y"], name="relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (batch, 16))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (batch, 4))],
        [numpy_helper.from_array(np.ones((16, 4), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def _set(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def _drop(*path: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


_COST = {"forward_ns": 1, "backward_ns": 1, "memory_kib": 1, "sensitivity": 0.0}
_PROBLEM_CHANGES: dict[str, Callable[[Any], None]] = {
    "misspelled-key.json": _set("latency_limit", value=1),
    "nan.json": _set("devices", 0, "operators", "a", "FP16", "sensitivity", value=float("nan")),
    "negative.json": _set("devices", 0, "operators", "a", "FP16", "forward_ns", value=-5),
    "no-table.json": _drop("devices", 0, "operators", "b"),
    "no-cast.json": _drop("devices", 0, "casts", "FP16>FP32"),
    "two-for-fixed.json": _set("devices", 0, "operators", "loss", value={"FP32": _COST, "FP16": _COST}),
    "order.json": lambda data: data["operators"].reverse(),
    "role.json": _set("operators", 0, "role", value="adjusted"),
    "sharing.json": _set("cast_sharing", value="consumer"),
}
_PLANS = {
    "unknown-precision.json": {"a": "FP8"},
    "contradiction.json": {"add": "FP32"},
    "missing-operator.json": {"b": ""},
}
_CLUSTERS = {
    "no-unit.yaml": ("15 GiB", "15"),
    "lower-case.yaml": ("[INT8, FP16, FP32]", "[int8, FP16, FP32]"),
    "twice.yaml": ("name: T4, count: 1", "name: T4, count: 1, count: 2"),
    "nothing-planned.yaml": ("precisions: [INT8, FP16, FP32]}", "role: fixed, precisions: [FP32]}"),
    "unknown-gpu.yaml": ("name: T4", "name: RTX-4090"),
    "two-fixed.yaml": ("[FP32]}\n  - {name: T4", "[FP16, FP32]}\n  - {name: T4"),
    "not-there.yaml": ("[INT8, FP16, FP32]", "[BF16, FP32]"),
    "no-profile.yaml": ("memory: 15 GiB", "profile: t4.json, memory: 15 GiB"),
}
