"""The compiled quantizers against their plain PyTorch specification, bit for bit, and against theory."""

import math
import random

import pytest
import torch

from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.quantize import (
    FORMATS,
    GRANULARITIES,
    ROUNDINGS,
    UNIT,
    dequantize_matrix,
    format_of,
    quantize_matrix,
    spread,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = tuple(FORMATS)
SOURCES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if not library.activate(UNIT):
        pytest.skip(f"the compiled quantizers do not run here: {library.reason(UNIT)}")


def _same(mine, theirs):
    assert torch.equal(mine.scale.view(torch.int32), theirs.scale.view(torch.int32))
    assert torch.equal(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    if theirs.transposed is not None:
        assert torch.equal(mine.transposed.view(torch.uint8), theirs.transposed.view(torch.uint8))


def _both(x, format, **choices):
    mine = quantize_matrix(x, format, backend="compiled", **choices)
    _same(mine, quantize_matrix(x, format, backend="reference", **choices))
    return mine


SHAPES = [
    (1, 1),
    (3, 5),
    (1, 4096),
    (130, 260),
    (129, 136),
    (4, 131072),
    (300, 1000),
    (256, 4096),
    (64, 8192),
    (2048, 64),
]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_bits_are_those_of_the_specification(source, format, granularity, rounding):
    for shape in SHAPES:
        x = torch.randn(shape, device=CUDA).mul_(torch.logspace(-6, 3, shape[0], device=CUDA)[:, None]).to(source)
        for transposed in (False, True):
            if transposed and granularity == "block":
                continue
            choices = {"granularity": granularity, "rounding": rounding, "transposed": transposed, "key": 77}
            _both(x, format, **choices)


def test_the_card_and_the_processor_agree():
    x = torch.randn(100, 300)
    for format in DTYPES:
        for granularity in GRANULARITIES:
            for rounding in ROUNDINGS:
                there = quantize_matrix(x.to(CUDA), format, granularity=granularity, rounding=rounding, key=-5)
                here = quantize_matrix(x, format, granularity=granularity, rounding=rounding, key=-5)
                assert torch.equal(there.scale.cpu(), here.scale)
                assert torch.equal(there.codes.cpu().view(torch.uint8), here.codes.view(torch.uint8))


def test_a_thousand_random_shapes_and_layouts():
    choose = random.Random(0)
    for _ in range(1000):
        rows, columns = choose.randint(0, 300), choose.choice((choose.randint(0, 700), 8 * choose.randint(1, 90)))
        x = torch.randn(rows, columns, device=CUDA).to(choose.choice(SOURCES))
        layout = choose.randrange(4)
        if layout == 1:
            x = x.t().contiguous().t()
        elif layout == 2:
            x = torch.cat([x, x], 1)[:, :columns]
        elif layout == 3:
            x = torch.cat([x, x], 1)[:, ::2]
        granularity = choose.choice(GRANULARITIES)
        result = _both(
            x,
            choose.choice(DTYPES),
            granularity=granularity,
            rounding=choose.choice(ROUNDINGS),
            key=choose.getrandbits(64),
            transposed=granularity != "block" and choose.random() < 0.5,
        )
        out = choose.choice(SOURCES)
        values = dequantize_matrix(result.codes, result.scale, out, backend="compiled")
        assert torch.equal(values, dequantize_matrix(result.codes, result.scale, out, backend="reference"))


def _steps(y, form):
    if form.mantissa_bits == 0:
        return torch.ones_like(y)
    exponent = (torch.frexp(y.abs())[1] - 1).clamp_min(form.min_exponent)
    return torch.ldexp(torch.ones_like(y), exponent - form.mantissa_bits)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", DTYPES, ids=str)
def test_mean_and_variance_of_ten_million_draws(format, granularity):
    form = format_of(format)
    rows, columns = 4096, 2560
    x = torch.randn(rows, columns, device=CUDA)
    codes, scale, _ = quantize_matrix(x, format, granularity=granularity, key=12345, backend="compiled")
    exact = x.double() / spread(scale, rows, columns).double()
    step = _steps(exact, form)
    place = (exact / step).frac().abs()
    variance = (place * (1 - place)).mean().item()
    error = (codes.float().double() - exact) / step
    assert x.numel() >= 10**7
    assert abs(error.mean().item()) < 4 * math.sqrt(variance / x.numel())
    assert error.square().mean().item() == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_poison_and_zeros(granularity):
    for shape in ((64, 256), (5, 7)):
        for poison in (math.nan, math.inf, -math.inf):
            x = torch.randn(shape, device=CUDA)
            x[2, 3] = poison
            for source in SOURCES:
                scale = quantize_matrix(x.to(source), torch.int8, granularity=granularity, backend="compiled").scale
                expected = quantize_matrix(x.to(source), torch.int8, granularity=granularity, backend="reference").scale
                assert torch.equal(scale.isnan(), expected.isnan())
                assert scale.isnan().sum() == 1
        zeros = _both(torch.zeros(shape, device=CUDA), torch.float8_e4m3fn, granularity=granularity)
        assert not zeros.codes.view(torch.uint8).any()
        _both(torch.full(shape, 1e-42, device=CUDA), torch.int8, granularity=granularity)


def test_graphs_replay_with_the_noise_of_their_step():
    x, step = torch.randn(128, 512, device=CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    for granularity in GRANULARITIES:
        step.zero_()
        transposed = granularity != "block"
        expected = []
        for _ in range(2):
            expected.append(quantize_matrix(x, torch.int8, granularity=granularity, step=step, transposed=transposed))
            step.add_(1)
        step.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = quantize_matrix(x, torch.int8, granularity=granularity, step=step, transposed=transposed)
            step.add_(1)
        for wanted in expected:
            graph.replay()
            _same(result, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_runs_on_the_current_stream_without_waiting():
    x = torch.randn(512, 512, device=CUDA)
    stream = torch.cuda.Stream()

    def enqueue():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            x.fill_(1.0)
            codes = quantize_matrix(x, torch.int8, rounding="nearest").codes
        return codes, stream.query()

    enqueue()  # the first call of any kernel loads it, which may wait for the device
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes, finished = enqueue()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not finished
    torch.cuda.synchronize()
    assert bool((codes == 127).all())


def test_compiles_without_a_graph_break():
    def step(x):
        codes, scale, turned = quantize_matrix(torch.relu(x), torch.int8, transposed=True)
        return dequantize_matrix(codes, scale, torch.bfloat16), turned

    x = torch.randn(256, 512, device=CUDA, dtype=torch.bfloat16)
    for mine, theirs in zip(torch.compile(step, fullgraph=True)(x), step(x), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("format", (torch.int8, torch.float8_e5m2), ids=str)
def test_registration(format):
    x = torch.randn(8, 160, device=CUDA)
    checks = ("test_autograd_registration", "test_faketensor")
    if format is torch.int8:
        checks = (*checks, "test_schema", "test_aot_dispatch_dynamic")
    arguments = (x, format, "row", "stochastic", 5, None, True)
    torch.library.opcheck(torch.ops.qsync_opt.quantize.default, arguments, test_utils=checks)


def test_more_than_two_to_the_31_elements():
    rows, columns = (1 << 19) + 8, 4096
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free memory on the card")
    x = torch.ones(rows, columns, dtype=torch.bfloat16, device=CUDA)
    x[-8:] = torch.randn(8, columns, device=CUDA)
    for granularity in GRANULARITIES:
        whole = quantize_matrix(x, torch.int8, granularity=granularity, rounding="nearest", backend="compiled")
        scale = spread(whole.scale, rows, columns)[-8:] if granularity in ("row", "block") else whole.scale
        inverse = scale.reciprocal()
        expected = torch.round(x[-8:].float() * inverse).to(torch.int8)
        assert torch.equal(whole.codes[-8:], expected)
        values = dequantize_matrix(whole.codes, whole.scale, torch.bfloat16)
        assert torch.equal(values[-8:], (expected.float() * scale).bfloat16())
        del values, whole


def test_refusals():
    x = torch.randn(4, 8, device=CUDA)
    with pytest.raises(RuntimeError, match="allowed are tensor, row, channel, block"):
        torch.ops.qsync_opt.quantize(x, torch.int8, "rows", "nearest", 0, None, False)
    with pytest.raises(RuntimeError, match="step"):
        step = torch.zeros(1, dtype=torch.int64)
        torch.ops.qsync_opt.quantize(x, torch.int8, "row", "stochastic", 0, step, False)
    with pytest.raises(RuntimeError, match="float32, bfloat16, float16"):
        torch.ops.qsync_opt.quantize(x.double(), torch.int8, "row", "stochastic", 0, None, False)
