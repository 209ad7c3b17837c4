"""Wrong cluster files and models, and what only Python can do wrong."""

from __future__ import annotations

from wrong_case import Case

from qsync_opt import Plan, uniform_plan
from qsync_opt.testing import diamond

MODEL_CASES: tuple[Case, ...] = (
    Case(
        what="a quantity without unit",
        run=("plan", "model.onnx", "no-unit.yaml"),
        value="15",
        allowed="units:",
        advice="write a number and a unit",
    ),
    Case(
        what="a precision in lower case",
        run=("plan", "model.onnx", "lower-case.yaml"),
        value="'int8'",
        allowed="allowed are INT8",
        advice="did you mean 'INT8'?",
    ),
    Case(
        what="a repeated key",
        run=("plan", "model.onnx", "twice.yaml"),
        value="'count'",
        allowed="repeated in one mapping (line 4)",
        advice="keep one",
    ),
    Case(
        what="a cluster with nothing to plan",
        run=("plan", "model.onnx", "nothing-planned.yaml"),
        value="'two-kinds'",
        allowed="role is planned",
        advice="give at least one",
    ),
    Case(
        what="two precisions for a fixed type",
        run=("plan", "model.onnx", "two-fixed.yaml"),
        value="'A100'",
        allowed="role is fixed",
        advice="name exactly one",
    ),
    Case(
        what="a GPU without data sheet",
        run=("plan", "model.onnx", "unknown-gpu.yaml"),
        value="'RTX-4090'",
        allowed="there is one for V100",
        advice="profile the device",
    ),
    Case(
        what="a precision that the device does not have",
        run=("plan", "model.onnx", "not-there.yaml"),
        value="'BF16'",
        allowed="has INT8-BWD8, INT8, FP16, FP32",
        advice="remove it or profile it",
    ),
    Case(
        what="a profile that is not there",
        run=("plan", "model.onnx", "no-profile.yaml"),
        value="t4.json",
        allowed="JSON file",
        advice="give the path",
    ),
    Case(
        what="a file that is no ONNX model",
        run=("plan", "notes.onnx", "cluster.yaml"),
        value="notes.onnx",
        allowed="ONNX",
        advice="export the model again",
    ),
    Case(
        what="a model whose batch size is open",
        run=("plan", "unfixed.onnx", "cluster.yaml"),
        value="[batch, 16]",
        allowed="fixed",
        advice="export with fixed shapes",
    ),
    Case(
        what="an indicator without what it needs",
        run=("plan", "model.onnx", "cluster.yaml", "--indicator", "statistics"),
        value="'statistics'",
        allowed="needs statistics",
        advice="collect them",
    ),
    Case(
        what="a latency limit without unit",
        run=("plan", "model.onnx", "cluster.yaml", "--latency-limit", "120"),
        value="'120'",
        allowed="units:",
        advice="write a number and a unit",
    ),
    Case(
        what="an optimizer that estimates do not know",
        run=("plan", "model.onnx", "cluster.yaml", "--optimizer", "adam"),
        value="'adam'",
        allowed="allowed are adamw, momentum, sgd",
        advice="profile the device for any other",
    ),
    Case(
        what="a uniform plan in an unknown precision",
        run=lambda: uniform_plan(diamond().problem, "int8"),
        call='uniform_plan(problem, "int8")',
        value="'int8'",
        allowed="has INT8, FP16, FP32",
        advice="did you mean 'INT8'?",
    ),
    Case(
        what="a plan without devices",
        run=lambda: Plan(problem="diamond", devices={}),
        call='Plan(problem="diamond", devices={})',
        value="no devices",
        allowed="at least one device type",
        advice="must name",
    ),
)
