import math

import pytest
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.quantize import dequantize, quantize_fp8, quantize_int8

NEAREST = KernelOptions(rounding="nearest")


@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 3), (2, 3, 4), (2, 3, 4, 5), (300, 400)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_rounds_half_to_even_with_the_scale_of_the_tensor(shape, dtype):
    x = torch.randn(shape).to(dtype)
    codes, scale = quantize_int8(x, None, NEAREST)
    assert codes.dtype is torch.int8
    assert scale.dtype is torch.float32
    assert scale.item() == pytest.approx(x.float().abs().max().item() / 127, rel=1e-6)
    error = (codes.double() * scale.double() - x.double()).abs().max().item()
    assert error <= scale.item() * 0.5001
    ties = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0])
    assert quantize_int8(ties, None, NEAREST).codes.tolist() == [0, 2, 2, 0, -2, 127]


@pytest.mark.parametrize("dims", [(0,), (1,), (1, 2), (0, 1, 2)])
def test_scales_are_those_of_the_slices(dims):
    x = torch.randn(4, 5, 6) * torch.logspace(-3, 3, 4)[:, None, None]
    codes, scale = quantize_int8(x, dims, NEAREST)
    assert torch.equal(scale, x.abs().amax(dims, keepdim=True) / 127)
    assert torch.equal(codes, torch.round(x * scale.reciprocal()).to(torch.int8))
    assert bool((codes.abs().amax(dims) == 127).all())


@pytest.mark.parametrize("granularity", [None, (1,)])
def test_stochastic_rounding_is_unbiased(granularity):
    x = torch.randn(40, 50)
    total = torch.zeros(40, 50, dtype=torch.float64)
    squares = torch.zeros(40, 50, dtype=torch.float64)
    draws = 400
    for draw in range(draws):
        codes, scale = quantize_int8(x, granularity, KernelOptions(seed=1, offset=draw))
        error = (codes.double() * scale.double() - x.double()) / scale.double()
        total += error
        squares += error.square()
        assert error.abs().max().item() < 1.0001
    # Per element the error has variance f(1-f) <= 1/4; 6 standard deviations over 2000 elements.
    assert (total / draws).abs().max().item() < 6 * 0.5 / math.sqrt(draws)
    # The error of one element has variance f(1 - f), f its place between two codes; 800000 draws in all.
    place = (x.double() / scale.double()).frac().abs()
    assert abs((total / draws).mean().item()) < 5 * math.sqrt(1 / 6 / (draws * 2000))
    expected = (place * (1 - place)).mean().item()
    assert (squares / draws).mean().item() == pytest.approx(expected, rel=0.01)
    assert expected == pytest.approx(1 / 6, rel=0.1)


def test_exact_values_stay_and_codes_stay_in_range():
    grid = torch.arange(-127, 128, dtype=torch.float32)
    for offset in range(50):
        assert torch.equal(quantize_int8(grid, None, KernelOptions(offset=offset)).codes, grid.to(torch.int8))
    awkward = torch.full((1 << 16,), 0.1).index_fill(0, torch.arange(0, 1 << 16, 3), -0.3)
    for offset in range(20):
        assert quantize_int8(awkward, None, KernelOptions(offset=offset)).codes.to(torch.int32).abs().max() == 127


def test_the_same_bits_with_any_number_of_threads_and_every_time():
    x = torch.randn(3, 70_000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            results.append(quantize_int8(x, None, KernelOptions(seed=3)).codes)
            results.append(quantize_int8(x, (1,), KernelOptions(seed=3)).codes)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], codes) for codes in results[2::2])
    assert all(torch.equal(results[1], codes) for codes in results[3::2])
    assert not torch.equal(results[0], quantize_int8(x, None, KernelOptions(seed=4)).codes)
    assert not torch.equal(results[0], quantize_int8(x, None, KernelOptions(seed=3, offset=1)).codes)
    assert not torch.equal(results[0], quantize_int8(x, None, KernelOptions(seed=3), stream=1).codes)


def test_any_memory_layout():
    x = torch.randn(4, 6, 5, 3)
    for view in (x.permute(3, 1, 0, 2), x.contiguous(memory_format=torch.channels_last), x[:, ::2], x.mT):
        codes, scale = quantize_int8(view, None, NEAREST)
        assert torch.equal(codes, torch.round(view * scale.reciprocal()).to(torch.int8))
    # A dense tensor and its transposition get the same noise: the layout decides, not the view.
    w = torch.randn(33, 65)
    assert torch.equal(quantize_int8(w.t()).codes, quantize_int8(w).codes.t())


def test_special_values():
    codes, scale = quantize_int8(torch.zeros(3, 4))
    assert not codes.any()
    assert scale.item() > 0
    assert not dequantize(quantize_int8(torch.zeros(3, 4)), torch.bfloat16).any()
    for poison in (math.nan, math.inf, -math.inf):
        x = torch.ones(3, 4)
        x[1, 2] = poison
        assert dequantize(quantize_int8(x), torch.float32).isnan().all()
        rows = dequantize(quantize_int8(x, (1,)), torch.float32)
        assert rows[1].isnan().all()
        assert not rows[[0, 2]].isnan().any()
        assert dequantize(quantize_fp8(x), torch.float32).isnan().all()
    tiny = torch.full((4,), 1e-42)
    assert dequantize(quantize_int8(tiny), torch.float32).isfinite().all()
    for shape in ((0,), (0, 4), (4, 0)):
        assert quantize_int8(torch.empty(shape), (len(shape) - 1,)).codes.shape == shape
        assert quantize_int8(torch.empty(shape)).scale.isfinite().all()


def test_dequantize_rounds_once():
    x = torch.randn(50, 60)
    for dims in (None, (1,)):
        quantized = quantize_int8(x, dims)
        exact = quantized.codes.float() * quantized.scale
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.equal(dequantize(quantized, dtype), exact.to(dtype))


def test_fp8_stays_on_the_grid_and_is_unbiased():
    x = torch.randn(30, 40)
    x[0, 0] = 5.0
    nearest = quantize_fp8(x, None, NEAREST)
    scaled = x * nearest.scale.reciprocal()
    assert torch.equal(nearest.codes.float(), scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    total = torch.zeros(30, 40, dtype=torch.float64)
    for draw in range(400):
        codes, scale = quantize_fp8(x, None, KernelOptions(offset=draw))
        total += codes.double() * scale.double()
    step = torch.exp2((torch.frexp(scaled)[1] - 1).float()).clamp_min(2.0**-6) * 2**-3 * nearest.scale
    assert ((total / 400 - x.double()) / step).abs().max().item() < 6 * 0.5 / 20
    assert quantize_fp8(x, (1,), NEAREST).scale.shape == (30, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounding", "up"),
        ("activation_granularity", "channel"),
        ("weight_granularity", "row"),
        ("half_format", "FP32"),
        ("backend", "fast"),
        ("seed", 1.5),
        ("offset", None),
    ],
)
def test_bad_options_are_named(field, value):
    with pytest.raises(UnsupportedError, match=field):
        KernelOptions(**{field: value})
