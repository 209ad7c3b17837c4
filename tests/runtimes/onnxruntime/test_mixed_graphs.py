"""Rewritten graphs: what is cast, what is stored, what is computed, and what is refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from qsync_opt.errors import ModelError, NotReadyError, UnsupportedError
from qsync_opt.model.onnx import read_weights
from qsync_opt.runtimes.onnxruntime import (
    RunnableModel,
    bfloat16_bits,
    compare,
    relative_error,
    rewrite,
    stored,
    weight_codes,
)

RANDOM = np.random.default_rng(7)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def model(nodes, inputs, weights, outputs, opset=21, **changes):
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    domains = {"", *(node.domain for node in nodes)}
    opsets = [helper.make_opsetid(domain, opset if domain == "" else 1) for domain in sorted(domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=changes.get("ir_version", 10))


def run(proto, plan, *args):
    runnable = RunnableModel(proto, threads=1)
    plain = runnable(*args)
    runnable.apply(plan)
    return runnable, plain, runnable(*args)


@pytest.fixture
def fork():
    """x -> fc1 -> relu, read by fc2, fc3 and softmax; fc2 and softmax are added."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="fc1"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["b"], name="fc2"),
        helper.make_node("MatMul", ["r", "w2"], ["z"], name="fc3"),
        helper.make_node("Softmax", ["r"], ["s"], name="soft"),
        helper.make_node("Add", ["b", "s"], ["y"], name="add"),
    ]
    return model(nodes, {"x": (6, 8)}, {"w1": normal(8, 8), "w2": normal(8, 8)}, ["y", "z"])


def kinds(proto):
    return [node.op_type for node in proto.graph.node]


def test_a_value_is_cast_once_per_format_and_weights_are_stored_low(fork):
    runnable, plain, mixed = run(fork, {"fc1": "FP16", "fc2": "FP16", "fc3": "INT8"}, normal(6, 8))
    # relu follows fc1 into FP16: fc2 reads it as it is, softmax by one cast, fc3 in codes by way of that cast.
    assert {(c.value, c.source, c.target) for c in runnable.casts} == {
        ("x", "FP32", "FP16"),
        ("r", "FP16", "FP32"),
        ("r", "FP16", "INT8"),
        ("b", "FP16", "FP32"),
    }
    named = [node for node in runnable.proto.graph.node if node.name.startswith("cast__")]
    assert sorted(node.op_type for node in named) == ["Cast", "Cast", "Cast", "DynamicQuantizeLinear"]
    weights = {t.name: t.data_type for t in runnable.proto.graph.initializer}
    assert weights["w1__FP16"] == weights["w2__FP16"] == TensorProto.FLOAT16
    assert TensorProto.INT8 in weights.values()
    assert not {"w1", "w2"} & set(weights)  # nobody reads them in FP32 any more
    assert {i.type.tensor_type.elem_type for i in runnable.proto.graph.output} == {TensorProto.FLOAT}
    assert all(relative_error(mixed[name], plain[name]) < 0.05 for name in plain)
    assert all(relative_error(mixed[name], plain[name]) > 0 for name in plain)
    assert all(array.dtype == np.float32 for array in mixed.values())


def test_a_plan_of_fp32_runs_the_model_as_it_was(fork):
    runnable, plain, mixed = run(fork, dict.fromkeys(("fc1", "fc2", "fc3"), "FP32"), normal(6, 8))
    assert runnable.proto.SerializeToString() == runnable.prepared.proto.SerializeToString()
    assert all(np.array_equal(plain[name], mixed[name]) for name in plain)


def test_undo_and_apply_alternate(fork):
    x = normal(6, 8)
    runnable, plain, _ = run(fork, {"fc1": "FP16", "fc2": "FP32", "fc3": "FP32"}, x)
    with pytest.raises(NotReadyError, match="undo"):
        runnable.apply({"fc1": "FP32", "fc2": "FP32", "fc3": "FP32"})
    runnable.undo()
    assert all(np.array_equal(runnable(x)[name], plain[name]) for name in plain)
    with pytest.raises(NotReadyError, match="apply"):
        runnable.undo()


def test_a_saved_graph_is_a_model_of_its_own(fork, tmp_path):
    x = normal(6, 8)
    runnable, _, mixed = run(fork, {"fc1": "FP16", "fc2": "INT8", "fc3": "FP32"}, x)
    runnable.save(tmp_path / "mixed.onnx")
    onnx.checker.check_model(str(tmp_path / "mixed.onnx"), full_check=True)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "mixed.onnx"), providers=["CPUExecutionProvider"])
    again = dict(zip(mixed, session.run(list(mixed), {"x": x}), strict=True))
    assert all(np.array_equal(again[name], mixed[name]) for name in mixed)


def test_compare_tells_results_and_operators(fork):
    x = normal(6, 8)
    runnable, plain, mixed = run(fork, {"fc1": "FP16", "fc2": "FP32", "fc3": "INT8"}, x)
    comparison = compare(runnable, (x,))
    assert comparison.results == {name: pytest.approx(relative_error(mixed[name], plain[name])) for name in plain}
    assert set(comparison.operators) == {"fc1", "relu", "fc2", "fc3", "soft", "add"}
    assert comparison.worst(1)[0][0] == "fc3"
    runnable.undo()
    assert set(compare(runnable, (x,)).operators.values()) == {0.0}


def test_masks_of_infinities_have_no_error_where_they_agree():
    mask = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"], name="scores"),
        helper.make_node("Add", ["scores", "mask"], ["masked"], name="mask"),
        helper.make_node("Softmax", ["masked"], ["y"], name="soft"),
    ]
    runnable = RunnableModel(model(nodes, {"x": (4, 5)}, {"w": normal(5, 4), "mask": mask}, {"y": None}))
    runnable.apply({"scores": "FP16"})
    assert 0 < compare(runnable, (normal(4, 5),)).operators["mask"] < 0.01
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    wanted = np.array([inf, nan, 3.0, 4.0], np.float32)
    assert relative_error(np.array([inf, nan, 3.0, 4.5], np.float32), wanted) == pytest.approx(0.1)
    for other in ([inf, nan, 3.0, nan], [-inf, nan, 3.0, 4.0], [1.0, nan, 3.0, 4.0]):
        assert relative_error(np.array(other, np.float32), wanted) == np.inf


def test_a_model_without_floating_point_values_has_nothing_to_compare():
    inputs = [helper.make_tensor_value_info("x", TensorProto.INT64, (3,))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, (3,))]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "whole", inputs, outputs)
    runnable = RunnableModel(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    assert not compare(runnable, (np.arange(3),)).results


@pytest.mark.parametrize("rows", [2**40, 2**62])
def test_inputs_beyond_all_memory_are_not_made_up(rows):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="m")]
    runnable = RunnableModel(model(nodes, {"x": (rows, 5)}, {"w": normal(5, 4)}, {"y": (rows, 4)}))
    with pytest.raises(ModelError, match=r"input 'x' of the model .* more than 2147483647 bytes.*smaller batch"):
        runnable.apply({"m": "FP16"})


def by_hand(x, weight):
    """An 8-bit product in float64 from the definition of DynamicQuantizeLinear and our weight codes."""
    low, high = min(x.min(), 0.0), max(x.max(), 0.0)
    scale = np.float32((high - low) / 255)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    codes = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    levels, scales = weight_codes(weight, 1)
    return (codes @ levels.astype(np.float64)) * scale * scales


@pytest.mark.parametrize(("trans_a", "trans_b"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_integer_gemm_is_what_its_definition_says(trans_a, trans_b):
    x, w, c = normal(5, 7), normal(7, 3), normal(3)
    a, b = (x.T.copy() if trans_a else x), (w.T.copy() if trans_b else w)
    attributes = {"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 2.0}
    node = helper.make_node("Gemm", ["x", "w", "c"], ["y"], name="fc", **attributes)
    proto = model([node], {"x": a.shape}, {"w": b, "c": c}, ["y"])
    _, plain, mixed = run(proto, {"fc": "INT8"}, a)
    np.testing.assert_allclose(plain["y"], 0.5 * x @ w + 2 * c, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mixed["y"], 0.5 * by_hand(x, w) + 2 * c, rtol=1e-5, atol=1e-5)


def test_integer_product_of_two_activations_and_of_a_stack_of_weights():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="stack"),
        helper.make_node("MatMul", ["a", "x2"], ["y"], name="both"),
    ]
    proto = model(nodes, {"x": (2, 4, 16), "x2": (2, 16, 5)}, {"w": normal(2, 16, 16)}, ["y"])
    runnable, plain, mixed = run(proto, {"stack": "INT8", "both": "INT8"}, normal(2, 4, 16), normal(2, 16, 5))
    assert kinds(runnable.proto).count("DynamicQuantizeLinear") == 3
    assert 0 < relative_error(mixed["y"], plain["y"]) < 0.05


@pytest.mark.parametrize("groups", [1, 2])
def test_integer_convolution_with_padding_strides_and_groups(groups):
    weight = normal(6, 4 // groups, 3, 3)
    attributes = {"group": groups, "pads": [1, 1, 1, 1], "strides": [2, 1]}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], name="conv", **attributes)
    proto = model([node], {"x": (2, 4, 9, 8)}, {"w": weight, "b": normal(6)}, ["y"])
    # Shifted values: padding must be zero, not the lowest code.
    runnable, plain, mixed = run(proto, {"conv": "INT8"}, normal(2, 4, 9, 8) + 3.0)
    assert "ConvInteger" in kinds(runnable.proto)
    assert 0 < relative_error(mixed["y"], plain["y"]) < 0.03


def test_an_operator_of_several_results_and_parameters_that_stay_fp32():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="fc"),
        helper.make_node("Split", ["a"], ["p", "q"], name="split", axis=1, num_outputs=2),
        helper.make_node("Reshape", ["p", "shape"], ["i"], name="image"),
        helper.make_node("Resize", ["i", "", "scales"], ["y"], name="resize", mode="linear"),
        helper.make_node("Constant", [], ["half"], name="half", value_float=0.5),
        helper.make_node("Mul", ["q", "half"], ["z"], name="scale"),
    ]
    weights = {"w": normal(8, 8), "shape": np.array([1, 2, 2, 4]), "scales": np.array([1, 1, 2, 2], np.float32)}
    proto = model(nodes, {"x": (4, 8)}, weights, ["y", "z"])
    runnable, plain, mixed = run(proto, {"fc": "FP16"}, normal(4, 8))
    assert runnable.precisions["scale"] == "FP16"
    assert runnable.precisions["resize"] == "FP32"  # it reads FP32 state, so that its role is fixed
    assert "Constant" not in kinds(runnable.proto)
    for name in plain:
        assert 0 < relative_error(mixed[name], plain[name]) < 1e-2
    # The rewriting itself lowers what the schema lets it: the data of Resize, not its scales.
    low = rewrite(runnable.prepared, ["FP16"] * len(nodes)).proto
    types = {t.name: t.data_type for t in low.graph.initializer}
    assert types["scales"] == TensorProto.FLOAT and types["half__FP16"] == TensorProto.FLOAT16
    assert kinds(low).count("Cast") == 3  # x, and the two results


def test_contributed_operators_and_sequences_stay_in_fp32():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="fc"),
        helper.make_node("BiasGelu", ["a", "b"], ["g"], name="gelu", domain="com.microsoft"),
        helper.make_node("SequenceConstruct", ["g", "g"], ["s"], name="sequence"),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], name="concat", axis=0),
    ]
    proto = model(nodes, {"x": (4, 8)}, {"w": normal(8, 8), "b": normal(8)}, ["y"])
    proto.graph.value_info.append(helper.make_tensor_value_info("g", TensorProto.FLOAT, (4, 8)))
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, (8, 8)))
    with pytest.warns(UserWarning, match="unknown to the role table"):
        runnable, plain, mixed = run(proto, {"fc": "FP16"}, normal(4, 8))
    assert runnable.precisions["gelu"] == runnable.precisions["sequence"] == "FP32"
    assert 0 < relative_error(mixed["y"], plain["y"]) < 1e-2


def test_names_that_are_taken_are_not_used_twice(fork):
    for node in fork.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = {"b": "a__FP16", "s": "x__FP16", "r": "r"}.get(name, name)
    _, plain, mixed = run(fork, {"fc1": "FP16", "fc2": "FP16", "fc3": "FP16"}, normal(6, 8))
    assert all(0 < relative_error(mixed[name], plain[name]) < 1e-2 for name in plain)


def test_names_that_no_file_can_have_are_refused(fork, tmp_path):
    onnx.save(fork, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        location = next(entry for entry in tensor.external_data if entry.key == "location")
        location.value = "i" * 300
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="cannot be read"):
        read_weights(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="cannot be read"):
        RunnableModel(tmp_path / "m.onnx")


def test_weights_beside_the_file(fork, tmp_path):
    x = normal(6, 8)
    expected = RunnableModel(fork)(x)
    onnx.save(fork, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert (tmp_path / "w.bin").exists()
    found = RunnableModel(tmp_path / "m.onnx")(x)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ModelError, match="external file"):
        RunnableModel(onnx.load(tmp_path / "m.onnx", load_external_data=False))
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelError, match="weights"):
        RunnableModel(tmp_path / "m.onnx")


@pytest.mark.parametrize("location", ["../outside.bin", "/etc/hostname", "link.bin"])
def test_external_weights_outside_of_the_folder_are_refused(fork, tmp_path, location):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(256))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    tensor = fork.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    (folder / "m.onnx").write_bytes(fork.SerializeToString())
    with pytest.raises(ModelError, match="cannot be read with its weights"):
        RunnableModel(folder / "m.onnx")


@pytest.mark.parametrize("stated", [{}, {"length": str(2**40)}])
def test_external_weights_that_are_too_many_are_refused_unread(fork, tmp_path, stated):
    tensor = fork.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "holes.bin", **stated}.items():
        tensor.external_data.add(key=key, value=value)
    with (tmp_path / "holes.bin").open("wb") as stream:
        stream.truncate(2**40)  # takes no space on the disk
    (tmp_path / "large.onnx").write_bytes(fork.SerializeToString())
    with pytest.raises(ModelError, match=r"large.onnx' has \d+ bytes with its weights.*plan it in parts"):
        RunnableModel(tmp_path / "large.onnx")


def test_the_name_of_a_weight_file_that_is_no_text_is_refused(fork, tmp_path):
    tensor = fork.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    (tmp_path / "m.onnx").write_bytes(fork.SerializeToString().replace(b"weights.bin", b"w\xb5ights.bin"))
    with pytest.raises(ModelError, match="cannot be read with its weights"):
        RunnableModel(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("plan", "kind", "needles"),
    [
        ({"fc1": "FP32", "fc2": "FP32"}, ModelError, ["lacks 'fc3'"]),
        ({"fc1": "FP32", "fc2": "FP32", "fc3": "FP32", "fc4": "FP32"}, ModelError, ["names 'fc4'"]),
        ({"fc1": "BF16", "fc2": "FP32", "fc3": "FP32"}, UnsupportedError, ["'fc1'", "BF16", "allowed are INT8, FP16"]),
        ({"fc1": "FP8", "fc2": "FP32", "fc3": "FP32"}, UnsupportedError, ["'fc1'", "FP8", "INT8, BF16, FP16, FP32"]),
        ({"fc1": "fp16", "fc2": "FP32", "fc3": "FP32"}, UnsupportedError, ["'fp16'", "upper case"]),
        (
            {"fc1": "FP16", "fc2": "FP32", "fc3": "FP32", "relu": "FP32"},
            UnsupportedError,
            ["'relu'", "runs in FP16", "the plan says FP32"],
        ),
        (42, ModelError, ["the plan is a int: a Plan is needed"]),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused_by_name(fork, plan, kind, needles):
    runnable = RunnableModel(fork)
    with pytest.raises(kind) as failure:
        runnable.apply(plan)
    assert all(needle in str(failure.value) for needle in needles), failure.value
    assert runnable.mixed is None and not runnable.precisions


def test_a_weight_beyond_fp16_is_refused_and_named(fork):
    fork.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full((8, 8), 7e4, np.float32), "w1"))
    runnable = RunnableModel(fork)
    with pytest.raises(UnsupportedError, match=r"'fc1' cannot run in FP16.*'w1' holds 70000.*allowed are INT8, FP32"):
        runnable.apply({"fc1": "FP16", "fc2": "FP32", "fc3": "FP32"})


def test_a_computed_convolution_weight_has_no_integer_form():
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    runnable = RunnableModel(model([node], {"x": (1, 2, 5, 5), "w": (3, 2, 3, 3)}, {}, ["y"]))
    with pytest.raises(UnsupportedError, match=r"'conv' cannot run in INT8.*computed weight"):
        runnable.apply({"conv": "INT8"})


def test_old_operator_sets_lack_formats(fork):
    fork.opset_import[0].version = 9
    fork.ir_version = 4
    runnable = RunnableModel(fork)
    with pytest.raises(UnsupportedError, match="'fc1' cannot run in INT8"):
        runnable.apply({"fc1": "INT8", "fc2": "FP32", "fc3": "FP32"})
    runnable.apply({"fc1": "FP16", "fc2": "FP32", "fc3": "FP32"})


@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.FLOAT16])
def test_models_in_other_formats_are_refused_by_name(kind):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", kind, (2,))],
        [helper.make_tensor_value_info("y", kind, (2,))],
    )
    with pytest.raises(ModelError, match=r"'x'.*(DOUBLE|FLOAT16).*FP32"):
        RunnableModel(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]))


@pytest.mark.parametrize(
    ("args", "kwargs", "needle"),
    [
        ((), {}, "'x' is missing"),
        ((normal(6, 8), normal(6, 8)), {}, "2 inputs were given"),
        ((normal(6, 8),), {"x": normal(6, 8)}, "given twice"),
        ((normal(5, 8),), {}, r"shape \(5, 8\)"),
        ((normal(6, 8).astype(np.float64),), {}, "float64"),
        ((), {"q": normal(6, 8)}, "'q' is given twice or unknown"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(fork, args, kwargs, needle):
    with pytest.raises(ModelError, match=needle):
        RunnableModel(fork)(*args, **kwargs)


def test_devices_that_are_not_there_are_refused(fork):
    import onnxruntime

    for device in ("tpu", "cpu:1", "cuda:x", ""):
        with pytest.raises(UnsupportedError, match="allowed are cpu, cuda"):
            RunnableModel(fork, device)
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        with pytest.raises(UnsupportedError, match="onnxruntime-gpu"):
            RunnableModel(fork, "cuda")


def test_files_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "junk.onnx").write_bytes(b"\x08\x09junk")
    with pytest.raises(ModelError):
        RunnableModel(tmp_path / "junk.onnx")
    with pytest.raises(ModelError, match="cannot read"):
        RunnableModel(tmp_path / "none.onnx")


def test_bfloat16_is_rounded_to_nearest_even():
    torch = pytest.importorskip("torch")
    values = np.concatenate([normal(1000), [0.0, -0.0, np.inf, -np.inf, 3.3e38, 1e-40], 1 + np.arange(64) / 1024])
    values = values.astype(np.float32)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bfloat16_bits(values), expected)
    assert bfloat16_bits(np.array([np.nan], np.float32))[0] & 0x7FFF > 0x7F80
    tensor = stored(values, "w", "BF16")
    assert tensor.data_type == TensorProto.BFLOAT16 and list(tensor.dims) == [len(values)]


def test_weight_codes_of_zeros_and_tiny_values():
    codes, scales = weight_codes(np.array([[0.0, 1e-45], [0.0, 0.0]], np.float32), 1)
    assert np.isfinite(scales).all() and (scales > 0).all() and (np.abs(codes) <= 63).all()
    with pytest.raises(UnsupportedError, match="not finite"):
        weight_codes(np.array([np.inf], np.float32), None)


def test_a_model_captured_from_torch_takes_plans_by_the_names_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from qsync_opt.runtimes.torch.capture import capture

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = torch.nn.Sequential(torch.nn.Embedding(11, 16), layer, torch.nn.Linear(16, 11))
    tokens = torch.randint(11, (2, 5))
    path = tmp_path / "net.onnx"
    graph = capture(net, (tokens,), onnx_path=path)
    runnable = RunnableModel(path)
    assert runnable.graph.fingerprint() == graph.fingerprint()
    plan = {o.name: "FP16" if o.op_type == "embedding" else "INT8" for o in graph if o.role == "adjustable"}
    plan["1.self_attn/scaled_dot_product_attention"] = "FP16"
    plain = runnable(tokens.numpy())
    runnable.apply(plan)
    (name,) = plain
    assert np.allclose(plain[name], net(tokens).detach().numpy(), atol=1e-5)
    assert 0 < relative_error(runnable(tokens.numpy())[name], plain[name]) < 0.05
