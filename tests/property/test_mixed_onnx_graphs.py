"""Random ONNX graphs under random plans: casts as the problem format counts them, errors within derived bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from qsync_opt.model import Role
from qsync_opt.numerics import FORMATS
from qsync_opt.runtimes import cast_pairs
from qsync_opt.runtimes.onnxruntime import WEIGHT_LEVEL, RunnableModel, border_formats
from qsync_opt.training import (
    CastCost,
    Communication,
    OperatorCost,
    Plan,
    Problem,
    ProblemDevice,
    ProblemOperator,
    evaluate,
    problem_inputs,
    problem_role,
)

ROWS, WIDTH = 4, 8
KINDS = ("MatMul", "Gemm", "MatMul", "Relu", "Tanh", "Add", "Sub", "Softmax", "Transpose2")
PRECISIONS = ("INT8", "FP16", "FP32")


@st.composite
def graphs(draw):
    """A graph of up to nine nodes over one input of ROWS x WIDTH, as (kind, inputs); one to three results."""
    nodes = []
    for position in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(KINDS))
        count = 2 if kind in ("Add", "Sub") else 1
        # Results so far by number, the input as -1; mostly recent ones, so that graphs are deep.
        inputs = [draw(st.integers(max(-1, position - 3), position - 1)) for _ in range(count)]
        nodes.append((kind, inputs))
    results = draw(st.lists(st.integers(0, len(nodes) - 1), min_size=0, max_size=2, unique=True))
    return nodes, sorted({*results, len(nodes) - 1}), draw(st.integers(0, 2**31))


def value(number):
    return "x" if number < 0 else f"v{number}"


def build(nodes, results, seed):
    random = np.random.default_rng(seed)
    made, weights = [], {}
    for i, (kind, inputs) in enumerate(nodes):
        names = [value(number) for number in inputs]
        if kind in ("MatMul", "Gemm"):
            weights[f"w{i}"] = (random.standard_normal((WIDTH, WIDTH)) * 0.4).astype(np.float32)
            names.append(f"w{i}")
        if kind == "Gemm":
            weights[f"b{i}"] = random.standard_normal(WIDTH).astype(np.float32)
            names.append(f"b{i}")
        if kind == "Transpose2":  # there and back, as exporters write it
            made.append(helper.make_node("Transpose", names, [f"t{i}"], name=f"t{i}"))
            names, kind = [f"t{i}"], "Transpose"
        made.append(helper.make_node(kind, names, [f"v{i}"], name=f"v{i}"))
    graph = helper.make_graph(
        made,
        "random",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (ROWS, WIDTH))],
        [helper.make_tensor_value_info(f"v{i}", TensorProto.FLOAT, (ROWS, WIDTH)) for i in results],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return proto, weights, random.standard_normal((ROWS, WIDTH)).astype(np.float32)


def as_problem(runnable):
    """The same choice as a problem: every cast costs a nanosecond, everything else nothing."""
    formats = {name: border_formats(name) for name in PRECISIONS}
    free = OperatorCost(forward_ns=0, backward_ns=0, memory_kib=0, sensitivity=0.0)
    operators, tables = [], {}
    for operator in runnable.graph:
        role = problem_role(operator)
        allowed = ["FP32"] if role is Role.FIXED else [p for p in runnable.support.precisions(operator) if p in formats]
        tables[operator.name] = dict.fromkeys(allowed, free)
        operators.append(
            ProblemOperator(
                name=operator.name,
                type=operator.op_type,
                role=role,
                inputs=problem_inputs(operator),
                output_elements=operator.output_elements,
                bucket=None,
            )
        )
    device = ProblemDevice(
        name="here",
        count=1,
        memory_limit_kib=2**40,
        precisions=formats,
        casts={pair: CastCost(base_ns=1, ns_per_mi_elements=0) for pair in cast_pairs(formats)},
        operators=tables,
    )
    return Problem(
        name="random",
        formats={name: FORMATS[name].num_bytes for name in PRECISIONS},
        operators=tuple(operators),
        communication=Communication(allreduce_ns=(), peer_ready_ns=()),
        optimizer_ns=0,
        latency_limit_ns=2**40,
        devices=(device,),
        cast_sharing="producer",
    )


def half(values, error):
    """Values, and their error after rounding to FP16: half a step, or half the smallest number."""
    return error + 2.0**-11 * (np.abs(values) + error) + 2.0**-25


def bounds(nodes, weights, x, precisions):
    """FP64 values of every node and, element by element, how far its rounded value can be from them.

    Standard error analysis: rounding adds half a unit in the last place, products pass errors on by the absolute values
    of the other operand, Relu, Tanh and Softmax do not enlarge the largest error of a row.
    """
    sums = 2 * WIDTH * 2.0**-24  # FP32 sums, with room for the order of terms
    exact, error = {-1: x.astype(np.float64)}, {-1: np.zeros_like(x, np.float64)}
    for i, (kind, inputs) in enumerate(nodes):
        a, e = exact[inputs[0]], error[inputs[0]]
        precision = precisions[f"v{i}"]
        if kind in ("MatMul", "Gemm"):
            w = weights[f"w{i}"].astype(np.float64)
            bias = weights[f"b{i}"].astype(np.float64) if kind == "Gemm" else np.zeros(WIDTH)
            e_w, e_b = np.zeros_like(w), np.zeros_like(bias)
            if precision == "FP16":
                e, e_w, e_b = half(a, e), half(w, e_w), half(bias, e_b)
            if precision == "INT8":
                # One step for the zero point, which is rounded too, and half a one for the value.
                spread = np.maximum(a + e, 0).max() - np.minimum(a - e, 0).min()
                e = e + 1.5 * spread / 255 + 1e-6
                e_w = e_w + np.abs(w).max(axis=0) / WEIGHT_LEVEL * 0.5 + 1e-7
            out = a @ w + bias
            err = (
                e @ np.abs(w)
                + (np.abs(a) + e) @ e_w
                + e_b
                + sums * ((np.abs(a) + e) @ (np.abs(w) + e_w) + np.abs(bias))
            )
            # Sums of an emulated or native FP16 kernel may be kept in FP16 between blocks.
            err = err + (WIDTH * 2.0**-11 * (np.abs(a) @ np.abs(w)) if precision == "FP16" else 0)
        elif kind in ("Add", "Sub"):
            b = exact[inputs[1]]
            out, err = (a + b if kind == "Add" else a - b), e + error[inputs[1]]
            if precision == "FP16":
                # An FP32 operand is rounded on its way in.
                err = half(a, e) + half(b, error[inputs[1]])
        elif kind == "Softmax":
            out = np.exp(a - a.max(axis=1, keepdims=True))
            out = out / out.sum(axis=1, keepdims=True)
            err = np.broadcast_to(e.max(axis=1, keepdims=True), out.shape)
        else:
            out = np.maximum(a, 0) if kind == "Relu" else np.tanh(a) if kind == "Tanh" else a
            err = e
        err = err + 1e-6 * (1 + np.abs(out))  # FP32 itself, and approximations of tanh and exp
        exact[i], error[i] = out, half(out, err) if precision == "FP16" else err
    return exact, error


@settings(max_examples=60)
@given(graphs(), st.randoms(use_true_random=False))
def test_random_graphs_under_random_plans(drawn, choose):
    nodes, results, seed = drawn
    nodes = [n for n in nodes]
    proto, weights, x = build(nodes, results, seed)
    runnable = RunnableModel(proto, threads=1)
    adjustable = runnable.graph.by_role(Role.ADJUSTABLE)
    plain = runnable(x)

    runnable.apply(dict.fromkeys((o.name for o in adjustable), "FP32"))
    assert all(np.array_equal(runnable(x)[name], plain[name]) for name in plain)
    assert runnable.casts == ()
    runnable.undo()

    plan = {o.name: choose.choice(PRECISIONS) for o in adjustable}
    runnable.apply(plan)
    mixed = runnable(x)

    # Every precision, and every cast, is the one that the problem format says.
    problem = as_problem(runnable)
    evaluation = evaluate(problem, Plan(problem="random", devices={"here": plan})).devices["here"]
    assert {o.name: o.precision for o in evaluation.operators} == dict(runnable.precisions)
    expected = {(c.producer, c.source, c.target) for o in evaluation.operators for c in o.forward_casts}
    returned = {c for c in runnable.casts if c.for_result}
    found = [(c.value, c.source, c.target) for c in runnable.casts if c not in returned]
    assert len(found) == len(set(found))
    assert {(source.removeprefix("input/"), a, b) for source, a, b in expected} == set(found)
    assert sum(len(o.forward_casts) for o in evaluation.operators) == len(found)

    # And so is the number of nodes: one Cast per pair, one DynamicQuantizeLinear per value in codes; sums of integers
    # are widened inside their operators. A value that goes to codes from FP16 only by way of FP32 has a node more.
    named = [node for node in runnable.proto.graph.node if node.name.startswith("cast__")]
    pairs = {(c.value, c.target) for c in runnable.casts}
    by_way = {(c.value, "FP32") for c in runnable.casts if c.target == "INT8" and c.source != "FP32"} - pairs
    assert sum(node.op_type == "Cast" for node in named) == sum(t != "INT8" for _, t in pairs) + len(by_way)
    assert sum(node.op_type == "DynamicQuantizeLinear" for node in named) == sum(t == "INT8" for _, t in pairs)
    integer = sum(node.op_type == "MatMulInteger" for node in runnable.proto.graph.node)
    assert sum(node.op_type == "Cast" for node in runnable.proto.graph.node) == integer + sum(
        node.op_type == "Cast" for node in named
    )

    # Weights are stored in the format that they are read in.
    stored = {t.name: t.data_type for t in runnable.proto.graph.initializer}
    for i, (kind, _) in enumerate(nodes):
        if kind in ("MatMul", "Gemm"):
            low = {"FP16": TensorProto.FLOAT16, "INT8": TensorProto.INT8, "FP32": TensorProto.FLOAT}[plan[f"v{i}"]]
            name = {"FP16": f"w{i}__FP16", "INT8": f"v{i}__weight", "FP32": f"w{i}"}[plan[f"v{i}"]]
            assert stored[name] == low
            assert (f"w{i}" in stored) == (plan[f"v{i}"] == "FP32")

    for i in results:
        exact, error = bounds(nodes, weights, x, runnable.precisions)
        assert mixed[f"v{i}"].dtype == np.float32
        assert (np.abs(mixed[f"v{i}"] - exact[i]) <= error[i]).all()
