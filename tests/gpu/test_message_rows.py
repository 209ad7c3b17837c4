"""The CUDA kernels of messages against plain PyTorch, bit for bit."""

import pytest

pytest.importorskip("torch")
import torch

from qsync_opt.kernels.messages import WIDTHS, pack_rows, unpack_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "shape", [(0, 8), (1, 1), (5, 7), (33, 100), (61, 24), (77, 64), (9, 128), (1000, 256), (41, 1032)]
)
@pytest.mark.parametrize("bits", WIDTHS)
def test_cards_send_the_bytes_of_the_reference(shape, bits):
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn((shape[0] + 2, shape[1]), generator=generator) * 100
    if shape[0] > 4:
        x[0, 0], x[1, -1], x[2] = torch.nan, torch.inf, 0.1
        x[3], x[4] = x[3] * 1e-38, x[4] * 1e30  # steps whose reciprocals are not taken
    index = torch.randperm(x.shape[0], generator=generator)
    expected = pack_rows(x, index, bits, -5, backend="reference")
    backend = "compiled" if bits < 32 else "auto"
    wire = pack_rows(x.cuda(), index.cuda(), bits, -5, backend=backend)
    assert torch.equal(wire.cpu(), expected)
    out, plain = torch.zeros_like(x).cuda(), torch.zeros_like(x)
    unpack_rows(wire, index.cuda(), out, bits, backend=backend)
    unpack_rows(expected, index, plain, bits, backend="reference")
    assert torch.equal(out.cpu().nan_to_num(7.0), plain.nan_to_num(7.0))
