import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.probes import probe_curvatures
from qsync_opt.sensitivity import IndicatorKind, sensitivities


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), y)


@pytest.fixture
def case():
    torch.manual_seed(5)
    return Smooth(), torch.randn(5, 3), torch.randint(0, 2, (5,))


def test_traces_are_those_of_the_real_hessian(case):
    model, x, y = case
    found = probe_curvatures(model, lambda: model(x, y), probes=3000, seed=1)

    def loss_with(weight, noise_z, entering):
        z = F.linear(entering, weight, model.a.bias) + noise_z
        return F.cross_entropy(model.b(torch.tanh(z)), y)

    points = {"second": model.a.weight.detach(), "output": torch.zeros(5, 4), "first": x}
    for position, (tensor, values) in enumerate(points.items()):

        def loss_at(moved, position=position):
            arguments = list(points.values())
            arguments[position] = moved
            return loss_with(*arguments)

        hessian = torch.autograd.functional.hessian(loss_at, values).reshape(values.numel(), values.numel())
        scale = float(hessian.square().sum().sqrt())
        assert found["a/linear"][tensor].uniform == pytest.approx(float(hessian.trace()), abs=0.15 * scale + 0.02)
    weights = model.a.weight.detach()
    hessian = torch.autograd.functional.hessian(lambda moved: loss_with(moved, torch.zeros(5, 4), x), weights).reshape(
        weights.numel(), weights.numel()
    )
    weighted = float((hessian.diagonal() * weights.flatten().square()).sum() / weights.square().mean())
    assert found["a/linear"]["second"].floating == pytest.approx(weighted, rel=0.3, abs=0.05)


def test_shared_weights_add_up_over_their_uses(case):
    _, x, y = case

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, y):
            return F.cross_entropy(self.b(torch.tanh(self.a(torch.tanh(self.a(x))))), y)

    model = Twice()
    found = probe_curvatures(model, lambda: model(x, y), probes=8)
    assert set(found) == {"a/linear", "a/linear_1", "b/linear"}


def test_calls_of_one_operator_count_by_the_noise_of_each():
    model, x = nn.Linear(1, 1, bias=False), torch.tensor([[0.1]])
    nn.init.ones_(model.weight)
    # Second derivatives by the operand are 2 and 0.02; the squares that its noise grows with, 0.01 and 0.16.
    found = probe_curvatures(
        model, lambda: model(x).square().sum() + 0.01 * model(4 * x).square().sum(), probes=800, seed=1
    )
    assert found["linear"]["first"].uniform == pytest.approx((2 * 0.01 + 0.02 * 0.16) / 0.085, rel=0.1)


def test_a_linear_loss_has_no_curvature():
    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    found = probe_curvatures(model, lambda: model(x).sum(), probes=2000)
    # Operand and weight of a product curve the loss together, neither alone; what is left is the estimator's noise,
    # 24 products of signs over the root of 2000.
    assert set(found["linear"]) == {"first", "second"}
    assert all(abs(c.uniform) < 5 * 24**0.5 / 2000**0.5 for c in found["linear"].values())


def test_what_has_no_second_derivative_is_refused():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad * 2

    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)
    with pytest.raises(ModelError, match="curvature_probes=0"):
        probe_curvatures(model, lambda: Once.apply(model(x)).square().sum(), probes=4)


def test_the_hessian_indicator_predicts_the_loss_increase_of_weight_noise():
    torch.manual_seed(0)
    model, x = Smooth(), torch.randn(64, 3)
    with torch.no_grad():
        y = model.b(torch.tanh(model.a(x))).argmax(1)
    graph = capture(model, (x, y))
    statistics = collect_statistics(model, [(x, y)], graph=graph, curvature_probes=400)
    curvature = statistics["a/linear"].curvatures["second"]
    sigma = 0.05
    increases = []
    original = model.a.weight.detach().clone()
    base = float(model(x, y).detach())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(4000):
            noise = sigma * torch.randn(original.shape, generator=generator)
            for sign in (1, -1):  # antithetic: the first-order term cancels
                model.a.weight.copy_(original + sign * noise)
                increases.append(float(model(x, y)) - base)
    measured = sum(increases) / len(increases)
    assert 0.5 * curvature.uniform * sigma**2 == pytest.approx(measured, rel=0.25)
    table = sensitivities(graph, statistics, device_formats("cpu"), kind=IndicatorKind.HESSIAN)
    assert table["a/linear"]["FP32"] == 0.0
    assert table["a/linear"]["INT8"] >= 0.0
    assert table.kind.unit == "loss"
