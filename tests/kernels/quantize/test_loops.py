"""The loops that numba compiles scale and round with the bits of plain PyTorch."""

import pytest
import torch

from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.quantize import formats, quantize_int8


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
