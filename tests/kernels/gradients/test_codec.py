"""The codec: unbiased by Monte Carlo, within the bound of its variance, without overflow, and bit for bit."""

import math

import pytest
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.gradients import BLOCK, BucketStatistics, Moments, scheme, schemes
from qsync_opt.kernels.gradients import CODES, Codec, Encoded, Layout, compiled_by, reference

PLAIN = Codec("reference")
SUMS = [each for each in schemes().values() if each.transport == "sum"]
COMPILED = pytest.mark.skipif(compiled_by("cpu") is None, reason="numba is not installed")


def layout_of(each, elements):
    return Layout(width=each.width, lanes=each.lanes, block=each.block or max(elements, 1))


def summed(each, gradients, key, codec=PLAIN):
    """What all workers end with."""
    workers, elements = len(gradients), len(gradients[0])
    layout, levels = layout_of(each, elements), each.levels(workers)
    scales = torch.stack([codec.sum_scales(x, layout.block).float() for x in gradients]).amax(0).bfloat16()
    codes = [codec.encode_sum(x, scales, levels, layout, key + i) for i, x in enumerate(gradients)]
    total = codes[0].clone()
    for other in codes[1:]:
        total += other
    return codec.decode_sum(total, scales, levels, workers, layout, elements)


def two_shot(form, gradients, key, codec=PLAIN):
    parts = [codec.encode(x, form, BLOCK, key + i) for i, x in enumerate(gradients)]
    codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
    return codec.decode(codec.reduce(codes, scales, form, BLOCK, key + 1000), form, BLOCK)


def exponential(gradients, key):
    workers = len(gradients)
    scale = torch.stack([reference.sum_scales(x, len(x)).float() for x in gradients]).amax(0)
    codes = torch.stack([reference.encode_exponential(x, scale, workers, key + i) for i, x in enumerate(gradients)])
    return reference.decode_exponential(reference.reduce_exponential(codes, key + 1000), scale, workers)


def reduced(name, gradients, key):
    each = scheme(name)
    if each.transport == "sum":
        return summed(each, gradients, key)
    if name == "exponential":
        return exponential(gradients, key)
    return two_shot({"two8": "int8", "two-fp8": "fp8", "BF16": "bf16"}[name], gradients, key)


def variance_bound(name, gradients):
    """Of the registered scheme, from moments computed here."""
    stacked = torch.stack(gradients).double()

    def moments(rows, largest):
        blocks = torch.nn.functional.pad(largest, (0, -len(largest) % BLOCK)).view(-1, BLOCK)
        most = blocks.amax(1).repeat_interleave(BLOCK)[: len(largest)]
        return Moments(
            square=float(rows.square().sum(1).mean()),
            block_square=float(most.square().sum()),
            block_absolute=float((rows.abs() * most).sum(1).mean()),
            bucket_square=float(len(largest) * largest.max() ** 2),
            bucket_absolute=float((rows.abs() * largest.max()).sum(1).mean()),
        )

    mean = stacked.mean(0, keepdim=True)
    statistics = BucketStatistics(
        elements=stacked.shape[1],
        local=moments(stacked, stacked.abs().amax(0)),
        mean=moments(mean, mean[0].abs()),
    )
    return scheme(name).mean_variance(statistics, len(gradients))


def rows_of_unequal_scale(workers, elements=1500):
    rows = torch.logspace(-6, 1, 10).repeat_interleave(elements // 10)
    return [torch.randn(elements) * rows for _ in range(workers)]


# Too many workers for so few bits are refused, which the test of the schemes' data sees to.
def lossy(*workers):
    """Schemes that round, with the numbers of workers that leave them a level."""
    names = [name for name in schemes() if name != "FP32"]
    return [(name, count) for name in names for count in workers if scheme(name).supports(count)]


@pytest.mark.parametrize(("name", "workers"), lossy(2, 3, 8))
def test_the_mean_is_unbiased(name, workers):
    check_unbiased(name, workers, draws=200)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), lossy(4, 5, 6, 7, 16, 33, 64))
def test_the_mean_is_unbiased_among_up_to_64_workers(name, workers):
    check_unbiased(name, workers, draws=60)


def check_unbiased(name, workers, draws):
    gradients = rows_of_unequal_scale(workers)
    exact = torch.stack(gradients).double().mean(0)
    errors = torch.stack([reduced(name, gradients, 7919 * draw).double() for draw in range(draws)]) - exact
    # Projections see the bias of all elements together: toward zero, away from it, and in some random directions.
    directions = torch.cat([exact.sign()[None], torch.randn(12, len(exact)).sign().double()])
    directions /= torch.stack(gradients).abs().amax(0).clamp_min(1e-9)
    projected = errors @ directions.T
    spread = projected.std(0) / math.sqrt(draws)
    assert (projected.mean(0).abs() <= 4.5 * spread + 1e-9).all()
    measured = errors.square().sum(1).mean()
    assert measured <= variance_bound(name, gradients) * 1.05 + 1e-12


@pytest.mark.parametrize("each", SUMS, ids=lambda each: each.name)
def test_equal_maxima_do_not_overflow(each):
    for workers in range(2, 34):
        if not each.supports(workers):
            continue
        gradients = [torch.tensor([3.0, -3.0, 0.0] * 100)] * workers
        result = summed(each, gradients, workers)
        assert torch.allclose(result, gradients[0], rtol=1 / each.levels(workers) + 0.02, atol=1e-6), workers


def test_a_block_that_is_not_finite_becomes_nan_everywhere_and_zeros_stay_zero():
    gradients = [torch.randn(1024) for _ in range(3)]
    gradients[1][300] = math.nan
    gradients[2][600] = -math.inf
    for x in gradients:
        x[768:] = 0.0
    for name in ("sum8", "sum4", "two8"):
        result = reduced(name, gradients, 1)
        assert result[:256].isfinite().all()
        assert result[256:768].isnan().all()
        assert (result[768:] == 0).all()
    assert reduced("linear", gradients, 1).isnan().all()
    assert reduced("exponential", gradients, 1).isnan().all()
    assert not two_shot("fp8", gradients, 1)[256:768].isfinite().any()
    assert not two_shot("bf16", gradients, 1)[[300, 600]].isfinite().any()


def test_empty_tiny_and_huge_values():
    for name in schemes():
        if name == "FP32":
            continue
        each = scheme(name)
        if each.transport == "sum" and each.block:
            assert summed(each, [torch.empty(0)] * 2, 1).shape == (0,)
        for value in (1e-44, 1e-38, 3e37):
            result = reduced(name, [torch.full((9,), value)] * 2, 3)
            assert result.isfinite().all(), (name, value)
    assert two_shot("int8", [torch.empty(0)] * 2, 1).shape == (0,)


def test_scales_are_rounded_up_to_bf16():
    x = torch.tensor([1.0 + 2**-20, 0.0, -2.0, 3.0e38])
    assert reference.sum_scales(x, 1).float().tolist() == [1.0078125, 0.0, 2.0, pytest.approx(3.0e38, rel=0.01)]


@COMPILED
@pytest.mark.parametrize("elements", [1, 3, 4, 255, 256, 257, 1000, 4099])
@pytest.mark.parametrize("each", SUMS, ids=lambda each: each.name)
def test_compiled_sums_equal_the_reference_bit_for_bit(each, elements):
    x = torch.randn(elements) * torch.logspace(-20, 10, elements)
    if elements > 300:
        x[256:300] = 0.0
        x[-1] = math.inf
    layout, key = layout_of(each, elements), 2**63 + elements
    plain, compiled = Codec("reference"), Codec("compiled")
    scales = plain.sum_scales(x, layout.block)
    assert torch.equal(scales, compiled.sum_scales(x, layout.block))
    for workers in (1, 2, 7):
        levels = each.levels(workers)
        codes = plain.encode_sum(x, scales, levels, layout, key)
        assert torch.equal(codes, compiled.encode_sum(x, scales, levels, layout, key))
        used = torch.full_like(codes, 77)  # as a buffer is that held other codes
        assert torch.equal(codes, compiled.encode_sum(x, scales, levels, layout, key, out=used))
        assert torch.equal(codes, used)
        total = (codes.long() * workers).to(codes.dtype)  # lanes carry nothing over
        values = [c.decode_sum(total, scales, levels, workers, layout, elements) for c in (plain, compiled)]
        assert torch.equal(values[0].view(torch.int32), values[1].view(torch.int32)) or torch.equal(
            values[0].nan_to_num(nan=9.0), values[1].nan_to_num(nan=9.0)
        )


@COMPILED
@pytest.mark.parametrize("form", CODES)
@pytest.mark.parametrize("elements", [1, 4, 255, 256, 1000, 4099])
def test_compiled_two_shot_equals_the_reference_bit_for_bit(elements, form):
    def equal(mine, theirs):
        assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
        assert torch.equal(mine.scales, theirs.scales)

    gradients = [torch.randn(elements) * torch.logspace(-40, 30, elements) for _ in range(3)]
    if elements > 300:
        gradients[0][:4] = torch.tensor([math.inf, -math.inf, -0.0, -3e38])
        gradients[1][256:512] = 0.0
        gradients[2][700] = -math.nan
    plain, compiled = Codec("reference"), Codec("compiled")
    parts = [[codec.encode(x, form, BLOCK, i) for i, x in enumerate(gradients)] for codec in (plain, compiled)]
    for mine, theirs in zip(*parts, strict=True):
        equal(mine, theirs)
    used = torch.full_like(parts[0][0].codes, 77)
    equal(compiled.encode(gradients[0], form, BLOCK, 0, out=used), parts[0][0])
    assert torch.equal(used.view(torch.uint8), parts[0][0].codes.view(torch.uint8))
    codes, scales = (torch.stack(each) for each in zip(*parts[0], strict=True))
    both = [codec.reduce(codes, scales, form, BLOCK, 5) for codec in (plain, compiled)]
    equal(*both)
    values = [codec.decode(Encoded(*both[0]), form, BLOCK).nan_to_num(nan=9.0) for codec in (plain, compiled)]
    assert torch.equal(*values)
    out = torch.full((elements,), 7.0)
    assert torch.equal(compiled.decode(both[0], form, BLOCK, out=out).nan_to_num(nan=9.0), values[0])
    assert torch.equal(out.nan_to_num(nan=9.0), values[0])


@COMPILED
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_compiled_rounding_of_every_exponent(form):
    powers = 2.0 ** torch.arange(-149, 128, dtype=torch.float64)
    x = torch.cat([powers * factor for factor in (1.0, -1.0, 1.0625, -1.5, 1.9999999)]).float()
    for key in range(20):
        for block in (4, 8 * BLOCK):  # near the scale of a block, and far below it
            codes = [codec.encode(x, form, block, key).codes.view(torch.uint8) for codec in (PLAIN, Codec("compiled"))]
            assert torch.equal(*codes)


@COMPILED
def test_compiled_codecs_leave_storages_resizable():
    x, codec, layout = torch.randn(1000), Codec("compiled"), Layout(width=8, lanes=1, block=BLOCK)
    scales = codec.sum_scales(x, BLOCK)
    codes = codec.encode_sum(x, scales, 63, layout, 1)
    codec.decode_sum(codes, scales, 63, 2, layout, len(x), out=x)
    parts = codec.encode(x, "int8", BLOCK, 1, out=codes)
    codec.decode(parts, "int8", BLOCK, out=x)
    for each in (x, scales, *parts):
        each.untyped_storage().resize_(0)  # as sharded parameters and gradients are freed


def test_exponents_are_added_as_the_paper_says():
    left, right = (c.flatten() for c in torch.meshgrid(torch.arange(-12, 13), torch.arange(-12, 13), indexing="ij"))
    # Exponent 0 has no room above it for two of one sign.
    keep = (left.abs() != 1) & (right.abs() != 1)
    left, right = left[keep].to(torch.int8), right[keep].to(torch.int8)
    exact = reference._exponent_values(left) + reference._exponent_values(right)
    random = torch.randint(0, 2**31, (4000, len(left)), dtype=torch.int64)
    draws = reference._exponent_values(reference.add_exponents(left, right, random)).double()
    error = draws.std(0) / math.sqrt(len(draws)) + 1e-9
    assert ((draws.mean(0) - exact).abs() / error).max() < 5
    relative = draws.var(0) / exact.square().clamp_min(1e-12)
    assert relative[exact != 0].max() < 0.135  # 1/8 and sampling


def test_a_backend_that_is_not_there_is_refused():
    with pytest.raises(UnsupportedError, match="backend='fast': allowed are auto, compiled, reference"):
        Codec("fast")


@pytest.mark.parametrize("elements", [1, 4, 5, 23, 24, 25, 1000])
@pytest.mark.parametrize("each", SUMS, ids=lambda each: each.name)
def test_as_many_codes_are_sent_as_are_planned(each, elements):
    layout, levels = layout_of(each, elements), each.levels(2)
    x = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    codes = PLAIN.encode_sum(x, PLAIN.sum_scales(x, layout.block), levels, layout, 3)
    assert codes.nbytes == each.code_bytes(elements)
    assert codes.numel() == layout.words(elements)
