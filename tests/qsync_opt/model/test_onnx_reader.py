"""ONNX models made elsewhere: nodes as operators, their FLOPs, and files that cannot be used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsync_opt.errors import ModelError
from qsync_opt.model import OpGraph, Role, RoleTable
from qsync_opt.model.onnx import GRAPH_KEY, read_onnx


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[int | str]],
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    *,
    output: str = "y",
    opset: int = 20,
    outputs: Sequence[int] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, outputs)],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    domains = {"", *(node.domain for node in nodes)}
    versions = [helper.make_opsetid(domain, opset if domain == "" else 1) for domain in sorted(domains)]
    return helper.make_model(graph, opset_imports=versions)


def weight(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype=np.float32)


@pytest.fixture
def small() -> onnx.ModelProto:
    """Conv -> BatchNormalization -> Relu -> GlobalAveragePool -> Flatten -> Gemm, no shapes stated."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv", strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "scale", "shift", "mean", "var"], ["b"], name="bn"),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], name="pool"),
        helper.make_node("Flatten", ["d"], ["e"], name="flat"),
        helper.make_node("Gemm", ["e", "v", "u"], ["y"], name="head", transB=1),
    ]
    weights = {"w": weight(6, 3, 3, 3), "v": weight(5, 6), "u": weight(5)}
    weights |= {name: weight(6) for name in ("scale", "shift", "mean", "var")}
    return model(nodes, {"x": (2, 3, 8, 8)}, weights)


def test_every_node_is_an_operator(small: onnx.ModelProto) -> None:
    graph = read_onnx(small)
    assert [o.name for o in graph] == ["input/x", "conv", "bn", "c", "pool", "flat", "head"]
    assert [o.inputs for o in graph][1:] == [("input/x",), ("conv",), ("bn",), ("c",), ("pool",), ("flat",)]
    roles = {o.name: o.role for o in graph}
    assert [name for name, role in roles.items() if role is Role.ADJUSTABLE] == ["conv", "head"]
    assert [name for name, role in roles.items() if role is Role.FIXED] == ["input/x", "bn"]
    assert graph["conv"].output_specs[0].shape == (2, 6, 4, 4)
    assert graph["conv"].flops == 2 * (2 * 6 * 4 * 4) * (3 * 3 * 3)
    assert graph["head"].flops == 2 * 2 * 6 * 5
    assert graph["head"].num_bytes == 4 * (2 * 6 + 5 * 6 + 5 + 2 * 5)
    assert graph["flat"].num_bytes == 0
    assert graph["head"].onnx_nodes == ("head",)


def test_initializers_are_parameters_but_running_statistics_are_not(small: onnx.ModelProto) -> None:
    graph = read_onnx(small)
    assert {p.name for p in graph.parameters} == {"w", "v", "u", "scale", "shift"}
    assert graph["bn"].parameters == ("scale", "shift")


def test_a_file_reads_as_the_model_and_the_model_is_left_alone(small: onnx.ModelProto, tmp_path: Path) -> None:
    before = small.SerializeToString()
    onnx.save(small, tmp_path / "m.onnx")
    assert read_onnx(tmp_path / "m.onnx") == read_onnx(small)
    assert small.SerializeToString() == before


def test_a_graph_that_exporters_gave_no_name_of_its_own_is_named_after_its_file(
    small: onnx.ModelProto, tmp_path: Path
) -> None:
    own = small.graph.name
    for given, name in (("main_graph", "resnet"), (own, own), ("", "resnet")):
        small.graph.name = given
        onnx.save(small, tmp_path / "resnet.onnx")
        assert read_onnx(tmp_path / "resnet.onnx").name == name
    assert read_onnx(tmp_path / "resnet.onnx", name="mine").name == "mine"


def test_a_name_that_is_no_text_is_refused(small: onnx.ModelProto, tmp_path: Path) -> None:
    for name in (b"transB", b"head", b"Relu"):
        damaged = small.SerializeToString().replace(name, name[:-1] + b"\xff")
        (tmp_path / "m.onnx").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"not UTF-8|not ONNX"):
            read_onnx(tmp_path / "m.onnx")


def test_external_data_is_not_loaded(tmp_path: Path) -> None:
    """The file says that its weight has 4 GiB in another file, which does not even exist."""
    rows = 2**20
    large = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
    large.external_data.add(key="location", value="weights.bin")
    proto = model([helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")], {"x": (4, rows)})
    proto.graph.initializer.append(large)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    graph = read_onnx(tmp_path / "m.onnx")
    assert graph["mm"].flops == 2 * 4 * rows * 1024
    assert graph.parameters[0].spec.num_bytes == 4 * 2**30


@pytest.mark.parametrize(
    ("node", "shapes", "flops"),
    [
        (("MatMul", {}), [(2, 3, 4, 5), (5, 6)], 2 * (2 * 3 * 4 * 6) * 5),
        (("MatMul", {}), [(4, 5), (5,)], 2 * 4 * 5),
        (("MatMul", {}), [(1, 3, 4, 5), (2, 1, 5, 6)], 2 * (2 * 3 * 4 * 6) * 5),
        (("Gemm", {"transA": 1}), [(5, 4), (5, 6)], 2 * 4 * 6 * 5),
        (("Conv", {"group": 2}), [(2, 4, 9), (6, 2, 3)], 2 * (2 * 6 * 7) * (2 * 3)),
        (("ConvTranspose", {"group": 2}), [(2, 4, 9), (4, 3, 5)], 2 * (2 * 4 * 9) * (3 * 5)),
        (("Einsum", {"equation": "bij,bjk->bik"}), [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (("Einsum", {"equation": "ij,jk,kl"}), [(2, 3), (3, 4), (4, 5)], 2 * 2 * 3 * 4 + 2 * 2 * 4 * 5),
        (("Einsum", {"equation": "i,j->ij"}), [(2,), (3,)], 0),
        (("Einsum", {"equation": "ij,jk->k"}), [(2, 3), (3, 4)], 2 * 3 * 4),
        (("Attention", {}), [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3)], 2 * 2 * 4 * 5 * 6 * (8 + 3)),
        (
            ("Attention", {"q_num_heads": 4, "kv_num_heads": 2}),
            [(2, 5, 32), (2, 6, 16), (2, 6, 6)],
            2 * 2 * 4 * 5 * 6 * (8 + 3),
        ),
        (("Relu", {}), [(2, 3)], 0),
    ],
)
def test_flops(node: tuple[str, dict[str, Any]], shapes: list[tuple[int, ...]], flops: int) -> None:
    kind, attributes = node
    names = [f"x{i}" for i in range(len(shapes))]
    nodes = [helper.make_node(kind, names, ["y"], name="n", **attributes)]
    graph = read_onnx(model(nodes, dict(zip(names, shapes, strict=True)), opset=23))
    assert graph["n"].flops == flops


def test_recurrent_flops() -> None:
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="n", hidden_size=4)]
    graph = read_onnx(model(nodes, {"x": (5, 2, 3)}, {"w": weight(1, 16, 3), "r": weight(1, 16, 4)}))
    assert graph["n"].flops == 2 * 5 * 2 * (16 * 3 + 16 * 4)


def test_rows_of_a_weight_are_an_embedding_and_rows_of_an_activation_are_not() -> None:
    indices = np.array([1, 0], dtype=np.int64)
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["a"], name="look-up"),
        helper.make_node("Add", ["a", "x"], ["b"], name="add"),
        helper.make_node("Gather", ["b", "i"], ["y"], name="select"),
    ]
    graph = read_onnx(model(nodes, {"x": (2, 4)}, {"table": weight(9, 4), "i": indices}))
    assert graph["look-up"].role is Role.ADJUSTABLE
    assert graph["select"].role is Role.DEPENDENT
    assert graph["add"].inputs == ("look-up", "input/x")


def test_what_reads_full_weights_is_fixed_and_scalars_decide_nothing() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "scalar"], ["a"], name="scaled"),
        helper.make_node("Mul", ["a", "vector"], ["b"], name="weighted"),
        helper.make_node("Cast", ["b"], ["y"], name="cast", to=TensorProto.FLOAT),
    ]
    graph = read_onnx(model(nodes, {"x": (2, 4)}, {"scalar": weight(), "vector": weight(4)}))
    assert [graph[name].role for name in ("scaled", "weighted", "cast")] == [Role.DEPENDENT, Role.FIXED, Role.FIXED]


def test_unknown_operators_are_kept_and_named_once() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="mm"),
        helper.make_node("Frobnicate", ["a"], ["b"], name="f1", domain="my.domain"),
        helper.make_node("Frobnicate", ["b"], ["y"], name="f2", domain="my.domain"),
    ]
    proto = model(nodes, {"x": (2, 4)}, {"w": weight(4, 4)}, outputs=(2, 4))
    proto.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, (2, 4)))
    with pytest.warns(UserWarning, match=r"kept in FP32: my\.domain\.Frobnicate;") as caught:
        graph = read_onnx(proto)
    assert len(caught) == 1
    assert graph["f2"].role is Role.FIXED
    assert graph["f2"].inputs == ("f1",)
    table = RoleTable(by_type={"my.domain.Frobnicate": Role.DEPENDENT})
    assert read_onnx(proto, roles=table)["f2"].role is Role.DEPENDENT


def test_shapes_computed_in_the_graph_are_found() -> None:
    """The target of Reshape is computed from the shape of another tensor, as exporters write it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Gather", ["s", "zero"], ["batch"], name="pick"),
        helper.make_node("Mul", ["batch", "two"], ["rows"], name="times"),
        helper.make_node("Concat", ["rows", "rest"], ["target"], name="join", axis=0),
        helper.make_node("Expand", ["one", "target"], ["e"], name="expand"),
        helper.make_node("MatMul", ["e", "w"], ["y"], name="mm"),
    ]
    integers = {name: np.array(value, dtype=np.int64) for name, value in (("zero", [0]), ("two", [2]), ("rest", [4]))}
    proto = model(nodes, {"x": (3, 4)}, {**integers, "one": weight(1), "w": weight(4, 5)})
    assert read_onnx(proto)["mm"].flops == 2 * 6 * 4 * 5


@pytest.mark.parametrize("opset", [11, 13, 18, 23])
def test_operator_sets_old_and_new(opset: int) -> None:
    axes: dict[str, Any] = {"axes": [0]} if opset < 13 else {}
    inputs = ["x"] if opset < 13 else ["x", "axes"]
    nodes = [
        helper.make_node("Unsqueeze", inputs, ["a"], name="u", **axes),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="mm"),
    ]
    proto = model(nodes, {"x": (3, 4)}, {"axes": np.array([0], dtype=np.int64), "w": weight(4, 5)}, opset=opset)
    assert read_onnx(proto)["mm"].output_specs[0].shape == (1, 3, 5)


def test_local_functions_are_opened() -> None:
    body = [helper.make_node("MatMul", ["p", "q"], ["r"], name="inner")]
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "Product", ["p", "q"], ["r"], body, versions[:1])
    proto = model([helper.make_node("Product", ["x", "w"], ["y"], domain="local")], {"x": (3, 4)}, {"w": weight(4, 5)})
    proto.functions.append(function)
    (_, product) = read_onnx(proto)
    assert (product.op_type, product.flops) == ("MatMul", 2 * 3 * 4 * 5)


def refusal(source: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read_onnx(source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_unusable_files_are_refused(small: onnx.ModelProto, tmp_path: Path) -> None:
    whole = small.SerializeToString()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.onnx").write_bytes(b"")
    (tmp_path / "text.onnx").write_text("this is no model\n")
    assert "cannot read ONNX file" in refusal(tmp_path / "none.onnx")
    assert "cannot read ONNX file" in refusal(tmp_path / "nu\0ll.onnx")
    assert "truncated or not ONNX" in refusal(tmp_path / "cut.onnx")
    assert "not an ONNX model" in refusal(tmp_path / "empty.onnx")
    assert "text.onnx" in refusal(tmp_path / "text.onnx")


def test_models_that_cannot_be_planned_are_refused(small: onnx.ModelProto) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"], name="relu")
    assert "has no nodes" in refusal(model([], {"x": (2,)}, output="x"))
    assert "input 'x' of the ONNX model has shape float32 [batch, 4]" in refusal(model([relu], {"x": ("batch", 4)}))
    unshaped = helper.make_node("Odd", ["x"], ["y"], name="odd", domain="d")
    assert "tensor 'y' of ONNX node 'odd' (d.Odd) has shape" in refusal(model([unshaped], {"x": (2,)}))
    branch = helper.make_graph([], "b", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2,))])
    choice = helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch, else_branch=branch)
    condition = {"c": np.array(True)}
    assert "'if' in the ONNX model is If" in refusal(model([choice], {"x": (2,)}, condition))
    mismatch = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (2, 3)}, {"w": weight(4, 5)})
    assert "shape inference fails" in refusal(mismatch)
    entry = small.metadata_props.add()
    entry.key, entry.value = GRAPH_KEY, "{"
    assert "truncated" in refusal(small)


def test_names_may_be_missing() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    graph: OpGraph = read_onnx(model(nodes, {"x": (2,)}), name="renamed")
    assert graph.name == "renamed"
    assert [o.name for o in graph] == ["input/x", "a", "y"]
