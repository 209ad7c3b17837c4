"""Times with intervals: every interval comes from something observed, or is unbounded."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.cluster import data_sheet
from qsync_opt.costs import (
    ESTIMATE_OPTION,
    Assumptions,
    CostFit,
    CostSource,
    DeviceProfile,
    IterationCheck,
    IterationOverhead,
    MeasuredCost,
    cast_cost,
    layer_cost,
    operator_cost,
    roofline_profile,
    total_cost,
)
from qsync_opt.costs.roofline import STEP_RATIOS
from qsync_opt.errors import ProblemError
from qsync_opt.io import decode, encode
from qsync_opt.testing import make_graph, make_operator, make_profile, residual_graph

BENCHMARK = Path(__file__).parents[3] / "benchmarks/results/roofline.json"
OFF_BY_A_QUARTER = IterationCheck(
    precision="FP32",
    forward_ns=40,
    backward_ns=60,
    summed_forward_ns=40,
    summed_backward_ns=60,
    predicted_forward_ns=50,
    predicted_backward_ns=75,
)


def test_a_measured_time_without_spread_has_no_bounds() -> None:
    profile = make_profile(residual_graph())
    cost = profile.cost("head")["BF16"]
    forward, backward = (operator_cost(profile, "head", "BF16", direction) for direction in ("forward", "backward"))
    assert (forward.time_s, backward.time_s) == pytest.approx((1e-9 * cost.forward_ns, 1e-9 * cost.backward_ns))
    assert (forward.low_s, forward.high_s, forward.source) == (0.0, math.inf, CostSource.MEASURED)
    assert "no spread" in forward.basis


def test_checked_iterations_bound_a_measured_time() -> None:
    overhead = IterationOverhead(iterations=(OFF_BY_A_QUARTER,))
    found = operator_cost(make_profile(residual_graph(), overhead=overhead), "head", "BF16", "forward")
    # The prediction is 25 % off: the truth is the time over 1.25, or over 0.75.
    assert (found.low_s, found.high_s) == pytest.approx((found.time_s / 1.25, found.time_s / 0.75))
    assert "1 whole iteration predicted" in found.basis
    twice = replace(OFF_BY_A_QUARTER, predicted_forward_ns=200)
    unbounded = make_profile(residual_graph(), overhead=IterationOverhead(iterations=(twice,)))
    assert operator_cost(unbounded, "head", "BF16", "forward").high_s == math.inf


def test_a_scaled_time_is_told_apart_in_the_profile_and_its_file() -> None:
    profile = make_profile(residual_graph())
    key = profile.operators["head"]
    table = {**profile.measurements[key], "FP32": replace(profile.measurements[key]["FP32"], scaled_from="BF16")}
    options = {ESTIMATE_OPTION: "FP32 of head was scaled from BF16, because it did not fit into memory"}
    scaled = replace(profile, measurements={**profile.measurements, key: table}, options=options)
    again = DeviceProfile.from_json(json.loads(json.dumps(scaled.to_json())))
    assert again == scaled
    found = operator_cost(again, "head", "FP32", "forward")
    assert (found.source, found.high_s) == (CostSource.SCALED, math.inf)
    assert "scaled from BF16" in found.basis
    assert operator_cost(again, "head", "BF16", "forward").source is CostSource.MEASURED


def test_other_estimates_do_not_pass_for_measurements() -> None:
    profile = replace(make_profile(residual_graph()), options={ESTIMATE_OPTION: "a guess"})
    for found in (operator_cost(profile, "head", "BF16", "forward"), cast_cost(profile, "FP32", "BF16", 10)):
        assert (found.source, found.low_s, found.high_s) == (CostSource.ESTIMATED, 0.0, math.inf)
        assert found.basis == "a guess; its error is not recorded"


def test_profiles_that_were_measured_look_as_before() -> None:
    cost = MeasuredCost(forward_ns=1, backward_ns=2)
    assert "x-scaled-from" not in encode(cost)
    assert decode(MeasuredCost, encode(replace(cost, scaled_from="BF16")), "cost").scaled_from == "BF16"


def test_the_ratios_of_the_roofline_enclose_what_was_measured() -> None:
    for row in json.loads(BENCHMARK.read_text())["rows"]:
        low, high = STEP_RATIOS[row["plan"] in ("uniform INT8", "uniform FP8")]
        assert low <= row["measured_ms"] / row["estimated_ms"] <= high


def test_a_roofline_estimate_is_bounded_by_measured_steps_under_the_same_assumptions() -> None:
    graph, sheet = residual_graph(), data_sheet("T4")
    found = operator_cost(roofline_profile(graph, sheet), "head", "INT8", "forward")
    assert found.source is CostSource.ROOFLINE
    assert (found.low_s, found.high_s) == pytest.approx((found.time_s, 5.06 * found.time_s))
    assert "roofline.json" in found.basis
    other = roofline_profile(graph, sheet, assumptions=Assumptions(efficiency=0.5))
    unbounded = operator_cost(other, "head", "INT8", "forward")
    assert (unbounded.low_s, unbounded.high_s) == (0.0, math.inf)
    assert cast_cost(other, "FP32", "FP16", 10).source is CostSource.ROOFLINE


def test_a_cast_is_bounded_by_the_error_of_its_fit() -> None:
    fit = CostFit(base_ns=1000, ns_per_mi_elements=2000, worst_error=0.25, samples=6)
    profile = replace(make_profile(residual_graph()), casts={"FP32>BF16": fit})
    found = cast_cost(profile, "FP32", "BF16", 2**20)
    assert (found.time_s, found.low_s, found.high_s) == pytest.approx((3e-6, 3e-6 / 1.25, 3e-6 / 0.75))
    assert "6 measurements" in found.basis
    written = replace(profile, casts={"FP32>BF16": replace(fit, samples=0)})
    assert cast_cost(written, "FP32", "BF16", 2**20).high_s == math.inf
    with pytest.raises(ProblemError, match="no cast from 'BF16' to 'FP8'; it has FP32>BF16"):
        cast_cost(profile, "BF16", "FP8", 1)


def test_a_layer_is_the_sum_of_its_operators() -> None:
    parts = [make_operator("block.fc/linear"), make_operator("block.act/relu"), make_operator("blocky/linear")]
    modules = ("block.fc", "block.act", "blocky")
    graph = make_graph([replace(part, module=module) for part, module in zip(parts, modules, strict=True)])
    profile = make_profile(graph, overhead=IterationOverhead(iterations=(OFF_BY_A_QUARTER,)))
    expected = total_cost(operator_cost(profile, part.name, "BF16", "forward") for part in parts[:2])
    assert layer_cost(profile, graph, "block", "BF16", "forward") == expected
    assert expected.high_s == pytest.approx(expected.time_s / 0.75)
    assert layer_cost(profile, graph, "", "BF16", "forward").time_s > expected.time_s
    # TF32 was not profiled: the next finer precision is taken.
    finer = operator_cost(profile, "blocky/linear", "FP32", "backward")
    assert layer_cost(profile, graph, "blocky", "TF32", "backward") == finer
    with pytest.raises(ProblemError, match="no operators in a layer 'blokk'; did you mean 'block"):
        layer_cost(profile, graph, "blokk", "BF16", "forward")


def test_what_was_not_profiled_is_refused() -> None:
    profile = make_profile(residual_graph())
    with pytest.raises(ProblemError, match=r"'head' was not profiled in 'FP8'.*; it has INT8, BF16, FP32"):
        operator_cost(profile, "head", "FP8", "forward")
    with pytest.raises(ProblemError, match="no entry for operator 'tail'"):
        operator_cost(profile, "tail", "FP32", "forward")
    with pytest.raises(ProblemError, match="direction is 'sideways', but allowed are forward and backward"):
        operator_cost(profile, "head", "FP32", "sideways")  # type: ignore[arg-type]
