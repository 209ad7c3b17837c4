import math

import pytest

pytest.importorskip("torch")
import torch

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import host
from qsync_opt.kernels.decoder import (
    add_rms_norm,
    add_rms_norm_and_round,
    gelu_gate,
    rms_norm,
    rotate_and_attend,
    rotate_into_pages,
    rotate_positions,
    silu_gate,
)
from qsync_opt.kernels.paged_attention import from_halves, paged_attention
from qsync_opt.kernels.weight_only import EIGHT_BITS, rotated_inputs

TYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (3, 7), (5, 33), (2, 640), (70, 300), (0, 8))


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype)


def assert_rounded_once(actual, exact, wide_error=None):
    """Within half a step of the type of what FP64 gives, and of the error of FP32 on the way, by default 1e-6 of it."""
    half_step = torch.finfo(torch.bfloat16).eps / 2 if actual.dtype is torch.bfloat16 else 0.0
    wide_error = 1e-6 * exact.abs() if wide_error is None else wide_error
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * half_step + wide_error).all()


def exact_norm(x, weight, epsilon):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def exact_rotation(x, cos, sin):
    """Both halves of a head as the real and imaginary parts of numbers."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * cos[..., :half] - second * sin[..., :half], second * cos[..., half:] + first * sin[..., half:]], -1
    )


def exact_gate(first, by_gelu):
    """A gate and the error of FP32: exp has that of its argument, and a closed gate leaves next to nothing."""
    x = first.double()
    argument = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) if by_gelu else x
    value = x * torch.sigmoid(argument)
    closed = torch.finfo(torch.float32).tiny * x.abs().clamp_min(1)
    return value, value.abs() * (1e-6 + 3e-7 * argument.abs().clamp_max(90)) + closed


GATES = ((gelu_gate, True), (silu_gate, False))


@pytest.fixture(params=["loops", "plain"])
def code(request, monkeypatch):
    """With compiled loops, and as without a compiler."""
    from qsync_opt.kernels.decoder import rows

    if request.param == "loops":
        assert not isinstance(host.load("decoder"), str), host.load("decoder")
    else:
        monkeypatch.setattr(rows, "_loops", lambda: None)
    return request.param


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_the_formula_s(code, shape, dtype):
    x, weight = randn(*shape, dtype=dtype, scale=3.0), randn(shape[1])
    assert_rounded_once(rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6))
    narrow = weight.to(dtype)
    assert_rounded_once(rms_norm(x, narrow, 1e-2), exact_norm(x, narrow, 1e-2))


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_heads_between_others(code, dtype):
    x, weight = randn(90, 6, 64, dtype=dtype), randn(64)
    q, k, _ = torch.split(x, [4, 1, 1], dim=1)
    for part in (q, k, x.transpose(0, 1), x.transpose(1, 2)):
        scale = weight if part.shape[-1] == 64 else weight[:6]
        assert_rounded_once(rms_norm(part, scale, 1e-6), exact_norm(part, scale, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [2, 6, 64, 130])
def test_rotations_are_the_formula_s(code, size, dtype):
    x = randn(40, 7, size, dtype=dtype)[:, 1:6]
    cos, sin = randn(40, 1, size, dtype=dtype), randn(40, 1, size, dtype=dtype)
    exact = exact_rotation(x, cos, sin)
    actual = rotate_positions(x, cos, sin)
    if code == "loops":
        assert_rounded_once(actual, exact, 1e-6 * (exact.abs() + 4 * x.double().abs().amax()))
    else:  # each operation rounds
        assert (actual.double() - exact).abs().max() <= 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("gate", "by_gelu"), GATES)
def test_gates_are_the_formula_s(code, gate, by_gelu, shape, dtype):
    first, second = randn(*shape, dtype=dtype, scale=3.0), randn(*shape, dtype=dtype)
    value, error = exact_gate(first, by_gelu)
    wide = second.double()
    actual = gate(torch.cat([first, second], 1))
    if code == "loops":
        assert_rounded_once(actual, value * wide, error * wide.abs() + 1e-38)
    else:  # each operation rounds, and 1 + tanh(u) near -1 has few digits
        assert torch.allclose(actual.double(), value * wide, rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("gate", "by_gelu"), GATES)
def test_gates_of_any_magnitude(gate, by_gelu):
    """Every exponent, and thousands of numbers where a gate bends."""
    powers = 2.0 ** torch.arange(-126, 127)
    first = torch.cat([powers, -powers, torch.zeros(2), torch.linspace(-100, 100, 20_001)])[None]
    assert_rounded_once(gate(torch.cat([first, torch.ones_like(first)], 1)), *exact_gate(first, by_gelu))


@pytest.mark.parametrize("activations", EIGHT_BITS)
@pytest.mark.parametrize("rotation", [0, 64, 128])
def test_norms_that_round_are_norms_that_are_rounded(rotation, activations):
    x, added, weight = randn(5, 256, scale=3.0), randn(5, 256), randn(256)
    run = torch.ops.qsync_opt.decoder_add_norm_and_round.default
    arguments = (x, added, weight, 1e-5, rotation, EIGHT_BITS[activations])
    codes, scale, total = run(*arguments)
    assert torch.equal(total, x + added)
    assert codes.dtype is EIGHT_BITS[activations]
    normed = exact_norm(total, weight, 1e-5)
    expected = rotated_inputs(normed, rotation) if rotation else normed
    step = scale.double() * (1 if activations == "A8" else codes.double().abs().clamp_min(1) / 8)
    assert ((codes.double() * scale.double() - expected).abs() <= 0.51 * step).all()
    torch.library.opcheck(run, arguments)


def test_norms_round_on_cards_only():
    x = randn(2, 64)
    assert add_rms_norm_and_round(x, x, randn(64), 1e-5, rotation=0, activations="A8") is None


def test_nan_stays_nan():
    for dtype in TYPES:
        x = torch.ones(3, 64, dtype=dtype)
        x[1, 5] = torch.nan
        assert rms_norm(x, torch.ones(64), 1e-6).isnan().all(1).tolist() == [False, True, False]
        for gate in (gelu_gate, silu_gate):
            assert gate(x).isnan().nonzero().tolist() == [[1, 5]]
        rotation = rotate_positions(x.view(3, 1, 64), *[torch.ones(3, 1, 64, dtype=dtype)] * 2)
        assert rotation.isnan().nonzero().tolist() == [[1, 0, 5], [1, 0, 37]]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    x, weight = randn(300, 330, dtype=dtype), randn(330)
    heads = x.view(300, 3, 110)
    cos, sin = randn(300, 1, 110, dtype=dtype), randn(300, 1, 110, dtype=dtype)
    together = rms_norm(x, weight, 1e-6), gelu_gate(x), silu_gate(x), rotate_positions(heads, cos, sin)
    for row in (0, 1, 150, 299):
        one = slice(row, row + 1)
        alone = (
            rms_norm(x[one], weight, 1e-6),
            gelu_gate(x[one].clone()),
            silu_gate(x[one]),
            rotate_positions(heads[one].clone(), cos[one], sin[one]),
        )
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))


def test_gradients_and_other_types_have_the_plain_formulas():
    x = torch.randn((4, 6), dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn((2, 4, 1, 6), dtype=torch.float64)
    turn = lambda x: rotate_positions(x.view(4, 1, 6), cos, sin)  # noqa: E731
    assert all(torch.autograd.gradcheck(function, x) for function in (turn, gelu_gate, silu_gate))
    narrow = x.detach().float().requires_grad_()
    exact_norm(x, torch.ones(6), 1e-6).sum().backward()
    rms_norm(narrow, torch.ones(6), 1e-6).sum().backward()
    assert torch.allclose(narrow.grad.double(), x.grad, atol=1e-5)
    weight = torch.ones(6, requires_grad=True)
    assert rms_norm(narrow.detach(), weight, 1e-6).requires_grad
    for dtype in TYPES:  # loops would lose the gradient
        heads, rows = x.detach().to(dtype).view(4, 1, 6).requires_grad_(), x.detach().to(dtype).requires_grad_()
        angles = cos[0].to(dtype).expand(4, 1, 6)
        assert rotate_positions(heads, angles, angles).requires_grad
        assert rotate_positions(heads.detach(), angles.clone().requires_grad_(), angles).requires_grad
        assert gelu_gate(rows).requires_grad and silu_gate(rows).requires_grad
    halves = x.detach().half()
    assert rms_norm(halves, torch.ones(6), 1e-6).dtype is gelu_gate(halves).dtype is torch.float16


def test_without_a_compiler_plain_code_runs(monkeypatch):
    from qsync_opt.kernels.decoder import rows

    monkeypatch.setenv("CXX", "no-such-compiler")
    for cached in (host.load, rows._loops):
        cached.cache_clear()
    try:
        x = randn(3, 64)
        assert rows._loops() is None
        assert torch.equal(silu_gate(x), torch.nn.functional.silu(x[:, :32]) * x[:, 32:])
    finally:
        for cached in (host.load, rows._loops):
            cached.cache_clear()


def test_shapes_and_types_that_do_not_fit_are_refused():
    x = torch.ones(2, 3, 6)
    cos = torch.ones(2, 1, 6)
    for refused in (
        lambda: rms_norm(torch.ones(2, 64), torch.ones(8), 1e-6),
        lambda: rms_norm(torch.ones(8), torch.ones(8), 1e-6),
        lambda: rms_norm(torch.ones(1, 2, 3, 8), torch.ones(8), 1e-6),
        lambda: rotate_positions(x, cos[:1], cos),
        lambda: rotate_positions(x, cos, cos.bfloat16()),
        lambda: rotate_positions(x[..., :5], cos[..., :5], cos[..., :5]),
        lambda: gelu_gate(torch.ones(2, 7)),
        lambda: silu_gate(torch.ones(8)),
    ):
        with pytest.raises(UnsupportedError, match="has the shape"):
            refused()


def test_other_devices_take_no_loops():
    x = torch.ones(2, 8, device="meta")
    assert silu_gate(x).shape == (2, 4) and rms_norm(x, torch.ones(8, device="meta"), 1e-6).shape == (2, 8)
    torch.set_default_device("meta")
    try:
        for y in (rms_norm(torch.ones(2, 8, device="cpu"), torch.ones(8, device="cpu"), 1e-6),
                  silu_gate(torch.ones(2, 8, device="cpu"))):  # fmt: skip
            assert y.device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_a_sum_and_its_norm(code):
    x, added, weight = randn(5, 64), randn(5, 64), randn(64)
    normed, total = add_rms_norm(x, added, weight, 1e-6)
    assert torch.equal(total, x + added) and torch.equal(normed, rms_norm(total, weight, 1e-6))
    with pytest.raises(UnsupportedError, match="must be \\(N, D\\) of one type"):
        add_rms_norm(x, added.bfloat16(), weight, 1e-6)


@pytest.mark.parametrize("coded", [False, True])
def test_what_cards_do_is_specified(coded):
    """The operators' plain implementations, which cards run where kernels are missing."""
    ops = torch.ops.qsync_opt
    x, added, weight = randn(5, 64), randn(5, 64), randn(64)
    assert torch.allclose(ops.decoder_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6))
    assert all(map(torch.allclose, ops.decoder_add_norm(x, added, weight, 1e-6), add_rms_norm(x, added, weight, 1e-6)))
    for by_gelu, gate in ((True, gelu_gate), (False, silu_gate)):
        assert torch.allclose(ops.decoder_gate(x, by_gelu), gate(x), atol=1e-6)
    heads, cos, sin = randn(7, 6, 64), randn(7, 1, 64), randn(7, 1, 64)
    slots, pool = torch.randperm(32)[:7], torch.zeros(2, 1, 32, 64, dtype=torch.uint8 if coded else torch.float32)
    scales = torch.zeros(2, 1, 32, 1) if coded else None
    assert rotate_into_pages(heads, cos, sin, slots, pool, scales) is None and not pool.any()  # CPUs have no kernel
    rotated = ops.decoder_rotate_into_pages(heads, cos, sin, slots, pool, scales)
    assert torch.allclose(rotated, rotate_positions(heads[:, :5], cos, sin), atol=1e-6)
    kept = from_halves(pool) * scales if coded else pool
    expected = torch.stack([rotated[:, 4], heads[:, 5]])
    step = expected.abs().amax(-1, keepdim=True) / 254 if coded else torch.zeros(1)
    assert ((kept[:, 0, slots] - expected).abs() <= step * 1.001).all()
    others = torch.ones(32, dtype=torch.bool)
    others[slots] = False
    assert not kept[:, :, others].any()


@pytest.mark.parametrize("coded", [False, True])
def test_one_operator_is_rotating_storing_and_attending(coded):
    ops = torch.ops.qsync_opt
    heads, cos, sin = randn(2, 8, 64), randn(2, 1, 64), randn(2, 1, 64)
    pages, contexts, slots = torch.tensor([[1, 2], [3, 0]]), torch.tensor([20, 16]), torch.tensor([35, 63])
    pool = torch.randint(0, 255, (2, 2, 64, 64), dtype=torch.uint8) if coded else randn(2, 2, 64, 64)
    scales = torch.rand(2, 2, 64, 1) / 127 if coded else None
    assert (
        rotate_and_attend(heads, cos, sin, slots, pool, pages, contexts, scale=0.1, scales=scales) is None
    )  # on a CPU
    own, own_scales = pool.clone(), None if scales is None else scales.clone()
    arguments = (heads, cos, sin, slots, own, own_scales, pages, contexts, 0.1, 0, False)
    torch.library.opcheck(ops.turn_and_attend.default, arguments)
    y = ops.turn_and_attend(*arguments)
    rotated = ops.decoder_rotate_into_pages(heads, cos, sin, slots, pool, scales)
    assert torch.equal(own, pool)
    assert torch.equal(y, paged_attention(rotated[:, :4], pool, pages, contexts, scale=0.1, scales=scales))
