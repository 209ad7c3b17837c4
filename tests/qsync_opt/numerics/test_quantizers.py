import numpy as np
import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import FormatQuantizer, Granularity, Rounding
from qsync_opt.registry import Kind, create, entries


def test_the_variance_of_int8_is_that_of_rounding_at_random():
    rng = np.random.default_rng(0)
    values = rng.normal(size=200_000)
    largest = np.abs(values).max()
    scale = largest / 127
    low = np.floor(values / scale)
    rounded = (low + (rng.random(values.shape) < values / scale - low)) * scale
    quantizer = create(Kind.QUANTIZER, "int8")
    expected = quantizer.variance(float(np.mean(values**2)), {"tensor": float(largest**2)})
    assert np.mean((rounded - values) ** 2) == pytest.approx(expected, rel=0.02)
    assert abs(np.mean(rounded - values)) < 4 * np.sqrt(expected / values.size)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("fp8", 8), ("bf16", 16), ("fp16", 16)])
def test_registered_quantizers(name, bits):
    quantizer = create(Kind.QUANTIZER, name)
    assert name in entries(Kind.QUANTIZER)
    assert (quantizer.bits, quantizer.unbiased) == (bits, True)
    assert quantizer.variance(1.0, {"tensor": 16.0}) > 0


def test_rounding_to_nearest_is_biased_and_halves_the_error():
    nearest = FormatQuantizer("INT8", Rounding.NEAREST, Granularity.ROW)
    stochastic = FormatQuantizer("INT8", granularity=Granularity.ROW)
    assert not nearest.unbiased
    moments = (1.0, {"row": 4.0})
    assert nearest.variance(*moments) == pytest.approx(stochastic.variance(*moments) / 2)


def test_an_unknown_format_is_refused():
    with pytest.raises(UnsupportedError, match="unknown precision 'INT3'"):
        FormatQuantizer("INT3")
