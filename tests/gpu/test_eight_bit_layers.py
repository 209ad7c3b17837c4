"""Training in 8 bits on the card: against float64, against the processor, compiled, and as a graph."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.kernels import KernelOptions, backend, layers, ops
from qsync_opt.kernels.autograd import feed_forward
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.matmul import tiles as matmul_choices
from qsync_opt.kernels.quantize import cached_bytes, clear_weights, quantize_by_amax

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    if not (matmul_choices.activate() and library.activate("quantize")):
        pytest.skip(f"the compiled products do not run here: {backend.explain(CUDA)['linear']}")


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def _needs(precision):
    # The code of an older target, tried on this card, has no FP8 products whatever the card has.
    compiled = precision != "FP8" or library.present_targets()[-1] in ("sm_89", "sm_90a")
    if not (compiled and ops.supports("linear", precision, CUDA)):
        pytest.skip(f"this card, or its kernels' target, has no {precision}")


def _run(x, w, b, precision, options):
    y = ops.execute("linear", precision, F.linear, (x, w, b), {}, options)
    grad = torch.arange(y.numel(), device=y.device).view(y.shape).mul(0.7).sin().to(y.dtype)
    return (y, *torch.autograd.grad(y, (x, w, b), grad)), grad


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
@pytest.mark.parametrize("backward", ["half", "eight"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_result_and_gradients_against_float64(precision, backward, rounding):
    _needs(precision)
    bound = {"INT8": 0.03, "FP8": 0.12}[precision]
    granularities = itertools.product(("tensor", "row"), ("tensor", "channel"))
    for (activation, weight), (n, k, m) in itertools.product(granularities, ((256, 512, 128), (33, 50, 17))):
        options = KernelOptions(
            rounding=rounding,
            backward=backward,
            activation_granularity=activation,
            weight_granularity=weight,
            half_format=backend.half_format(CUDA),
        )
        x, w, b = (torch.randn(s, device=CUDA).requires_grad_() for s in ((n, k), (m, k), (m,)))
        mine, grad = _run(x, w, b, precision, options)
        doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
        exact = F.linear(*doubles)
        theirs = (exact, *torch.autograd.grad(exact, doubles, grad.double()))
        assert max(map(_norm_error, mine, theirs)) < bound


@pytest.mark.parametrize("backward", ["half", "eight"])
def test_the_card_and_the_processor_agree(backward):
    options = KernelOptions(backward=backward, seed=3, half_format=backend.half_format(CUDA))
    here = [torch.randn(s).requires_grad_() for s in ((64, 96), (32, 96), (32,))]
    there = [t.detach().to(CUDA).requires_grad_() for t in here]
    for mine, theirs in zip(_run(*there, "INT8", options)[0], _run(*here, "INT8", options)[0], strict=True):
        # The codes are the same; sums of the gradients differ by a rounding of the 16-bit format.
        assert _norm_error(mine.cpu(), theirs) < 4e-3


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("backward", ["half", "eight"])
def test_compiled_and_eager_agree(backward):
    step = torch.zeros(1, dtype=torch.int64, device=CUDA)
    options = KernelOptions(backward=backward, step=step, half_format=backend.half_format(CUDA))
    tensors = [torch.randn(s, device=CUDA).requires_grad_() for s in ((128, 256), (64, 256), (64,))]

    def run(x, w, b):
        return ops.execute("linear", "INT8", F.linear, (x, w, b), {}, options)

    compiled = torch.compile(run, fullgraph=True)
    for _ in range(2):
        y, z = run(*tensors), compiled(*tensors)
        assert torch.equal(y, z)
        grad = torch.randn_like(y)
        pairs = zip(torch.autograd.grad(y, tensors, grad), torch.autograd.grad(z, tensors, grad), strict=True)
        for mine, theirs in pairs:
            # The input's gradient is in FP32 here, and in the 16-bit format where it is compiled.
            assert _norm_error(mine, theirs) < 4e-3
        step.add_(1)


def test_a_graph_of_a_step_replays_with_new_noise():
    step = torch.zeros(1, dtype=torch.int64, device=CUDA)
    options = KernelOptions(backward="eight", step=step, half_format=backend.half_format(CUDA))
    x, w, b = (torch.randn(s, device=CUDA).requires_grad_() for s in ((128, 256), (64, 256), (64,)))
    expected = []
    for _ in range(2):
        expected.append(_run(x, w, b, "INT8", options)[0])
        step.add_(1)
    step.zero_()
    # Leaves of their own: autograd may not wait, in a capture, for the stream on which others were used before.
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, _ = _run(x, w, b, "INT8", options)
        step.add_(1)
    for wanted in expected:
        graph.replay()
        for mine, theirs in zip(result, wanted, strict=True):
            assert torch.equal(mine, theirs)


def test_batched_products_and_embedding():
    options = KernelOptions(activation_granularity="row", half_format=backend.half_format(CUDA))
    a, b = torch.randn(6, 40, 64, device=CUDA), torch.randn(6, 64, 48, device=CUDA)
    assert _norm_error(layers.matmul(a, b, "INT8", options), a.double() @ b.double()) < 0.02
    assert _norm_error(layers.matmul(a, a.mT, "INT8", options), a.double() @ a.double().mT) < 0.02
    table = layers.Embedding(100, 96, options=options, device=CUDA)
    index = torch.randint(0, 100, (3, 50), device=CUDA)
    assert _norm_error(table(index), table.weight[index]) < 0.02


def test_weights_are_quantized_once_per_step():
    clear_weights()
    options = KernelOptions(backward="eight", weights="step", half_format=backend.half_format(CUDA))
    linear = layers.Linear(64, 32, options=options, device=CUDA)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=True)
    x = torch.randn(16, 64, device=CUDA)
    first = linear(x)
    kept = cached_bytes()
    assert torch.equal(first, linear(x))
    assert kept == cached_bytes() >= 64 * 32
    first.float().square().mean().backward()
    optimizer.step()
    assert not torch.equal(first, linear(x))
    del linear, optimizer, first
    assert cached_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gelu_with_its_largest_magnitude(dtype):
    for shape in ((300, 1000), (3, 7), (1, 1), (0, 4)):
        x, grad = (torch.randn(shape, device=CUDA).mul_(3).to(dtype) for _ in range(2))
        # Absolute error of the approximation, and one rounding.
        absolute, relative = 5e-7, {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        value, largest = torch.ops.qsync_opt.gelu_amax(x)
        exact = x.double().requires_grad_()
        theirs = F.gelu(exact)
        assert bool(((value.double() - theirs).abs() <= 5 * absolute + relative * theirs.abs()).all())
        assert largest.item() == (value.abs().max().item() if x.numel() else 0)
        slope, largest = torch.ops.qsync_opt.gelu_backward_amax(grad, x)
        (theirs,) = torch.autograd.grad(theirs, exact, grad.double())
        bound = 5 * absolute * (1 + grad.double().abs()) + relative * theirs.abs()
        assert bool(((slope.double() - theirs).abs() <= bound).all())
        assert largest.item() == (slope.abs().max().item() if x.numel() else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_codes_of_gelu_are_those_of_what_its_operators_write(format, rounding, dtype):
    step = torch.tensor([5], device=CUDA)
    for shape in ((512, 1024), (132, 264), (3, 7), (0, 8)):
        x, grad = (torch.randn(shape, device=CUDA).mul_(3).to(dtype) for _ in range(2))
        for gradient, source in ((None, x), (grad, grad)):
            largest = source.abs().amax().float().reshape(1) if x.numel() else torch.zeros(1, device=CUDA)
            summed = gradient is not None
            *found, total = torch.ops.qsync_opt.gelu_quantize(x, gradient, largest, format, rounding, 77, step, summed)
            gelu, slope = torch.ops.qsync_opt.gelu_amax, torch.ops.qsync_opt.gelu_backward_amax
            values, exact = gelu(x) if gradient is None else slope(grad, x)
            bound = largest if gradient is None else largest * 1.14
            assert exact.item() <= bound.item()
            same = quantize_by_amax(values, bound, format, rounding=rounding, key=77, step=step, transposed=True)
            for mine, theirs in zip(found, same, strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            if summed:
                magnitudes = values.double().abs().sum(0)
                assert bool(((total.double() - values.double().sum(0)).abs() <= 1e-5 * magnitudes).all())


def test_registration_of_codes_of_gelu():
    x = torch.randn(64, 128, device=CUDA, dtype=torch.bfloat16)
    for grad in (None, x):
        arguments = (x, grad, x.abs().amax().float().reshape(1), torch.float8_e5m2, "stochastic", 3, None)
        arguments = (*arguments, grad is not None)
        torch.library.opcheck(torch.ops.qsync_opt.gelu_quantize.default, arguments)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_feed_forward_against_float64(precision):
    _needs(precision)
    options = KernelOptions(half_format=backend.half_format(CUDA))
    model = layers.FeedForward(256, 512, precision=precision, options=options, device=CUDA)
    x = torch.randn(384, 256, device=CUDA, requires_grad=True)
    parameters = (x, model.first.weight, model.first.bias, model.second.weight, model.second.bias)
    doubles = [t.detach().double().requires_grad_() for t in parameters]
    exact = F.linear(F.gelu(F.linear(*doubles[:3])), *doubles[3:])
    grad = torch.randn_like(exact)
    theirs = (exact, *torch.autograd.grad(exact, doubles, grad))
    for run in (model, torch.compile(model, fullgraph=True)):
        y = run(x)
        mine = (y, *torch.autograd.grad(y, parameters, grad.to(y.dtype)))
        assert max(map(_norm_error, mine, theirs)) < {"INT8": 0.05, "FP8": 0.15}[precision]


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_feed_forward_without_biases_against_float64(precision):
    _needs(precision)
    options = KernelOptions(half_format=backend.half_format(CUDA))
    leaves = [torch.randn(shape, device=CUDA) for shape in ((384, 256), (512, 256), (256, 512))]
    x, first, second = ((leaf * leaf.shape[1] ** -0.5).requires_grad_() for leaf in leaves)
    doubles = [t.detach().double().requires_grad_() for t in (x, first, second)]
    exact = F.linear(F.gelu(F.linear(doubles[0], doubles[1])), doubles[2])
    grad = torch.randn_like(exact)
    theirs = (exact, *torch.autograd.grad(exact, doubles, grad))
    y = feed_forward(x, first, None, second, None, precision, options)
    mine = (y, *torch.autograd.grad(y, (x, first, second), grad.to(y.dtype)))
    assert max(map(_norm_error, mine, theirs)) < {"INT8": 0.05, "FP8": 0.15}[precision]
