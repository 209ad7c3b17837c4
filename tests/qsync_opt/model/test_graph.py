"""Operator graphs: order, distances, fingerprints, and their files."""

import json
from pathlib import Path

import pytest

from qsync_opt.errors import ModelError
from qsync_opt.model import (
    Operator,
    OpGraph,
    ParameterSpec,
    Role,
    TensorSpec,
    graph_to_json,
    load_graph,
    parse_graph,
    save_graph,
)

SPEC = TensorSpec(shape=(2, 3), dtype="float32")


def operator(name: str, *inputs: str, role: Role = Role.ADJUSTABLE, flops: int = 12) -> Operator:
    return Operator(
        name=name,
        op_type="linear",
        module=name,
        role=role,
        inputs=inputs,
        input_specs=(SPEC,) * len(inputs),
        output_specs=(SPEC,),
        parameters=("w",),
        onnx_nodes=(f"node_{name}",),
        flops=flops,
        num_bytes=48,
        signature="linear:0",
    )


def graph(*operators: Operator) -> OpGraph:
    return OpGraph(name="g", operators=operators, parameters=(ParameterSpec(name="w", spec=SPEC),))


@pytest.fixture
def residual() -> OpGraph:
    """a -> b -> c -> add, with a shortcut a -> add, then head; the addition is not adjustable."""
    return graph(
        operator("a"),
        operator("b", "a"),
        operator("c", "b"),
        operator("add", "c", "a", role=Role.DEPENDENT),
        operator("head", "add"),
    )


def test_distances_follow_the_longest_path_and_count_adjustable_operators(residual: OpGraph) -> None:
    assert residual.distances_to_input() == {"a": 0, "b": 1, "c": 2, "add": 3, "head": 3}
    assert residual.distances_to_loss() == {"a": 3, "b": 2, "c": 1, "add": 1, "head": 0}


def test_consumers_are_listed_once_per_argument() -> None:
    twice = graph(operator("a"), operator("b", "a", "a"))
    assert twice.consumers("a") == ("b", "b")


def test_a_file_round_trip_keeps_everything(residual: OpGraph, tmp_path: Path) -> None:
    save_graph(residual, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert loaded == residual
    assert loaded.fingerprint() == residual.fingerprint()
    assert [p.name for p in tmp_path.iterdir()] == ["graph.json"]


def test_fingerprints_tell_models_apart(residual: OpGraph) -> None:
    other = graph(operator("a"), operator("b", "a"), operator("c", "a"), *residual.operators[3:])
    assert other.fingerprint() != residual.fingerprint()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "qsync-graph/9", "format is 'qsync-graph/9'"),
        (("operators", 0, "flop"), 3, "unknown key 'flop'"),
        (("operators", 1, "role"), "free", "role is 'free', but allowed are adjustable, dependent, fixed"),
        (("operators", 1, "flops"), -1, "flops is -1"),
        (("operators", 1, "inputs"), ["c"], "'b' reads 'c', which does not come before it"),
        (("operators", 1, "name"), "a", "'a' is named twice"),
        (("operators", 1, "parameters"), ["v"], "unknown parameter 'v'"),
        (("operators", 0, "output_tensors"), [["float32", [2, -3]]], "negative size"),
        (("operators", 0, "output_tensors"), [["float31", [2]]], "unknown element type 'float31'"),
        (("operators", 0, "output_tensors"), [["float32", [2.5]]], "a tensor is written"),
        (("operators",), [], "has no operators"),
    ],
)
def test_unusable_files_are_refused(residual: OpGraph, path: tuple[object, ...], value: object, message: str) -> None:
    data = graph_to_json(residual)
    place: object = data
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    with pytest.raises(ModelError, match=message):
        parse_graph(json.dumps(data), where="g.json")


def test_a_missing_key_and_a_truncated_file_are_refused(residual: OpGraph, tmp_path: Path) -> None:
    data = graph_to_json(residual)
    del data["operators"][2]["signature"]
    with pytest.raises(ModelError, match="'signature' is missing"):
        parse_graph(json.dumps(data), where="g.json")
    (tmp_path / "cut.json").write_text(json.dumps(data)[:100])
    with pytest.raises(ModelError, match="truncated"):
        load_graph(tmp_path / "cut.json")
    with pytest.raises(ModelError, match="cannot read"):
        load_graph(tmp_path / "none.json")


def test_costs_must_not_be_negative() -> None:
    with pytest.raises(ModelError, match="'a' has -1 FLOPs"):
        operator("a", flops=-1)


def test_complex_numbers_carry_precision() -> None:
    assert TensorSpec(shape=(2,), dtype="complex64").is_floating
    assert not TensorSpec(shape=(2,), dtype="int64").is_floating
