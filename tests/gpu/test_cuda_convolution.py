"""The compiled INT8 convolution against its specification, bit for bit, on random geometries and on every tile."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.convolution import scaled_conv2d

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    assert library.activate("convolution"), library.reason("convolution")


def codes(generator: torch.Generator, *shape: int) -> Tensor:
    drawn = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    return drawn.contiguous(memory_format=torch.channels_last)


def operands(
    seed: int, n: int, c: int, h: int, w: int, k: int, r: int, s: int, groups: int, *, per_sample: bool, bias: bool
):
    generator = torch.Generator().manual_seed(seed)
    x, weight = codes(generator, n, c, h, w), codes(generator, k, c // groups, r, s)
    x_scale = torch.rand(n if per_sample else 1, generator=generator) / 64 + 0.001
    weight_scale = torch.rand(k, generator=generator) / 64 + 0.001
    return x, weight, x_scale, weight_scale, torch.randn(k, generator=generator) if bias else None


def on_card(tensors):
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def assert_same(given, **options):
    expected = scaled_conv2d(*given, **options)
    found = scaled_conv2d(*on_card(given), **options)
    assert found.shape == expected.shape
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def random_case(rng: random.Random):
    groups = rng.choice([1, 1, 1, 1, 2, 3, 8])
    channels = rng.choice([1, 3, 4, 5, 8, 16, 17, 32, 48, 64, 80, 96, 128, 160])
    outputs = rng.choice([1, 2, 7, 8, 16, 24, 33, 64, 72, 128, 136, 264])
    if rng.random() < 0.1:  # depthwise, with a multiplier
        groups, outputs = channels, channels * rng.choice([1, 2])
    else:
        channels, outputs = channels * groups, outputs * groups
    r, s = rng.choice([(1, 1), (1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (1, 3), (2, 4)])
    dilation = rng.choice([(1, 1), (1, 1), (2, 2), (1, 3)])
    padding = rng.choice([(0, 0), (r // 2, s // 2), (rng.randint(0, 4), rng.randint(0, 4))])
    stride = rng.choice([(1, 1), (1, 1), (2, 2), (1, 2), (3, 2)])
    least_h, least_w = dilation[0] * (r - 1) + 1 - 2 * padding[0], dilation[1] * (s - 1) + 1 - 2 * padding[1]
    h, w = (rng.randint(max(least, 1), max(least, 1) + 17) for least in (least_h, least_w))
    given = operands(
        rng.randrange(1 << 30),
        rng.choice([1, 1, 2, 3, 5]),
        channels,
        h,
        w,
        outputs,
        r,
        s,
        groups,
        per_sample=rng.random() < 0.5,
        bias=rng.random() < 0.5,
    )
    options = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "activation": rng.choice(["none", "relu"]),
        "out_dtype": rng.choice([torch.bfloat16, torch.float16, torch.float32]),
    }
    return given, options


@pytest.mark.parametrize("seed", range(40))
def test_random_geometries_give_the_bits_of_the_specification(seed):
    rng = random.Random(seed)
    for _ in range(25):
        given, options = random_case(rng)
        assert_same(given, **options)


TILES = range(8)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="not sm_90")
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_gives_the_same_bits(tile):
    cases = [
        (operands(1, 3, 192, 13, 11, 136, 3, 3, 1, per_sample=True, bias=True), {"padding": (1, 1)}),
        (operands(2, 2, 64, 57, 31, 200, 3, 3, 1, per_sample=False, bias=False), {"padding": (1, 1), "stride": (2, 2)}),
        (operands(3, 70, 256, 14, 14, 320, 1, 1, 1, per_sample=False, bias=True), {"out_dtype": torch.float32}),
        (operands(4, 9, 3, 33, 47, 64, 7, 7, 1, per_sample=True, bias=True), {"padding": (3, 3), "stride": (2, 2)}),
        (operands(5, 40, 128, 28, 28, 512, 1, 3, 1, per_sample=False, bias=False), {"stride": (2, 1)}),
    ]
    ran = 0
    for given, options in cases:
        try:
            found = scaled_conv2d(*on_card(given), **options, tile=tile)
        except RuntimeError as error:
            assert "does not divide" in str(error)
            continue
        torch.testing.assert_close(found.cpu(), scaled_conv2d(*given, **options), rtol=0, atol=0)
        ran += 1
    assert ran > 0


def test_layouts_that_are_not_channels_last_are_converted():
    x, weight, *factors = operands(6, 2, 64, 9, 10, 32, 3, 3, 1, per_sample=False, bias=True)
    expected = scaled_conv2d(x, weight, *factors, padding=(1, 1))
    plain = scaled_conv2d(x.contiguous().cuda(), weight.contiguous().cuda(), *on_card(factors), padding=(1, 1))
    torch.testing.assert_close(plain.cpu(), expected, rtol=0, atol=0)
    wide = torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last).cuda()
    for first in (0, 1, 16):
        part = scaled_conv2d(wide[:, first : first + 64], weight.cuda(), *on_card(factors), padding=(1, 1))
        expected = scaled_conv2d(torch.cat([x, x], 1)[:, first : first + 64], weight, *factors, padding=(1, 1))
        torch.testing.assert_close(part.cpu(), expected, rtol=0, atol=0)


def test_an_empty_batch_gives_an_empty_result():
    given = operands(7, 0, 64, 9, 10, 32, 3, 3, 1, per_sample=False, bias=True)
    assert scaled_conv2d(*on_card(given)).shape == (0, 32, 7, 8)


def test_results_of_more_than_two_to_the_31_elements():
    x, weight, *factors = operands(8, 1, 16, 1024, 1024, 64, 1, 1, 1, per_sample=False, bias=True)
    many = x.cuda().expand(34, -1, -1, -1)
    many = many.contiguous(memory_format=torch.channels_last)
    many[33] = -many[33]
    found = scaled_conv2d(many, weight.cuda(), *on_card(factors))
    assert found.numel() > 1 << 31
    one = scaled_conv2d(x.cuda(), weight.cuda(), *on_card(factors))
    last = scaled_conv2d(-x.cuda(), weight.cuda(), *on_card(factors))
    assert torch.equal(found[0], one[0])
    assert torch.equal(found[32], one[0])
    assert torch.equal(found[33], last[0])


def test_the_operator_passes_torchs_checks():
    x, weight, *factors = on_card(operands(9, 2, 16, 8, 8, 16, 3, 3, 1, per_sample=False, bias=True))
    arguments = (x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1).contiguous(), *factors)
    torch.library.opcheck(
        torch.ops.qsync_opt.scaled_conv2d.default, (*arguments, [1, 1], [1, 1], [1, 1], 1, "relu", torch.bfloat16)
    )


def test_a_compiled_function_and_a_graph_give_the_same_bits():
    given = on_card(operands(10, 4, 64, 14, 14, 64, 3, 3, 1, per_sample=True, bias=True))
    expected = scaled_conv2d(*given, padding=(1, 1))
    compiled = torch.compile(lambda *args: scaled_conv2d(*args, padding=(1, 1)), fullgraph=True)
    assert torch.equal(compiled(*given), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = scaled_conv2d(*given, padding=(1, 1))
    given[0].neg_()
    graph.replay()
    assert torch.equal(found, scaled_conv2d(*given, padding=(1, 1)))
    assert not torch.equal(found, expected)


def test_the_current_stream_is_used():
    given = on_card(operands(11, 8, 128, 28, 28, 128, 3, 3, 1, per_sample=False, bias=False))
    expected = scaled_conv2d(*given, padding=(1, 1))
    stream = torch.cuda.Stream()
    source = given[0].clone()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.neg_()
        found = scaled_conv2d(source, *given[1:], padding=(1, 1))
    torch.cuda.synchronize()
    assert torch.equal(found, -expected)


def test_what_the_kernels_cannot_do_is_refused_by_name():
    x, weight, *factors = on_card(operands(12, 2, 16, 8, 8, 16, 3, 3, 1, per_sample=False, bias=True))
    with pytest.raises(UnsupportedError, match="weight is on cpu"):
        scaled_conv2d(x, weight.cpu(), *factors)
    with pytest.raises(RuntimeError, match="tile 99; allowed are"):
        scaled_conv2d(x, weight, *factors, tile=99)
    weight_KRSC = weight.permute(0, 2, 3, 1).contiguous()
    with pytest.raises(RuntimeError, match="channels of x must be contiguous"):
        torch.ops.qsync_opt.scaled_conv2d(
            x.contiguous().permute(0, 2, 3, 1),
            weight_KRSC,
            *factors[:2],
            None,
            [1, 1],
            [1, 1],
            [1, 1],
            1,
            "none",
            torch.bfloat16,
        )


GEOMETRIES = [
    {"stride": 1, "padding": 1},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"stride": 1, "padding": 0, "groups": 4},
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_a_planned_convolution_and_its_gradients(geometry, granularity):
    generator = torch.Generator().manual_seed(13)
    groups = geometry.get("groups", 1)
    x = torch.randn(4, 32, 14, 14, generator=generator).cuda().contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(48, 32 // groups, 3, 3, generator=generator) / 17).cuda()
    bias = torch.randn(48, generator=generator).cuda()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    options = KernelOptions(rounding="nearest", activation_granularity=granularity)
    result = ops.execute("conv2d", "INT8", torch.nn.functional.conv2d, tuple(leaves), geometry, options)
    grad = torch.randn(result.shape, generator=generator).cuda().to(result.dtype)
    result.backward(grad)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.nn.functional.conv2d(*exact, **geometry)
    expected.backward(grad.double())
    assert (result - expected).norm() / expected.norm() < 0.02
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype is torch.float32
        assert (leaf.grad - reference.grad).norm() / reference.grad.norm() < 0.02


BACKWARD = {
    "1x1": ((8, 64, 14, 14), (96, 64, 1, 1), {}),
    "1x1, stride 2": ((8, 64, 14, 14), (96, 64, 1, 1), {"stride": 2}),
    "3x3": ((8, 64, 14, 14), (96, 64, 3, 3), {"padding": 1}),
    "3x3, stride 2": ((4, 64, 15, 14), (48, 64, 3, 3), {"padding": 1, "stride": 2}),
    "7x7, stride 2, three channels": ((4, 3, 32, 32), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
    "dilated": ((4, 32, 16, 16), (32, 32, 3, 3), {"padding": 2, "dilation": 2}),
    "groups": ((4, 32, 16, 16), (32, 8, 3, 3), {"padding": 1, "groups": 4}),
    "odd": ((3, 5, 9, 7), (7, 5, 3, 2), {"padding": (0, 1), "stride": (2, 1)}),
}


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("weight_granularity", ["tensor", "channel"])
def test_gradients_in_eight_bits_against_float64_and_the_processor(name, weight_granularity):
    size, taps, geometry = BACKWARD[name]
    options = KernelOptions(backward="eight", weight_granularity=weight_granularity, seed=5)
    here = [torch.randn(shape).to(memory_format=torch.channels_last) for shape in (size, taps)]
    there = [t.cuda().requires_grad_() for t in here]
    here = [t.requires_grad_() for t in here]
    doubles = [t.detach().double().requires_grad_() for t in here]
    exact = F.conv2d(*doubles, **geometry)
    grad = torch.randn(exact.shape).bfloat16()
    theirs = torch.autograd.grad(exact, doubles, grad.double())
    found = {}
    for device, leaves in (("cpu", here), ("cuda", there)):
        result = ops.execute("conv2d", "INT8", F.conv2d, tuple(leaves), geometry, options)
        found[device] = (result, *torch.autograd.grad(result, leaves, grad.to(device)))
        for mine, expected in zip(found[device], (exact, *theirs), strict=True):
            assert ((mine.cpu().double() - expected).norm() / expected.norm()).item() < 0.03
    for mine, other in zip(found["cuda"], found["cpu"], strict=True):
        # The codes are the same; what remains are roundings of 16-bit operands and results.
        assert ((mine.cpu().double() - other.double()).norm() / other.double().norm()).item() < 6e-3


def test_a_captured_step_in_eight_bits_rounds_anew():
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    options = KernelOptions(backward="eight", weight_granularity="tensor", step=step)
    x, w = (
        torch.randn(size, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        for size in ((4, 32, 8, 8), (32, 32, 3, 3))
    )
    grad = torch.randn(4, 32, 8, 8, device="cuda").bfloat16().to(memory_format=torch.channels_last)

    def run():
        result = ops.execute("conv2d", "INT8", F.conv2d, (x, w), {"padding": 1}, options)
        return (result, *torch.autograd.grad(result, (x, w), grad))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # All on one stream: the graph of gradients remembers on which its leaves were first used.
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            captured = run()
        graph.replay()
        first = [t.clone() for t in captured]
        eager = run()
        step.add_(1)
        graph.replay()
    side.synchronize()
    assert all(torch.equal(mine, other) for mine, other in zip(first, eager, strict=True))
    assert all(not torch.equal(mine, before) for mine, before in zip(captured, first, strict=True))
