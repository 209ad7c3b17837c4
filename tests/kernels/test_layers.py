import pytest
import torch
import torch.nn.functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions, layers, ops
from qsync_opt.kernels.autograd import feed_forward


def _norm_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_embedding_rounds_the_rows_and_passes_the_gradient(precision):
    table = torch.randn(20, 24, requires_grad=True)
    index = torch.tensor([[1, 2, 2], [0, 19, 7]])
    rows = layers.embedding(index, table, precision, KernelOptions(rounding="nearest"))
    assert rows.dtype is torch.bfloat16
    amax = table.detach()[index].abs().amax(-1, keepdim=True)
    # Half a step of INT8, or 2**-4 of a value and half of the smallest step of E4M3; then one rounding to BF16.
    bound = amax / 254 if precision == "INT8" else table.detach()[index].abs() * 2**-4 + amax / 448 * 2**-10
    error = (rows.double() - table.detach()[index].double()).abs()
    assert bool((error <= bound * 1.001 + rows.double().abs() * 2**-8).all())
    grad = torch.randn(2, 3, 24).bfloat16()
    rows.backward(grad)
    expected = torch.zeros(20, 24).index_add(0, index.flatten(), grad.float().view(6, 24))
    assert torch.allclose(table.grad, expected)


def test_modules_have_the_parameters_of_torch():
    torch.manual_seed(1)
    linear = layers.Linear(24, 16, options=KernelOptions(backward="eight"))
    torch.manual_seed(1)
    plain = torch.nn.Linear(24, 16)
    linear.load_state_dict(plain.state_dict())
    x = torch.randn(4, 24)
    assert _norm_error(linear(x), plain(x)) < 0.03
    table = layers.Embedding(10, 24, padding_idx=0, options=KernelOptions(rounding="nearest"))
    table.load_state_dict({"weight": torch.randn(10, 24)})
    rows = table(torch.tensor([0, 3]))
    assert _norm_error(rows, table.weight[[0, 3]]) < 0.01
    rows.sum().backward()
    assert not table.weight.grad[0].any()
    assert bool((table.weight.grad[3] == 1).all())


def test_a_small_network_learns_in_eight_bits():
    torch.manual_seed(0)
    step = torch.zeros(1, dtype=torch.int64)
    options = KernelOptions(backward="eight", weights="step", step=step)
    model = torch.nn.Sequential(
        layers.Embedding(12, 32, options=options),
        layers.Linear(32, 32, options=options),
        torch.nn.ReLU(),
        layers.Linear(32, 4, options=options),
    )
    index, labels = torch.arange(12).repeat(8), (torch.arange(12) * 7 % 4).repeat(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = F.cross_entropy(model(index).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.add_(1)
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_matmul_and_refusals():
    a, b = torch.randn(2, 5, 16), torch.randn(2, 16, 3)
    assert _norm_error(layers.matmul(a, b, "INT8"), a @ b) < 0.05
    assert torch.equal(layers.matmul(a, b, "INT8"), ops.execute("matmul", "INT8", torch.matmul, (a, b)))
    for make in (lambda: layers.Linear(4, 4, precision="INT4"), lambda: layers.Embedding(4, 4, precision="BF16")):
        with pytest.raises(UnsupportedError, match="allowed are INT8, FP8"):
            make()


@pytest.mark.parametrize("precision", ["INT8", "FP8"])
def test_feed_forward_against_float64(precision):
    model = layers.FeedForward(32, 64, precision=precision, options=KernelOptions(weights="step"))
    x = torch.randn(3, 40, 32, requires_grad=True)
    y = model(x)
    assert y.dtype is torch.bfloat16
    grad = torch.randn_like(y)
    parameters = (x, model.first.weight, model.first.bias, model.second.weight, model.second.bias)
    mine = torch.autograd.grad(y, parameters, grad)
    doubles = [t.detach().double().requires_grad_() for t in parameters]
    exact = F.linear(F.gelu(F.linear(*doubles[:3])), *doubles[3:])
    bound = {"INT8": 0.04, "FP8": 0.15}[precision]
    assert _norm_error(y, exact) < bound
    for here, there in zip(mine, torch.autograd.grad(exact, doubles, grad.double()), strict=True):
        assert here.dtype is torch.float32
        assert _norm_error(here, there) < bound


def test_feed_forward_computes_only_what_is_needed():
    model = layers.FeedForward(16, 32, bias=False)
    for parameter in model.first.parameters():
        parameter.requires_grad_(False)
    model(torch.randn(8, 16)).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad.shape == (16, 32)
    with pytest.raises(UnsupportedError, match="allowed are INT8, FP8"):
        feed_forward(torch.randn(2, 2), torch.randn(2, 2), None, torch.randn(2, 2), None, "INT4")


def test_gelu_operators_find_the_largest_magnitude():
    x, grad = torch.randn(7, 9).bfloat16(), torch.randn(7, 9).bfloat16()
    value, largest = torch.ops.qsync_opt.gelu_amax(x)
    assert torch.equal(value, F.gelu(x.float()).bfloat16())
    assert largest.item() == value.abs().max().item()
    slope, largest = torch.ops.qsync_opt.gelu_backward_amax(grad, x)
    exact = x.double().requires_grad_()
    (theirs,) = torch.autograd.grad(F.gelu(exact), exact, grad.double())
    assert _norm_error(slope, theirs) < 3e-3
    assert largest.item() == slope.abs().max().item()
    torch.library.opcheck(torch.ops.qsync_opt.gelu_amax.default, (x,))
    torch.library.opcheck(torch.ops.qsync_opt.gelu_backward_amax.default, (grad, x))
    assert torch.ops.qsync_opt.gelu_amax(x[:0])[1].item() == 0


def test_codes_of_gelu_by_a_bound():
    x, grad = (torch.randn(24, 40).mul(3).bfloat16() for _ in range(2))
    for gradient, bound, values in (
        (None, x.abs().amax().float(), torch.ops.qsync_opt.gelu_amax(x)[0]),
        (grad, grad.abs().amax().float(), torch.ops.qsync_opt.gelu_backward_amax(grad, x)[0]),
    ):
        arguments = (x, gradient, bound.reshape(1), torch.float8_e5m2, "nearest", 7, None, gradient is not None)
        codes, scale, turned, total = torch.ops.qsync_opt.gelu_quantize(*arguments)
        # Half of the last of three significant bits, and of the smallest number.
        found = codes.float() * scale
        assert bool(((found - values.float()).abs() <= values.float().abs() / 8 + scale * 2**-17).all())
        assert torch.equal(turned.view(torch.uint8), codes.view(torch.uint8).t())
        if gradient is not None:
            torch.testing.assert_close(total, values.sum(0, dtype=torch.float32))
        torch.library.opcheck(torch.ops.qsync_opt.gelu_quantize.default, arguments)
