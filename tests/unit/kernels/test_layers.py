import pytest
import torch
import torch.nn.functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import layers, ops
from qsync_opt.kernels.options import KernelOptions


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
