from dataclasses import replace

import pytest

from qsync_opt.costs import MeasuredCost, scale_costs
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role, TensorSpec


def _operator(name: str, kind: str, elements: int, *, flops: int = 0, view: bool = False) -> Operator:
    spec = TensorSpec(shape=(elements,), dtype="float32")
    return Operator(
        name=name,
        op_type=kind,
        module="",
        role=Role.ADJUSTABLE if flops else Role.DEPENDENT,
        inputs=() if kind == "input" else ("x",),
        input_specs=(spec,),
        output_specs=(spec,),
        parameters=(),
        onnx_nodes=(),
        flops=flops,
        num_bytes=0 if view else 8 * elements,
        signature=name,
    )


GRAPH = OpGraph(
    name="g",
    operators=(
        _operator("x", "input", 100),
        _operator("small", "linear", 100, flops=1000),
        _operator("large", "linear", 400, flops=9000),
        _operator("wanted", "linear", 200, flops=2000),
        _operator("gelu", "gelu", 100),
        _operator("relu", "relu", 300),
        _operator("view", "transpose", 300, view=True),
        _operator("turned", "permute", 300, view=True),
    ),
    parameters=(),
)
PRODUCT = MeasuredCost(forward_ns=50, backward_ns=100, saved_bytes=10, saves_inputs=(0,), backward_workspace_bytes=40)
MEASURED = {
    ("small", "BF16"): PRODUCT,
    ("large", "BF16"): replace(PRODUCT, forward_ns=900),
    ("large", "FP32"): replace(PRODUCT, forward_ns=1800),
    ("gelu", "BF16"): MeasuredCost(forward_ns=7, backward_ns=9, saves_inputs=(0,)),
    ("view", "FP32"): MeasuredCost(forward_ns=1, backward_ns=1, alias_input=0),
}


def test_the_nearest_of_the_same_kind_and_precision_is_scaled() -> None:
    cost = scale_costs(GRAPH, [("wanted", "BF16")], MEASURED)["wanted", "BF16"]
    # By operations from the smaller one, which is the nearer; memory by bytes.
    assert (cost.forward_ns, cost.backward_ns) == (100, 200)
    assert (cost.saved_bytes, cost.saves_inputs, cost.backward_workspace_bytes) == (20, (0,), 80)
    assert cost.scaled_from == "small in BF16"


def test_without_the_precision_another_one_of_the_sort_serves() -> None:
    cost = scale_costs(GRAPH, [("wanted", "INT8")], {("large", "FP32"): MEASURED["large", "FP32"], **MEASURED})
    assert cost["wanted", "INT8"].scaled_from == "small in BF16"
    # In 8 bits a product keeps copies, not its input.
    assert (cost["wanted", "INT8"].saves_inputs, cost["wanted", "INT8"].saved_bytes) == ((), 200)


def test_other_kinds_give_times_but_not_what_is_kept() -> None:
    cost = scale_costs(GRAPH, [("relu", "BF16")], MEASURED)["relu", "BF16"]
    assert (cost.forward_ns, cost.backward_ns, cost.scaled_from) == (21, 27, "gelu in BF16")
    assert (cost.saves_inputs, cost.saves_output) == ((), True)


def test_views_are_scaled_from_views() -> None:
    cost = scale_costs(GRAPH, [("turned", "BF16")], MEASURED)["turned", "BF16"]
    assert (cost.forward_ns, cost.alias_input, cost.scaled_from) == (1, 0, "view in FP32")


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ProblemError, match="no operator was measured"):
        scale_costs(GRAPH, [("wanted", "BF16")], {})
