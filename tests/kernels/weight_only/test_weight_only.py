"""Packing, and products with packed weights on the CPU against FP64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import host
from qsync_opt.kernels.weight_only import (
    PackedWeight,
    RoundedRows,
    codes_of,
    explain,
    gated_linear,
    hadamard,
    linear,
    pack,
    pack_codes,
    pack_parts,
    rotate,
    rotate_and_round,
    rotated_inputs,
    unpack,
)

RANGES = {4: (-8, 8), 8: (-128, 128)}
needs_compiler = pytest.mark.skipif(bool(explain("cpu")), reason=f"no compiled product: {explain('cpu')}")


def random_packed(outputs, inputs, bits, group, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(*RANGES[bits], (outputs, inputs), generator=generator).to(torch.int8)
    groups = 1 if group is None else -(-inputs // group)
    scales = torch.rand((outputs, groups), generator=generator) + 0.1
    packed = pack_codes(codes, scales, bits, group)
    weight = codes.double() * scales.double().repeat_interleave(packed.group, 1)[:, :inputs]
    return packed, codes, weight


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 140), st.integers(1, 300), st.sampled_from([4, 8]), st.sampled_from([64, 128, None]))
def test_codes_come_back(outputs, inputs, bits, group):
    packed, codes, weight = random_packed(outputs, inputs, bits, group)
    assert torch.equal(codes_of(packed), codes)
    assert torch.equal(unpack(packed, torch.float64), weight)
    assert torch.equal(unpack(packed), weight.float())
    assert torch.equal(unpack(packed, torch.bfloat16), weight.float().bfloat16())
    assert packed.shape == (outputs, inputs)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128, None])
def test_packing_rounds_to_the_nearest_code(bits, group):
    weight = torch.randn((70, 200), generator=torch.Generator().manual_seed(1))
    packed = pack(weight, bits, group)
    step = packed.scales.t()[:70].repeat_interleave(packed.group, 1)[:, :200]
    error = (unpack(packed) - weight).abs()
    assert bool((error <= 0.5 * step * (1 + 1e-5)).all())
    highest = RANGES[bits][1] - 1
    assert int(codes_of(packed).abs().amax()) == highest
    assert packed.memory_bytes < weight.nbytes


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_parts_are_packed_as_the_whole(bits, group, rotated):
    weight = torch.randn((200, 100), generator=torch.Generator().manual_seed(4))
    whole = pack(weight, bits, group, rotate=rotated)
    parts = pack_parts(iter(weight.split([64, 128, 8])), 200, bits, group, rotate=rotated)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)
    assert (parts.shape, parts.group, parts.rotation) == (whole.shape, whole.group, whole.rotation)


def test_zeros_and_tiny_weights_stay_finite():
    weight = torch.zeros((3, 130))
    weight[1] = 1e-45
    assert torch.equal(unpack(pack(weight, 4))[0], weight[0])
    assert bool(torch.isfinite(unpack(pack(weight, 4))).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128, None])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_those_of_float64(bits, group, rows, dtype):
    packed, _, weight = random_packed(130, 200, bits, group)
    x = torch.randn((rows, 200), generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = x.double() @ weight.t()
    terms = x.double().abs() @ weight.abs().t()
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-14}[dtype]
    if dtype is torch.bfloat16 and rows > 64:
        rounding = 2**-7  # the unpacked weight is rounded, too
    for backend in ("auto", "reference"):
        y = linear(x, packed, backend=backend)
        assert y.dtype is dtype
        assert bool(((y.double() - exact).abs() <= rounding * terms).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_one_number_are_columns_of_the_weight(bits, dtype):
    packed, _, _ = random_packed(130, 200, bits, 64)
    columns = unpack(packed).t().to(dtype)
    for rows in torch.eye(200, dtype=dtype).split([1, 2, 3, 5, 8, 15, 32, 64, 70]):
        y = linear(rows, packed, reproducible=not explain("cpu"))
        # Zeros of codes are subtracted after the sum where numbers are FP32.
        assert torch.allclose(y.float(), columns[rows.argmax(1)].float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def rounded(x, activations):
    """Rows as codes say, in FP64."""
    largest = {"A8": 127, "F8": 448, "A4": 7}[activations]
    scale = x.double().abs().amax(1, keepdim=True) / largest
    codes = x.double() / scale
    codes = codes.to(torch.float8_e4m3fn).double() if activations == "F8" else codes.round()
    return codes * scale


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activations", ["A8", "F8", "A4"])
@pytest.mark.parametrize("rotate", [False, True])
def test_rounded_activations(bits, activations, rotate):
    generator = torch.Generator().manual_seed(3)
    x, dense = (torch.randn((rows, 256), generator=generator) for rows in (70, 130))
    x[:, 7] *= 20
    packed = pack(dense, bits, 64, rotate=rotate)
    weight, turned = unpack(packed, torch.float64), x.double()
    if rotate:
        weight, turned = (rotated_inputs(matrix, packed.rotation) for matrix in (weight, turned))
    taken = rounded(turned.float(), activations)
    exact, step = taken @ weight.t(), (taken - turned).abs().amax()
    for rows in (5, 70):  # by packed and by unpacked weights
        for backend in ("auto", "reference"):
            y = linear(x[:rows], packed, activations=activations, backend=backend).double()
            # A number near the middle of two codes may be rounded to either.
            near = (y - exact[:rows]).abs() <= 1e-5 * (taken.abs() @ weight.abs().t())[:rows]
            assert near.double().mean() > 0.9
            assert bool(((y - exact[:rows]).abs() <= 3 * step * weight.abs().amax()).all())
    wide = linear(x, packed).double()
    assert torch.allclose(wide, x.double() @ unpack(packed, torch.float64).t(), rtol=1e-3, atol=1e-3)


def test_rotation_helps_rows_with_numbers_that_stand_out():
    generator = torch.Generator().manual_seed(4)
    x, dense = torch.randn((16, 256), generator=generator), torch.randn((64, 256), generator=generator)
    x[:, ::64] *= 50

    def error(rotate, activations):
        packed = pack(dense, 8, rotate=rotate)
        exact = x.double() @ unpack(packed, torch.float64).t()
        return float((linear(x, packed, activations=activations).double() - exact).norm() / exact.norm())

    for activations in ("A8", "A4"):
        assert error(True, activations) < 0.5 * error(False, activations)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 5), st.sampled_from([64, 128]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_rotations_are_products_with_hadamard_s_matrix(seed, rows, blocks, block, dtype):
    x = torch.randn((rows, blocks * block), generator=torch.Generator().manual_seed(seed)).to(dtype)
    matrix = hadamard(block)
    assert torch.equal(matrix, matrix.t())
    assert torch.allclose(matrix @ matrix, torch.eye(block, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, block**-0.5), rtol=1e-15)
    exact = (x.double().view(-1, block) @ matrix).view(x.shape)
    y = rotate(x, block)
    assert y.dtype is dtype
    # Rounded once to the type; sums in FP64 are those of a block, here in another order.
    eps = max(2 * torch.finfo(dtype).eps, block * torch.finfo(torch.float64).eps)
    assert torch.allclose(y.double(), exact, rtol=0, atol=float(exact.abs().amax()) * eps)
    assert torch.equal(rotate(x[:1], block), y[:1])
    assert torch.allclose(rotate(y, block).double(), x.double(), rtol=0, atol=40 * torch.finfo(dtype).eps)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300), st.sampled_from([4, 8]), st.sampled_from([64, 128, None]))
def test_rotated_weights_are_rounded_to_the_nearest_code(outputs, inputs, bits, group):
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(inputs))
    packed = pack(weight, bits, group, rotate=True)
    assert packed.shape == (outputs, inputs)
    assert packed.rotation == (128 if inputs > 64 and -(-inputs // 64) % 2 == 0 else 64)
    error = unpack(packed, torch.float64) - weight.double()
    assert float(error.norm()) <= 0.5 * float(packed.scales[:, :outputs].max()) * (256 + inputs) ** 0.5 * outputs**0.5
    x = torch.randn((3, inputs), generator=torch.Generator().manual_seed(outputs))
    exact = x.double() @ unpack(packed, torch.float64).t()
    for backend in ("auto", "reference"):
        assert torch.allclose(linear(x, packed, backend=backend).double(), exact, rtol=1e-4, atol=1e-3)


def test_rows_that_hold_nan_stay_nan():
    packed = pack(torch.ones(64, 64), 4, rotate=True)
    x = torch.ones(2, 64)
    x[1, 3] = torch.nan
    for activations in ("A8", "F8", "A4"):
        y = linear(x, packed, activations=activations)
        assert bool(y[1].isnan().all())
        assert torch.allclose(y[0], torch.full((64,), 64.0), rtol=1e-3)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_reproducible_rows_do_not_depend_on_the_batch(bits):
    packed, _, _ = random_packed(130, 320, bits, 128)
    x = torch.randn((37, 320), generator=torch.Generator().manual_seed(4)).bfloat16()
    together = linear(x, packed, reproducible=True)
    for rows in (1, 2, 3, 5, 16):
        assert torch.equal(linear(x[:rows], packed, reproducible=True), together[:rows])
    assert torch.equal(linear(x[36:], packed, reproducible=True), together[36:])


@needs_compiler
def test_threads_change_nothing():
    packed, _, _ = random_packed(300, 320, 4, 128)
    x = torch.randn((3, 320), generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(x, packed)
        torch.set_num_threads(2)
        assert torch.equal(linear(x, packed), one)
    finally:
        torch.set_num_threads(before)


def test_shapes_and_bias():
    packed, _, weight = random_packed(65, 64, 4, None)
    bias = torch.arange(65.0)
    x = torch.randn((2, 3, 64), generator=torch.Generator().manual_seed(6))
    assert torch.allclose(linear(x, packed, bias), (x.double() @ weight.t()).float() + bias, rtol=1e-4, atol=1e-3)
    assert linear(x[0, 0], packed).shape == (65,)
    assert linear(x[:0], packed).shape == (0, 3, 65)
    assert linear(x.transpose(0, 1), packed).shape == (3, 2, 65)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, p: pack(w, 3), "allowed are 4 and 8"),
        (lambda w, p: pack(w, 4, 32), "multiple of 64"),
        (lambda w, p: pack(w[0], 4), "a matrix"),
        (lambda w, p: pack(w * float("nan"), 4), "NaN"),
        (lambda w, p: pack_codes(torch.full((2, 64), 8), torch.ones(2, 1), 4), "from -8 to 7"),
        (lambda w, p: pack_codes(torch.zeros((2, 64), dtype=torch.int8), torch.ones(2, 2), 4), "scales have the shape"),
        (lambda w, p: pack_parts([w, w], 8, 4), "begin at whole tiles"),
        (lambda w, p: pack_parts([w], 3, 4), "rows 0 to 4 of 3"),
        (lambda w, p: pack_parts([w], 5, 4), "the parts have 4 rows, but the weight has 5"),
        (lambda w, p: linear(torch.ones(2, 63), p), "64 inputs"),
        (lambda w, p: linear(torch.ones(2, 64, dtype=torch.int32), p), "x is torch.int32"),
        (lambda w, p: linear(torch.ones(2, 64), p, activations="A6"), "allowed are A16, A8, F8, A4"),
        (lambda w, p: linear(torch.ones(2, 64), p, backend="fast"), "allowed are auto"),
        (lambda w, p: linear(torch.ones(2, 64, dtype=torch.float64), p, reproducible=False, backend="none"), "backend"),
        (lambda w, p: unpack(p, torch.int8), "dtype is"),
        (lambda w, p: rotate(w, 32), "block is 32, but allowed are 128, 64"),
        (lambda w, p: rotate(w, 128), "a multiple of 128"),
    ],
)
def test_bad_arguments_are_refused(call, text):
    weight = torch.ones(4, 64)
    with pytest.raises(UnsupportedError, match=text):
        call(weight, pack(weight, 4))


def test_without_a_compiler_plain_code_runs_and_says_why(monkeypatch):
    from qsync_opt.kernels.weight_only import host as weight_only_host
    from qsync_opt.kernels.weight_only import operators

    monkeypatch.setenv("CXX", "no-such-compiler")
    for cached in (host.load, weight_only_host.functions, operators._refusal):
        cached.cache_clear()
    try:
        packed, _, weight = random_packed(65, 64, 4, None)
        x = torch.randn((2, 64), generator=torch.Generator().manual_seed(7))
        assert "no-such-compiler" in explain("cpu")
        assert torch.allclose(linear(x, packed).double(), x.double() @ weight.t(), rtol=1e-4, atol=1e-3)
        assert torch.equal(unpack(packed), weight.float())
        with pytest.raises(UnsupportedError, match="no-such-compiler"):
            linear(x, packed, backend="compiled")
        with pytest.raises(UnsupportedError, match="reproducible"):
            linear(x, packed, reproducible=True)
    finally:
        for cached in (host.load, weight_only_host.functions, operators._refusal):
            cached.cache_clear()


@pytest.mark.parametrize("activations", ["A8", "F8", "A4"])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_that_are_rounded_already(activations, rotated, backend):
    weight = torch.randn((70, 128), generator=torch.Generator().manual_seed(1))
    x = torch.randn((9, 128), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    packed, bias = pack(weight, 4, rotate=rotated), torch.arange(70.0)
    rows = rotate_and_round(x, packed.rotation, activations, backend)
    y = linear(rows, packed, bias, backend=backend)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, linear(x, packed, bias, activations=activations, backend=backend))
    none = linear(RoundedRows(rows.codes[:0], rows.scale[:0], torch.float32), packed)
    assert none.shape == (0, 70) and none.dtype is torch.float32
    with pytest.raises(UnsupportedError, match="last dimension must be the weight's 128 inputs"):
        linear(RoundedRows(rows.codes[:, :64], rows.scale, x.dtype), packed)


@pytest.mark.parametrize("by_gelu", [False, True])
def test_the_plain_gated_product_gates_the_first_half(by_gelu):
    packed, _, _ = random_packed(128, 64, 4, 64)
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(0)) / 64
    arguments = (packed.codes, packed.scales, packed.bits, packed.group, 128)
    product = torch.ops.qsync_opt.weight_only_linear_gated(x, *arguments, by_gelu)
    gate, up = linear(x, packed, backend="reference").double().chunk(2, dim=-1)
    gate = torch.nn.functional.gelu(gate, approximate="tanh") if by_gelu else torch.nn.functional.silu(gate)
    torch.testing.assert_close(product.double(), gate * up, rtol=1e-5, atol=1e-6)
    assert gated_linear(x, packed, by_gelu=by_gelu) is None  # on a CPU


def test_operators_keep_torch_s_rules():
    packed, _, _ = random_packed(65, 128, 4, 64)
    assert isinstance(packed, PackedWeight)
    x = torch.randn((2, 128))
    arguments = (packed.codes, packed.scales, packed.bits, packed.group)
    ops = torch.ops.qsync_opt
    torch.library.opcheck(ops.weight_only_linear.default, (x, *arguments, 65))
    torch.library.opcheck(ops.weight_only_linear_gated.default, (x, *arguments, 64, True))
    torch.library.opcheck(ops.weight_only_unpack.default, (*arguments, torch.bfloat16))
    torch.library.opcheck(ops.weight_only_rotate.default, (x, 128))
    torch.library.opcheck(ops.weight_only_rotate_and_round.default, (x, 64, torch.int8))
    codes, scale = torch.ones((2, 128), dtype=torch.int8), torch.ones(2)
    torch.library.opcheck(
        ops.weight_only_linear_rounded.default, (codes, scale, packed.codes, packed.scales, 64, 65, torch.float32)
    )
