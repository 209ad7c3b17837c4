import pytest

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.sensitivity import (
    Curvature,
    Distances,
    GradientNoise,
    IndicatorKind,
    Noise,
    OperatorKind,
    OperatorSensitivity,
    OperatorStatistics,
    OperatorVariances,
    ProductSizes,
    SensitivityTable,
    TensorStatistics,
    fisher_score,
    hessian_increase,
    random_score,
    weight_variance,
)


def tensor(elements, mean_square=1.0):
    return TensorStatistics(elements=elements, amax=3.0, square_sum=elements * mean_square)


def operator(name="a", *, weight=True, curvatures=()):
    return OperatorStatistics(
        name=name,
        op_type="linear" if weight else "matmul",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=8, contraction=16, columns=16),),
        first_parameter=None,
        second_parameter="a.weight" if weight else None,
        first=tensor(128),
        second=tensor(256),
        output=tensor(128),
        output_gradient=tensor(128, 0.25),
        curvatures=dict(curvatures),
    )


def output_noise(total):
    return OperatorVariances(
        output=Noise(independent=total), first_gradient=None, second_gradient=None, third_gradient=None
    )


def test_hessian_takes_the_trace_that_fits_the_noise():
    measured = operator(curvatures={"first": Curvature(uniform=4.0, floating=10.0)})
    noise = {"first": ((0.5, "tensor"), (0.1, "floating"))}
    assert hessian_increase(measured, noise) == pytest.approx(0.5 * (0.5 * 4 + 0.1 * 10))


def test_a_negative_trace_is_no_gain():
    measured = operator(curvatures={"second": Curvature(uniform=-4.0, floating=-4.0)})
    assert hessian_increase(measured, {"second": ((1.0, "channel"),)}) == 0.0


def test_fisher_is_squared_gradient_times_squared_error():
    assert fisher_score(operator(), output_noise(3.0)) == pytest.approx(0.25 * 3.0)


def test_weights_alone():
    noise = {"first": ((9.0, "tensor"),), "second": ((0.5, "channel"),)}
    assert weight_variance(operator(), noise) == pytest.approx(256 * 0.5)
    assert weight_variance(operator(weight=False), noise) == 0.0


def test_chance_is_the_same_everywhere_and_falls_with_precision():
    first = {precision: random_score("block/linear", precision, 7) for precision in ("INT8", "FP8", "BF16", "FP32")}
    assert first == {precision: random_score("block/linear", precision, 7) for precision in first}
    assert first["INT8"] == pytest.approx(4 * first["FP8"])
    assert first["FP8"] == pytest.approx(4 * first["BF16"])
    assert first["FP32"] == 0.0
    assert random_score("block/linear", "INT8", 8) != first["INT8"]
    # Pinned: a change of the drawing would change plans.
    assert first["INT8"] == pytest.approx(0.435595705477915)


def table(kind):
    part = OperatorSensitivity(own=1.0, backward=2.0, forward=3.0, variances=output_noise(1.0))
    return SensitivityTable(
        kind=kind,
        details={"a": {"INT8": part}},
        excluded={"a": {"FP16": "overflows"}},
        distances=Distances(to_input={}, to_loss={}),
    )


def test_sensitivities_as_shares_of_the_gradients_own_noise():
    noise = GradientNoise(mean_square_norm=50.0, variance=30.0)
    shares = table(IndicatorKind.PROBED).relative_to(noise, workers=4)
    assert {name: dict(row) for name, row in shares.items()} == {"a": {"INT8": pytest.approx(6 / (4 * 30))}}
    assert shares.unit == "gradient noise"
    assert shares.excluded == {"a": {"FP16": "overflows"}}


@pytest.mark.parametrize(
    ("kind", "noise", "workers", "error", "said"),
    [
        (IndicatorKind.FISHER, GradientNoise(mean_square_norm=1.0, variance=1.0), 1, UnsupportedError, "squared loss"),
        (IndicatorKind.PROBED, None, 1, ProblemError, "two different batches"),
        (IndicatorKind.PROBED, GradientNoise(mean_square_norm=1.0, variance=0.0), 1, ProblemError, "two different"),
        (IndicatorKind.PROBED, GradientNoise(mean_square_norm=1.0, variance=1.0), 0, ProblemError, "workers is 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(kind, noise, workers, error, said):
    with pytest.raises(error, match=said):
        table(kind).relative_to(noise, workers=workers)


def test_every_kind_names_its_unit():
    assert {kind.unit for kind in IndicatorKind} == {
        "squared gradient",
        "share of progress",
        "loss",
        "squared loss",
        "squared weight",
        "none",
    }
