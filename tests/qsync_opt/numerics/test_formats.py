"""Precisions by rank, and the formats at the borders of operators."""

import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import closest_precision, formats_for, number_format


@pytest.mark.parametrize(
    ("wanted", "expected"), [("INT8", "INT8"), ("FP8", "FP16"), ("TF32", "FP32"), ("BF16", "FP16")]
)
def test_the_closest_precision_is_the_coarsest_that_is_fine_enough(wanted: str, expected: str) -> None:
    assert closest_precision(["FP32", "INT8", "FP16"], wanted) == expected


def test_without_a_finer_precision_the_finest_is_the_closest() -> None:
    assert closest_precision(["INT8", "BF16"], "FP32") == "BF16"


def test_8_bit_operators_have_borders_in_16_bits() -> None:
    borders = formats_for(("FP8", "TF32", "FP32"), "BF16")
    assert [border.output for border in borders.values()] == ["BF16", "FP32", "FP32"]
    assert borders["FP8"].gradient_input == borders["FP8"].gradient_output == "BF16"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown precision 'FP4': allowed are INT8"):
        number_format("FP4")
