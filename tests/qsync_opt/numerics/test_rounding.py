import numpy as np
import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import (
    GRADIENT_KINDS,
    Granularity,
    Rounding,
    closed_form_variance,
    fixed_point_variance,
    floating_point_variance,
    noise_kind,
    noise_kinds,
    smallest_exponent,
)


@pytest.mark.parametrize("rounding", Rounding)
def test_fixed_point_form_is_the_error_of_uniform_positions(rounding: Rounding) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-40, 40, 200_000)
    step = 0.75
    units = x / step
    down = np.floor(units)
    up = rng.random(x.size) < units - down if rounding is Rounding.STOCHASTIC else units - down > 0.5
    measured = np.mean(((down + up) * step - x) ** 2)
    assert fixed_point_variance(step**2, rounding) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("mantissa_bits", [3, 7, 10])
def test_floating_form_is_the_error_of_uniform_mantissas(rounding: Rounding, mantissa_bits: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(1, 2, 400_000) * 2.0 ** rng.integers(-3, 4, 400_000)
    step = 2.0 ** (np.floor(np.log2(x)) - mantissa_bits)
    units = x / step
    down = np.floor(units)
    up = rng.random(x.size) < units - down if rounding is Rounding.STOCHASTIC else units - down > 0.5
    measured = np.mean(((down + up) * step - x) ** 2)
    assert floating_point_variance(mantissa_bits, float(np.mean(x**2)), rounding) == pytest.approx(measured, rel=0.02)


def test_magnitude_enters_squared_and_small_numbers_count_less_than_large_ones() -> None:
    # A factor of the exponent itself, of its magnitude, or one that is clipped, would break each of these.
    one = floating_point_variance(10, 1.0, Rounding.STOCHASTIC)
    assert floating_point_variance(10, 2.0**10, Rounding.STOCHASTIC) == pytest.approx(one * 2**10)
    assert floating_point_variance(10, 2.0**-10, Rounding.STOCHASTIC) == pytest.approx(one / 2**10)
    assert floating_point_variance(10, 2.0**40, Rounding.STOCHASTIC) == pytest.approx(one * 2**40)


def test_mantissas_are_those_of_the_formats() -> None:
    def variance(kind: str) -> float:
        return closed_form_variance(kind, Rounding.STOCHASTIC, mean_square=1.0, mean_square_amax={})

    assert variance("FP16") == pytest.approx(2.0**-20 / 14)
    assert variance("TF32") == variance("FP16")
    assert variance("BF16") == pytest.approx(4**3 * variance("FP16"))
    # Gradients in FP8 have one bit of the mantissa less than other tensors.
    assert variance(GRADIENT_KINDS["FP8"]) == pytest.approx(4**8 * variance("FP16"))


def test_scale_of_every_granularity_is_its_own_and_squared() -> None:
    amax = {"tensor": 127.0**2 * 9, "channel": 127.0**2 * 4, "row": 127.0**2}
    found = [
        closed_form_variance(f"INT8/{g}", Rounding.STOCHASTIC, mean_square=1.0, mean_square_amax=amax)
        for g in ("tensor", "channel", "row")
    ]
    assert found == pytest.approx([9 / 6, 4 / 6, 1 / 6])


def test_ranges() -> None:
    assert {name: smallest_exponent(name) for name in ("BF16", "TF32", "FP16", "FP8")} == {
        "BF16": -126,
        "TF32": -126,
        "FP16": -14,
        "FP8": -6,
    }


def test_kinds_are_named_with_their_granularity_only_if_they_have_scales() -> None:
    assert noise_kind("BF16", Granularity.ROW) == "BF16"
    assert noise_kind("INT8", Granularity.ROW) == "INT8/row"
    assert set(noise_kinds(scaled=False)) < set(noise_kinds(scaled=True))


def test_unknown_kind_and_missing_scales_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="'INT4/tensor': allowed are"):
        closed_form_variance("INT4/tensor", Rounding.NEAREST, mean_square=1.0, mean_square_amax={})
    with pytest.raises(UnsupportedError, match="scales per row"):
        closed_form_variance("INT8/row", Rounding.NEAREST, mean_square=1.0, mean_square_amax={"tensor": 1.0})
