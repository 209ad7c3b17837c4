"""Sensitivities from weights alone: the stated formulas, and nothing more than they say."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qsync_opt.errors import ModelError, ProblemError
from qsync_opt.model import weight_statistics
from qsync_opt.model.onnx import read_onnx, read_weights
from qsync_opt.numerics import formats_for
from qsync_opt.sensitivity import ModelKnowledge, weight_sensitivities
from qsync_opt.testing import check_indicator, sample_graph, sample_knowledge

FORMATS = formats_for(("INT8", "BF16", "FP32"), "BF16")


def model(weight, kind="MatMul", external=False):
    nodes = [helper.make_node(kind, ["x", "w"], ["y"], name="fc")]
    tensor = numpy_helper.from_array(weight, "w")
    if external:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, weight.shape[0]))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (4, weight.shape[1]))],
        [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def test_statistics_of_a_weight():
    found = weight_statistics("w", np.array([[1.0, -2.0, 0.0], [3.0, 0.0, 4.0]], np.float32))
    assert found.mean_square == pytest.approx(30 / 6)
    assert found.mean_square_amax["first"] == pytest.approx((4 + 16) / 2)
    assert found.mean_square_amax["last"] == pytest.approx((9 + 4 + 16) / 3)
    assert (found.first_size, found.last_size) == (2, 3)


def test_the_noise_of_a_weight_is_what_rounding_it_shows():
    """Stochastic INT8 rounding of the weight, done many times, has the variance that the indicator counts."""
    source = np.random.default_rng(0)
    weight = source.standard_normal((64, 32)).astype(np.float32) * np.geomspace(0.01, 1.0, 32, dtype=np.float32)
    table = weight_sensitivities(read_onnx(model(weight)), FORMATS, read_weights(model(weight)))
    step = np.abs(weight).max(axis=0) / 127
    low = np.floor(weight / step)
    errors = []
    for _ in range(200):
        rounded = (low + (source.random(weight.shape) < weight / step - low)) * step
        errors.append(np.mean((rounded - weight) ** 2))
    measured = np.mean(errors) / np.mean(weight**2)
    activation = 2 * np.log(4 * 64) / 127**2 / 6
    border = 2 * 4.0**-7 / 28  # result and gradient in BF16
    assert table["fc"]["INT8"] - activation - border == pytest.approx(measured, rel=0.02)
    assert table["fc"]["FP32"] == 0.0
    assert table["fc"]["BF16"] == pytest.approx(4 * 4.0**-7 / 28)


def test_an_outlier_in_a_weight_counts():
    plain = np.full((16, 8), 0.1, np.float32)
    spiked = plain.copy()
    spiked[0, :] = 10.0
    values = [
        weight_sensitivities(read_onnx(model(weight)), FORMATS, read_weights(model(weight)))["fc"]["INT8"]
        for weight in (plain, spiked)
    ]
    assert values[1] > values[0]


def test_a_weight_of_zeros_adds_nothing():
    zeros = model(np.zeros((16, 8), np.float32))
    row = weight_sensitivities(read_onnx(zeros), FORMATS, read_weights(zeros))["fc"]
    assert row["BF16"] == pytest.approx(3 * 4.0**-7 / 28)


def test_bad_weights_are_named():
    with pytest.raises(ModelError, match="weight 'w' holds NaN or infinity"):
        read_weights(model(np.full((4, 4), np.nan, np.float32)))
    with pytest.raises(ModelError, match=r"weight 'w' cannot be read.*estimate without weights"):
        read_weights(model(np.ones((64, 64), np.float32), external=True))
    graph = read_onnx(model(np.ones((64, 64), np.float32)))
    with pytest.raises(ProblemError, match="'fc': the file has no values for weight 'w'"):
        weight_sensitivities(graph, FORMATS, {})
    assert weight_sensitivities(graph, FORMATS, None)["fc"]["INT8"] > 0


def test_external_weights_beside_the_file_are_read(tmp_path):
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    proto = model(weight, external=True)
    (tmp_path / "w.bin").write_bytes(weight.tobytes())
    onnx.save(proto, tmp_path / "net.onnx")
    found = read_weights(tmp_path / "net.onnx")["w"]
    assert found.mean_square == pytest.approx(np.mean(weight**2))


def test_external_weights_larger_than_memory_are_named(tmp_path):
    with (tmp_path / "w.bin").open("wb") as stream:
        stream.truncate(2**43)  # takes no space on the disk
    onnx.save(model(np.ones((4, 4), np.float32), external=True), tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="weight 'w' cannot be read: it is larger than the memory"):
        read_weights(tmp_path / "net.onnx")


@pytest.mark.parametrize("name", ["weights", "formats"])
def test_built_in_indicators_conform(name):
    table = check_indicator(name)
    assert all(row["INT8"] > row["BF16"] > 0 for row in table.values() if "INT8" in row)


def test_indicators_say_what_they_need():
    with pytest.raises(ProblemError, match="'statistics' needs statistics of 'sample'"):
        check_indicator("statistics")
    with pytest.raises(ProblemError, match="'weights' needs the values of the weights"):
        check_indicator("weights", knowledge=ModelKnowledge())
    graph = sample_graph()
    assert set(sample_knowledge(graph).weights) == {p.name for p in graph.parameters}
