import json
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.errors import ProblemError
from qsync_opt.io import encode
from qsync_opt.numerics import Rounding
from qsync_opt.sensitivity import (
    SIGN_CHANGE_RATIOS,
    Gain,
    GradientNoise,
    ModelStatistics,
    OperatorKind,
    OperatorStatistics,
    ProductSizes,
    RoundingFactor,
    Signal,
    TensorStatistics,
    load_statistics,
    merge_statistics,
    save_statistics,
)


def operand(elements: int, square_sum: float, *, amax: float = 4.0, factor: float = 0.9) -> TensorStatistics:
    return TensorStatistics(
        elements=elements,
        amax=amax,
        square_sum=square_sum,
        mean_square_amax={"tensor": amax**2, "channel": amax, "row": amax / 2},
        rounding={"INT8/tensor": RoundingFactor(stochastic=factor, nearest=factor / 2)},
    )


def operator(name: str = "fc/linear", *, scale: float = 1.0, factor: float = 0.9) -> OperatorStatistics:
    plain = TensorStatistics(elements=6, amax=1.0, square_sum=3.0 * scale)
    return OperatorStatistics(
        name=name,
        op_type="linear",
        kind=OperatorKind.PRODUCT,
        calls=1,
        products=(ProductSizes(products=1, rows=2, contraction=5, columns=3),),
        first_parameter=None,
        second_parameter="fc.weight",
        first=operand(10, 20.0 * scale, factor=factor),
        second=operand(15, 5.0),
        output=plain,
        output_gradient=plain,
        second_gradient=TensorStatistics(elements=15, amax=1.0, square_sum=2.0),
        alignment={"first>output/tensor": 1.5 * scale},
        gains={"first": Gain(uniform=scale, floating=2.0)},
    )


def model(**changes: object) -> ModelStatistics:
    fields: dict[str, object] = {
        "batches": 1,
        "operators": (operator(),),
        "signals": {"norm/layer_norm": Signal(elements=4, input_square_sum=2.0, output_square_sum=4.0)},
        "model_fingerprint": "abc",
    }
    return ModelStatistics(**{**fields, **changes})  # type: ignore[arg-type]


def _text() -> str:
    return json.dumps(encode(model(), version="qsync-statistics/3"), indent=1)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    save_statistics(model(), path)
    assert load_statistics(path) == model()
    assert [entry.name for entry in tmp_path.iterdir()] == ["statistics.json"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"qsync-statistics/3"', '"qsync-statistics/9"', "format is 'qsync-statistics/9'"),
        ('"batches": 1', '"batches": 0', "batches is 0"),
        ('"batches": 1', '"batches": "one"', "batches is 'one', but it must be an integer of at least 1"),
        ('"batches": 1', '"batches": true', "batches is True, but it must be an integer of at least 1"),
        ('"batches": 1', '"batches": 1, "extra": 2', "unknown key 'extra'"),
        ('"square_sum": 5.0', '"square_sum": NaN', "NaN"),
        ('"square_sum": 5.0', '"square_sum": -5.0', r"second.*square_sum is -5.0"),
        ('"square_sum": 5.0', '"square_sum": 1e999', r"square_sum is inf"),
        (
            '"square_sum": 5.0',
            '"sum": 5.0',
            r"'fc/linear': second: the key 'square_sum' is missing.*collect the statistics again",
        ),
        ('"kind": "product"', '"kind": "sum"', "kind is 'sum', but allowed are product, lookup, attention"),
        ('"first>output/tensor"', '"first>out/tensor"', "alignment: unknown key 'first>out/tensor'"),
        ('"INT8/tensor"', '"INT4/tensor"', "first: rounding: unknown key 'INT4/tensor'"),
        ('"calls": 1,', "", "the key 'calls' is missing"),
    ],
)
def test_bad_files_are_refused_with_the_place_and_the_value(old: str, new: str, message: str, tmp_path: Path) -> None:
    text, path = _text(), tmp_path / "statistics.json"
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ProblemError, match=message):
        load_statistics(path)


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "short.json").write_text(_text()[:-20])
    with pytest.raises(ProblemError, match="truncated"):
        load_statistics(tmp_path / "short.json")
    with pytest.raises(ProblemError, match="cannot read"):
        load_statistics(tmp_path / "none.json")


def test_an_operator_named_twice_or_missing_is_named() -> None:
    with pytest.raises(ProblemError, match="'fc/linear' has statistics twice"):
        model(operators=(operator(),) * 2)
    with pytest.raises(ProblemError, match="no statistics for operator 'other'"):
        model()["other"]


def test_variance_is_closed_form_times_measured_factor() -> None:
    tensor = operand(10, 20.0, amax=127.0, factor=0.5)
    assert tensor.variance("INT8/tensor", Rounding.STOCHASTIC) == pytest.approx(0.5 / 6)
    assert tensor.variance("INT8/tensor", Rounding.NEAREST) == pytest.approx(0.25 / 12)
    assert tensor.variance(None, Rounding.NEAREST) == 0.0


def test_merge_averages_what_the_parts_predict() -> None:
    parts = [model(), model(batches=3, operators=(operator(scale=2.0, factor=0.3),))]
    merged = merge_statistics(parts)
    assert merged.batches == 4
    for rounding in Rounding:
        wanted = [p["fc/linear"].first.variance("INT8/tensor", rounding) for p in parts]
        found = merged["fc/linear"].first.variance("INT8/tensor", rounding)
        assert found == pytest.approx((wanted[0] + 3 * wanted[1]) / 4)

    def path(part: ModelStatistics) -> float:
        o = part["fc/linear"]
        noise = o.first.variance("INT8/tensor", Rounding.STOCHASTIC)
        return o.alignment["first>output/tensor"] * noise * o.second.mean_square

    assert path(merged) == pytest.approx((path(parts[0]) + 3 * path(parts[1])) / 4)
    assert merged["fc/linear"].gains["first"].uniform == pytest.approx((1 + 3 * 2) / 4)


def test_merged_gradient_noise_pools_the_scatter_within_the_parts() -> None:
    """A variance estimated from n batches has n - 1 degrees of freedom; parts without it have no say."""
    parts = [
        model(batches=3, gradient_noise=GradientNoise(mean_square_norm=10.0, variance=6.0)),
        model(batches=2, gradient_noise=GradientNoise(mean_square_norm=20.0, variance=9.0)),
        model(batches=1),
    ]
    noise = merge_statistics(parts).gradient_noise
    assert noise is not None
    assert noise.mean_square_norm == pytest.approx((3 * 10.0 + 2 * 20.0) / 5)
    assert noise.variance == pytest.approx((2 * 6.0 + 1 * 9.0) / 3)
    assert merge_statistics([model(), model()]).gradient_noise is None


@pytest.mark.parametrize("shape", ["floating", "tensor", "channel"])
def test_merged_alignments_predict_the_mean_of_their_products(shape: str) -> None:
    """Noise of a tensor times the signal that multiplies it, times their alignment, averages over batches."""
    key = f"first>output/{shape}"
    parts = [
        model(batches=batches, operators=(replace(operator(scale=scale), alignment={key: alignment}),))
        for batches, scale, alignment in ((1, 1.0, 1.5), (3, 4.0, 0.5))
    ]
    merged = merge_statistics(parts)

    def product(statistics: ModelStatistics) -> float:
        found = statistics["fc/linear"]
        noise = (
            found.first.mean_square
            if shape == "floating"
            else found.first.variance(f"INT8/{shape}", Rounding.STOCHASTIC)
        )
        return found.alignment[key] * noise * found.second.mean_square

    assert product(merged) == pytest.approx((product(parts[0]) + 3 * product(parts[1])) / 4)


def test_merged_signals_are_means_by_batches() -> None:
    def part(batches: int, scale: float, flips: tuple[float, ...]) -> ModelStatistics:
        signal = Signal(
            elements=4, input_square_sum=2.0 * scale, output_square_sum=3.0 * scale, curvature=0.5 * scale,
            noise_weight=scale, noise_ratio=0.1 * scale, flips=flips,
        )  # fmt: skip
        return model(batches=batches, signals={"r": signal}, shift=7.0 * scale)

    flips = tuple(float(k + 1) for k in range(len(SIGN_CHANGE_RATIOS)))
    merged = merge_statistics([part(1, 1.0, flips), part(3, 3.0, ())])
    signal = merged.signals["r"]
    assert (signal.input_square_sum, signal.output_square_sum) == pytest.approx((5.0, 7.5))
    assert (signal.curvature, signal.noise_weight, signal.noise_ratio) == pytest.approx((1.25, 2.5, 0.25))
    assert signal.flips == pytest.approx([flip / 4 for flip in flips])
    assert (signal.adaptive_flips, merged.shift) == ((), pytest.approx(17.5))


def test_merge_of_equal_parts_is_the_part() -> None:
    merged = merge_statistics([model(), model()])
    assert merged.batches == 2
    alignment = merged["fc/linear"].alignment
    assert alignment == pytest.approx(operator().alignment)
    exact = replace(merged["fc/linear"], alignment=operator().alignment)
    assert replace(merged, batches=1, operators=(exact,)) == model()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (model(model_fingerprint="xyz"), "different models"),
        (model(operators=(operator("a"),)), "different operators"),
        (model(signals={}), "different signals"),
        (model(operators=(replace(operator(), gains={}),)), "probed in some parts only"),
        (model(operators=(replace(operator(), second_gradient=None),)), "gradients in some parts only"),
        (
            model(
                operators=(replace(operator(), products=(ProductSizes(products=1, rows=4, contraction=5, columns=3),)),)
            ),
            "batches of one shape",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(other: ModelStatistics, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        merge_statistics([model(), other])


def test_nothing_to_merge() -> None:
    with pytest.raises(ProblemError, match="at least one"):
        merge_statistics([])
