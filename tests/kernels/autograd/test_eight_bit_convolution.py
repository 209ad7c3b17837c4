"""INT8 convolutions with an 8-bit backward pass: against float64, exactly where rounding is, and without bias."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.autograd.convolutions import input_gradient, phases, takes_input_gradient
from qsync_opt.kernels.quantize import Quantized, cached_bytes, clear_weights

# Function, input, weight, stride, padding, dilation, groups.
CASES = {
    "1x1": (F.conv2d, (3, 6, 5, 7), (4, 6, 1, 1), 1, 0, 1, 1),
    "1x1, stride 2": (F.conv2d, (3, 6, 6, 7), (4, 6, 1, 1), 2, 0, 1, 1),
    "1x1, padded": (F.conv2d, (3, 6, 5, 7), (4, 6, 1, 1), 1, 1, 1, 1),
    "3x3": (F.conv2d, (2, 5, 8, 9), (6, 5, 3, 3), 1, 1, 1, 1),
    "3x3, stride 2": (F.conv2d, (2, 5, 9, 8), (6, 5, 3, 3), 2, 1, 1, 1),
    "7x7, stride 2": (F.conv2d, (1, 3, 15, 14), (4, 3, 7, 7), 2, 3, 1, 1),
    "2x3, strides 3 and 2, a remainder": (F.conv2d, (2, 4, 11, 10), (3, 4, 2, 3), (3, 2), (0, 2), 1, 1),
    "wide padding": (F.conv2d, (2, 4, 5, 6), (3, 4, 3, 3), 1, (4, 3), 1, 1),
    "dilated": (F.conv2d, (2, 4, 9, 9), (3, 4, 3, 3), 1, 2, 2, 1),
    "dilated, stride 2": (F.conv2d, (2, 4, 9, 9), (3, 4, 3, 3), 2, 2, 2, 1),
    "groups": (F.conv2d, (2, 6, 7, 7), (4, 3, 3, 3), 1, 1, 1, 2),
    "a line": (F.conv1d, (3, 4, 13), (5, 4, 4), 2, 1, 1, 1),
    "a volume": (F.conv3d, (1, 3, 4, 5, 6), (2, 3, 2, 3, 2), (1, 2, 1), 1, 1, 1),
}


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def _run(case, x, w, b, options):
    function, _, _, *geometry = case
    kind = {F.conv1d: "conv1d", F.conv2d: "conv2d", F.conv3d: "conv3d"}[function]
    return ops.execute(kind, "INT8", function, (x, w, b, *geometry), {}, options)


def _operands(case):
    _, x, w, *_ = case
    return tuple(torch.randn(size).requires_grad_() for size in (x, w, w[:1]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("activation", "weight"), [("tensor", "channel"), ("row", "tensor")])
def test_result_and_gradients_against_float64(name, activation, weight):
    case = CASES[name]
    options = KernelOptions(backward="eight", activation_granularity=activation, weight_granularity=weight)
    leaves = _operands(case)
    if case[0] is F.conv2d and activation == "tensor":
        leaves = (leaves[0].detach().to(memory_format=torch.channels_last).requires_grad_(), *leaves[1:])
    result = _run(case, *leaves, options)
    assert result.dtype is torch.bfloat16
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = case[0](*doubles, *case[3:])
    assert result.shape == exact.shape
    assert _norm_error(result, exact) < 0.03
    grad = torch.randn_like(result)
    pairs = zip(
        torch.autograd.grad(result, leaves, grad), torch.autograd.grad(exact, doubles, grad.double()), strict=True
    )
    for mine, theirs in pairs:
        assert mine.dtype is torch.float32
        assert mine.shape == theirs.shape
        assert _norm_error(mine, theirs) < 0.03


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("groups", "dilated, stride 2")])
def test_the_input_gradient_of_codes_is_exact(name):
    function, x, w, *geometry = CASES[name]
    leaf = torch.zeros(x, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(-127, 128, w, dtype=torch.int8)
    result = function(leaf, codes.double(), None, *geometry)
    grad = torch.randint(-127, 128, result.shape, dtype=torch.int8)
    (expected,) = torch.autograd.grad(result, leaf, grad.double())
    dims = len(x) - 2
    stride, padding, dilation = ((v,) * dims if isinstance(v, int) else v for v in geometry[:3])
    plain = (stride, padding, dilation, False, (0,) * dims, 1)
    assert takes_input_gradient(plain)
    scales = torch.rand(x[1])
    found = input_gradient(
        Quantized(grad, torch.ones(1)),
        Quantized(codes.transpose(0, 1), scales.reshape(-1, *(1,) * (dims + 1))),
        x[2:],
        plain,
        torch.float32,
        "reference",
    )
    torch.testing.assert_close(found, (expected * scales.reshape(1, -1, *(1,) * dims)).float(), rtol=1e-6, atol=0)


def test_phases_name_every_element_once_and_every_tap_that_reaches_it():
    for size, taps, stride, padding, dilation in itertools.product(
        (1, 4, 7, 10), (1, 2, 3, 5), (1, 2, 3), (0, 1, 4), (1, 2)
    ):
        result = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        if result < 1 or (stride > 1 and dilation > 1):
            continue
        found = {}
        for phase in phases(size, result, taps, stride, padding, dilation):
            for i in range(phase.elements):
                places = [i + phase.begin - phase.padding + dilation * u for u in range(phase.taps)]
                used = {(p, phase.tap + stride * t) for t, p in enumerate(reversed(places)) if 0 <= p < result}
                assert found.setdefault(stride * i + phase.first, used) is used
        for element in range(size):
            reached = {
                (p, tap)
                for p, tap in itertools.product(range(result), range(taps))
                if p * stride + tap * dilation - padding == element
            }
            assert found[element] == reached


@pytest.mark.parametrize("name", ["1x1", "3x3, stride 2", "groups"])
def test_gradients_are_unbiased(name):
    case = CASES[name]
    x, w, b = _operands(case)
    grad = torch.randn_like(_run(case, x, w, b, KernelOptions()))
    draws = []
    for offset in range(100):
        options = KernelOptions(backward="eight", weight_granularity="tensor", offset=offset)
        draws.append([g.double() for g in torch.autograd.grad(_run(case, x, w, b, options), (x, w), grad)])
    doubles = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = torch.autograd.grad(case[0](*doubles, None, *case[3:]), doubles, grad.double())
    for index, expected in enumerate(exact):
        parts = torch.stack([draw[index] for draw in draws])
        # Six standard errors of the mean, and the roundings to nearest of 16-bit operands and results.
        slack = 6 * parts.std(0) / len(draws) ** 0.5 + parts.abs().mean(0).max() * 2.0**-7
        assert bool(((parts.mean(0) - expected).abs() <= slack).all())


def test_saved_tensors_are_codes():
    for name in ("1x1", "3x3"):
        x, w, b = _operands(CASES[name])
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=saved: (kept.append(t), t)[1], lambda t: t):
            _run(CASES[name], x, w, b, KernelOptions(backward="eight", weight_granularity="tensor"))
        big = [t for t in saved if t.numel() > 1]
        assert {t.dtype for t in big} == {torch.int8}
        assert sorted(t.numel() for t in big) == sorted((x.numel(), w.numel()))


def test_only_what_is_needed_is_computed():
    options = KernelOptions(backward="eight")
    for name in ("1x1", "3x3, stride 2", "groups"):
        case = CASES[name]
        for needed in range(3):
            leaves = [t.detach().requires_grad_(index == needed) for index, t in enumerate(_operands(case))]
            result = _run(case, *leaves, options)
            result.sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [index == needed for index in range(3)]


def test_weights_once_per_step():
    clear_weights()
    x, w, b = _operands(CASES["3x3"])
    options = KernelOptions(backward="eight", weights="step")
    first = _run(CASES["3x3"], x, w, b, options)
    kept = cached_bytes()
    assert kept >= 2 * w.numel()  # along output channels and along input channels
    again = _run(CASES["3x3"], x, w, b, options)
    assert torch.equal(first, again)
    assert cached_bytes() == kept
    clear_weights()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("name", ["1x1", pytest.param("3x3, stride 2", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()  # else strides and paddings of the case before become symbols, in guards of great depth
    case = CASES[name]
    step = torch.zeros(1, dtype=torch.int64)
    options = KernelOptions(backward="eight", step=step)
    x, w, b = _operands(case)

    def run(x, w, b):
        return _run(case, x, w, b, options)

    eager = run(x, w, b)
    grad = torch.randn_like(eager)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(x, w, b)
    assert torch.equal(eager, compiled) or _norm_error(compiled, eager) < 4e-3
    for mine, theirs in zip(
        torch.autograd.grad(compiled, (x, w, b), grad), torch.autograd.grad(eager, (x, w, b), grad), strict=True
    ):
        assert _norm_error(mine, theirs) < 4e-3
