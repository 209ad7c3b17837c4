"""Scaled products on a card: against float64, over random shapes, every tile, graphs, compilation and partitions."""

import itertools
import math
import random

import pytest
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul import scaled as matmul
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.matmul import tuning as matmul_tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
# Relative error (norms): one rounding to the result's type, at most its unit roundoff, and 1e-6 for FP32 arithmetic.
# FP8 sums of the tensor core have about 13 bits.
BOUNDS = {torch.bfloat16: 2**-8 + 1e-6, torch.float16: 2**-11 + 1e-6, torch.float32: 1e-6}
FAST_FP8, ACCURATE_FP8 = 1e-3, 2e-4


@pytest.fixture(autouse=True)
def _compiled():
    torch.manual_seed(0)
    assert matmul_choices.activate(), library.reason("matmul")


def _has_fp8():
    capability = torch.cuda.get_device_capability()
    return capability >= (8, 9) and library.present_targets()[-1] in ("sm_89", "sm_90a")


def _hopper():
    return library.present_targets() == ("sm_90a",)


def _codes(shape, dtype):
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
    return torch.randn(shape, device="cuda").to(dtype)


def _widened(scale, codes):
    rows, depth = codes.shape[-2:]
    batch = codes.shape[0] if codes.dim() == 3 else 1
    if scale.numel() in (1, batch, batch * rows):
        each = scale.reshape(batch, -1, 1) if scale.numel() > 1 else scale.reshape(1, 1, 1)
        return each.expand(batch, rows, depth).reshape(codes.shape).double()
    return scale.reshape(*codes.shape[:-1], -1).repeat_interleave(128, -1)[..., :depth].double()


def _expected(a, b, a_scale, b_scale, bias, epilogue):
    x = (a.double() * _widened(a_scale, a)) @ (b.double() * _widened(b_scale, b)).mT
    x = x if bias is None else x + bias.double()
    return {"none": x, "relu": x.relu(), "gelu": torch.nn.functional.gelu(x)}[epilogue], x


def _error(found, expected):
    size = expected.norm()
    return ((found.double() - expected).norm() / size).item() if size > 0 else found.double().norm().item()


def _bound(codes, out_dtype, accurate):
    if codes is torch.int8:
        return BOUNDS[out_dtype]
    return BOUNDS[out_dtype] + (ACCURATE_FP8 if accurate else FAST_FP8)


def _random_case(draw):
    """One product of random sizes, types, scales and epilogue; odd sizes and rows apart by any number of bytes too."""
    sizes = [draw.choice([1, 3, 16, 31, 64, 100, 128, 200, 257, 384, 520, 1000]) for _ in range(3)]
    codes = draw.choice([torch.int8, torch.int8, *(FP8 if _has_fp8() else ())])
    b_codes = codes if codes is torch.int8 else draw.choice(FP8)
    lead = draw.choice([(), (), (3,)])
    rows, columns, depth = sizes
    extra = draw.choice([0, 0, 0, 5, 16])
    a = _codes((*lead, rows, depth + extra), codes)[..., :depth]
    b = _codes((*lead, columns, depth), b_codes)
    batch = math.prod(lead)
    scales = [
        (torch.rand(draw.choice([1, batch, batch * n, batch * n * -(-depth // 128)]), device="cuda") + 0.1) * 0.02
        for n in (rows, columns)
    ]
    bias = torch.randn(columns, device="cuda").to(draw.choice(RESULTS)) if draw.random() < 0.5 else None
    return (a, b, *scales, bias), {
        "epilogue": draw.choice(matmul.EPILOGUES),
        "out_dtype": draw.choice(RESULTS),
        "accurate": draw.random() < 0.3,
    }


def test_a_thousand_random_products():
    draw = random.Random(0)
    for number in range(1000):
        arguments, options = _random_case(draw)
        found, before = matmul.scaled_mm_aux(*arguments, **options)
        expected, preactivation = _expected(*arguments, options["epilogue"])
        bound = _bound(arguments[0].dtype, options["out_dtype"], options["accurate"])
        case = (number, arguments[0].shape, arguments[1].shape, arguments[0].dtype, arguments[1].dtype, options)
        # Results that the activation nearly cancels are held to the size of what it was applied to.
        size = preactivation.norm().clamp_min(1e-30)
        assert ((found.double() - expected).norm() / size).item() < bound, case
        assert _error(before, preactivation) < bound, case


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_every_tile_and_split(codes):
    if not _hopper():
        pytest.skip("tiles are Hopper's")
    for promoting in (False, True):
        for variant in matmul_choices.variants("INT8", promoting=promoting):
            for (rows, columns, depth), splits in (
                ((300, 520, 1040), 1),
                (((1000, 776, 2064), 3)),
                ((129, 131, 144), 2),
                ((4000, 3000, 784), 1),  # several tiles per block
            ):
                a, b = _codes((rows, depth), codes), _codes((columns, depth), codes)
                blocks = -(-depth // 128) if promoting else 1
                scales = (torch.rand(rows, blocks, device="cuda"), torch.rand(columns, blocks, device="cuda"))
                kind = matmul_choices.kind_of(a, b, torch.float32, promoting=promoting)
                choice = matmul_choices.Choice(variant=variant, splits=splits, group=4)
                matmul_choices.remember(kind, choice)
                assert matmul_choices.choice_of(kind) == choice
                found = matmul.scaled_mm(a, b, *scales, epilogue="gelu", out_dtype=torch.float32)
                again = matmul.scaled_mm(a, b, *scales, epilogue="gelu", out_dtype=torch.float32)
                matmul_choices.remember(kind, None)
                expected, _ = _expected(a, b, *scales, None, "gelu")
                assert _error(found, expected) < _bound(codes, torch.float32, promoting), (variant, splits)
                assert torch.equal(found, again)


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_one_scale_for_all_gives_the_bits_of_equal_scales(codes):
    if codes is not torch.int8 and not _has_fp8():
        pytest.skip("the card has no FP8 products")
    for (rows, columns, depth), out_dtype in itertools.product(((300, 520, 1040), (4000, 3000, 768)), RESULTS):
        a, b = _codes((rows, depth), codes), _codes((columns, depth), codes)
        one, other = torch.rand(1, device="cuda"), torch.rand(1, device="cuda")
        found = matmul.scaled_mm(a, b, one, other, out_dtype=out_dtype)
        assert torch.equal(found, matmul.scaled_mm(a, b, one.repeat(rows), other.repeat(columns), out_dtype=out_dtype))


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("out_dtype", RESULTS)
def test_the_largest_magnitude_is_that_of_the_results(codes, out_dtype):
    if codes is not torch.int8 and not _has_fp8():
        pytest.skip("the card has no FP8 products")
    for (rows, columns, depth), biased in itertools.product(
        ((300, 520, 1040), (4000, 3000, 768), (33, 17, 50), (5, 8, 0)), (False, True)
    ):
        a, b = _codes((rows, depth), codes), _codes((columns, depth), codes)
        scales = torch.rand(1, device="cuda"), torch.rand(1, device="cuda")
        bias = torch.randn(columns, device="cuda") if biased else None
        choices = [None]
        if _hopper() and depth:
            kind = matmul_choices.kind_of(a, b, out_dtype, promoting=False)
            variants = matmul_choices.variants("INT8", promoting=False)
            choices = [
                matmul_choices.Choice(variant=v, splits=s, group=4) for v, s in itertools.product(variants, (1, 2))
            ]
        for choice in choices:
            if choice is not None:
                matmul_choices.remember(kind, choice)
            found, largest = matmul.scaled_mm_amax(a, b, *scales, bias, out_dtype=out_dtype)
            same = matmul.scaled_mm(a, b, *scales, bias, out_dtype=out_dtype)
            if choice is not None:
                matmul_choices.remember(kind, None)
            assert torch.equal(found, same), choice
            assert largest.item() == found.abs().max().item(), choice
    spoilt = torch.full((1,), torch.nan, device="cuda")
    a = _codes((300, 256), codes)
    assert matmul.scaled_mm_amax(a, a, spoilt, spoilt, out_dtype=out_dtype)[1].isnan()


def test_int8_is_the_same_as_on_the_cpu():
    a, b = _codes((257, 333), torch.int8), _codes((130, 333), torch.int8)
    scales = torch.rand(257, device="cuda"), torch.rand(130, device="cuda")
    found = matmul.scaled_mm(a, b, *scales, out_dtype=torch.float32)
    expected = matmul.scaled_mm(a.cpu(), b.cpu(), *(scale.cpu() for scale in scales), out_dtype=torch.float32)
    torch.testing.assert_close(found.cpu(), expected, rtol=3e-7, atol=0)


def test_int8_sums_beyond_32_bits():
    a = torch.full((2, 200_000), -128, dtype=torch.int8, device="cuda")
    found = matmul.scaled_mm(a, a, *(torch.ones(1, device="cuda"),) * 2, out_dtype=torch.float32)
    torch.testing.assert_close(found, torch.full_like(found, 200_000 * 128 * 128), rtol=1e-6, atol=0)


def test_nothing_to_do():
    one = torch.ones(1, device="cuda")
    for rows, columns, depth in ((0, 4, 8), (4, 0, 8), (4, 5, 0)):
        a, b = _codes((rows, depth), torch.int8), _codes((columns, depth), torch.int8)
        bias = torch.arange(float(columns), device="cuda")
        found = matmul.scaled_mm(a, b, one, one, bias, out_dtype=torch.float32)
        assert torch.equal(found, bias.expand(rows, columns))


def test_results_of_more_than_2_to_the_31_elements():
    rows, columns, depth = (1 << 20) + 8, 2056, 32
    a, b = _codes((rows, depth), torch.int8), _codes((columns, depth), torch.int8)
    one = torch.full((1,), 1e-3, device="cuda")
    found = matmul.scaled_mm(a, b, one, one)
    assert found.numel() > 1 << 31
    for part in (slice(0, 64), slice(rows - 64, rows), slice(rows // 2, rows // 2 + 64)):
        assert _error(found[part], _expected(a[part], b, one, one, None, "none")[0]) < BOUNDS[torch.bfloat16]


def test_codes_of_more_than_2_to_the_31_elements():
    rows, depth = (1 << 16) + 8, (1 << 15) + 16
    a, b = _codes((rows, depth), torch.int8), _codes((8, depth), torch.int8)
    one = torch.full((1,), 1e-3, device="cuda")
    assert a.numel() > 1 << 31
    found = matmul.scaled_mm(a, b, one, one)
    for part in (slice(0, 64), slice(rows - 64, rows)):
        assert _error(found[part], _expected(a[part], b, one, one, None, "none")[0]) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("splits", [1, 3])
def test_replayed_from_a_graph(splits):
    a, b = _codes((256, 1024), torch.int8), _codes((512, 1024), torch.int8)
    scales = torch.rand(256, device="cuda"), torch.rand(512, device="cuda")
    kind = matmul_choices.kind_of(a, b, torch.bfloat16)
    if _hopper():
        matmul_choices.remember(kind, matmul_choices.Choice(variant=0, splits=splits))
    matmul.scaled_mm(a, b, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = matmul.scaled_mm(a, b, *scales)
    a.copy_(_codes((256, 1024), torch.int8))
    found.zero_()
    graph.replay()
    expected = _expected(a, b, *scales, None, "none")[0]
    if _hopper():
        matmul_choices.remember(kind, None)
    assert _error(found, expected) < BOUNDS[torch.bfloat16]


def test_compiled_without_graph_breaks():
    a, b = _codes((256, 384), torch.int8), _codes((512, 384), torch.int8)
    scales = torch.rand(256, device="cuda"), torch.rand(512, device="cuda")

    def step(a, b, x, y):
        return matmul.scaled_mm(a, b, x * 2, y, epilogue="gelu") * 3

    found = torch.compile(step, fullgraph=True)(a, b, *scales)
    torch.testing.assert_close(found, step(a, b, *scales), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_aux"])
def test_operators_keep_their_promises(name):
    a, b = _codes((64, 128), torch.int8), _codes((48, 128), torch.int8)
    scales = torch.rand(64, device="cuda"), torch.rand(48, device="cuda")
    operator = getattr(torch.ops.qsync_opt, name).default
    torch.library.opcheck(operator, (a, b, *scales, None, "relu", torch.bfloat16, False))
    torch.library.opcheck(torch.ops.qsync_opt.scaled_mm_amax.default, (a, b, *scales, None, torch.bfloat16))


def test_on_another_stream():
    a, b = _codes((2048, 2048), torch.int8), _codes((2048, 2048), torch.int8)
    one = torch.ones(1, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        a.zero_()
        found = matmul.scaled_mm(a, b, one, one)
    stream.synchronize()
    assert not found.any()


def test_on_a_partition():
    if not _hopper() or not hasattr(torch.cuda, "GreenContext"):
        pytest.skip("partitions need torch.cuda.GreenContext")
    a, b = _codes((1000, 1024), torch.int8), _codes((700, 1024), torch.int8)
    scales = torch.rand(1000, device="cuda"), torch.rand(700, device="cuda")
    torch.cuda.synchronize()
    context = torch.cuda.GreenContext.create(num_sms=16, device_id=0)
    stream = context.Stream()
    with torch.cuda.stream(stream):
        assert matmul_choices.kind_of(a, b, torch.bfloat16).multiprocessors == 16
        found = matmul.scaled_mm(a, b, *scales)
    stream.synchronize()
    assert _error(found, _expected(a, b, *scales, None, "none")[0]) < BOUNDS[torch.bfloat16]


def test_tuning_keeps_the_fastest(tmp_path, monkeypatch):
    if not _hopper():
        pytest.skip("tiles are Hopper's")
    monkeypatch.setenv("QSYNC_KERNEL_CACHE", str(tmp_path))
    ranked = matmul_tuning.tune(640, 768, 512)
    table = matmul_choices.read_choices(matmul_choices.cache_file())
    kind, choice = next(iter(table.items()))
    assert (kind.rows, kind.columns, kind.depth) == (640, 768, 512)
    assert choice == ranked[0][1] == matmul_choices.choice_of(kind)
    matmul_choices.remember(kind, None)


def test_fp8_is_refused_by_name_where_the_card_has_none():
    if _has_fp8():
        pytest.skip("the card multiplies FP8")
    a = _codes((16, 32), torch.float8_e4m3fn)
    one = torch.ones(1, device="cuda")
    with pytest.raises((RuntimeError, UnsupportedError), match="FP8 products need compute capability"):
        matmul.scaled_mm(a, a, one, one)
