"""Convolutions part by part of the batch have the results, gradients and layouts of the whole."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.autograd import convolution_parts
from qsync_opt.kernels.matmul import half

CALLS = {
    "line": ("conv1d", F.conv1d, (6, 3, 9), (4, 3, 3), {"padding": 1}),
    "strided groups": ("conv2d", F.conv2d, (6, 4, 9, 8), (6, 2, 3, 2), {"stride": 2, "padding": 1, "groups": 2}),
    "pixels": ("conv2d", F.conv2d, (6, 4, 9, 8), (6, 4, 1, 1), {}),
    "volumes": ("conv3d", F.conv3d, (6, 4, 3, 4, 5), (6, 4, 2, 2, 2), {}),
    "transposed": ("conv_transpose2d", F.conv_transpose2d, (6, 3, 4, 4), (3, 6, 2, 2), {"stride": 2}),
}

CASES = [(name, p) for name in CALLS for p in ("BF16", "INT8", "INT8-BWD8") if p == "BF16" or name != "transposed"]


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr(half, "_has_half_units", lambda: False)


def _passes(name, precision, layout, options):
    op_type, function, x_shape, weight_shape, kwargs = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(x_shape, generator=generator), torch.randn(weight_shape, generator=generator)
    bias = torch.randn(4 if x.dim() == 3 else 6, generator=generator)
    if x.dim() == 4:
        x = x.contiguous(memory_format=layout)
    if x.dim() == 5 and layout is torch.channels_last:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    result = ops.execute(op_type, precision, function, tuple(leaves), kwargs, options)
    gradients = torch.autograd.grad(result, leaves, torch.randn(result.shape, generator=generator).to(result.dtype))
    return result.detach(), *gradients


def _steps(x):
    """Strides of dimensions that have more than one element."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
@pytest.mark.parametrize(("name", "precision"), CASES)
@pytest.mark.parametrize("elements", [1, 100])
def test_parts_are_those_of_the_whole(without_units, name, precision, layout, granularity, elements, monkeypatch):
    options = KernelOptions(activation_granularity=granularity, backend="reference")
    whole = _passes(name, precision, layout, options)
    counts = []
    original = convolution_parts.parts_of

    def counted(*arguments):
        result = original(*arguments)
        counts.append(len(result))
        return result

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(convolution_parts, "_PART", elements)
    monkeypatch.setattr(convolution_parts, "parts_of", counted)
    parts = _passes(name, precision, layout, options)
    assert max(counts) > 1
    for own, expected in zip(parts, whole, strict=True):
        assert own.dtype is expected.dtype
        assert _steps(own) == _steps(expected)
        torch.testing.assert_close(own, expected, rtol=2**-7, atol=1e-5)
    if precision != "BF16":
        assert torch.equal(parts[0], whole[0])  # sums of codes are exact


@pytest.mark.parametrize("elements", [0, 100, 2**19, 2**20 - 1, 2**20, 3 * 2**19, 2**24])
@pytest.mark.parametrize("taps", [9, 2**20])
def test_parts_name_every_sample_once_and_are_no_smaller_than_the_weight(elements, taps, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    parts = convolution_parts.parts_of(7, elements, torch.empty(taps))
    assert [sample for part in parts for sample in range(*part.indices(7))] == list(range(7))
    least, size = max(2**19, taps), len(range(*parts[0].indices(7)))
    assert (len(parts) == 1) == (elements < 2 * least)
    assert size >= 2 and (len(parts) == 1 or size * elements / 7 >= least)
    assert size <= 3 or (size - 1) * elements / 7 < 2 * least
