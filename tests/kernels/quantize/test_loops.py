"""The loop that numba compiles rounds with the bits of plain PyTorch."""

import pytest
import torch

from qsync_opt.kernels import KernelOptions
from qsync_opt.kernels.quantize import formats, quantize_int8


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "dims"), [((0, 4), None), ((7,), None), ((64, 256), (1,)), ((3, 5, 7), None), ((131, 517), None)]
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
