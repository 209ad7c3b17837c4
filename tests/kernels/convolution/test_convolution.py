import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.autograd import convolution, scaled_convolution
from qsync_opt.kernels.convolution import MAX_TERMS, scaled_conv2d
from qsync_opt.kernels.quantize import quantize_int8


def codes(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def exact(x, weight, x_scale, weight_scale, bias, activation="none", **geometry) -> Tensor:
    """The result in FP64, from the values of the codes."""
    values = x.double() * x_scale.double().reshape(-1, 1, 1, 1)
    kernel = weight.double() * weight_scale.double().reshape(-1, 1, 1, 1)
    result = torch.nn.functional.conv2d(values, kernel, None if bias is None else bias.double(), **geometry)
    return result.relu() if activation == "relu" else result


# Unit roundoff of the output; FP32 is rounded three times (scale, product, sum).
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 4 * 2.0**-24}
GEOMETRIES = [
    {},
    {"padding": (1, 2)},
    {"stride": (2, 3), "padding": (2, 0)},
    {"dilation": (2, 1), "padding": (1, 1)},
    {"groups": 2},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_the_plain_operator_is_the_convolution_of_the_values(geometry, dtype):
    x, weight = codes(3, 6, 11, 9), codes(8, 6 // geometry.get("groups", 1), 3, 2)
    for samples, channels, activation in itertools.product((1, 3), (1, 8), ("none", "relu")):
        x_scale, weight_scale, bias = torch.rand(samples) / 100, torch.rand(channels) / 100, torch.randn(8)
        found = scaled_conv2d(
            x, weight, x_scale, weight_scale, bias, **geometry, activation=activation, out_dtype=dtype
        )
        expected = exact(x, weight, x_scale, weight_scale, bias, activation, **geometry)
        assert found.dtype is dtype
        assert found.is_contiguous(memory_format=torch.channels_last)
        # Relative to the terms, since the bias may cancel the sum.
        unit = expected.abs() + bias.double().abs().reshape(-1, 1, 1)
        assert ((found.double() - expected).abs() <= ROUNDOFF[dtype] * 1.01 * unit).all()


def test_layouts_give_the_same_result():
    x, weight, factors = codes(2, 16, 7, 8), codes(4, 16, 3, 3), (torch.rand(1), torch.rand(4))
    expected = scaled_conv2d(x, weight, *factors)
    last = [tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight)]
    assert torch.equal(scaled_conv2d(*last, *factors), expected)
    wide = torch.cat([codes(2, 3, 7, 8), x], 1)
    assert torch.equal(scaled_conv2d(wide[:, 3:], weight, *factors), expected)
    flipped = x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert torch.equal(scaled_conv2d(flipped, weight, *factors), expected)


def test_an_empty_batch():
    found = scaled_conv2d(codes(0, 4, 6, 7), codes(5, 4, 3, 3), torch.rand(1), torch.rand(5), stride=(2, 2))
    assert found.shape == (0, 5, 2, 3)


@pytest.mark.parametrize("samples", [1, 2])
def test_it_agrees_with_the_operator_of_the_training_layer(samples):
    x, weight, bias = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3), torch.randn(6)
    quantized = quantize_int8(x, (1, 2, 3) if samples == 2 else None), quantize_int8(weight, (1, 2, 3))
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    found = scaled_conv2d(
        quantized[0].codes, quantized[1].codes, quantized[0].scale, quantized[1].scale, bias, padding=(1, 1)
    )
    assert torch.equal(found, scaled_convolution(*quantized, bias, geometry, torch.bfloat16, "reference"))


@pytest.mark.parametrize("bias", [None, torch.randn(8)], ids=["no bias", "bias"])
def test_the_operator_passes_torchs_checks(bias):
    arguments = (codes(2, 7, 8, 6), codes(8, 3, 2, 6), torch.rand(2), torch.rand(8), bias)
    operator = torch.ops.qsync_opt.scaled_conv2d.default
    torch.library.opcheck(operator, (*arguments, [1, 2], [1, 0], [1, 1], 1, "relu", torch.float16))
    torch.library.opcheck(operator, (*arguments, [1, 1], [0, 2], [2, 1], 1, "none", torch.float32))


def test_a_compiled_function_gives_the_same_bits():
    given = codes(2, 8, 8, 8), codes(8, 8, 3, 3), torch.rand(1), torch.rand(8), torch.randn(8)

    def function(*arguments: Tensor) -> Tensor:
        return scaled_conv2d(*arguments, padding=(1, 1), activation="relu")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), function(*given))


def test_weights_are_quantized_once_per_step_where_that_is_asked_for():
    zeros, weight = torch.zeros(2, 4, 6, 6), torch.nn.Parameter(torch.randn(8, 4, 3, 3))
    options = KernelOptions(weights="step", backend="reference")
    geometry = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    other = options.at(seed=0, offset=1)
    zeros[:, :, 3, 3] = 1  # exact in INT8: only the weight's noise is left

    def result(chosen: KernelOptions) -> Tensor:
        return convolution(zeros, weight, None, geometry, chosen).detach()

    first = result(options)
    assert torch.equal(result(other), first)
    assert not torch.equal(result(replace(other, weights="call")), first)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(result(options), 2 * first)


GOOD = {
    "x": codes(2, 4, 6, 6),
    "weight": codes(6, 4, 3, 3),
    "x_scale": torch.rand(1),
    "weight_scale": torch.rand(6),
    "bias": torch.randn(6),
}
BAD = [
    ({"x": torch.randn(2, 4, 6, 6)}, r"x of shape \(2, 4, 6, 6\) and torch.float32; needed are INT8 codes"),
    ({"weight": codes(6, 4, 3)}, r"weight of shape \(6, 4, 3\)"),
    ({"weight": codes(6, 3, 3, 3)}, r"4 channels and a weight of shape \(6, 3, 3, 3\) do not fit 1 groups"),
    ({"groups": 4}, "do not fit 4 groups"),
    ({"groups": 0}, "do not fit 0 groups"),
    ({"x_scale": torch.rand(3)}, "x_scale has 3 elements of torch.float32; needed are 1 or 2"),
    ({"weight_scale": torch.rand(4)}, "weight_scale has 4 elements .* needed are 1 or 6"),
    ({"bias": torch.ones(6, dtype=torch.int32)}, "bias has 6 elements of torch.int32"),
    ({"bias": torch.ones(6, device="meta")}, "bias is on meta, x on cpu"),
    ({"weight": codes(6, 4, 3, 3).to("meta")}, "the weight is on meta, x on cpu"),
    ({"stride": (0, 1)}, r"stride \(0, 1\); needed are two integers from 1"),
    ({"padding": (1,)}, r"padding \(1,\); needed are two integers from 0"),
    ({"dilation": (3, 1)}, r"a kernel of \(3, 3\) does not fit an input of \(6, 6\)"),
    ({"activation": "gelu"}, "activation 'gelu'; allowed are none, relu"),
    ({"out_dtype": torch.float64}, "out_dtype torch.float64; allowed are BF16, FP16 and FP32"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_what_does_not_fit_is_refused_by_name(change, message):
    given = GOOD | change
    operands = [given.pop(name) for name in ("x", "weight", "x_scale", "weight_scale", "bias")]
    with pytest.raises(UnsupportedError, match=message):
        scaled_conv2d(*operands, **given)


def test_sums_that_may_overflow_are_refused():
    channels = MAX_TERMS // 9 + 1
    x, weight = torch.zeros(1, channels, 3, 3, dtype=torch.int8), torch.zeros(1, channels, 3, 3, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="may leave INT32; at most 133144"):
        scaled_conv2d(x, weight, torch.ones(1), torch.ones(1))
