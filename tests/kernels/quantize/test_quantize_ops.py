import math

import pytest
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.quantize import (
    BLOCK,
    FORMATS,
    GRANULARITIES,
    ROUNDINGS,
    dequantize_matrix,
    format_of,
    quantize_int8,
    quantize_matrix,
    spread,
    stepped_key,
    stream_key,
)

DTYPES = tuple(FORMATS)


def _steps(y, form):
    """Distance of the two codes around each value in units of its scale, float64."""
    if form.mantissa_bits == 0:
        return torch.ones_like(y)
    exponent = (torch.frexp(y.abs())[1] - 1).clamp_min(form.min_exponent)
    return torch.ldexp(torch.ones_like(y), exponent - form.mantissa_bits)


@pytest.mark.parametrize("format", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 128), (5, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_within_the_rounding_of_the_format(format, granularity, shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None]).to(dtype)
    form = format_of(format)
    for rounding, share in (("nearest", 0.5), ("stochastic", 1.0)):
        result = quantize_matrix(x, format, granularity=granularity, rounding=rounding, key=3)
        scale = spread(result.scale, *shape).double()
        exact = x.double() / scale
        error = (result.codes.float().double() - exact).abs()
        # The scaled value is formed in FP32: two roundings of 2**-24 each, and one of the reciprocal.
        assert bool((error <= share * _steps(exact, form) + exact.abs() * 2.0**-22).all())
        expected = {"tensor": (1, 1), "row": (shape[0], 1), "channel": (1, shape[1])}
        assert tuple(result.scale.shape) == expected.get(granularity, (shape[0], -(-shape[1] // BLOCK)))
        largest = result.codes.float().abs().max().item()
        assert largest == form.largest


@pytest.mark.parametrize("format", DTYPES, ids=str)
def test_stochastic_rounding_has_the_mean_and_variance_of_theory(format):
    form = format_of(format)
    # Every octave of the format, its subnormals and its largest code are hit.
    x = torch.logspace(-11, 0, 1000, base=2)[:, None].expand(1000, 500).contiguous()
    codes, scale, _ = quantize_matrix(x, format, key=stream_key(1, 2, 3))
    exact = x.double() / scale.double()
    step = _steps(exact, form)
    place = (exact / step).frac()
    error = (codes.float().double() - exact) / step
    variance = (place * (1 - place)).mean(1)
    assert bool((error.mean(1).abs() <= 5 * (variance / 500).sqrt() + 2.0**-15).all())
    assert error.mean().abs().item() <= 4 * math.sqrt(variance.mean().item() / x.numel()) + 2.0**-16
    assert error.square().mean().item() == pytest.approx(variance.mean().item(), rel=0.05)


@pytest.mark.parametrize("format", DTYPES[1:], ids=str)
def test_every_code_of_a_floating_format_stays_itself(format):
    form = format_of(format)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(format)
    finite = every.float().isfinite() & (every.float().abs() <= form.largest)
    x = every.float()[finite].view(1, -1)
    for rounding in ROUNDINGS:
        for key in range(5):
            codes = quantize_matrix(x, format, rounding=rounding, key=key).codes
            assert torch.equal(codes.view(torch.uint8), every[finite].view(1, -1).view(torch.uint8))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", DTYPES, ids=str)
def test_the_transposed_copy_holds_the_same_codes(format, rounding):
    x = torch.randn(12, 20)
    for granularity in ("tensor", "row", "channel"):
        result = quantize_matrix(x, format, granularity=granularity, rounding=rounding, transposed=True)
        assert result.transposed.is_contiguous()
        assert torch.equal(result.transposed.float().t(), result.codes.float())
    assert quantize_matrix(x, format).transposed is None


def test_strides_do_not_change_the_codes():
    x = torch.randn(10, 24)
    for view in (x.t().contiguous().t(), torch.randn(10, 48)[:, ::2].copy_(x), torch.randn(20, 24)[::2].copy_(x)):
        for granularity in GRANULARITIES:
            mine = quantize_matrix(view, torch.int8, granularity=granularity)
            theirs = quantize_matrix(x, torch.int8, granularity=granularity)
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scale, theirs.scale)


def test_a_step_gives_new_noise_and_the_same_for_the_same_step():
    x, step = torch.randn(30, 40), torch.zeros(1, dtype=torch.int64)
    first = quantize_matrix(x, torch.int8, step=step).codes
    assert torch.equal(first, quantize_matrix(x, torch.int8, step=step).codes)
    step.add_(1)
    assert not torch.equal(first, quantize_matrix(x, torch.int8, step=step).codes)
    keys = {int(stepped_key(9, torch.tensor([value]))) for value in (-1, 0, 1, 2**62)}
    assert len(keys) == 4
    assert stepped_key(9, None) == 9
    stepped = KernelOptions(step=step)
    assert not torch.equal(quantize_int8(x, None, stepped).codes, quantize_int8(x, None, KernelOptions()).codes)


def test_values_of_codes_round_once():
    x = torch.randn(6, 300)
    for granularity in GRANULARITIES:
        for format in DTYPES:
            codes, scale, _ = quantize_matrix(x, format, granularity=granularity)
            exact = codes.float() * spread(scale, 6, 300)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert torch.equal(dequantize_matrix(codes, scale, dtype), exact.to(dtype))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices(shape):
    for granularity in GRANULARITIES:
        codes, scale, _ = quantize_matrix(torch.empty(shape), torch.int8, granularity=granularity)
        assert codes.shape == shape
        assert bool(scale.isfinite().all())
        assert dequantize_matrix(codes, scale, torch.bfloat16).shape == shape


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", DTYPES, ids=str)
def test_registration(granularity, format):
    # torch cannot compare FP8 tensors, which two of the four checks do with the results.
    checks = ("test_autograd_registration", "test_faketensor")
    if format is torch.int8:
        checks = (*checks, "test_schema", "test_aot_dispatch_dynamic")
    x, step = torch.randn(8, 160), torch.zeros(1, dtype=torch.int64)
    for rounding in ROUNDINGS:
        arguments = (x, format, granularity, rounding, 5, step, granularity != "block")
        torch.library.opcheck(torch.ops.qsync_opt.quantize.default, arguments, test_utils=checks)
    codes, scale, _ = quantize_matrix(x, format, granularity=granularity)
    values = (codes, scale, torch.bfloat16)
    torch.library.opcheck(torch.ops.qsync_opt.dequantize.default, values, test_utils=checks)


def test_refusals():
    x = torch.randn(4, 8)
    with pytest.raises(UnsupportedError, match="3-dimensional"):
        quantize_matrix(x[None], torch.int8)
    with pytest.raises(UnsupportedError, match=r"torch\.float64"):
        quantize_matrix(x.double(), torch.int8)
    with pytest.raises(UnsupportedError, match=r"torch\.int16"):
        quantize_matrix(x, torch.int16)
    with pytest.raises(UnsupportedError, match="granularity='rows'"):
        quantize_matrix(x, torch.int8, granularity="rows")
    with pytest.raises(UnsupportedError, match="rounding='up'"):
        quantize_matrix(x, torch.int8, rounding="up")
    with pytest.raises(UnsupportedError, match="blocks have no transposed copy"):
        quantize_matrix(x, torch.int8, granularity="block", transposed=True)
    codes, scale, _ = quantize_matrix(x, torch.int8)
    with pytest.raises(UnsupportedError, match=r"scales \(2, 2\)"):
        dequantize_matrix(codes, scale.expand(2, 2), torch.float32)
    with pytest.raises(UnsupportedError, match=r"torch\.int32"):
        dequantize_matrix(codes, scale, torch.int32)
    with pytest.raises(UnsupportedError, match=r"codes of type torch\.float32"):
        dequantize_matrix(x, scale, torch.float32)
