import pytest

pytest.importorskip("torch")
import torch
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import decoder
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.paged_attention import PAGE, in_halves, paged_attention, to_codes
from qsync_opt.kernels.weight_only import EIGHT_BITS, linear, pack, rotate_and_round

pytestmark = pytest.mark.gpu

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    for unit in ("decoder", "paged_attention", "weight_only"):
        assert library.activate(unit), library.reason(unit)


def randn(*shape, dtype, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def assert_rounded_once(actual, exact, wide_error=None):
    """Within half a step of the type of what FP64 gives, and of the error of FP32 on the way, by default 2e-6 of it."""
    half_step = 0.0 if actual.dtype is torch.float32 else torch.finfo(actual.dtype).eps / 2
    wide_error = 2e-6 * exact.abs() if wide_error is None else wide_error
    tiny = 2.0**-25 if actual.dtype is torch.float16 else 0.0  # half a subnormal step
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * half_step + wide_error + tiny).all()


def exact_norm(x, weight, epsilon):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (2, 4096), (17, 4104), (5, 16384), (0, 64)])
def test_norms_and_sums_before_them(shape, dtype):
    x, added = randn(*shape, dtype=dtype, scale=3.0), randn(*shape, dtype=dtype)
    for weight in (randn(shape[1], dtype=dtype), randn(shape[1], dtype=torch.float32)):
        assert_rounded_once(decoder.rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6))
        normed, total = decoder.add_rms_norm(x, added, weight, 1e-2)
        assert torch.equal(total, x + added)
        assert_rounded_once(normed, exact_norm(total, weight, 1e-2))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activations", EIGHT_BITS)
@pytest.mark.parametrize("rotation", [0, 64, 128])
def test_norms_that_round_are_norms_that_are_rounded(rotation, activations, dtype):
    for rows, size in ((1, 128), (3, 640), (5, 4096), (2, 5120), (17, 16384), (0, 128)):
        x, added = randn(rows, size, dtype=dtype, scale=3.0), randn(rows, size, dtype=dtype)
        if rows > 2:
            x[1], added[1] = 0.0, 0.0
            x[2, 77] = torch.nan
        for weight in (randn(size, dtype=dtype), randn(size, dtype=torch.float32)):
            rounded, total = decoder.add_rms_norm_and_round(
                x, added, weight, 1e-5, rotation=rotation, activations=activations
            )
            normed, expected_total = decoder.add_rms_norm(x, added, weight, 1e-5)
            expected = rotate_and_round(normed, rotation, activations)
            assert torch.equal(total.nan_to_num(), expected_total.nan_to_num())
            assert rounded.dtype is dtype and rounded.codes.dtype is expected.codes.dtype
            assert torch.equal(rounded.scale.isnan(), expected.scale.isnan())
            known = ~rounded.scale.isnan()[:, 0]
            assert (~known).sum() == (rows > 2)
            assert torch.equal(rounded.scale[known], expected.scale[known])
            assert torch.equal(rounded.codes[known].view(torch.uint8), expected.codes[known].view(torch.uint8))


def test_norms_do_not_round_what_is_padded_or_not_of_8_bits():
    x, weight = randn(2, 72, dtype=torch.bfloat16), randn(72, dtype=torch.bfloat16)
    assert decoder.add_rms_norm_and_round(x, x, weight, 1e-5, rotation=0, activations="A8") is None
    x, weight = randn(2, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16)
    assert decoder.add_rms_norm_and_round(x, x, weight, 1e-5, rotation=0, activations="A4") is None


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_heads_between_others(dtype):
    heads, weight = randn(50, 6, 128, dtype=dtype), randn(128, dtype=torch.float32)
    for part in torch.split(heads, [3, 2, 1], dim=1):
        assert_rounded_once(decoder.rms_norm(part, weight, 1e-6), exact_norm(part, weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("by_gelu", [True, False])
def test_gates(by_gelu, dtype):
    gate = decoder.gelu_gate if by_gelu else decoder.silu_gate
    for rows, size in ((1, 14336), (19, 8), (70, 640)):
        x = randn(rows, 2 * size, dtype=dtype, scale=3.0)
        first, second = x.double().chunk(2, 1)
        exact = (F.gelu(first, approximate="tanh") if by_gelu else F.silu(first)) * second
        assert_rounded_once(gate(x), exact, 4e-6 * exact.abs() + 1e-6 * second.abs() + 1e-37)
    closed = torch.tensor([[-1e4] * 8 + [1.0] * 8], device="cuda", dtype=dtype)
    assert (gate(closed).abs() < 1e-6).all()
    closed[0, 3] = torch.nan
    assert gate(closed).isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_rotations_and_pages(size, dtype):
    tokens, queries, kv_heads, slots_of_head = 37, 6, 2, 80
    wide = randn(tokens, queries + 2 * kv_heads + 1, size, dtype=dtype)
    heads = wide[:, 1:]
    cos, sin = randn(tokens, 1, size, dtype=dtype), randn(tokens, 1, size, dtype=dtype)
    first, second = heads.double().chunk(2, -1)
    exact = torch.cat(
        [
            first * cos.double()[..., : size // 2] - second * sin.double()[..., : size // 2],
            second * cos.double()[..., size // 2 :] + first * sin.double()[..., size // 2 :],
        ],
        -1,
    )
    error = 1e-6 * 40
    assert_rounded_once(decoder.rotate_positions(heads, cos, sin), exact, error)
    slots = torch.randperm(slots_of_head, device="cuda")[:tokens]
    pool = randn(2, kv_heads, slots_of_head, size, dtype=dtype)
    before = pool.clone()
    rotated = decoder.rotate_into_pages(heads, cos, sin, slots, pool)
    assert torch.equal(rotated, decoder.rotate_positions(heads, cos, sin)[:, : queries + kv_heads])
    before[0][:, slots] = rotated[:, queries:].transpose(0, 1)
    before[1][:, slots] = heads[:, queries + kv_heads :].transpose(0, 1)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_codes_in_pages_are_those_of_the_rounded_numbers(size, dtype):
    tokens, queries, kv_heads, slots_of_head = 37, 4, 2, 64
    heads = randn(tokens, queries + 2 * kv_heads, size, dtype=dtype)
    heads[3] = 0.0
    heads[5, -1, 7] = torch.nan
    cos, sin = randn(tokens, 1, size, dtype=dtype), randn(tokens, 1, size, dtype=dtype)
    slots = torch.randperm(slots_of_head, device="cuda")[:tokens]
    pool = torch.zeros(2, kv_heads, slots_of_head, size, device="cuda", dtype=torch.uint8)
    scales = torch.zeros(2, kv_heads, slots_of_head, 1, device="cuda")
    rotated = decoder.rotate_into_pages(heads, cos, sin, slots, pool, scales)
    for which, numbers in enumerate((rotated[:, queries:], heads[:, -kv_heads:])):
        codes, scale = to_codes(numbers.transpose(0, 1))
        known = ~scale.isnan()[..., 0]
        assert (~known).sum() == which  # the value with NaN
        assert torch.equal(pool[which][:, slots][known], in_halves(codes)[known])
        assert torch.equal(scales[which][:, slots].nan_to_num(), scale.nan_to_num())
        assert torch.equal(scales[which][:, slots].isnan(), scale.isnan())
    left = torch.ones(slots_of_head, dtype=torch.bool, device="cuda")
    left[slots] = False
    assert pool[:, :, left].count_nonzero() == 0 and scales[:, :, left].count_nonzero() == 0


def cache(contexts, kv_heads, size, dtype, coded):
    """Random pages, scales of codes, and where contexts' pages and newest positions are."""
    width = -(-max(contexts) // PAGE)
    pages = torch.randperm(len(contexts) * width, device="cuda").view(-1, width)
    shape = (2, kv_heads, pages.numel() * PAGE, size)
    pool = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8) if coded else randn(*shape, dtype=dtype)
    scales = torch.rand((*shape[:3], 1), device="cuda") / 127 if coded else None
    contexts = torch.tensor(contexts, device="cuda")
    newest = contexts - 1
    slots = pages[torch.arange(len(contexts), device="cuda"), newest // PAGE] * PAGE + newest % PAGE
    return pool, scales, pages, contexts, slots


@pytest.mark.parametrize("kept", ["numbers", "codes", "upper halves"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shared", [1, 4, 16])
def test_one_kernel_rotates_stores_and_attends(kept, dtype, size, window, shared):
    contexts, kv_heads = [1, 15, 16, 17, 100, 512, 513, 1300], 2
    heads = randn(len(contexts), (shared + 2) * kv_heads, size, dtype=dtype)
    cos, sin = randn(len(contexts), 1, size, dtype=dtype), randn(len(contexts), 1, size, dtype=dtype)
    pool, scales, pages, contexts, slots = cache(contexts, kv_heads, size, dtype, kept != "numbers")
    own, own_scales = pool.clone(), None if scales is None else scales.clone()
    options = {"scale": size**-0.5, "window": window, "high_halves": kept == "upper halves"}
    rotated = decoder.rotate_into_pages(heads, cos, sin, slots, pool, scales)
    queries = rotated[:, : shared * kv_heads]
    expected = paged_attention(queries, pool, pages, contexts, scales=scales, **options)
    y = decoder.rotate_and_attend(heads, cos, sin, slots, own, pages, contexts, scales=own_scales, **options)
    assert torch.equal(y, expected) and torch.equal(own, pool)
    assert scales is None or torch.equal(own_scales, scales)


def test_attention_of_newest_tokens_between_products():
    """It starts while the product before it ends, and the product after it while it ends."""
    size, kv_heads, contexts = 128, 4, [3, 40, 600, 256]
    packed = [pack(randn(24 * size, 16 * size, dtype=torch.float32), 4) for _ in range(8)]
    cos, sin = (randn(len(contexts), 1, size, dtype=torch.bfloat16) for _ in range(2))
    pool, _, pages, contexts, slots = cache(contexts, kv_heads, size, torch.bfloat16, False)
    x = randn(len(contexts), 16 * size, dtype=torch.bfloat16, scale=0.01)

    def layer(x, weight):
        heads = linear(x, weight).view(len(x), -1, size)
        y = decoder.rotate_and_attend(heads, cos, sin, slots, pool, pages, contexts, scale=size**-0.5)
        return y.view(len(x), -1)

    expected = [x]
    for weight in packed:
        expected.append(layer(expected[-1], weight))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [x]
        for weight in packed:
            results.append(layer(results[-1], weight))
    for _ in range(5):
        for result in results[1:]:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))


def test_what_no_kernel_attends_to_is_left_as_it_is():
    heads, angles = randn(3, 6, 64, dtype=torch.bfloat16), randn(3, 1, 64, dtype=torch.bfloat16)
    pool, _, pages, contexts, slots = cache([5, 6, 7], 2, 64, torch.bfloat16, False)
    before = pool.clone()
    attend = decoder.rotate_and_attend
    assert attend(heads, angles, angles, slots, pool, pages[:1], contexts[:1], scale=1.0) is None  # three tokens of one
    assert attend(heads.float(), angles.float(), angles.float(), slots, pool, pages, contexts, scale=1.0) is None
    many = randn(3, 2 * 17 + 4, 64, dtype=torch.bfloat16)
    assert attend(many, angles, angles, slots, pool, pages, contexts, scale=1.0) is None
    assert torch.equal(pool, before)


def test_kernels_in_a_row_and_in_a_graph_wait_for_each_other():
    """Each starts early and waits for what the one before has written."""
    x = randn(4, 4096, dtype=torch.bfloat16)
    weight = randn(4096, dtype=torch.bfloat16)

    def chain(x):
        total = x
        for _ in range(20):
            normed, total = decoder.add_rms_norm(total, x, weight, 1e-6)
            total = total + torch.cat([decoder.silu_gate(normed), decoder.gelu_gate(normed)], 1)
        return decoder.rms_norm(decoder.rms_norm(decoder.rms_norm(total, weight, 1e-6), weight, 1e-6), weight, 1e-6)

    expected = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(x)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)


def test_others_take_the_plain_formulas():
    x = randn(3, 30, dtype=torch.bfloat16)
    weight = randn(30, dtype=torch.bfloat16)
    assert_rounded_once(decoder.rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6))
    assert decoder.silu_gate(x).shape == (3, 15)
    narrow = randn(4, 16, dtype=torch.float32).requires_grad_()
    assert decoder.silu_gate(narrow).requires_grad
    assert decoder.rms_norm(narrow, torch.ones(16, device="cuda"), 1e-6).requires_grad
    heads, angles = randn(5, 4, 32, dtype=torch.bfloat16), randn(5, 1, 32, dtype=torch.bfloat16)
    pool = torch.zeros(2, 1, 16, 32, device="cuda", dtype=torch.bfloat16)
    assert decoder.rotate_into_pages(heads, angles, angles, torch.arange(5, device="cuda"), pool) is None
    assert pool.count_nonzero() == 0 and decoder.rotate_positions(heads, angles, angles).shape == heads.shape
    with pytest.raises(UnsupportedError, match="has the shape"):
        decoder.add_rms_norm(x, x[:2], weight, 1e-6)
