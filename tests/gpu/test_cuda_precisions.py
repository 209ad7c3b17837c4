"""Every precision of a CUDA device against FP64, and plans applied there."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, backend, ops, reference
from qsync_opt.kernels.autograd import float_modes
from qsync_opt.kernels.matmul import integer
from qsync_opt.kernels.quantize import dequantize, quantize_fp8, quantize_int8
from qsync_opt.runtimes.torch.execution import apply, device_formats, operator_kind, undo
from qsync_opt.runtimes.torch.interception import intercept

pytestmark = [
    pytest.mark.gpu,
    # torch's own: the thread of the backward pass makes its CUDA context late.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _a_device_and_the_same_numbers():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    torch.zeros(1, device=CUDA).mul_(1)  # makes the context, which cuBLAS would warn about if it came first


def _needs(precision):
    if precision not in device_formats(CUDA):
        pytest.skip(f"this card has no {precision}")


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def test_formats_of_this_card():
    formats = device_formats(CUDA)
    major, minor = torch.cuda.get_device_capability()
    assert "FP32" in formats
    assert ("INT8" in formats) == ((major, minor) >= (7, 5))
    assert ("FP8" in formats) == ((major, minor) >= (8, 9))
    if "INT8" in formats:
        assert formats["INT8"].output == ("BF16" if major >= 8 else "FP16")
    assert all(backend.explain(CUDA).values())


# Largest relative error of the result and of the gradients, in norm. FP32 is far below TF32 (the weight gradient of a
# convolution sums tens of thousands of products), so that one cannot pass
# for the other; TF32 must also be above FP32's bound, so that it is seen to be in force.
BOUNDS = {"FP32": 1e-5, "TF32": 2e-3, "FP16": 2e-3, "BF16": 1e-2, "INT8": 3e-2, "FP8": 8e-2}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("tf32_outside", [False, True])
@pytest.mark.parametrize("op_type", ["linear", "matmul", "conv2d"])
def test_precisions_against_fp64(precision, tf32_outside, op_type):
    _needs(precision)
    if not ops.supports(op_type, precision, CUDA):
        pytest.skip(f"{op_type} has no {precision}")
    function, a, b, extra = {
        "linear": (F.linear, torch.randn(8, 96, 320), torch.randn(192, 320), ()),
        "matmul": (torch.matmul, torch.randn(4, 3, 96, 320), torch.randn(4, 3, 320, 64), ()),
        # Large enough that cuDNN has a TF32 algorithm for it; for small ones it computes in FP32 whatever is allowed.
        "conv2d": (F.conv2d, torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3), (None, 1, 1)),
    }[op_type]
    a, b = a.to(CUDA).requires_grad_(), b.to(CUDA).requires_grad_()
    family = "conv" if op_type == "conv2d" else "matmul"
    with float_modes.fp32_mode(family, "tf32" if tf32_outside else "ieee"):
        result = ops.execute(op_type, precision, function, (a, b, *extra))
        grad = torch.randn_like(result)
        grads = torch.autograd.grad(result, (a, b), grad)
        assert float_modes.current_mode(family) == ("tf32" if tf32_outside else "ieee")
    halves = {"BF16": torch.bfloat16, "FP16": torch.float16}
    half = halves[backend.half_format(CUDA)]
    expected_dtype = {"FP32": torch.float32, "TF32": torch.float32, "INT8": half, "FP8": half} | halves
    assert result.dtype is expected_dtype[precision]
    doubles = tuple(t.detach().double().requires_grad_() for t in (a, b))
    expected = function(*doubles, *extra)
    errors = [_norm_error(result, expected)]
    for mine, theirs in zip(grads, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert mine.dtype is torch.float32
        errors.append(_norm_error(mine, theirs))
    assert max(errors) < BOUNDS[precision], errors
    if precision == "TF32":
        assert min(errors) > 1e-5, errors


def test_settings_of_torch_are_left_alone():
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    x = torch.randn(4, 32, 8, 8, device=CUDA, requires_grad=True)
    w = torch.randn(8, 32, 3, 3, device=CUDA, requires_grad=True)
    for precision in ("FP32", "TF32"):
        if precision in device_formats(CUDA):
            ops.execute("conv2d", precision, F.conv2d, (x, w)).sum().backward()
            ops.execute("matmul", precision, torch.matmul, (x, x)).sum().backward()
    assert before == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize("how", ["auto", "compiled", "reference"])
@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (3, 5, 9), (17, 33, 65), (64, 64, 64), (5, 2000, 8), (0, 3, 4)])
def test_integer_products_are_exact(how, n, k, m):
    _needs("INT8")
    a = torch.randint(-127, 128, (3, n, k), dtype=torch.int8, device=CUDA)
    b = torch.randint(-127, 128, (3, k, m), dtype=torch.int8, device=CUDA)
    expected = (a.double() @ b.double()).to(torch.int32)
    assert torch.equal(integer.int8_mm(a[0], b[0], how), expected[0])
    assert torch.equal(integer.int8_bmm(a, b, how), expected)


@pytest.mark.parametrize("how", ["auto", "reference"])
@pytest.mark.parametrize("groups", [1, 2])
def test_integer_convolutions_are_exact(how, groups):
    _needs("INT8")
    x = torch.randint(-127, 128, (2, 130, 9, 7), dtype=torch.int8, device=CUDA)
    w = torch.randint(-127, 128, (6, 130 // groups, 3, 3), dtype=torch.int8, device=CUDA)
    geometry = ((2, 1), (1, 0), (1, 2), False, (0, 0), groups)
    expected = torch.convolution(x.double().cpu(), w.double().cpu(), None, *geometry).to(torch.int32)
    assert torch.equal(integer.exact_convolution(x, w, geometry, how).cpu(), expected)


@pytest.mark.parametrize("dims", [None, (1,)])
def test_codes_are_those_of_the_cpu(dims):
    x = torch.randn(300, 700)
    for options in (KernelOptions(seed=5, offset=9), KernelOptions(rounding="nearest")):
        there, here = quantize_int8(x.to(CUDA), dims, options), quantize_int8(x, dims, options)
        # Scales may differ in the last bit between devices; a code then differs where a value lies on the border.
        assert torch.allclose(there.scale.cpu(), here.scale, rtol=1e-6)
        differing = (there.codes.cpu() != here.codes).float().mean().item()
        assert differing < 1e-4
        assert torch.equal(there.codes, quantize_int8(x.to(CUDA), dims, options).codes)
        floats = quantize_fp8(x.to(CUDA), dims, options).codes.cpu().float()
        assert (floats != quantize_fp8(x, dims, options).codes.float()).float().mean().item() < 1e-4


def test_poison():
    _needs("INT8")
    x, w = torch.randn(32, 64, device=CUDA), torch.randn(48, 64, device=CUDA)
    for poison in (float("nan"), float("inf")):
        x[3, 3] = poison
        assert ops.execute("linear", "INT8", F.linear, (x, w)).isnan().all()
        assert dequantize(quantize_int8(x, (1,)), torch.float32).isnan().any(1).sum() == 1


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 50, 17), (256, 512, 128)])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_eight_bit_linear_is_the_specified_one(precision, shape, rounding):
    _needs(precision)
    n, k, m = shape
    options = KernelOptions(rounding=rounding, half_format=backend.half_format(CUDA))
    x = torch.randn(n, k, device=CUDA, requires_grad=True)
    w, b = torch.randn(m, k, device=CUDA, requires_grad=True), torch.randn(m, device=CUDA, requires_grad=True)
    result = ops.execute(precision=precision, op_type="linear", function=F.linear, args=(x, w, b), options=options)
    expected = reference.product(x.detach(), w.detach().t(), b.detach(), precision, options)
    assert _norm_error(result, expected) < 5e-3
    grad = torch.randn_like(result)
    gx, gw, gb = torch.autograd.grad(result, (x, w, b), grad)
    assert {gx.dtype, gw.dtype, gb.dtype} == {torch.float32}
    a_values, b_values = reference.product_operands(x.detach(), w.detach().t(), precision, options)
    assert _norm_error(gx, grad.double() @ b_values.T) < 5e-3
    # Operands are rounded to 16 bits, sums are not: the weight gradient is finer than a 16-bit result.
    assert _norm_error(gw, (a_values.T @ grad.double()).T) < 5e-3
    assert bool((gw != gw.to(result.dtype).float()).any()) or gw.numel() < 100


def test_rows_and_channels():
    _needs("INT8")
    options = KernelOptions(activation_granularity="row", half_format=backend.half_format(CUDA))
    a, b = torch.randn(3, 40, 72, device=CUDA), torch.randn(3, 72, 24, device=CUDA)
    result = ops.execute("bmm", "INT8", torch.bmm, (a, b), {}, options)
    assert _norm_error(result, reference.product(a, b, None, "INT8", options)) < 5e-3


@pytest.mark.parametrize("precision", ["INT8", "FP8", "TF32", "FP32"])
def test_no_operator_waits_for_the_device(precision):
    _needs(precision)
    x, w = torch.randn(64, 64, device=CUDA, requires_grad=True), torch.randn(64, 64, device=CUDA, requires_grad=True)
    options = KernelOptions(half_format=backend.half_format(CUDA))

    def step():
        result = ops.execute("linear", precision, F.linear, (x, w), {}, options)
        torch.autograd.grad(result, (x, w), torch.ones_like(result))

    step()  # the first call tries the integer product once
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm, self.before = nn.BatchNorm2d(16), nn.LayerNorm(16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)
        return self.head(x + F.scaled_dot_product_attention(q, k, v).to(x.dtype)).mean(1)


def _names(model, x):
    names = []
    with intercept(model, lambda call: (names.append(call.name), call.run())[1]):
        model(x)
    return [name for name in names if operator_kind(name) is not None]


def _rounding(precision):
    """Root mean square of one rounding, relative to the values.

    Of floating formats with mantissas spread evenly on a logarithmic scale: the step is ``eps`` times a power of two,
    its mean square over that of a value 3 / (8 log 2), and an error within a step has the variance 1/12 of its square
    to nearest and 1/6 stochastically; tensor cores may also cut TF32 off, where the mean square is 1/3. Codes of INT8
    are 1/127 of the largest magnitude apart, here of normal numbers, at most five standard deviations.
    """
    if precision == "INT8":
        return 5 / 127 / 6**0.5
    eps, share = {
        "FP8": (2**-3, 6),
        "BF16": (2**-7, 12),
        "FP16": (2**-10, 12),
        "TF32": (2**-10, 3),
        "FP32": (2**-23, 3),
    }[precision]
    return eps * (3 / (8 * math.log(2)) / share) ** 0.5


def _derived_bounds(plan, half):
    """Bounds on the relative error of the output, of gradients behind the rectifier, and of the one before it.

    Roundings add up as independent noise does. An operator rounds two operands and the result (8-bit operators that in
    16 bits), and backward the gradient and two results (in 16 bits); relative noise is not amplified by sums, and at
    most kept by the rest of the network. Noise of ratio rho in a rectifier's input changes the sign of sqrt(rho) / pi
    of the elements, and half of them pass a gradient: of its energy the changes are 2 sqrt(rho) / pi.
    """
    forward = backward = 0.0
    for precision in plan.values():
        wide = half if precision in ("INT8", "FP8") else precision
        forward += 2 * _rounding(precision) ** 2 + _rounding(wide) ** 2
        backward += _rounding(precision) ** 2 + 3 * _rounding(wide) ** 2
    conv = plan["conv/conv2d"]
    wide = half if conv == "INT8" else conv
    noise = (2 * _rounding(conv) ** 2 + _rounding(wide) ** 2) ** 0.5
    # In FP32 not one of the 8192 elements is that near to zero.
    kinks = 0.0 if conv == "FP32" else 2 / math.pi * noise
    # Sums of thousands of products in FP32 err by more than their operands.
    sums = 1e-5
    behind, before = (forward + backward) ** 0.5, (forward + backward + kinks) ** 0.5
    # Gradients of weights partly cancel, above all before a normalization, and the noise does not.
    return 1.5 * forward**0.5 + sums, 2 * behind + 5 * sums, 2.5 * before + 5 * sums


@pytest.mark.parametrize("low", ["INT8", "FP8", "BF16", "FP16", "TF32", "FP32"])
def test_plans_on_cuda(low):
    _needs(low)
    model, x = Net().to(CUDA), torch.randn(8, 3, 8, 8, device=CUDA)
    names = _names(model, x)
    assert len(names) == 7
    other = "BF16" if "BF16" in device_formats(CUDA) else "FP16"
    plan = {n: low if ops.supports(operator_kind(n), low, CUDA) else other for n in names}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    exact = _step(_fresh(state).double(), x.double())
    apply(model, plan)
    output, grads = _step(model, x)
    undo(model)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    output_bound, behind, before = _derived_bounds(plan, other)
    assert _norm_error(output, exact[0]) < output_bound
    # Normalization takes the gradient of the convolution's bias away.
    errors = {k: _norm_error(grads[k], exact[1][k]) for k in grads if k != "conv.bias"}
    assert len(errors) == 11
    assert errors.pop("conv.weight") < before
    assert max(errors.values()) < behind, errors
    model.load_state_dict(state)
    plain, again = _step(_fresh(state), x), _step(model, x)
    assert torch.equal(plain[0], again[0])


def _fresh(state):
    model = Net().to(CUDA)
    model.load_state_dict(state)
    return model


def _step(model, x):
    model.zero_grad(set_to_none=True)
    output = model(x)
    output.to(x.dtype).square().mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_training_under_a_plan_lowers_the_loss():
    _needs("INT8")
    model, x = Net().to(CUDA), torch.randn(64, 3, 8, 8, device=CUDA)
    labels = (x.mean((1, 2, 3)) > 0).long()
    half = backend.half_format(CUDA)
    plan = {n: "INT8" if ops.supports(operator_kind(n), "INT8", CUDA) else half for n in _names(model, x)}
    apply(model, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(x).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_refusals():
    model = Net().to(CUDA)
    with pytest.raises(UnsupportedError, match=r"'scaled_dot_product_attention' cannot run in INT8 on cuda:0"):
        apply(model, {"scaled_dot_product_attention": "INT8"})
