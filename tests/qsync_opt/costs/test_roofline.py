"""Estimated profiles: peaks, bytes and what is kept follow the stated rules and are labelled."""

from dataclasses import replace

import pytest

from qsync_opt.cluster import DATA_SHEETS, DataSheet, DeviceType, data_sheet
from qsync_opt.costs import MI_ELEMENTS, Assumptions, estimated_by, fit_assumptions, roofline_profile
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec
from qsync_opt.numerics import FORMATS
from qsync_opt.testing import check_cost_model

IDEAL = Assumptions(efficiency=1.0, efficiency_8bit=1.0, memory_efficiency=1.0, kernel_ns=0, launch_ns=0)
SHEET = DataSheet(
    name="round",
    peak_flops={"INT8": 4e12, "FP16": 2e12, "FP32": 1e12},
    bandwidth_bytes_per_s=1e12,
    half_format="FP16",
    source="made up",
)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, dtype="float32")


def linear_graph(rows: int = 4096, width: int = 1024, kind: str = "linear") -> OpGraph:
    """input -> linear -> relu -> view."""

    def operator(name: str, op_type: str, role: Role, inputs: tuple[str, ...], **other: object) -> Operator:
        defaults = {
            "module": "",
            "input_specs": (spec(rows, width),) if inputs else (),
            "output_specs": (spec(rows, width),),
            "parameters": (),
            "onnx_nodes": (),
            "flops": 0,
            "num_bytes": 8 * rows * width,
        }
        return Operator(name=name, op_type=op_type, role=role, inputs=inputs, signature=name, **(defaults | other))

    operators = (
        operator("x", "input", Role.FIXED, (), num_bytes=0),
        operator(
            "fc",
            kind,
            Role.ADJUSTABLE,
            ("x",),
            input_specs=(spec(rows, width), spec(width, width)),
            parameters=("fc.weight",),
            flops=2 * rows * width * width,
        ),
        operator("relu", "relu", Role.DEPENDENT, ("fc",)),
        operator("view", "view", Role.DEPENDENT, ("relu",), num_bytes=0),
    )
    return OpGraph(
        name="one", operators=operators, parameters=(ParameterSpec(name="fc.weight", spec=spec(width, width)),)
    )


def test_a_large_product_takes_its_operations_at_the_peak():
    graph = linear_graph()
    costs = roofline_profile(graph, SHEET, assumptions=IDEAL).cost("fc")
    flops = 2 * 4096 * 1024 * 1024
    assert costs["FP32"].forward_ns == round(1e9 * flops / 1e12)
    assert costs["FP16"].forward_ns == round(1e9 * flops / 2e12)
    assert costs["INT8"].forward_ns == round(1e9 * flops / 4e12)
    # The input is the model's own and needs no gradient: one gradient product; that of INT8 runs in FP16.
    assert costs["FP32"].backward_ns == costs["FP32"].forward_ns
    assert costs["INT8"].backward_ns == costs["FP16"].backward_ns == costs["FP16"].forward_ns


def test_a_thin_product_takes_its_bytes_at_the_bandwidth():
    costs = roofline_profile(linear_graph(rows=1), SHEET, assumptions=IDEAL).cost("fc")
    weights = 1024 * 1024
    assert costs["FP32"].forward_ns == round(1e-3 * (4 * weights + 8 * 1024))
    assert costs["FP16"].forward_ns == round(1e-3 * (8 * weights + 4 * 1024))


def test_efficiency_and_constants_are_added():
    graph = linear_graph()
    ideal = roofline_profile(graph, SHEET, assumptions=IDEAL).cost("fc")["FP32"]
    half = roofline_profile(graph, SHEET, assumptions=replace(IDEAL, efficiency=0.5, kernel_ns=7, launch_ns=11))
    found = half.cost("fc")["FP32"]
    assert found.forward_ns == pytest.approx(2 * ideal.forward_ns + 7, abs=1)
    assert found.host_forward_ns == 11


def kernels(graph, name="fc"):
    """Kernels of the forward and of the backward pass of an operator, by precision."""
    plain, dear = (roofline_profile(graph, SHEET, assumptions=replace(IDEAL, kernel_ns=ns)).cost(name) for ns in (0, 7))
    return {
        precision: (
            (dear[precision].forward_ns - plain[precision].forward_ns) / 7,
            (dear[precision].backward_ns - plain[precision].backward_ns) / 7,
        )
        for precision in plain
    }


def test_kernels_are_counted_products_casts_of_weights_and_quantization():
    graph = linear_graph()
    # The input of the model needs no gradient; a gradient of a weight that was cast is cast back.
    # With an 8-bit backward pass the gradient of the result is quantized too.
    assert kernels(graph) == {"FP32": (1, 1), "FP16": (2, 2), "INT8": (4, 2), "INT8-BWD8": (4, 3)}
    bare = [replace(operator, parameters=()) if operator.name == "fc" else operator for operator in graph]
    assert kernels(replace(graph, operators=tuple(bare), parameters=())) == {
        "FP32": (1, 0),
        "FP16": (1, 0),
        "INT8": (3, 0),
        "INT8-BWD8": (3, 0),
    }
    assert kernels(graph, "relu") == {"FP16": (1, 1), "FP32": (1, 1)}
    assert kernels(graph, "view") == {"FP16": (0, 0), "FP32": (0, 0)}


def test_other_operators_move_their_tensors_and_backward_what_they_kept():
    graph = linear_graph(rows=1000, width=1000)

    def times(op_type, precision):
        operators = [replace(operator, op_type=op_type) if operator.name == "relu" else operator for operator in graph]
        profile = roofline_profile(replace(graph, operators=tuple(operators)), SHEET, assumptions=IDEAL)
        cost = profile.cost("relu")[precision]
        return cost.forward_ns, cost.backward_ns

    # A million elements at 1000 bytes a nanosecond: input and output; backward the gradients and, if kept, one more.
    for width, precision in ((4, "FP32"), (2, "FP16")):
        assert times("relu", precision) == (2000 * width, 3000 * width)
        assert times("add", precision) == (2000 * width, 2000 * width)


def test_what_computes_more_than_it_moves_takes_its_operations_and_twice_as_many_backward():
    operators = [replace(o, flops=10**12) if o.name == "relu" else o for o in linear_graph(rows=8, width=16)]
    graph = replace(linear_graph(rows=8, width=16), operators=tuple(operators))
    cost = roofline_profile(graph, SHEET, assumptions=IDEAL).cost("relu")
    assert (cost["FP32"].forward_ns, cost["FP32"].backward_ns) == (10**9, 2 * 10**9)
    assert (cost["FP16"].forward_ns, cost["FP16"].backward_ns) == (10**9 // 2, 10**9)


def test_what_is_kept_for_backward_follows_the_kind():
    profile = roofline_profile(linear_graph(), SHEET)
    fc, relu, view = (profile.cost(name) for name in ("fc", "relu", "view"))
    assert (fc["FP32"].saves_inputs, fc["FP32"].saved_bytes) == ((0,), 0)
    assert fc["FP16"].saved_bytes == 2 * 1024 * 1024  # the cast copy of the weight
    assert (fc["INT8"].saves_inputs, fc["INT8"].saved_bytes) == ((), 4096 * 1024 + 1024 * 1024)
    assert (relu["FP32"].saves_output, relu["FP32"].saves_inputs) == (True, ())
    assert (view["FP32"].alias_input, view["FP32"].forward_ns) == (0, 0)


def test_masks_are_kept_as_bytes_and_places_of_maxima_as_indices():
    graph = linear_graph(rows=8, width=16)

    def kept(op_type):
        operators = [replace(operator, op_type=op_type) if operator.name == "relu" else operator for operator in graph]
        cost = roofline_profile(replace(graph, operators=tuple(operators)), SHEET).cost("relu")["FP32"]
        return cost.saved_bytes, cost.saves_inputs, cost.saves_output

    assert kept("dropout") == (8 * 16, (), False)
    assert kept("max_pool2d") == (8 * 8 * 16, (0,), False)
    assert kept("gelu") == (0, (0,), False)
    assert kept("tanh") == (0, (), True)
    assert kept("add") == (0, (), False)


def test_casts_move_their_bytes():
    profile = roofline_profile(linear_graph(), SHEET, assumptions=IDEAL)
    assert profile.casts["FP32>FP16"].ns_per_mi_elements == round(1e-3 * 6 * MI_ELEMENTS)
    assert profile.casts["FP32>INT8"].ns_per_mi_elements == round(1e-3 * 9 * MI_ELEMENTS)  # read twice: amax first
    assert roofline_profile(linear_graph(), data_sheet("A100")).casts["FP32>TF32"].ns(MI_ELEMENTS) == 0


def test_the_optimizer_is_one_of_three():
    parameters = 4 * 1024 * 1024
    states = {
        name: roofline_profile(linear_graph(), SHEET, assumptions=Assumptions(optimizer=name)).optimizer.state_bytes
        for name in ("adamw", "momentum", "sgd")
    }
    assert states == {"adamw": 2 * parameters, "momentum": parameters, "sgd": 0}
    with pytest.raises(UnsupportedError, match="optimizer is 'lion', but allowed are adamw, momentum, sgd"):
        Assumptions(optimizer="lion")


def test_kinds_without_a_kernel_do_not_get_the_precision():
    for kind, allowed in (
        ("conv_transpose2d", {"FP16", "FP32"}),
        ("einsum", {"FP16", "FP32"}),
        ("conv2d", {"INT8-BWD8", *SHEET.peak_flops}),
        ("bmm", {*SHEET.peak_flops}),
    ):
        assert set(roofline_profile(linear_graph(kind=kind), SHEET).cost("fc")) == allowed
    embedding = roofline_profile(linear_graph(kind="embedding"), SHEET).cost("fc")
    assert set(embedding) == {"FP16", "FP32"}
    assert embedding["FP32"].saves_inputs == ()


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_an_8_bit_backward_pass_pays_where_its_quantizer_is_small_beside_the_products(precision):
    for width, pays in ((512, False), (16384, True)):
        profile = roofline_profile(linear_graph(width=width), data_sheet("H100"))
        half, eight = (profile.cost("fc")[name] for name in (precision, f"{precision}-BWD8"))
        assert eight.forward_ns >= half.forward_ns  # transposed codes are written too
        assert (eight.backward_ns < half.backward_ns) is pays
    assert (eight.saved_bytes, eight.saves_inputs) == (half.saved_bytes, half.saves_inputs)
    casts = profile.casts
    assert casts[f"BF16>{precision}-BWD8"].ns(2**20) > casts[f"BF16>{precision}"].ns(2**20)


def test_a_data_sheet_names_formats_that_are_multiplied():
    with pytest.raises(ProblemError, match="INT8-BWD8, which multiplies in INT8; name that instead"):
        replace(SHEET, peak_flops={**SHEET.peak_flops, "INT8-BWD8": 1e12})


def test_the_profile_says_what_it_is():
    profile = roofline_profile(linear_graph(), data_sheet("t4"))
    assert estimated_by(profile) == "roofline from the NVIDIA T4 data sheet"
    assert profile.options["efficiency"] == Assumptions().efficiency


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_every_data_sheet_prices_a_problem(name):
    sheet = data_sheet(name.lower())
    assert list(sheet.peak_flops) == sorted(sheet.peak_flops, key=lambda p: FORMATS[p].rank)
    device = DeviceType(name=name, count=2, memory_limit_bytes=2**34, precisions=tuple(sheet.peak_flops))
    check_cost_model("roofline", device=device)


def test_hardware_names_the_data_sheet():
    device = DeviceType(
        name="pool", hardware="L4", count=1, memory_limit_bytes=2**34, precisions=("FP8", "BF16", "FP32")
    )
    check_cost_model("roofline", device=device)


def test_unknown_and_unusable_data_sheets():
    with pytest.raises(
        UnsupportedError, match=r"no data sheet for 'H10'; did you mean 'H100'\?; there is one for V100"
    ):
        data_sheet("H10")
    with pytest.raises(ProblemError, match="peak_flops lacks FP32"):
        replace(SHEET, peak_flops={"FP16": 1e12})
    with pytest.raises(ProblemError, match="bandwidth in bytes per second is 0"):
        replace(SHEET, bandwidth_bytes_per_s=0.0)
    with pytest.raises(ProblemError, match=r"efficiency is 1.5, but it is a share"):
        Assumptions(efficiency=1.5)


def test_assumptions_are_found_again_in_a_measured_profile():
    graph = linear_graph()
    truth = Assumptions(
        efficiency=0.6, efficiency_8bit=0.3, memory_efficiency=0.7, launch_ns=12_000, optimizer="momentum"
    )
    estimate = roofline_profile(graph, SHEET, assumptions=truth)
    # As if it had been measured.
    measured = replace(estimate, device=replace(estimate.device, versions={"torch": "2"}), options={})
    fitted = fit_assumptions(graph, measured, SHEET)
    assert fitted.launch_ns == truth.launch_ns
    for name in ("efficiency", "efficiency_8bit", "memory_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.01)
    other = linear_graph(rows=8192)
    predicted, wanted = (roofline_profile(other, SHEET, assumptions=known) for known in (fitted, truth))
    for operator in other:
        for precision, cost in predicted.cost(operator.name).items():
            assert cost.forward_ns == pytest.approx(wanted.cost(operator.name)[precision].forward_ns, rel=0.02)


def test_an_operator_without_work_shows_what_a_kernel_takes():
    graph = linear_graph(rows=1, width=16)
    estimate = roofline_profile(graph, SHEET, assumptions=Assumptions(kernel_ns=3300))
    measured = replace(estimate, device=replace(estimate.device, versions={"torch": "2"}), options={})
    assert fit_assumptions(graph, measured, SHEET).kernel_ns == pytest.approx(3300, rel=0.01)


def test_assumptions_are_fitted_to_measurements_of_the_same_graph_only():
    graph = linear_graph()
    estimate = roofline_profile(graph, SHEET)
    with pytest.raises(ProblemError, match="is a roofline estimate; measure one on the card"):
        fit_assumptions(graph, estimate, SHEET)
    with pytest.raises(ProblemError, match="is of another model"):
        fit_assumptions(linear_graph(rows=8), estimate, SHEET)
