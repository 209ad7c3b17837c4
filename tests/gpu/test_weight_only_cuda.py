"""The CUDA products with packed weights against FP64, and their independence of the batch."""

import pytest
import torch

from qsync_opt.kernels import decoder
from qsync_opt.kernels.quantize import quantize_matrix
from qsync_opt.kernels.weight_only import (
    EIGHT_BITS,
    RoundedRows,
    explain,
    gated_linear,
    linear,
    pack,
    pack_codes,
    rotate,
    rotate_and_round,
    rotated_inputs,
    unpack,
)

pytestmark = pytest.mark.gpu
RANGES = {4: (-8, 8), 8: (-128, 128)}
SHAPES = [
    (64, 64), (130, 200), (300, 704), (640, 2048), (1024, 4096), (4096, 4096), (6144, 4096), (14336, 4096),
    (4096, 14336),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if explain("cuda"):
        pytest.skip(f"the compiled products do not run here: {explain('cuda')}")


def random_packed(outputs, inputs, bits, group):
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)
    codes = torch.randint(*RANGES[bits], (outputs, inputs), generator=generator, device="cuda").to(torch.int8)
    groups = 1 if group is None else -(-inputs // group)
    scales = torch.rand((outputs, groups), generator=generator, device="cuda") + 0.1
    packed = pack_codes(codes, scales, bits, group)
    return packed, codes.double() * scales.double().repeat_interleave(packed.group, 1)[:, :inputs]


def activations(rows, inputs, dtype):
    return torch.randn((rows, inputs), generator=torch.Generator("cuda").manual_seed(rows), device="cuda").to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_float64(bits, group, shape, dtype):
    packed, weight = random_packed(*shape, bits, group)
    for rows in (1, 2, 7, 8, 9, 16, 17, 32, 200):
        x = activations(rows, shape[1], dtype) / shape[1]  # FP16 must not overflow
        exact, terms = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
        y = linear(x, packed, backend="compiled").double()
        # One rounding of the result; beyond few rows the weight is rounded, too.
        unit = torch.finfo(dtype).eps / 2
        allowed = unit * exact.abs() * 1.01 + 4e-6 * terms + (unit * terms if rows > 32 else 0) + 1e-7
        assert bool(((y - exact).abs() <= allowed).all()), (rows, float((y - exact).abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_more_outputs_than_sums_fit_a_multiprocessor(bits):
    packed, weight = random_packed(262_144, 128, bits, 128)
    x = activations(16, 128, torch.bfloat16) / 128
    exact, terms = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    y = linear(x, packed, backend="compiled").double()
    assert bool(((y - exact).abs() <= 2**-8 * exact.abs() + 4e-6 * terms + 1e-7).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounded_to", ["A8", "F8"])
def test_eight_bit_activations(shape, bits, rounded_to):
    packed, weight = random_packed(*shape, bits, 128)
    for rows in (1, 5, 8, 9, 16, 70):
        x = activations(rows, shape[1], torch.bfloat16)
        y = linear(x, packed, activations=rounded_to, backend="compiled").double()
        reference = linear(x, packed, activations=rounded_to, backend="reference").double()
        terms = x.double().abs() @ weight.abs().t()
        assert bool(((y - reference).abs() <= 2**-7 * reference.abs() + 1e-5 * terms).all())


@pytest.mark.parametrize("codes_as", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_codes_are_exact_up_to_sums_in_fp32(codes_as, dtype):
    for group in (64, 128, None):
        packed, weight = random_packed(130, 1000, 4, group)
        for rows in (1, 8, 9, 33):
            x = activations(rows, 1000, torch.float32)
            codes, scale, _ = quantize_matrix(x, codes_as, granularity="row", rounding="nearest")
            y = linear(RoundedRows(codes, scale.view(-1, 1), dtype), packed, backend="compiled")
            assert y.dtype is dtype
            exact = codes.double() @ weight.t() * scale.view(-1, 1).double()
            # Codes stay plus 8 until they are added, so that the terms are larger than those of the product.
            terms = codes.double().abs() @ (weight.abs() + 8 * weight.abs().amax()).t() * scale.view(-1, 1).double()
            unit = torch.finfo(dtype).eps / 2
            assert bool(((y.double() - exact).abs() <= 1.01 * unit * exact.abs() + 4e-6 * terms + 1e-7).all())


@pytest.mark.parametrize("rounded_to", ["A8", "F8"])
def test_rows_that_are_not_finite_spoil_only_their_own_results(rounded_to):
    packed, _ = random_packed(130, 256, 4, 128)
    x = activations(9, 256, torch.bfloat16)
    expected = linear(x, packed, activations=rounded_to)
    x[2, 7], x[5, 100] = torch.nan, torch.inf
    y = linear(x, packed, activations=rounded_to)
    assert y[[2, 5]].isnan().all()
    others = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotations_are_those_of_float64(block, dtype):
    for rows, inputs in ((1, 128), (5, 640), (32, 4096), (3, 14336)):
        x = activations(rows, inputs, dtype)
        exact = rotated_inputs(x, block)
        y = rotate(x, block, backend="compiled").double()
        assert torch.allclose(y, exact, rtol=torch.finfo(dtype).eps, atol=4e-6)
        wide = rotate(x.float(), block)
        for rounded_to, codes_as in EIGHT_BITS.items():
            rounded = rotate_and_round(x, block, rounded_to)
            expected, scales, _ = quantize_matrix(wide, codes_as, granularity="row", rounding="nearest")
            assert rounded.dtype is dtype
            assert torch.equal(rounded.scale, scales.view(-1, 1))
            assert torch.equal(rounded.codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("rounded_to", ["A8", "F8", "A4"])
def test_rotated_weights_and_rounded_activations(rounded_to):
    weight = activations(256, 640, torch.float32)
    packed = pack(weight, 4, rotate=True)
    for rows in (1, 9, 16, 40):
        x = activations(rows, 640, torch.bfloat16)
        for taken in ("A16", rounded_to):
            y = linear(x, packed, activations=taken, backend="compiled").double()
            reference = linear(x, packed, activations=taken, backend="reference").double()
            terms = x.double().abs() @ unpack(packed, torch.float64).abs().t()
            assert bool(((y - reference).abs() <= 2**-7 * reference.abs() + 2**-7 * terms).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activations_as", ["A8", "F8", "A16"])
@pytest.mark.parametrize("shape", [(130, 200), (4096, 4096), (14336, 4096)], ids=str)
def test_reproducible_rows_do_not_depend_on_the_batch(bits, activations_as, shape):
    packed, _ = random_packed(*shape, bits, 128)
    x = activations(70, shape[1], torch.bfloat16)
    together = linear(x, packed, activations=activations_as, reproducible=True)
    for begin, end in ((0, 1), (3, 8), (0, 9), (5, 21), (40, 70)):
        part = linear(x[begin:end], packed, activations=activations_as, reproducible=True)
        assert torch.equal(part, together[begin:end])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_gelu", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("outputs", [128, 8448, 28672])
def test_gated_products_are_products_that_are_gated_after(bits, dtype, by_gelu, rotated, outputs):
    weight = activations(outputs, 384, torch.float32)
    packed = pack(weight, bits, 64, rotate=rotated)
    gate = decoder.gelu_gate if by_gelu else decoder.silu_gate
    for rows in (1, 8, 9, 33):
        x = activations(rows, 384, dtype) / 8
        product, expected = gated_linear(x, packed, by_gelu=by_gelu), gate(linear(x, packed))
        # Sums in another order differ by a rounding of either half at most.
        scale = linear(x, packed).abs().amax().float() ** 2
        assert product.shape == (rows, outputs // 2)
        assert float((product.float() - expected.float()).abs().max() / scale) < 4 * torch.finfo(dtype).eps
    many = activations(200, 384, dtype) / 8
    assert gated_linear(many, packed, by_gelu=by_gelu) is None
    together = gated_linear(many, packed, by_gelu=by_gelu, reproducible=True)
    assert torch.equal(together[70:71], gated_linear(many[70:71], packed, by_gelu=by_gelu))


def test_gated_products_need_whole_tiles():
    x = activations(4, 384, torch.bfloat16)
    assert gated_linear(x, pack(activations(130, 384, torch.float32), 4), by_gelu=False) is None
    assert gated_linear(x[:, :200], pack(activations(128, 200, torch.float32), 4), by_gelu=False) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpacked_weights_are_the_same_bits_as_on_the_cpu(bits, dtype):
    packed, _ = random_packed(130, 200, bits, 64)
    assert torch.equal(unpack(packed, dtype).cpu(), unpack(packed.to("cpu"), dtype))


def test_packing_on_the_card_is_packing_on_the_cpu():
    weight = activations(130, 200, torch.float32)
    here, there = pack(weight, 4), pack(weight.cpu(), 4)
    assert torch.equal(here.codes.cpu(), there.codes)
    assert torch.equal(here.scales.cpu(), there.scales)


@pytest.mark.parametrize("shape", [(130, 200), (4096, 4096)], ids=str)
def test_a_weight_is_complete_before_its_first_product(shape):
    weight, x = activations(*shape, torch.float32), activations(4, shape[1], torch.bfloat16)
    expected = linear(x, pack(weight, 4))
    copy = weight.new_zeros(shape)
    torch.cuda._sleep(20_000_000)
    copy.copy_(weight)
    product = linear(x, pack(copy, 4))
    assert torch.equal(product, expected)


def test_chains_of_products_are_those_of_products_alone():
    """Kernels that start early read nothing that the ones before have not written yet."""
    packed = [random_packed(1024, 1024, 4, 128)[0], random_packed(1024, 1024, 8, None)[0]] * 10
    x = activations(8, 1024, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [x]
        for weight in packed:
            results.append(linear(results[-1] / results[-1].abs().amax(), weight))
        direct = [x]
        for weight in packed[:4]:
            direct.append(linear(direct[-1], weight))
    for _ in range(5):
        for result in [*results[1:], *direct[1:]]:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for weight, before, after in zip(packed, results, results[1:], strict=False):
            assert torch.equal(after, linear(before / before.abs().amax(), weight))
        for weight, before, after in zip(packed, direct, direct[1:], strict=False):
            torch.cuda.synchronize()
            assert torch.equal(after, linear(before, weight))


def test_products_can_be_captured():
    packed, _ = random_packed(4096, 4096, 4, 128)
    x = activations(4, 4096, torch.bfloat16)
    expected = linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, packed)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
