import warnings

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, convolution_call, ops, product_call, reference
from qsync_opt.kernels.autograd import float_modes, product_slices
from qsync_opt.kernels.quantize import Quantized

# Largest relative error of rounding to BF16's 8 significant bits.
BF16_ROUNDING = 2.0**-8


def _close(result, expected, relative, absolute=0.0):
    error = (result.double() - expected.double()).abs()
    allowed = relative * expected.double().abs() + absolute
    assert bool((error <= allowed).all()), f"largest excess {(error - allowed).max().item()}"


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


OPTIONS = [
    KernelOptions(rounding=rounding, activation_granularity=a, weight_granularity=w, backend=how, seed=7)
    for rounding in ("stochastic", "nearest")
    for a, w in (("tensor", "channel"), ("row", "tensor"))
    for how in ("auto", "reference")
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.rounding}-{o.activation_granularity}-{o.backend}")
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (40, 64, 24), (2, 3, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_is_the_exact_product_rounded_once(options, shape, dtype):
    n, m, k = shape
    x, w, b = torch.randn(n, k).to(dtype), torch.randn(m, k), torch.randn(m)
    result = ops.execute("linear", "INT8", F.linear, (x, w, b), {}, options)
    expected = reference.product(x, w.t(), b, "INT8", options)
    assert result.dtype is torch.bfloat16
    # One rounding to BF16, and the FP32 rounding of scale times sum where product and bias cancel.
    _close(result, expected, BF16_ROUNDING * 1.01, 1e-5)
    assert _norm_error(result, F.linear(x.double(), w.double(), b.double())) < 0.06


@pytest.mark.parametrize("options", OPTIONS[:4], ids=lambda o: f"{o.activation_granularity}-{o.backend}")
def test_int8_gradients_are_those_of_the_rounded_operands(options):
    x = torch.randn(6, 20, 33, requires_grad=True)
    w, b = torch.randn(17, 33, requires_grad=True), torch.randn(17, requires_grad=True)
    result = ops.execute("linear", "INT8", F.linear, (x, w), {"bias": b}, options)
    grad = torch.randn_like(result)
    gx, gw, gb = torch.autograd.grad(result, (x, w, b), grad)
    assert {gx.dtype, gw.dtype, gb.dtype} == {torch.float32}
    a, bt = x.detach().reshape(-1, 33), w.detach().t()
    a_values, b_values = reference.product_operands(a, bt, "INT8", options)
    g = grad.reshape(-1, 17).double()
    assert _norm_error(gx.reshape(-1, 33), g @ b_values.T) < BF16_ROUNDING
    assert _norm_error(gw, (a_values.T @ g).T) < BF16_ROUNDING
    assert _norm_error(gb, g.sum(0)) < 1e-6


def test_saved_activations_are_int8():
    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        ops.execute("linear", "INT8", F.linear, (x, w))
    assert {t.dtype for t in saved if t.numel() > 16} == {torch.int8}
    assert sum(t.numel() for t in saved if t.dtype is torch.int8) == 64 * 32 + 16 * 32


def test_int8_gradient_is_unbiased_through_the_whole_layer():
    # With a loss linear in the output, the weight gradient is x_hat^T g: its mean over draws is x^T g.
    x, w = torch.randn(16, 24), torch.randn(8, 24, requires_grad=True)
    g = torch.randn(16, 8).bfloat16()
    total, draws = torch.zeros(8, 24, dtype=torch.float64), 300
    outputs = torch.zeros(16, 8, dtype=torch.float64)
    for offset in range(draws):
        y = ops.execute("linear", "INT8", F.linear, (x, w), {}, KernelOptions(offset=offset))
        total += torch.autograd.grad(y, w, g)[0].double()
        outputs += y.detach().double()
    expected = (x.double().T @ g.double()).T
    spread = x.abs().max().double() / 127 * 0.5 * g.double().norm(dim=0)[:, None]
    # Six standard deviations of the mean, and the rounding of x_hat to BF16, which is to nearest.
    assert bool(((total / draws - expected).abs() <= 6 * spread / draws**0.5 + expected.abs().max() * 2**-9).all())
    exact = x.double() @ w.detach().double().T
    assert _norm_error(outputs / draws, exact) < 0.002


def _product_calls():
    a, b, c = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    p, q = torch.randn(2, 4, 5, 7), torch.randn(2, 4, 7, 3)
    return [
        ("mm", torch.mm, (a, b), {}),
        ("mm", torch.Tensor.mm, (a,), {"mat2": b}),
        ("addmm", torch.addmm, (c, a, b), {}),
        ("addmm", torch.addmm, (torch.randn(5, 3), a, b), {"beta": 0.5, "alpha": 2}),
        ("bmm", torch.bmm, (p[0], q[0]), {}),
        ("baddbmm", torch.baddbmm, (torch.randn(4, 5, 3), p[0], q[0]), {"beta": 2, "alpha": 0.25}),
        ("matmul", torch.matmul, (p, q), {}),
        ("matmul", torch.matmul, (p,), {"other": b}),
        ("matmul", torch.Tensor.__matmul__, (a, q[0, 0]), {}),
        ("matmul", torch.Tensor.__rmatmul__, (b, a), {}),
        ("matmul", torch.matmul, (a[0], b), {}),
        ("matmul", torch.matmul, (a, b[:, 0]), {}),
        ("matmul", torch.matmul, (a[0], b[:, 0]), {}),
        ("matmul", torch.matmul, (p[:, :1], q[0]), {}),
        ("matmul", torch.matmul, (a, q), {}),
        ("linear", F.linear, (a[0], b.t()), {}),
        ("linear", F.linear, (p, b.t(), c), {}),
    ]


@pytest.mark.parametrize("index", range(17))
@pytest.mark.parametrize("precision", ["INT8", "BF16", "FP32"])
def test_every_product_in_every_precision(index, precision):
    op_type, function, args, kwargs = _product_calls()[index]
    expected = function(
        *[t.double() for t in args], **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    )
    options = KernelOptions(activation_granularity="row")
    result = ops.execute(op_type, precision, function, args, kwargs, options)
    assert result.shape == expected.shape
    assert result.dtype is (torch.float32 if precision == "FP32" else torch.bfloat16)
    assert _norm_error(result, expected) < {"INT8": 0.05, "BF16": 0.02, "FP32": 1e-5}[precision]


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("padding", [0, 1, "same", "valid", (1, 2)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=lambda o: f"{o.activation_granularity}-{o.backend}")
def test_int8_convolution(padding, groups, options):
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    w = torch.randn(6, 4 // groups, 3, 2, requires_grad=True)
    b = torch.randn(6, requires_grad=True)
    stride = 1 if padding == "same" else 2
    arguments = (x, w, b, stride, padding, 1, groups)
    result = ops.execute("conv2d", "INT8", F.conv2d, arguments, {}, options)
    call = convolution_call("conv2d", tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments), {})
    expected = reference.convolution(call.x, call.weight, call.bias, call.geometry, options)
    _close(result, expected, BF16_ROUNDING * 1.01, 1e-5)
    grad = torch.randn_like(result)
    gx, gw, gb = torch.autograd.grad(result, (x, w, b), grad)
    doubles = tuple(t.detach().double().requires_grad_() for t in (x, w, b))
    plain = F.conv2d(*doubles, stride, padding, 1, groups)
    for mine, theirs in zip((gx, gw, gb), torch.autograd.grad(plain, doubles, grad.double()), strict=True):
        assert mine.dtype is torch.float32
        assert _norm_error(mine, theirs) < 0.03


@pytest.mark.parametrize(
    ("op_type", "x", "w"),
    [("conv1d", (2, 3, 9), (4, 3, 3)), ("conv3d", (1, 2, 4, 5, 6), (3, 2, 2, 2, 3)), ("conv1d", (3, 9), (4, 3, 3))],
)
def test_int8_convolutions_of_other_dimensions(op_type, x, w):
    x, w = torch.randn(x), torch.randn(w)
    function = getattr(F, op_type)
    result = ops.execute(op_type, "INT8", function, (x, w), {"padding": 1})
    expected = function(x.double(), w.double(), padding=1)
    assert result.shape == expected.shape
    assert _norm_error(result, expected) < 0.03


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_empty_products(shape):
    n, k = shape
    x, w = torch.randn(n, k, requires_grad=True), torch.randn(3, k, requires_grad=True)
    b = torch.randn(3)
    result = ops.execute("linear", "INT8", F.linear, (x, w, b))
    assert torch.equal(result, b.bfloat16().expand(n, 3))
    result.sum().backward()
    assert w.grad.shape == (3, k)
    assert not w.grad.any()


def test_poison_reaches_the_result():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    x[1, 1] = float("nan")
    assert ops.execute("linear", "INT8", F.linear, (x, w)).isnan().all()
    rows = ops.execute("linear", "INT8", F.linear, (x, w), {}, KernelOptions(activation_granularity="row"))
    assert rows[1].isnan().all()
    assert rows[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("precision", ["BF16", "FP32"])
def test_other_kinds_in_16_and_32_bits(precision):
    dtype = {"BF16": torch.bfloat16, "FP32": torch.float32}[precision]
    table, index = torch.randn(10, 6, requires_grad=True), torch.tensor([[1, 2], [3, 1]])
    rows = ops.execute("embedding", precision, F.embedding, (index, table))
    assert torch.equal(rows, table[index].to(dtype))
    rows.sum().backward()
    assert table.grad.dtype is torch.float32
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e4)
    out = ops.execute(
        "scaled_dot_product_attention",
        precision,
        F.scaled_dot_product_attention,
        (q.bfloat16(), k, v),
        {"attn_mask": mask},
    )
    assert out.dtype is dtype
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask.double())
    assert _norm_error(out, expected) < 0.02
    out = ops.execute("einsum", precision, torch.einsum, ("bhqd,bhkd->bhqk", q, k.bfloat16()))
    assert out.dtype is dtype
    out = ops.execute(
        "conv_transpose2d", precision, F.conv_transpose2d, (torch.randn(1, 3, 4, 4), torch.randn(3, 2, 2, 2))
    )
    assert out.dtype is dtype


def test_integer_operands_run_as_they_are():
    a = torch.arange(6).view(2, 3)
    assert torch.equal(ops.execute("matmul", "INT8", torch.matmul, (a, a.t())), a @ a.t())


def test_refusals_name_kind_precision_and_what_is_allowed():
    x = torch.randn(2, 2)
    for op_type, precision in (("embedding", "INT8"), ("linear", "TF32"), ("linear", "FP16"), ("linear", "INT4")):
        with pytest.raises(UnsupportedError, match=f"{op_type} cannot run in {precision} on cpu: allowed are .*FP32"):
            ops.execute(op_type, precision, F.linear, (x, x))
    with pytest.raises(UnsupportedError, match="out="):
        ops.execute("mm", "INT8", torch.mm, (x, x), {"out": torch.empty(2, 2)})
    with pytest.raises(UnsupportedError, match="INT4"):
        ops.cast(x, "INT4")
    assert ops.precisions_of("linear", "cpu") == ("INT8-BWD8", "INT8", "BF16", "FP32")
    assert ops.default_precisions_of("linear", "cpu") == ("INT8", "BF16", "FP32")
    assert ops.precisions_of("embedding", "cpu") == ("BF16", "FP32")
    assert ops.precisions_of("layer_norm", "cpu") == ("FP32",)


def test_casts():
    x = torch.randn(4, 6)
    assert ops.cast(x, "BF16").dtype is torch.bfloat16
    assert ops.cast(x.half(), "FP32").dtype is torch.float32
    assert ops.cast(x, "TF32") is x
    codes = ops.cast(x, "INT8", KernelOptions(activation_granularity="row"))
    assert isinstance(codes, Quantized)
    assert codes.scale.shape == (4, 1)
    assert ops.cast(x, "FP8").codes.dtype is torch.float8_e4m3fn


def test_slices_of_products():
    a, b = torch.empty(4, 5), torch.empty(5, 6)
    options = KernelOptions(activation_granularity="row")
    assert product_slices(a, b, options) == ((1,), (0,))
    assert product_slices(a[None], b[None], options) == ((2,), (1,))
    assert product_slices(a[None], b[None], KernelOptions()) == (None, None)


@pytest.mark.parametrize("family", ["matmul", "conv"])
def test_fp32_mode_is_restored_even_after_an_error(family):
    before = float_modes.current_mode(family)
    older = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    for mode in ("tf32", "ieee"):
        with pytest.raises(ZeroDivisionError), float_modes.fp32_mode(family, mode):
            assert float_modes.current_mode(family) == mode
            _ = 1 / 0
        assert float_modes.current_mode(family) == before
    # The older switches refuse to be read while they contradict the newer ones.
    assert older == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_float_modes_have_the_gradients_of_the_plain_operators():
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 2, requires_grad=True)
    mine = torch.autograd.grad(float_modes.product(a, b, None, "tf32").sum(), (a, b))
    theirs = torch.autograd.grad((a @ b).sum(), (a, b))
    assert all(torch.allclose(m, t) for m, t in zip(mine, theirs, strict=True))
    x, w, c = (
        torch.randn(2, 4, 6, 6, requires_grad=True),
        torch.randn(6, 2, 3, 3, requires_grad=True),
        torch.randn(6, requires_grad=True),
    )
    call = convolution_call("conv2d", (x, w, c, 2, 1, 1, 2), {})
    y = float_modes.convolution(call.x, call.weight, call.bias, call.geometry, "ieee")
    plain = F.conv2d(x, w, c, 2, 1, 1, 2)
    assert torch.allclose(y, plain)
    grad = torch.randn_like(y)
    for m, t in zip(torch.autograd.grad(y, (x, w, c), grad), torch.autograd.grad(plain, (x, w, c), grad), strict=True):
        assert torch.allclose(m, t, atol=1e-5)


def test_product_call_takes_every_spelling():
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    for function, args, kwargs in (
        (torch.matmul, (a, b), {}),
        (torch.matmul, (a,), {"other": b}),
        (torch.matmul, (), {"input": a, "other": b}),
        (torch.Tensor.matmul, (a,), {"other": b}),
    ):
        call = product_call("matmul", function, args, kwargs)
        assert torch.equal(call.finish(call.a @ call.b), a @ b)


def test_no_warning_is_raised():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        ops.execute("linear", "INT8", F.linear, (x, w)).float().sum().backward()
