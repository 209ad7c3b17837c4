"""Formulas against hand calculations; the errors that earlier indicators made would each fail one of these."""

from dataclasses import replace

import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import Granularity, PrecisionFormats, Rounding
from qsync_opt.sensitivity import (
    MeasuredErrors,
    NoiseOptions,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    TensorStatistics,
    variances,
)

N, K, M = 64, 512, 256
BF16 = PrecisionFormats(output="BF16", gradient_input="BF16", gradient_output="BF16")
FULL = PrecisionFormats(output="FP32", gradient_input="FP32", gradient_output="FP32")
PER_TENSOR = NoiseOptions(weight_granularity=Granularity.TENSOR)


def tensor(elements: int, mean_square: float, *, amax: float = 4.0, scaled: bool = False) -> TensorStatistics:
    return TensorStatistics(
        elements=elements,
        amax=amax,
        square_sum=elements * mean_square,
        mean_square_amax={"tensor": amax**2, "channel": amax**2 / 4, "row": amax**2 / 9} if scaled else {},
    )


def linear(
    *, x: float = 1.0, w: float = 0.01, g: float = 1e-4, x_amax: float = 4.0, w_amax: float = 0.5
) -> OperatorStatistics:
    return OperatorStatistics(
        name="fc/linear",
        op_type="linear",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=N, contraction=K, columns=M),),
        first_parameter=None,
        second_parameter="fc.weight",
        first=tensor(N * K, x, amax=x_amax, scaled=True),
        second=tensor(K * M, w, amax=w_amax, scaled=True),
        output=tensor(N * M, K * x * w),
        output_gradient=tensor(N * M, g),
        first_gradient=tensor(N * K, M * g * w),
        second_gradient=tensor(K * M, N * g * x),
    )


def test_int8_linear_is_the_exact_formula() -> None:
    found = variances(linear(), "INT8", FULL, PER_TENSOR)
    s_x2, s_w2 = (4.0 / 127) ** 2, (0.5 / 127) ** 2
    x2, w2, g2 = N * K * 1.0, K * M * 0.01, N * M * 1e-4
    assert found.output.total == pytest.approx(s_w2 / 6 * M * x2 + s_x2 / 6 * N * w2 + N * K * M * s_x2 * s_w2 / 36)
    assert found.second_gradient is not None
    assert found.second_gradient.total == pytest.approx(s_x2 / 6 * K * g2)  # the gradient stays FP32 here
    assert found.first_gradient is not None
    assert found.first_gradient.total == pytest.approx(s_w2 / 6 * K * g2)


def test_bf16_rounds_operands_gradient_and_results_to_nearest() -> None:
    found = variances(linear(), "BF16", BF16)
    v = 4.0**-7 / 28
    volume = N * K * M
    z, dw, dx = volume * 0.01, volume * 1e-4, volume * 1e-4 * 0.01
    assert found.output.total == pytest.approx(z * (2 * v + v * v) + v * N * M * K * 0.01)
    assert found.second_gradient is not None
    assert found.first_gradient is not None
    assert found.second_gradient.total == pytest.approx(dw * (2 * v + v * v) + v * dw)
    assert found.first_gradient.total == pytest.approx(dx * (2 * v + v * v) + v * dx)


def test_variance_of_a_product_grows_with_the_square_of_its_operands() -> None:
    # Norms that are not squared would grow linearly.
    base = variances(linear(), "INT8", BF16, PER_TENSOR)
    larger = variances(linear(x=9.0, x_amax=12.0), "INT8", BF16, PER_TENSOR)
    assert larger.output.total == pytest.approx(9 * base.output.total)
    assert larger.second_gradient is not None
    assert base.second_gradient is not None
    assert larger.second_gradient.total == pytest.approx(9 * base.second_gradient.total)


def test_contraction_is_not_counted_twice() -> None:
    # The product of norms |x|^2 * numel(w) * s_w^2 is too large by K; splitting K in two halves must halve the output.
    whole = linear()
    half = replace(
        whole,
        products=(ProductSizes(products=1, rows=N, contraction=K // 2, columns=M),),
        first=tensor(N * K // 2, 1.0, scaled=True),
        second=tensor(K * M // 2, 0.01, amax=0.5, scaled=True),
    )
    ratio = [variances(o, "INT8", FULL, PER_TENSOR).output.total for o in (whole, half)]
    assert ratio[0] == pytest.approx(2 * ratio[1])
    bound = (0.5 / 127) ** 2 / 6 * N * K * 1.0 * K * M
    assert ratio[0] < bound / 100


def test_the_gradient_has_its_own_exponent_in_int8() -> None:
    # With the input's exponent for the gradient tensor, small gradients would seem hugely noisy.
    base, small = variances(linear(), "INT8", BF16), variances(linear(g=1e-4 / 2**20), "INT8", BF16)
    assert base.second_gradient is not None
    assert small.second_gradient is not None
    assert base.second_gradient.total == pytest.approx(2**20 * small.second_gradient.total)


def test_output_gradient_counts_and_not_the_weight_gradient() -> None:
    operator = linear()
    found = variances(operator, "INT8", FULL)
    other = replace(operator, second_gradient=tensor(K * M, 1e6))
    assert variances(other, "INT8", FULL) == found


def test_both_operands_follow_their_granularity() -> None:
    def output(first: Granularity, second: Granularity) -> float:
        options = NoiseOptions(activation_granularity=first, weight_granularity=second)
        return variances(linear(), "INT8", FULL, options).output.total

    t, c, r = Granularity.TENSOR, Granularity.CHANNEL, Granularity.ROW
    s_x2, s_w2, volume = (4.0 / 127) ** 2, (0.5 / 127) ** 2, N * K * M
    for first, second, x_share, w_share in ((t, t, 1, 1), (t, c, 1, 4), (r, t, 9, 1), (r, c, 9, 4)):
        v_x, v_w = s_x2 / 6 / x_share, s_w2 / 6 / w_share
        assert output(first, second) == pytest.approx(volume * (v_x * 0.01 + v_w * 1.0 + v_x * v_w))


def test_nearest_rounding_halves_the_first_order() -> None:
    stochastic = variances(linear(), "INT8", FULL).second_gradient
    nearest = variances(linear(), "INT8", FULL, NoiseOptions(rounding=Rounding.NEAREST)).second_gradient
    assert stochastic is not None
    assert nearest is not None
    assert stochastic.total == pytest.approx(2 * nearest.total)


def test_weight_noise_is_shared_and_activation_noise_is_not() -> None:
    found = variances(linear(), "INT8", FULL, PER_TENSOR).output
    assert found.shared == pytest.approx((0.5 / 127) ** 2 / 6 * M * N * K)
    both_activations = replace(linear(), second_parameter=None)
    assert variances(both_activations, "INT8", FULL, PER_TENSOR).output.shared == 0


def test_batched_second_operand_is_scaled_as_an_activation() -> None:
    operator = replace(
        linear(),
        op_type="matmul",
        second_parameter=None,
        products=(ProductSizes(products=4, rows=N // 4, contraction=K, columns=M),),
    )
    tensorwise = variances(operator, "INT8", FULL, NoiseOptions(weight_granularity=Granularity.CHANNEL))
    assert tensorwise == variances(operator, "INT8", FULL, PER_TENSOR)
    rows = NoiseOptions(activation_granularity=Granularity.ROW, weight_granularity=Granularity.TENSOR)
    assert variances(operator, "INT8", FULL, rows).output.total < tensorwise.output.total / 2


def test_groups_of_a_convolution_are_no_batch_of_products() -> None:
    """Its weight has scales per output channel, whatever the number of groups; a batch's second operand has one."""
    sizes = (ProductSizes(products=4, rows=N, contraction=K, columns=M // 4),)
    convolution, batch = (replace(linear(), op_type=kind, products=sizes) for kind in ("conv2d", "bmm"))
    fine, coarse = NoiseOptions(weight_granularity=Granularity.CHANNEL), PER_TENSOR
    shared = {
        (kind.op_type, options.weight_granularity): variances(kind, "INT8", FULL, options).output.shared
        for kind in (convolution, batch)
        for options in (fine, coarse)
    }
    assert shared["conv2d", "channel"] == pytest.approx(shared["conv2d", "tensor"] / 4)
    assert shared["bmm", "channel"] == shared["bmm", "tensor"] == pytest.approx(shared["conv2d", "tensor"])


def test_tf32_rounds_what_is_multiplied_and_nothing_else() -> None:
    found = variances(linear(), "TF32", FULL)
    v = 4.0**-10 / 28
    assert found.output.total == pytest.approx(N * K * M * 0.01 * (2 * v + v * v))


def test_fp32_is_silent_and_calls_add_up() -> None:
    found = variances(linear(), "FP32", FULL)
    assert found.output.total == 0
    assert found.second_gradient is not None
    assert found.second_gradient.total == 0
    once, twice = (variances(replace(linear(), calls=c), "INT8", BF16).output.total for c in (1, 2))
    assert twice == pytest.approx(2 * once)


def test_alignment_multiplies_its_path_and_shape_only() -> None:
    operator = replace(linear(), alignment={"second>output/tensor": 3.0})
    base, aligned = (variances(o, "INT8", FULL, PER_TENSOR).output for o in (linear(), operator))
    assert aligned.shared == pytest.approx(3 * base.shared)
    assert aligned.independent == pytest.approx(base.independent)
    assert variances(operator, "INT8", FULL).output == variances(linear(), "INT8", FULL).output


def test_lookup_rounds_its_rows_once_and_sums_gradients_in_fp32() -> None:
    rows, width, tokens = 100, 8, 40
    table = tensor(rows * width, 1.0, scaled=True)
    one_hot = replace(tensor(tokens * rows, 1 / rows, amax=1.0, scaled=True))
    operator = OperatorStatistics(
        name="embedding",
        op_type="embedding",
        kind=OperatorKind.LOOKUP,
        calls=1,
        products=(ProductSizes(products=1, rows=tokens, contraction=rows, columns=width),),
        first_parameter=None,
        second_parameter="weight",
        first=one_hot,
        second=table,
        output=tensor(tokens * width, 1.0),
        output_gradient=tensor(tokens * width, 4.0),
        second_gradient=tensor(rows * width, 1.0),
    )
    found = variances(operator, "BF16", BF16)
    v = 4.0**-7 / 28
    assert found.output.total == pytest.approx(tokens * width * v)
    assert found.first_gradient is None
    assert found.second_gradient is not None
    assert found.second_gradient.total == pytest.approx(tokens * width * 4.0 * v)


def test_attention_uses_measured_errors_and_refuses_other_precisions() -> None:
    errors = MeasuredErrors(output=1.0, first_gradient=2.0, second_gradient=3.0, third_gradient=4.0)
    operator = replace(
        linear(),
        kind=OperatorKind.ATTENTION,
        op_type="scaled_dot_product_attention",
        second_parameter=None,
        third=tensor(4, 1.0),
        third_gradient=tensor(4, 1.0),
        measured={"BF16": errors},
        calls=2,
    )
    found = variances(operator, "BF16", BF16)
    assert (found.output.total, found.third_gradient and found.third_gradient.total) == (2.0, 8.0)
    assert variances(operator, "FP32", FULL).output.total == 0
    with pytest.raises(UnsupportedError, match="no noise formula for scaled_dot_product_attention in INT8"):
        variances(operator, "INT8", BF16)


def test_options_are_checked() -> None:
    with pytest.raises(UnsupportedError, match="activation_granularity is 'channel': allowed are tensor, row"):
        NoiseOptions(activation_granularity=Granularity.CHANNEL)
    with pytest.raises(UnsupportedError, match="rounding is 'up'"):
        NoiseOptions(rounding="up")  # type: ignore[arg-type]


def test_measured_errors_of_rounding_to_nearest_can_be_left_out() -> None:
    measured = replace(linear(), nearest={"BF16": 1e3})
    plain = variances(linear(), "BF16", BF16)
    assert variances(measured, "BF16", BF16, nearest=False) == plain
    assert variances(measured, "BF16", BF16) != plain


def test_measured_errors_stand_beside_the_noise_of_scaled_operands() -> None:
    """Of an INT8 layer whose gradient is rounded to BF16: what repeats was measured, INT8 noise is by the formula."""
    v = 4.0**-7 / 28
    s_x2 = (4.0 / 127) ** 2
    volume, g2 = N * K * M, 1e-4
    found = variances(replace(linear(), nearest={"BF16": 0.5}), "INT8", BF16, PER_TENSOR).second_gradient
    assert found is not None
    int8 = volume * s_x2 / 6 * g2
    assert found.total == pytest.approx(0.5 + int8 + volume * s_x2 / 6 * v * g2, rel=1e-9)
    assert volume * s_x2 / 6 * v * g2 > 1e-7 * found.total


def test_measured_errors_of_several_calls_add_up() -> None:
    once, twice = (variances(replace(linear(), calls=calls, nearest={"BF16": 1e3}), "BF16", BF16) for calls in (1, 2))
    assert once.second_gradient is not None and twice.second_gradient is not None
    assert twice.second_gradient.total == pytest.approx(2 * once.second_gradient.total)
    assert once.second_gradient.total >= 1e3
