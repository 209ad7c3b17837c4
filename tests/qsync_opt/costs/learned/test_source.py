"""Profiles from measured, scaled, learned and roofline costs."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from qsync_opt.cluster import DATA_SHEETS, DeviceType
from qsync_opt.costs import CostSource, DeviceProfile, MeasuredCost, operator_cost
from qsync_opt.costs.learned import (
    LearnedCosts,
    LearnedModel,
    at_quantile,
    fit_laws,
    has_intervals,
    known_device,
    learned_profile,
    shipped_model,
    workload_of,
)
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.model import OpGraph, Role
from qsync_opt.testing import make_cost_record, make_device_vector, make_graph, make_operator

pytest.importorskip("scipy")


def _graph() -> OpGraph:
    """Two linear operators of unlike shapes, one activation that was learned and one that was not."""
    operators = [
        make_operator("x", Role.FIXED, op_type="input", shape=(64, 64)),
        make_operator("one", inputs=["x"], op_type="linear", shape=(64, 256), parameters=("a",)),
        make_operator("relu", Role.DEPENDENT, ["one"], op_type="relu", shape=(64, 256)),
        make_operator("mish", Role.DEPENDENT, ["relu"], op_type="mish", shape=(64, 256)),
        make_operator("two", inputs=["mish"], op_type="linear", shape=(64, 128), parameters=("b",)),
    ]
    graph = make_graph(operators, {"a": (256, 64), "b": (128, 256)})
    return replace(
        graph,
        operators=tuple(
            replace(o, signature=f"{o.op_type}:{o.name}", num_bytes=o.num_bytes or 4, flops=o.flops or 1000)
            for o in graph
        ),
    )


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return _graph()


@pytest.fixture(scope="module")
def model() -> LearnedModel:
    return fit_laws(make_cost_record(), errors=False, rounds=1)


@pytest.fixture(scope="module")
def profile(graph: OpGraph, model: LearnedModel) -> DeviceProfile:
    return learned_profile(graph, make_device_vector(), model)


def _source(profile: DeviceProfile, operator: str, precision: str) -> CostSource:
    return operator_cost(profile, operator, precision, "forward").source


def test_kinds_that_were_not_measured_have_the_law_of_their_class_and_are_marked(profile: DeviceProfile) -> None:
    assert _source(profile, "one", "INT8") is CostSource.LEARNED
    assert _source(profile, "relu", "BF16") is CostSource.LEARNED
    assert _source(profile, "mish", "BF16") is CostSource.LEARNED
    assert "6 learned ones unlike the training data" in str(profile.options["estimated_by"])


def test_learned_times_have_an_interval_and_a_profile_survives_its_file(profile: DeviceProfile) -> None:
    estimate = operator_cost(profile, "two", "FP32", "backward")
    assert 0 < estimate.low_s <= estimate.time_s <= estimate.high_s < 1
    assert "held out" in estimate.basis
    assert DeviceProfile.from_json(profile.to_json()) == profile


def test_measured_wins_then_scaled_then_learned(graph: OpGraph, model: LearnedModel, profile: DeviceProfile) -> None:
    def cost(ns: int) -> MeasuredCost:
        return MeasuredCost(forward_ns=ns, backward_ns=2 * ns)

    measured = replace(
        profile,
        options={},
        measurements={
            "linear:one adjustable": {"FP32": cost(1000), "BF16": cost(400)},
            "linear:two adjustable": {"FP32": cost(3000)},
        },
        operators={"one": "linear:one adjustable", "two": "linear:two adjustable"},
    )
    mixed = learned_profile(graph, make_device_vector(), model, measured=measured)
    assert _source(mixed, "one", "FP32") is CostSource.MEASURED
    assert _source(mixed, "two", "BF16") is CostSource.SCALED
    assert mixed.cost("two")["BF16"].forward_ns == 1200
    assert mixed.cost("two")["BF16"].scaled_from == "FP32"
    assert _source(mixed, "two", "INT8") is CostSource.LEARNED
    for source in ("measured", "scaled", "learned"):
        assert f" {source}" in str(mixed.options["estimated_by"])


def test_what_was_measured_corrects_the_other_operators_of_an_unseen_device(
    graph: OpGraph, model: LearnedModel
) -> None:
    vector = make_device_vector("unseen")
    plain = learned_profile(graph, vector, model)
    slow = {
        precision: replace(cost, forward_ns=4 * cost.forward_ns, backward_ns=4 * cost.backward_ns, source="",
                           interval_ns=())
        for precision, cost in plain.cost("one").items()
    }  # fmt: skip
    measured = replace(plain, options={}, measurements={"linear:one x": slow}, operators={"one": "linear:one x"})
    other = learned_profile(graph, vector, model, measured=measured)
    for precision, cost in other.cost("two").items():
        assert cost.source == "learned"
        assert 2 < cost.backward_ns / plain.cost("two")[precision].backward_ns < 5


def test_an_estimate_is_no_measurement(graph: OpGraph, model: LearnedModel, profile: DeviceProfile) -> None:
    with pytest.raises(ProblemError, match="itself an estimate"):
        learned_profile(graph, make_device_vector(), model, measured=profile)


def test_a_quantile_raises_learned_times_only(graph: OpGraph, profile: DeviceProfile) -> None:
    assert has_intervals(profile)
    raised = at_quantile(profile, 0.9)
    assert not has_intervals(raised)
    changes: Counter[bool] = Counter()
    for operator in graph:
        for precision, cost in profile.cost(operator.name).items():
            other = raised.cost(operator.name)[precision]
            assert other.forward_ns >= cost.forward_ns
            if not cost.interval_ns:
                assert other == cost
            changes[other.forward_ns > cost.forward_ns] += 1
    assert changes[True] > 3
    with pytest.raises(ProblemError, match="quantile"):
        at_quantile(profile, 1.0)


def test_device_types_are_data_sheets_or_trained_devices(graph: OpGraph, model: LearnedModel) -> None:
    costs = LearnedCosts(model)

    def device(name: str) -> DeviceType:
        return DeviceType(name=name, count=1, memory_limit_bytes=1, precisions=("FP32",))

    assert _source(costs.profile(graph, device("device")), "one", "FP32") is CostSource.LEARNED
    # A model that was fitted to no card predicts none: the roofline of the data sheet is left.
    card = costs.profile(graph, device("T4"))
    assert card.device.kind == "cuda"
    assert _source(card, "one", "FP32") is CostSource.ROOFLINE
    with pytest.raises(UnsupportedError, match="there is neither a data sheet nor a learned device 'T5'"):
        costs.profile(graph, device("T5"))


def test_an_interval_that_is_none_is_refused() -> None:
    for ends in ((1, 2), (5, 9, 1, 1), (0, 0, 0, 0)):
        with pytest.raises(ProblemError, match="interval_ns"):
            MeasuredCost(forward_ns=3, backward_ns=1, source="learned", interval_ns=ends)
    with pytest.raises(ProblemError, match="guessed"):
        MeasuredCost(forward_ns=3, backward_ns=1, source="guessed")


def test_operators_of_onnx_have_the_families_of_aten() -> None:
    operators = [
        make_operator("x", Role.FIXED, op_type="input", shape=(2, 3, 8, 8)),
        make_operator("conv", inputs=["x"], op_type="Conv", shape=(2, 4, 8, 8), parameters=("w",)),
        make_operator("relu", Role.DEPENDENT, ["conv"], op_type="Relu", shape=(2, 4, 8, 8)),
        make_operator("head", inputs=["relu"], op_type="Gemm", shape=(2, 10), parameters=("h",)),
        make_operator("scores", inputs=["head", "head"], op_type="MatMul", shape=(2, 2)),
        make_operator("line", inputs=["x"], op_type="Conv", shape=(2, 4, 8), parameters=("w",)),
    ]
    graph = make_graph(operators, {"w": 108, "h": 2560})
    kinds = {operator.name: workload_of(graph, operator).kind for operator in graph}
    assert kinds == {
        "x": "input", "conv": "conv2d", "relu": "relu", "head": "linear", "scores": "matmul", "line": "conv",
    }  # fmt: skip


def test_no_learned_time_is_below_the_roofline_of_the_rest(graph: OpGraph, model: LearnedModel) -> None:
    # Casts that take very long leave nothing of an 8-bit operator's own time but its roofline.
    vector = make_device_vector()
    plain = learned_profile(graph, vector, model)
    slow = replace(plain.casts["BF16>INT8"], base_ns=10**9)
    measured = replace(plain, options={}, measurements={}, operators={}, casts={"BF16>INT8": slow})
    cost = learned_profile(graph, vector, model, measured=measured).cost("two")["INT8"]
    assert 0 < cost.interval_ns[0] <= cost.forward_ns < plain.cost("two")["INT8"].forward_ns


def test_a_probed_card_is_better_than_its_data_sheet(graph: OpGraph) -> None:
    peaks = {p: 1e14 for p in ("INT8", "BF16", "FP32")}
    card = make_device_vector("NVIDIA H100 80GB HBM3 (132 SMs)", kind="cuda", peak_flops=peaks)
    costs = LearnedCosts(fit_laws(make_cost_record(12, (card,)), errors=False, rounds=1))
    device = DeviceType(name="any", hardware="H100", count=1, memory_limit_bytes=1, precisions=("FP32",))
    profile = costs.profile(graph, device)
    assert profile.device.name == card.name
    assert _source(profile, "one", "INT8") is CostSource.LEARNED


def test_the_model_of_the_package_predicts_on_the_devices_that_it_was_fitted_to(graph: OpGraph) -> None:
    model = shipped_model()
    for vector in model.card.vectors:
        cost = operator_cost(learned_profile(graph, vector, model), "one", "FP32", "forward")
        assert cost.source is CostSource.LEARNED
        assert 0 < cost.low_s <= cost.time_s <= cost.high_s


def _on(hardware: str, graph: OpGraph) -> DeviceProfile:
    device = DeviceType(name="any", hardware=hardware, count=1, memory_limit_bytes=1, precisions=("FP32",))
    return LearnedCosts().profile(graph, device)


def _counts(profile: DeviceProfile) -> tuple[int, int]:
    """Of a profile, how many costs are learned, and how many of these are unlike the training data."""
    counted = str(profile.options["estimated_by"])
    learned, unlike = re.search(r"(\d+) learned[,;].* (\d+) learned ones unlike", counted).groups()
    return int(learned), int(unlike)


@pytest.mark.parametrize("name", ["H200", "h200"])
def test_a_card_of_the_training_data_has_its_own_vector_and_laws(graph: OpGraph, name: str) -> None:
    profile = _on(name, graph)
    assert profile.device.name == "NVIDIA H200 (132 SMs)"
    for precision in ("FP32", "TF32", "FP16", "BF16", "INT8", "FP8"):
        cost = operator_cost(profile, "one", precision, "forward")
        assert cost.source is CostSource.LEARNED
        assert 0 < cost.low_s <= cost.time_s <= cost.high_s < 1e-3
    learned, unlike = _counts(profile)
    assert 0 < unlike < learned / 2


@pytest.mark.parametrize("name", sorted(set(DATA_SHEETS) - {"H200"}))
def test_other_cards_have_the_laws_of_cards_and_are_marked(graph: OpGraph, name: str) -> None:
    profile = _on(name, graph)
    assert profile.device.name == name
    learned, unlike = _counts(profile)
    assert learned == unlike > 0
    for precision in profile.cost("one"):
        cost = operator_cost(profile, "one", precision, "backward")
        if cost.source is CostSource.LEARNED:
            assert 0 < cost.low_s < cost.time_s < cost.high_s < 1e-2


def test_a_gradient_that_is_handed_on_takes_no_time_on_a_card() -> None:
    operators = [
        make_operator("x", Role.FIXED, op_type="input", shape=(64, 64)),
        make_operator("one", inputs=["x"], op_type="linear", shape=(64, 64), parameters=("a",)),
        make_operator("two", inputs=["one"], op_type="linear", shape=(64, 64), parameters=("b",)),
        make_operator("sum", Role.DEPENDENT, ["one", "two"], op_type="add", shape=(64, 64)),
    ]
    cost = _on("H200", make_graph(operators, {"a": (64, 64), "b": (64, 64)})).cost("sum")["BF16"]
    assert cost.source == "learned"
    assert cost.forward_ns > 0
    assert cost.backward_ns == 0


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H200", "NVIDIA H200 (132 SMs)"), ("NVIDIA H200", "NVIDIA H200 (132 SMs)"), ("h200", "NVIDIA H200 (132 SMs)"),
        ("NVIDIA H200, 66 multiprocessors", "NVIDIA H200, 66 multiprocessors"), ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("Intel Xeon, 1 thread", "Intel Xeon, 1 thread"),
    ],
)  # fmt: skip
def test_devices_are_known_by_data_sheets_and_by_torch_s_names(name, known):
    assert known_device(name).name == known


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "Intel Xeon", "H20", ""])
def test_other_devices_are_not_known(name):
    with pytest.raises(UnsupportedError, match="neither a data sheet nor a learned device"):
        known_device(name)
