from dataclasses import replace

import pytest

from qsync_opt.errors import ModelError, ProblemError, UnsupportedError
from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec
from qsync_opt.numerics import Granularity, PrecisionFormats
from qsync_opt.sensitivity import (
    SIGN_CHANGE_RATIOS,
    Gain,
    IndicatorKind,
    MeasuredErrors,
    ModelStatistics,
    NoiseOptions,
    OperatorKind,
    OperatorSensitivity,
    OperatorStatistics,
    ProductSizes,
    RoundingFactor,
    SensitivityTable,
    Signal,
    TensorStatistics,
    plan_variance,
    sensitivities,
)


def borders(name: str) -> PrecisionFormats:
    return PrecisionFormats(output=name, gradient_input=name, gradient_output=name)


CPU = {"INT8": borders("BF16"), "BF16": borders("BF16"), "FP32": borders("FP32")}
ADA = {"INT8": borders("BF16"), "FP8": borders("BF16"), "BF16": borders("BF16"), "FP16": borders("FP16")}


def node(name: str, op_type: str, *inputs: str) -> Operator:
    spec = TensorSpec(shape=(8, 16), dtype="float32")
    return Operator(
        name=name,
        op_type=op_type,
        module="",
        role=Role.DEPENDENT if op_type == "relu" else Role.ADJUSTABLE,
        inputs=inputs,
        input_specs=(spec,),
        output_specs=(spec,),
        parameters=(f"{name}.weight",) if op_type in ("linear", "conv2d") else (),
        onnx_nodes=(),
        flops=1,
        num_bytes=1,
        signature=op_type,
    )


def graph(*operators: Operator) -> OpGraph:
    spec = TensorSpec(shape=(16, 16), dtype="float32")
    names = [name for operator in operators for name in operator.parameters]
    return OpGraph(name="net", operators=operators, parameters=tuple(ParameterSpec(name=n, spec=spec) for n in names))


def tensor(elements: int, *, amax: float = 3.0, scaled: bool = False, mean_square: float = 1.0) -> TensorStatistics:
    scales = {"tensor": amax**2, "channel": amax**2 / 2, "row": amax**2 / 3} if scaled else {}
    return TensorStatistics(elements=elements, amax=amax, square_sum=elements * mean_square, mean_square_amax=scales)


def measured(name: str, op_type: str = "linear", *, amax: float = 3.0) -> OperatorStatistics:
    weight = op_type != "matmul"
    return OperatorStatistics(
        name=name,
        op_type=op_type,
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=8, contraction=16, columns=16),),
        first_parameter=None,
        second_parameter=f"{name}.weight" if weight else None,
        first=tensor(128, amax=amax, scaled=True),
        second=tensor(256, scaled=True),
        output=tensor(128),
        output_gradient=tensor(128),
        first_gradient=tensor(128),
        second_gradient=tensor(256),
    )


def statistics(*operators: OperatorStatistics) -> ModelStatistics:
    return ModelStatistics(batches=1, operators=operators)


NET = graph(
    node("conv/conv2d", "conv2d"),
    node("act/relu", "relu", "conv/conv2d"),
    node("fc/linear", "linear", "act/relu"),
    node("mix/matmul", "matmul", "fc/linear", "act/relu"),
)
MEASURED = statistics(measured("conv/conv2d", "conv2d"), measured("fc/linear"), measured("mix/matmul", "matmul"))


@pytest.mark.parametrize("kind", [IndicatorKind.PROPAGATED, IndicatorKind.DEPTH])
def test_every_adjustable_operator_has_a_positive_value_at_every_low_precision(kind: IndicatorKind) -> None:
    # Convolutions and products without weights included: both were once left out or zero.
    table = sensitivities(NET, MEASURED, CPU, kind=kind)
    assert set(table) == {"conv/conv2d", "fc/linear", "mix/matmul"}
    for values in table.values():
        assert values["FP32"] == 0
        assert values["INT8"] > 0
        assert values["BF16"] > 0
    assert not table.excluded


def test_parts_add_up() -> None:
    table = sensitivities(NET, MEASURED, CPU)
    part = table.details["fc/linear"]["INT8"]
    assert table["fc/linear"]["INT8"] == pytest.approx(part.own + part.backward + part.forward)
    assert part.own > 0
    assert part.backward > 0
    assert part.forward > 0
    first = table.details["conv/conv2d"]["INT8"]
    assert first.backward == 0  # nothing stands between it and the input


def test_independent_noise_adds_up_by_rows_and_shared_noise_as_the_signal_does() -> None:
    """What the propagated form is made of: energies of gradients, by hand, and variances of the rounding."""
    chain = graph(node("a/linear", "linear"), node("b/linear", "linear", "a/linear"))
    table = sensitivities(chain, statistics(measured("a/linear"), measured("b/linear")), CPU, kind="propagated")
    # Of one weight gradient: sum over rows of |x|^2 |g|^2, and its own squared norm. Signals have the energy 128.
    incoherent, norm, energy = 8 * 16 * 16, 256, 128
    noise = table.details["a/linear"]["INT8"].variances.output
    assert noise.shared > 0 and noise.independent > 0 and noise.shared != pytest.approx(noise.independent)
    forward = (incoherent * noise.independent + norm * noise.shared) / energy
    assert table.details["a/linear"]["INT8"].forward == pytest.approx(forward)
    noise = table.details["b/linear"]["INT8"].variances.first_gradient
    assert noise is not None and noise.shared > 0 and noise.independent > 0
    backward = (incoherent * noise.independent + norm * noise.shared) / energy
    assert table.details["b/linear"]["INT8"].backward == pytest.approx(backward)


def test_order_of_the_statistics_does_not_matter() -> None:
    shuffled = statistics(*reversed(MEASURED.operators))
    for kind in (IndicatorKind.PROPAGATED, IndicatorKind.DEPTH):
        a, b = (sensitivities(NET, s, CPU, kind=kind) for s in (MEASURED, shuffled))
        assert {name: dict(a[name]) for name in a} == {name: dict(b[name]) for name in b}


def test_depth_form_uses_true_distances() -> None:
    table = sensitivities(NET, MEASURED, CPU, kind=IndicatorKind.DEPTH, gamma=2.0)
    part = table.details["conv/conv2d"]["INT8"]
    assert NET.distances_to_loss()["conv/conv2d"] == 2
    assert part.forward == pytest.approx(2.0 * 2 * part.variances.output.total)
    last = table.details["mix/matmul"]["INT8"]
    assert last.forward == 0
    gradients = last.variances.first_gradient, last.variances.second_gradient
    assert last.backward == pytest.approx(3 * sum(noise.total for noise in gradients if noise is not None))


def test_an_outlier_makes_int8_worse_than_fp8() -> None:
    # Only for INT8 does the step of all elements follow the largest of them: no order of precisions is presumed.
    def values(amax: float) -> dict[str, float]:
        tame = statistics(measured("fc/linear", amax=amax))
        options = NoiseOptions(weight_granularity=Granularity.TENSOR)
        return dict(sensitivities(graph(node("fc/linear", "linear")), tame, ADA, options=options)["fc/linear"])

    assert values(3.0)["INT8"] < values(3.0)["FP8"]
    assert values(300.0)["INT8"] > values(300.0)["FP8"]


def test_gradients_that_fp16_flushes_make_it_worse_than_bf16() -> None:
    flushed = replace(
        measured("fc/linear"),
        output_gradient=TensorStatistics(
            elements=128,
            amax=1e-8,
            square_sum=128e-18,
            rounding={"FP16": RoundingFactor(stochastic=1e7, nearest=2.9e7)},
        ),
        second_gradient=tensor(256, mean_square=8e-18),
    )
    values = sensitivities(graph(node("fc/linear", "linear")), statistics(flushed), ADA)["fc/linear"]
    assert values["FP16"] > values["BF16"]


def test_precisions_that_overflow_are_excluded_with_the_reason() -> None:
    large = replace(measured("fc/linear"), output=tensor(128, amax=1e5))
    table = sensitivities(graph(node("fc/linear", "linear")), statistics(large), ADA)
    assert "FP16" not in table["fc/linear"]
    assert table.excluded == {
        "fc/linear": {"FP16": "FP16 overflows: output reaches 1e+05, the largest number of FP16 is 65504"}
    }


@pytest.mark.parametrize(
    ("precision", "border", "tensors", "fits"),
    [
        ("FP16", "FP16", {"output": tensor(128, amax=1e5)}, False),
        ("INT8", "FP16", {"output": tensor(128, amax=1e5)}, False),
        ("INT8", "BF16", {"output": tensor(128, amax=1e5)}, True),
        ("BF16", "BF16", {"output": tensor(128, amax=1e5)}, True),
        ("FP16", "FP16", {"second_gradient": tensor(256, amax=7e4)}, False),
        ("FP16", "FP16", {}, True),
    ],
)
def test_only_fp16_at_some_border_overflows(
    precision: str, border: str, tensors: dict[str, TensorStatistics], fits: bool
) -> None:
    operator = replace(measured("fc/linear"), **tensors)
    formats = {precision: borders(border)}
    table = sensitivities(graph(node("fc/linear", "linear")), statistics(operator), formats)
    assert (precision in table["fc/linear"]) is fits
    assert bool(table.excluded) is not fits


def test_attention_in_eight_bits_is_excluded_with_the_reason() -> None:
    errors = MeasuredErrors(output=1.0, first_gradient=1.0, second_gradient=1.0, third_gradient=1.0)
    attention = replace(
        measured("sdpa", "matmul"),
        kind=OperatorKind.ATTENTION,
        op_type="scaled_dot_product_attention",
        third=tensor(128),
        third_gradient=tensor(128),
        measured={"BF16": errors},
    )
    net = graph(node("sdpa", "scaled_dot_product_attention"))
    table = sensitivities(net, statistics(attention), CPU)
    assert table.excluded["sdpa"] == {"INT8": "no noise formula for scaled_dot_product_attention in INT8"}
    assert set(table["sdpa"]) == {"BF16", "FP32"}


def probed(table_gains: dict[str, Gain]) -> SensitivityTable:
    operator = replace(measured("fc/linear"), gains=table_gains)
    return sensitivities(graph(node("fc/linear", "linear")), statistics(operator), CPU)


def test_probed_gains_multiply_the_variance_per_element() -> None:
    gains = {"first": Gain(uniform=5.0, floating=7.0), "output": Gain(uniform=100.0, floating=11.0)}
    table = probed(gains)
    assert table.kind is IndicatorKind.PROBED
    v8, v16 = (3.0 / 127) ** 2 / 6, 4.0**-7 / 28
    assert table["fc/linear"]["INT8"] == pytest.approx(5.0 * v8 + 11.0 * v16)
    assert table["fc/linear"]["BF16"] == pytest.approx(7.0 * v16 + 11.0 * v16)
    assert table["fc/linear"]["FP32"] == 0


def test_a_probed_total_is_split_by_where_its_noise_arises() -> None:
    gains = {
        "first": Gain(uniform=5.0, floating=7.0),
        "output": Gain(uniform=100.0, floating=11.0),
        "first_gradient": Gain(uniform=13.0, floating=17.0),
        "output_gradient": Gain(uniform=19.0, floating=23.0),
        "second_gradient": Gain(uniform=1.5, floating=31.0),
    }
    part = probed(gains).details["fc/linear"]["BF16"]
    v16 = 4.0**-7 / 28
    noise = part.variances.second_gradient
    assert noise is not None and part.flips == 0
    # The weight gradient's own noise counts by the gain of its elements, of which there are 256.
    assert part.own == pytest.approx(1.5 / 256 * noise.total)
    forward, total = (7.0 + 11.0) * v16, part.value
    assert total > forward + part.own and total == pytest.approx(part.own + part.backward + part.forward)
    rest = total - part.own
    assert part.forward == pytest.approx(rest * forward / total)
    assert part.backward == pytest.approx(rest * (1 - forward / total))


def test_expected_loss_is_fisher_and_the_variance_weighed_by_the_horizon() -> None:
    operator = replace(measured("fc/linear"), gains={"first": Gain(uniform=5.0, floating=7.0)})
    net, found = graph(node("fc/linear", "linear")), statistics(operator)

    def value(kind: str, horizon: float = 0.0) -> float:
        return sensitivities(net, found, CPU, kind=IndicatorKind(kind), horizon=horizon)["fc/linear"]["INT8"]

    assert value("fisher") > 0
    assert value("loss") == pytest.approx(value("fisher"))
    assert value("loss", 3.0) == pytest.approx(value("fisher") + 3.0 * value("probed"))
    with pytest.raises(UnsupportedError, match="horizon is -1"):
        value("loss", -1.0)
    with pytest.raises(ProblemError, match="hold no gains"):
        sensitivities(NET, MEASURED, CPU, kind=IndicatorKind.LOSS)


def test_noise_of_operators_adds_up_before_rectifiers_change_sign() -> None:
    flips = tuple(100.0 * ratio**0.5 for ratio in SIGN_CHANGE_RATIOS)
    net = graph(node("a/linear", "linear"), node("b/linear", "linear", "a/linear"), node("relu", "relu", "b/linear"))
    gains = {"output": Gain(uniform=0.0, floating=0.0)}
    found = replace(
        statistics(replace(measured("a/linear"), gains=gains), replace(measured("b/linear"), gains=gains)),
        signals={"relu": Signal(elements=128, input_square_sum=128.0, output_square_sum=64.0, flips=flips)},
    )
    table = sensitivities(net, found, CPU)
    parts = [table.details[name]["INT8"] for name in ("a/linear", "b/linear")]
    # Both operators hand noise on as it is: V times the mean squares, over the energy of the output, is 16.
    ratios = [part.variances.output.total / 128 * weight for part, weight in zip(parts, (16.0, 1.0), strict=True)]
    assert [part.flips for part in parts] == pytest.approx([100.0 * ratio**0.5 for ratio in ratios])
    together = plan_variance(net, found, table, {"a/linear": "INT8", "b/linear": "INT8"})
    assert together == pytest.approx(100.0 * sum(ratios) ** 0.5)
    assert together < sum(part.value for part in parts)
    with pytest.raises(UnsupportedError, match="know no INT4 of operator 'a/linear'"):
        plan_variance(net, found, table, {"a/linear": "INT4"})
    with pytest.raises(UnsupportedError, match="of kind 'fisher': probed ones are needed"):
        plan_variance(net, found, sensitivities(net, found, CPU, kind=IndicatorKind.FISHER), {})


def test_what_arrives_at_a_rectifier_is_what_was_measured_there() -> None:
    flips = tuple(100.0 * ratio**0.5 for ratio in SIGN_CHANGE_RATIOS)
    net = graph(node("a/linear", "linear"), node("b/linear", "linear", "a/linear"), node("relu", "relu", "b/linear"))
    gains = {"output": Gain(uniform=0.0, floating=0.0)}
    operators = [replace(measured(name), gains=gains) for name in ("a/linear", "b/linear")]

    def found(ratio: float, shift: float) -> ModelStatistics:
        signal = Signal(elements=128, input_square_sum=128.0, output_square_sum=64.0, flips=flips, noise_ratio=ratio)
        return replace(statistics(*operators), signals={"relu": signal}, shift=shift)

    wide = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")
    plan = {"a/linear": "INT8", "b/linear": "INT8"}
    for ratio in (1e-4, 4e-4):
        table = sensitivities(net, found(ratio, 0.0), {"INT8": wide, "FP32": wide})
        assert plan_variance(net, found(ratio, 0.0), table, plan) == pytest.approx(100.0 * ratio**0.5)
        parts = [table.details[name]["INT8"].flips for name in plan]
        # The sweep shares it out: the weight of a is 16 times that of b, and the noises are alike.
        assert parts[0] / parts[1] == pytest.approx(16.0**0.5)
        # The mean moves by the share of the energy, and adds the square of that.
        assert plan_variance(net, found(ratio, 7.0), table, plan) == pytest.approx(100.0 * ratio**0.5 + 7.0)
        alone = plan_variance(net, found(ratio, 7.0), table, {"b/linear": "INT8", "a/linear": "FP32"})
        assert alone == pytest.approx(parts[1] + 7.0 / 17**2)
        assert table["b/linear"]["INT8"] == pytest.approx(parts[1])


def test_a_rectifier_whose_ratio_was_not_measured_keeps_the_shares_of_the_sweep() -> None:
    flips = tuple(100.0 * ratio**0.5 for ratio in SIGN_CHANGE_RATIOS)
    net = graph(
        node("a/linear", "linear"), node("first/relu", "relu", "a/linear"), node("second/relu", "relu", "first/relu")
    )
    gained = replace(measured("a/linear"), gains={"output": Gain(uniform=0.0, floating=0.0)})

    def value(*ratios: float) -> float:
        signals = {
            f"{name}/relu": Signal(
                elements=128, input_square_sum=128.0, output_square_sum=64.0, flips=flips, noise_ratio=ratio
            )
            for name, ratio in zip(("first", "second"), ratios, strict=True)
        }
        found = replace(statistics(gained), signals=signals)
        return plan_variance(net, found, sensitivities(net, found, CPU), {"a/linear": "INT8"})

    unmeasured, both = value(0.0, 0.0), value(1e-4, 1e-4)
    assert value(1e-4, 0.0) == pytest.approx((both + unmeasured) / 2)
    assert unmeasured != pytest.approx(both)


def test_operators_without_statistics_add_no_noise() -> None:
    flips = tuple(100.0 * ratio**0.5 for ratio in SIGN_CHANGE_RATIOS)
    net = graph(node("a/linear", "linear"), node("b/linear", "linear", "a/linear"), node("relu", "relu", "b/linear"))
    gained = [replace(measured(f"{n}/linear"), gains={"output": Gain(uniform=0.0, floating=0.0)}) for n in "ab"]
    signal = Signal(elements=128, input_square_sum=128.0, output_square_sum=64.0, flips=flips, noise_ratio=1e-4)
    found = replace(statistics(*gained), signals={"relu": signal})
    table = sensitivities(net, found, CPU)
    alone = plan_variance(net, replace(found, operators=tuple(gained[1:])), table, {"b/linear": "INT8"})
    # All the noise that was measured there must then come from b.
    assert alone > plan_variance(net, found, table, {"b/linear": "INT8"}) > 0


def test_an_operator_that_could_not_be_probed_gets_the_propagated_score() -> None:
    """In the unit of progress it is scaled by what the others have in both."""
    chain = graph(
        node("a/linear", "linear"), node("b/linear", "linear", "a/linear"), node("c/linear", "linear", "b/linear")
    )
    gains = {
        "first": Gain(uniform=5.0, floating=7.0),
        "output": Gain(uniform=3.0, floating=2.0),
        "first_gradient": Gain(uniform=1.0, floating=4.0),
    }

    def table(kind: str, **found: dict[str, Gain]) -> SensitivityTable:
        operators = [measured("a/linear"), *(replace(measured(f"{name}/linear"), **found) for name in "bc")]
        return sensitivities(chain, statistics(*operators), CPU, kind=IndicatorKind(kind))

    plain, probed, progress = table("propagated"), table("probed", gains=gains), table("progress", adaptive_gains=gains)
    for precision in ("INT8", "BF16"):
        alone = plain.details["a/linear"][precision]
        assert alone.value > 0
        part = probed.details["a/linear"][precision]
        assert (part.own, part.backward, part.forward) == (alone.own, alone.backward, alone.forward)
        ratio = sum(progress[f"{name}/linear"][precision] for name in "bc")
        ratio /= sum(plain[f"{name}/linear"][precision] for name in "bc")
        assert ratio > 0 and ratio != pytest.approx(1.0)
        part = progress.details["a/linear"][precision]
        assert (part.own, part.backward, part.forward) == pytest.approx(
            (ratio * alone.own, ratio * alone.backward, ratio * alone.forward)
        )
    assert progress["a/linear"]["FP32"] == 0


def test_progress_needs_adaptive_gains() -> None:
    gains = {"first": Gain(uniform=5.0, floating=7.0)}
    net, operator = graph(node("fc/linear", "linear")), measured("fc/linear")
    with pytest.raises(ProblemError, match="hold no adaptive gains: collect them with adaptive_probes"):
        sensitivities(net, statistics(replace(operator, gains=gains)), CPU, kind=IndicatorKind.PROGRESS)
    table = sensitivities(net, statistics(replace(operator, adaptive_gains=gains)), CPU, kind=IndicatorKind.PROGRESS)
    assert table["fc/linear"]["INT8"] == pytest.approx(5.0 * (3.0 / 127) ** 2 / 6)
    assert table.kind.unit == "share of progress"


def test_the_kind_is_what_the_statistics_were_collected_for() -> None:
    gains = {"first": Gain(uniform=5.0, floating=7.0)}
    net, operator = graph(node("fc/linear", "linear")), measured("fc/linear")

    def kind(**found: dict[str, Gain]) -> str:
        return sensitivities(net, statistics(replace(operator, **found)), CPU).kind

    assert kind() == "propagated"
    assert kind(gains=gains) == kind(gains=gains, adaptive_gains=gains) == "probed"
    assert kind(adaptive_gains=gains) == "progress"


@pytest.mark.parametrize(("kind", "weight"), [("probed", 1.0), ("progress", 12.5)])
def test_errors_that_repeat_are_taken_as_measured(kind: str, weight: float) -> None:
    """They count as the parameter's gradient does, which the gain of its elements says."""
    net, operator = graph(node("fc/linear", "linear")), measured("fc/linear")

    def part(found: OperatorStatistics) -> OperatorSensitivity:
        return sensitivities(net, statistics(found), CPU, kind=IndicatorKind(kind)).details["fc/linear"]["BF16"]

    own = weight * operator.second_gradient.elements
    gains = {"first": Gain(uniform=5.0, floating=700.0), "second_gradient": Gain(uniform=own, floating=own)}
    gained = replace(operator, **{"gains" if kind == "probed" else "adaptive_gains": gains})
    plain, repeated = part(gained), part(replace(gained, nearest={"BF16": 3.0}))
    rounded = plain.variances.second_gradient
    assert rounded is not None and repeated.variances.second_gradient is not None
    result = 256 * 4.0**-7 / 28  # the weight gradient is itself rounded
    assert repeated.variances.second_gradient.total == pytest.approx(3.0 + result)
    assert repeated.value - plain.value == pytest.approx(weight * (3.0 + result - rounded.total))


def test_probed_without_gains_is_refused() -> None:
    with pytest.raises(ProblemError, match="hold no gains: collect them with probes"):
        sensitivities(NET, MEASURED, CPU, kind=IndicatorKind.PROBED)
    assert sensitivities(NET, MEASURED, CPU).kind is IndicatorKind.PROPAGATED


def test_missing_statistics_are_an_error_and_not_an_exclusion() -> None:
    with pytest.raises(ProblemError, match="no statistics for 1 adjustable operators, the first is 'mix/matmul'"):
        sensitivities(NET, statistics(*MEASURED.operators[:2]), CPU)


def test_statistics_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match="of another model or batch shape than graph 'net'"):
        sensitivities(NET, replace(MEASURED, model_fingerprint="other"), CPU)
    same = replace(MEASURED, model_fingerprint=NET.fingerprint())
    assert len(sensitivities(NET, same, CPU)) == 3


def test_bad_options_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="kind is 'best': allowed are propagated, probed, loss, progress"):
        sensitivities(NET, MEASURED, CPU, kind="best")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="gamma is -1"):
        sensitivities(NET, MEASURED, CPU, gamma=-1)
