"""Second derivatives of losses with little memory, and the random signs they are probed with."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.runtimes.torch.sensitivity.records import signals
from qsync_opt.runtimes.torch.sensitivity.signs import RandomSigns


def call(function, *args, **kwargs):
    return SimpleNamespace(function=function, args=args, kwargs=kwargs)


def exact_energy(function, x):
    """|H|^2 mean(x^2) / |g|^2 from the whole Hessian."""
    hessian = torch.autograd.functional.hessian(function, x).reshape(x.numel(), x.numel())
    gradient = torch.autograd.functional.jacobian(function, x)
    return float(hessian.square().sum() * x.square().mean() / gradient.square().sum())


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3, "weight": "given"}])
def test_a_large_cross_entropy_in_parts_is_the_whole(monkeypatch, options):
    torch.manual_seed(0)
    x, target = torch.randn(300, 50), torch.randint(0, 50, (300,))
    if "weight" in options:
        options = {**options, "weight": torch.rand(50) + 0.5}
    whole = signals.loss_curvature(call(F.cross_entropy, x, target, **options), x)
    monkeypatch.setattr(signals, "_CHUNK", 2000)
    parts = signals.loss_curvature(call(F.cross_entropy, input=x, target=target, **options), x)
    assert float(parts) == pytest.approx(float(whole), rel=0.05)  # other signs, the same norm


def test_the_estimate_is_the_exact_energy_in_the_mean():
    torch.manual_seed(1)
    x, target = torch.randn(60, 8), torch.randint(0, 8, (60,))
    found = signals.loss_curvature(call(F.cross_entropy, x, target), x)
    assert float(found) == pytest.approx(exact_energy(lambda z: F.cross_entropy(z, target), x), rel=0.2)


def test_a_linear_loss_is_flat_and_other_losses_are_taken_whole():
    x = torch.randn(4, 5)
    assert float(signals.loss_curvature(call(torch.sum, x), x)) == 0
    square = signals.loss_curvature(call(F.mse_loss, x, torch.zeros(4, 5)), x)
    # H = 2 / 20 on the diagonal and g = 2 x / 20.
    assert float(square) == pytest.approx(20 * float(x.square().mean()) / float(x.square().sum()), rel=1e-5)


def test_signs_are_signs_and_follow_the_seed():
    x = torch.empty(1000)
    signs = RandomSigns(5).like(x)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.2
    assert torch.equal(signs, RandomSigns(5).like(x))
    assert not torch.equal(signs, RandomSigns(6).like(x))
    again = RandomSigns(5)
    again.like(x)
    assert not torch.equal(signs, again.like(x))


def test_a_loss_that_is_linear_in_its_input_and_has_parameters_bends_nothing():
    # As normalized weights have it: the gradient can be differentiated, but does not depend on the input.
    scale, x = torch.ones(3, requires_grad=True), torch.randn(4, 3)
    found = signals.loss_curvature(call(lambda x: (x * scale).sum(), x), x)
    assert found.item() == 0
