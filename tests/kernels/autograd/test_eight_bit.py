import gc
import itertools

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.kernels.autograd import product
from qsync_opt.kernels.quantize import cached_bytes, clear_weights, once_per_step

PRECISIONS = ("INT8", "FP8")


@pytest.fixture(autouse=True)
def _empty_cache():
    clear_weights()
    yield
    clear_weights()


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def _product(x, w, b, precision, options):
    return product(x, w.t(), b, precision, options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("activation", "weight"), list(itertools.product(("tensor", "row"), ("tensor", "channel"))))
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_result_and_gradients_against_float64(precision, activation, weight, rounding):
    options = KernelOptions(
        rounding=rounding, activation_granularity=activation, weight_granularity=weight, backward="eight"
    )
    x, w, b = (torch.randn(s).requires_grad_() for s in ((96, 64), (48, 64), (48,)))
    y = _product(x, w, b, precision, options)
    assert y.dtype is torch.bfloat16
    grad = torch.randn_like(y)
    doubles = tuple(t.detach().double().requires_grad_() for t in (x, w, b))
    exact = F.linear(*doubles)
    bounds = {"INT8": (0.03, 0.03), "FP8": (0.08, 0.12)}[precision]
    assert _norm_error(y, exact) < bounds[0]
    pairs = zip(
        torch.autograd.grad(y, (x, w, b), grad), torch.autograd.grad(exact, doubles, grad.double()), strict=True
    )
    for mine, theirs in pairs:
        assert mine.dtype is torch.float32
        assert _norm_error(mine, theirs) < bounds[1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_unbiased(precision):
    x, w = torch.randn(24, 16).requires_grad_(), torch.randn(8, 16).requires_grad_()
    grad = torch.randn(24, 8).bfloat16()
    totals, draws = [torch.zeros(24, 16, dtype=torch.float64), torch.zeros(8, 16, dtype=torch.float64)], 400
    single = []
    for offset in range(draws):
        options = KernelOptions(backward="eight", weight_granularity="tensor", offset=offset)
        y = _product(x, w, None, precision, options)
        grads = torch.autograd.grad(y, (x, w), grad)
        for total, part in zip(totals, grads, strict=True):
            total += part.double()
        single.append([part.double() for part in grads])
    exact = (grad.double() @ w.detach().double(), grad.double().T @ x.detach().double())
    for index, (total, expected) in enumerate(zip(totals, exact, strict=True)):
        spread = torch.stack([parts[index] for parts in single]).std(0)
        # Six standard errors of the mean, and the rounding to nearest of the 16-bit result.
        assert bool(((total / draws - expected).abs() <= 6 * spread / draws**0.5 + expected.abs() * 2.0**-8).all())


def test_a_precision_with_an_8_bit_backward_pass_implies_its_options():
    x, w, b = (torch.randn(s).requires_grad_() for s in ((24, 16), (8, 16), (8,)))
    grad = torch.randn(24, 8).bfloat16()
    told = KernelOptions(backward="eight", weight_granularity="tensor", offset=3)
    planned, asked = (
        (y, *torch.autograd.grad(y, (x, w, b), grad))
        for y in (
            ops.execute("linear", "INT8-BWD8", F.linear, (x, w, b), options=KernelOptions(offset=3)),
            ops.execute("linear", "INT8", F.linear, (x, w, b), options=told),
        )
    )
    for one, other in zip(planned, asked, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(), (16,), (3, 4, 16)])
def test_a_cast_for_an_8_bit_backward_pass_has_the_transposed_codes(shape):
    codes = ops.cast(torch.randn(shape), "INT8-BWD8")
    assert codes.transposed.shape == codes.codes.shape[::-1]


def test_saved_tensors_are_codes():
    x, w = torch.randn(64, 32).requires_grad_(), torch.randn(16, 32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        _product(x, w, None, "INT8", KernelOptions(backward="eight", weight_granularity="tensor"))
    assert sorted((tuple(t.shape), t.dtype) for t in saved if t.numel() > 1) == [
        ((32, 16), torch.int8),
        ((32, 64), torch.int8),
    ]


def test_only_what_is_needed_is_computed():
    w = torch.randn(16, 32).requires_grad_()
    options = KernelOptions(backward="eight")
    y = _product(torch.randn(64, 32), w, None, "INT8", options)
    y.sum().backward()
    assert w.grad.shape == w.shape
    x = torch.randn(64, 32).requires_grad_()
    _product(x, w.detach(), None, "INT8", options).sum().backward()
    assert x.grad.shape == x.shape
    b = torch.zeros(16).requires_grad_()
    _product(x.detach(), w.detach(), b, "INT8", options).sum().backward()
    assert torch.equal(b.grad, torch.full((16,), 64.0))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("precision", "granularity"), [("INT8", "channel"), ("INT8", "tensor"), ("FP8", "tensor")])
def test_a_compiled_graph_keeps_no_codes_of_a_weight(precision, granularity, rounding):
    options = KernelOptions(
        backward="eight", rounding=rounding, weight_granularity=granularity, step=torch.full((1,), 3)
    )
    kept = []

    def run(x, w):
        return product(x, w.t(), None, precision, options)

    def pack(tensor):
        kept.append(tensor)
        return tensor

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")):
        x, w = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((24, 32), (16, 32)))
        x.requires_grad_(), w.requires_grad_()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(x, w)
        y.float().square().sum().backward()
        results.append((y, x.grad.bfloat16(), w.grad))  # whose cast to FP32 a compiled graph leaves to what reads it
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    assert [tensor.numel() for tensor in kept if tensor.element_size() == 1] == [x.numel()]


@pytest.mark.parametrize("backward", ["half", "eight"])
def test_through_the_door(backward):
    options = KernelOptions(backward=backward)
    x, w, b = (torch.randn(s).requires_grad_() for s in ((2, 24, 32), (16, 32), (16,)))
    y = ops.execute("linear", "INT8", F.linear, (x, w, b), {}, options)
    y.float().square().mean().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    F.linear(*exact).square().mean().backward()
    for mine, theirs in zip((x, w, b), exact, strict=True):
        assert _norm_error(mine.grad, theirs.grad) < 0.05
    with pytest.raises(UnsupportedError, match="backward='four'"):
        KernelOptions(backward="four")


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("backward", ["half", "eight"])
def test_compiles_without_a_graph_break(backward):
    step = torch.zeros(1, dtype=torch.int64)
    options = KernelOptions(backward=backward, step=step)

    def run(x, w, b):
        return ops.execute("linear", "INT8", F.linear, (x, w, b), {}, options)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (run, compiled):
        x, w, b = (
            torch.arange(s[0] * s[-1]).float().sin().view(s).requires_grad_() for s in ((24, 32), (16, 32), (1, 16))
        )
        y = function(x, w, b[0])
        y.float().square().sum().backward()
        results.append((y, x.grad, w.grad, b.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)
    step.add_(1)
    assert not torch.equal(results[1][0], compiled(x, w, b[0]))


@pytest.mark.parametrize("backward", ["half", "eight"])
@pytest.mark.parametrize("precision", ["INT8"])
def test_weights_are_quantized_once_per_step(backward, precision):
    x, w = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    options = KernelOptions(backward=backward, weights="step", activation_granularity="row")

    def call(weight):
        return ops.execute("linear", precision, F.linear, (x, weight), {}, options).detach()

    first = call(w)
    kept = cached_bytes()
    assert kept >= 4 * 16
    with torch.no_grad():
        w[0, 0] = 100.0
    changed = call(w)
    assert not torch.equal(first[:, 0], changed[:, 0])
    assert cached_bytes() == kept
    again = ops.execute("linear", precision, F.linear, (x[:1], w), {}, options).detach()
    assert torch.allclose(again, changed[:1])
    del w, again
    gc.collect()
    assert cached_bytes() == 0


def test_the_cache_computes_once_per_version():
    calls = []

    def codes(weight, facts):
        def quantize(plain):
            calls.append(1)
            return (torch.ones(3),)

        once_per_step(weight, facts, KernelOptions(weights="step"), quantize)

    w = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        codes(w, "a")
        codes(w.t(), "a")
    assert len(calls) == 2
    torch.optim.SGD([w], lr=0.1).zero_grad()
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()
    codes(w, "a")
    assert len(calls) == 3
    codes(w, "b")
    w.data = torch.zeros(4, 4)
    codes(w, "a")
    assert len(calls) == 5
    with torch.inference_mode():
        frozen = torch.ones(2)
        codes(frozen, "a")
        codes(frozen, "a")
    assert len(calls) == 7
