"""The loops that numba compiles scale and round with the bits of plain PyTorch."""

import pytest
import torch

from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.quantize import Quantized, dequantize, formats, quantize_int8, rescaled


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((0, 4), None),
        ((7,), None),
        ((64, 256), (1,)),
        ((64, 256), (0,)),
        ((9, 517), (1,)),
        ((300, 1, 3, 3), (1, 2, 3)),
        ((3, 5, 7), (0, 2)),
        ((131, 517), None),
    ],
)
def test_the_codes_are_those_of_plain_pytorch(shape, dims, dtype, rounding, monkeypatch):
    pytest.importorskip("numba")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for seed, step in ((0, None), (2**63 + 5, None), (3, torch.tensor(12))):
        options = KernelOptions(rounding=rounding, seed=seed, step=step)
        compiled = quantize_int8(x, dims, options, stream=2)
        with monkeypatch.context() as patch:
            patch.setattr(formats, "_loops", lambda: None)
            plain = quantize_int8(x, dims, options, stream=2)
        assert torch.equal(compiled.codes, plain.codes)
        assert torch.equal(compiled.scale, plain.scale)


@pytest.mark.parametrize("dims", [None, (1, 2, 3), (2, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_codes_keep_the_layout_of_the_values_whichever_loop_runs(dims, layout, monkeypatch):
    pytest.importorskip("numba")
    x = torch.randn(2, 5, 3, 4).contiguous(memory_format=layout)
    compiled = quantize_int8(x, dims)
    monkeypatch.setattr(formats, "_loops", lambda: None)
    plain = quantize_int8(x, dims)
    assert compiled.codes.stride() == plain.codes.stride() == x.stride()
    assert torch.equal(compiled.codes, plain.codes) and torch.equal(compiled.scale, plain.scale)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_have_the_scale_nan_and_others_their_own(bad):
    x = torch.tensor([[1.0, bad, 2.0], [1.0, -2.54, 2.0], [0.0, -0.0, 0.0], [1e-44, -3e-44, 0.0]])
    scale = quantize_int8(x, (1,), KernelOptions(rounding="nearest")).scale.flatten().tolist()
    assert scale[0] != scale[0]
    assert scale[1:] == [torch.tensor(2.54).div(torch.tensor(127.0)).item(), 2.0**-126, 2.0**-126]


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((9, 517), (1, 1)),
        ((9, 517), (9, 1)),
        ((5, 3, 7, 7), (5, 1, 1, 1)),
        ((3, 4), (3, 4)),
        ((4, 4), (4,)),  # one scale per column, as torch broadcasts
    ],
)
def test_values_are_those_of_plain_pytorch(shape, sizes, monkeypatch):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    quantized = Quantized(codes, torch.rand(sizes, generator=generator))
    compiled = dequantize(quantized, torch.float32)
    monkeypatch.setattr(formats, "_loops", lambda: None)
    assert torch.equal(compiled, dequantize(quantized, torch.float32))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "channel"), [((33, 70), 1), ((3, 5, 70), 2), ((3, 70, 7, 6), 1), ((0, 4), 1)])
def test_sums_are_scaled_as_by_plain_pytorch(shape, channel, dtype, granularity, biased, monkeypatch):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    per_sample = [size if dim < channel and granularity == "row" else 1 for dim, size in enumerate(shape)]
    per_channel = [size if dim == channel and granularity == "row" else 1 for dim, size in enumerate(shape)]
    scales = [torch.rand(sizes, generator=generator) / 100 for sizes in (per_sample, per_channel)]
    bias = torch.randn(shape[channel], generator=generator) if biased else None
    exact = torch.randint(-(2**20), 2**20, shape, generator=generator).float()
    exact.flatten()[:3] = torch.tensor([0.0, -0.0, torch.nan])[: exact.numel()]
    off = exact + torch.rand(shape, generator=generator) * 0.4  # as convolutions by transforms leave it
    compiled = [rescaled(sums.clone(), *scales, bias, dtype, channel) for sums in (exact, off)]
    monkeypatch.setattr(formats, "_loops", lambda: None)
    plain = [rescaled(sums.clone(), *scales, bias, dtype, channel) for sums in (exact, off)]
    for result, expected in zip(compiled, plain, strict=True):
        assert result.dtype is dtype
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(result[result == 0].signbit(), expected[expected == 0].signbit())
        torch.testing.assert_close(result, plain[0], rtol=0, atol=0, equal_nan=True)


def test_a_bias_of_another_length_is_refused_as_by_torch():
    one = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="size"):
        rescaled(torch.ones(2, 8), one, one, torch.ones(5), torch.bfloat16, 1)
