"""The indicator of the paper's release, against its formulas written out."""

import math

import pytest

from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.sensitivity import (
    ModelStatistics,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    TensorStatistics,
    sensitivities,
)

FORMATS = {
    "INT8": PrecisionFormats(output="FP32", gradient_input="FP16", gradient_output="FP16"),
    "FP16": PrecisionFormats(output="FP16", gradient_input="FP16", gradient_output="FP16"),
    "FP32": PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32"),
}
SPEC = TensorSpec(shape=(4, 4), dtype="float32")


def _node(name: str, *inputs: str, weight: bool = True) -> Operator:
    return Operator(
        name=name,
        op_type="linear" if weight else "matmul",
        module="",
        role=Role.ADJUSTABLE,
        inputs=inputs,
        input_specs=(SPEC,),
        output_specs=(SPEC,),
        parameters=(f"{name}.weight",) if weight else (),
        onnx_nodes=(),
        flops=1,
        num_bytes=1,
        signature=name,
    )


def _tensor(elements: int, amax: float, square_sum: float) -> TensorStatistics:
    scales = {"tensor": amax**2, "channel": amax**2, "row": amax**2}
    return TensorStatistics(elements=elements, amax=amax, square_sum=square_sum, mean_square_amax=scales)


def _statistics(name: str, *, weight: bool = True) -> OperatorStatistics:
    return OperatorStatistics(
        name=name,
        op_type="linear" if weight else "matmul",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=10, contraction=20, columns=30),),
        first_parameter=None,
        second_parameter=f"{name}.weight" if weight else None,
        first=_tensor(200, 4.0, 900.0),
        second=_tensor(600, 0.5, 16.0),
        output=_tensor(300, 5.0, 100.0),
        output_gradient=_tensor(300, 0.1, 1.0),
        first_gradient=_tensor(200, 0.1, 1.0),
        second_gradient=_tensor(600, 0.03, 4.0),
    )


def _table(*names: str, gamma: float = 4.0):
    nodes = [_node(name, *names[max(0, i - 1) : i], weight=name != "product") for i, name in enumerate(names)]
    parameters = tuple(ParameterSpec(name=p, spec=SPEC) for node in nodes for p in node.parameters)
    graph = OpGraph(name="g", operators=tuple(nodes), parameters=parameters)
    collected = ModelStatistics(
        batches=1, operators=tuple(_statistics(name, weight=name != "product") for name in names), signals={}
    )
    return sensitivities(graph, collected, FORMATS, kind="published", gamma=gamma)


def test_the_formulas_of_the_release() -> None:
    table = _table("a", "b", "c")
    # Norms 30, 4 and 2; the root of 30 / 200 is 0.39, of 4 / 600 0.08, the largest gradient 0.03.
    e_v, e_w, e_g = 1, 3, 5
    eight_forward = (4 * (4 / 127) ** 2 * 200 + 30 * (0.5 / 127) ** 2 * 600) / 6
    eight_backward = (2 * (4 / 127) ** 2 * 200 + 30 * 4**e_v * 2**-18 * 300) / 6
    half_forward = 2**-18 * (4 * 200 * e_v + 30 * 600 * e_w) / 6
    half_backward = 2**-18 * (2 * 200 * e_v + 30 * 300 * e_g) / 6
    for depth, name in enumerate("abc"):
        assert table[name]["INT8"] == pytest.approx(4 * (2 - depth) * eight_forward + depth * eight_backward)
        assert table[name]["FP16"] == pytest.approx(4 * (2 - depth) * half_forward + depth * half_backward)
        assert table[name]["FP32"] == 0.0
    assert math.frexp(0.387)[1] == -1


def test_an_operator_without_weights_has_no_value() -> None:
    table = _table("a", "product", "c")
    assert table["product"] == {"INT8": 0.0, "FP16": 0.0, "FP32": 0.0}
    assert table.kind.unit == "none"
