import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.sensitivity import collect_statistics, reductions
from qsync_opt.runtimes.torch.sensitivity import errors as nearest_error

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}


def step(model, batch):
    x, target = batch
    return F.mse_loss(model(x), target)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_the_error_of_a_weight_gradient_is_that_of_its_rounded_factors(kind, scale):
    torch.manual_seed(0)
    model = nn.Linear(12, 9) if kind == "linear" else nn.Conv2d(3, 4, 3, stride=2, padding=1)
    # Rows that are alike err alike, which no sum of independent errors tells.
    shape = (32, 12) if kind == "linear" else (8, 3, 7, 7)
    x = torch.randn(1, *shape[1:]).repeat(shape[0], *(1,) * (len(shape) - 1)) + 0.01 * torch.randn(shape)
    target = 1e-3 * torch.randn_like(model(x)) + model(x).detach()
    found = collect_statistics(model, [(x, target)], step=step, loss_scale=scale).operators[0]

    weight = model.weight.detach().double().requires_grad_()

    def gradient(x, g):
        forward = F.linear if kind == "linear" else lambda x, w: F.conv2d(x, w, stride=2, padding=1)
        return torch.autograd.grad(forward(x.double(), weight), weight, g.double())[0]

    output = model(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.mse_loss(output, target), output)
    for name, dtype in DTYPES.items():
        error = gradient(x.to(dtype), (g.double() * scale).float().to(dtype).double() / scale) - gradient(x, g)
        assert found.nearest[name] == pytest.approx(float(error.square().sum()), rel=1e-2)


def test_a_loss_scale_brings_small_gradients_into_reach_of_fp16():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(16, 8)
    batch = (x, model(x).detach() + 1e-5 * torch.randn(16, 8))
    plain, scaled = (collect_statistics(model, [batch], step=step, loss_scale=s).operators[0] for s in (1.0, 2.0**16))
    assert scaled.nearest["FP16"] < 1e-3 * plain.nearest["FP16"]
    assert scaled.nearest["BF16"] == pytest.approx(plain.nearest["BF16"], rel=1e-6)
    factor = [found.output_gradient.rounding["FP16"].nearest for found in (plain, scaled)]
    assert factor[1] < 2 < 100 < factor[0]
    with pytest.raises(ProblemError, match=r"loss_scale is 1000\.0: a power of two"):
        collect_statistics(model, [batch], step=step, loss_scale=1000.0)


def test_large_tensors_are_taken_in_parts(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 16))
    batch = (torch.randn(8, 3, 8, 8), torch.randn(8, 16))
    whole = collect_statistics(model, [batch], step=step)
    monkeypatch.setattr(reductions, "_CHUNK", 64)
    monkeypatch.setattr(nearest_error, "_CHUNK", 64)
    parts = collect_statistics(model, [batch], step=step)
    for a, b in zip(whole.operators, parts.operators, strict=True):
        assert dict(a.alignment) == pytest.approx(dict(b.alignment), rel=1e-5)
        assert dict(a.nearest) == pytest.approx(dict(b.nearest), rel=1e-5)
        for kind, factor in a.output_gradient.rounding.items():
            assert factor.stochastic == pytest.approx(b.output_gradient.rounding[kind].stochastic, rel=1e-5)


def test_attention_is_measured_at_the_loss_scale():
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.project(x).unsqueeze(1).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v).squeeze(1)

    model, x = Attention(), torch.randn(4, 6, 8)
    batch = (x, model(x).detach() + 1e-5 * torch.randn(4, 6, 8))
    plain, scaled = (
        collect_statistics(model, [batch], step=step, loss_scale=s).operators[1].measured for s in (1.0, 2.0**16)
    )
    for name in ("output", "first_gradient", "second_gradient", "third_gradient"):
        errors = [getattr(found[precision], name) for found in (plain, scaled) for precision in ("BF16", "FP16")]
        assert errors[2] == pytest.approx(errors[0], rel=1e-4)
        assert errors[3] < 0.1 * errors[2]  # in FP16 with a scale less than in BF16
    assert plain["FP16"].third_gradient > scaled["FP16"].third_gradient * 100
