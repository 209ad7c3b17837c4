"""The compiled codec of compressed all-reduce against its plain PyTorch specification, bit for bit."""

import math

import pytest
import torch

from qsync_opt.gradients import BLOCK, schemes
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.gradients import CODES, UNIT, Codec, Encoded, Layout

pytestmark = pytest.mark.gpu
PLAIN, COMPILED = Codec("reference"), Codec("compiled")
SUMS = [each for each in schemes().values() if each.transport == "sum"]
SIZES = (1, 3, 4, 255, 256, 257, 1000, 4099, 1 << 20)


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if not library.activate(UNIT):
        pytest.skip(f"the compiled codec does not run here: {library.reason(UNIT)}")


def gradient(elements, offset=0):
    torch.manual_seed(elements)
    x = torch.randn(elements + offset) * torch.logspace(-20, 10, elements + offset)
    if elements > 300:
        x[256:300] = 0.0
        x[-1] = math.inf
    return x


def same(mine, theirs):
    mine, theirs = mine.cpu(), theirs.cpu()
    assert mine.dtype == theirs.dtype
    if mine.dtype.is_floating_point:
        assert torch.equal(mine.isnan(), theirs.isnan())
        mine, theirs = mine.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("each", SUMS, ids=lambda each: each.name)
def test_sums(each, elements, offset):
    x = gradient(elements, offset)
    here, there = x[offset:], x.cuda()[offset:]
    layout, key = Layout(width=each.width, lanes=each.lanes, block=each.block or elements), 2**63 + elements
    scales = PLAIN.sum_scales(here, layout.block)
    same(COMPILED.sum_scales(there, layout.block), scales)
    for workers in (1, 2, 7):
        levels = each.levels(workers)
        codes = PLAIN.encode_sum(here, scales, levels, layout, key)
        same(COMPILED.encode_sum(there, scales.cuda(), levels, layout, key), codes)
        total = (codes.long() * workers).to(codes.dtype)
        same(
            COMPILED.decode_sum(total.cuda(), scales.cuda(), levels, workers, layout, elements),
            PLAIN.decode_sum(total, scales, levels, workers, layout, elements),
        )


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("elements", SIZES)
def test_two_shot(elements, form, offset):
    gradients = [gradient(elements, offset) * (1 + worker) for worker in range(3)]
    if elements > 700:
        gradients[1][600] = -math.nan
        gradients[2][:3] = torch.tensor([-math.inf, -0.0, -3e38])
    parts = [PLAIN.encode(x[offset:], form, BLOCK, worker) for worker, x in enumerate(gradients)]
    for worker, (x, part) in enumerate(zip(gradients, parts, strict=True)):
        mine = COMPILED.encode(x.cuda()[offset:], form, BLOCK, worker)
        same(mine.codes.view(torch.uint8), part.codes.view(torch.uint8))
        same(mine.scales, part.scales)
    codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
    theirs = PLAIN.reduce(codes, scales, form, BLOCK, 5)
    mine = COMPILED.reduce(codes.cuda(), scales.cuda(), form, BLOCK, 5)
    same(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    same(mine.scales, theirs.scales)
    same(COMPILED.decode(Encoded(*mine), form, BLOCK), PLAIN.decode(theirs, form, BLOCK))


@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_rounding_of_every_exponent(form):
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, -1.0, 1.0625, -1.5, 1.9999999)]).float()
    for key in range(20):
        mine, theirs = COMPILED.encode(x.cuda(), form, BLOCK, key), PLAIN.encode(x, form, BLOCK, key)
        same(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))


def test_empty_gradients():
    x = torch.empty(0, device="cuda")
    layout = Layout(width=8, lanes=4, block=BLOCK)
    scales = COMPILED.sum_scales(x, BLOCK)
    assert COMPILED.encode_sum(x, scales, 63, layout, 1).numel() == 0
    assert COMPILED.decode_sum(x.int(), scales, 63, 2, layout, 0).numel() == 0
