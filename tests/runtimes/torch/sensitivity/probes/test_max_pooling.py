"""Contestants of windows by brute force; what their switches add to a gradient, against Monte Carlo."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.probes import contest, noisy_passes, pool_call
from qsync_opt.sensitivity import sensitivities, sign_change_variance

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def members(size, out, kernel, stride, padding, dilation):
    """Per window of one dimension, the elements it holds."""
    starts = [position * stride - padding for position in range(out)]
    return [[i for i in range(s, s + kernel * dilation, dilation) if 0 <= i < size] for s in starts]


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((2, 3, 11), {"kernel_size": 3, "stride": 2, "padding": 1}),
        ((3, 9), {"kernel_size": 2}),
        ((2, 2, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
        ((2, 3, 7, 9), {"kernel_size": (2, 3), "stride": (3, 1), "dilation": (2, 1), "padding": (0, 1)}),
        ((1, 2, 4, 5, 6), {"kernel_size": 2, "stride": (2, 1, 2)}),
        ((1, 2, 5), {"kernel_size": 1, "stride": 1}),
    ],
)
def test_competing_elements_are_the_two_largest_of_every_window(shape, given):
    torch.manual_seed(0)
    x, dims = torch.randn(shape), 1 if len(shape) <= 3 else len(shape) - 2
    entering, window = pool_call(f"max_pool{dims}d", (x,), given)
    assert entering is x
    found, pooled = contest(x, window), POOLS[dims](x, **given)
    assert found.shape == pooled.shape
    rows = x.reshape(-1, *shape[-dims:])
    assert torch.equal(rows.flatten(1).gather(1, found.first).view(pooled.shape), pooled)
    places = torch.arange(rows[0].numel()).view(rows.shape[1:])
    sizes = zip(rows.shape[1:], pooled.shape[-dims:], *window[:4], strict=True)
    windows = list(itertools.product(*(members(*facts) for facts in sizes)))
    assert len(windows) == found.first.shape[1]
    for row, flat in enumerate(rows):
        for number, ranges in enumerate(windows):
            held = [int(places[place]) for place in itertools.product(*ranges)]
            ranked = sorted(held, key=lambda place: -float(flat.flatten()[place]))
            assert found.first[row, number] == ranked[0]
            if len(held) == 1:
                assert found.gap[row, number] == float("inf")
            else:
                assert found.second[row, number] == ranked[1]
                gap = flat.flatten()[ranked[0]] - flat.flatten()[ranked[1]]
                assert found.gap[row, number] == pytest.approx(float(gap))


def test_pools_that_give_indices_are_left_alone():
    assert pool_call("max_pool2d", (torch.ones(1, 1, 4, 4), 2), {"return_indices": True}) is None


class Pooled(nn.Module):
    """Linear but for the pool, and the rectifier before it if there is one: all that noise changes are the flips."""

    def __init__(self, rectifier, shift):
        super().__init__()
        self.a, self.pool, self.rectifier = nn.Conv2d(6, 48, 1), nn.MaxPool2d(3, 2, 1), rectifier
        self.signs = torch.randn(64, 48, 6, 6)  # gradients of either sign, as those of a network are
        with torch.no_grad():
            self.a.bias.fill_(shift)

    def after(self, z):
        pooled = self.pool(self.rectifier(z))
        return (pooled * self.signs[: len(pooled)]).sum()

    def forward(self, x):
        return self.after(self.a(x))


def rounded(x, dims=None):
    """INT8 with a scale per slice, up or down at random."""
    scale = (x.abs().max() if dims is None else x.abs().amax(dims, keepdim=True)) / 127
    return (x / scale + torch.rand_like(x)).floor() * scale


@pytest.mark.parametrize(
    ("rectifier", "shift"),
    [(nn.Identity(), 0.0), (nn.ReLU(), 0.0), (nn.ReLU(), -0.9), (nn.ReLU(inplace=True), -0.9)],
)
def test_switches_are_those_of_many_draws(probe_gains, rectifier, shift):
    torch.manual_seed(1)
    model, x = Pooled(rectifier, shift), torch.randn(64, 6, 12, 12)
    found = probe_gains(model, lambda: model(x), probes=16)
    z = model.a(x).detach()
    if shift:  # many windows hold nothing positive, or hardly anything
        assert 0.2 < (F.max_pool2d(z, 3, 2, 1) > 0).float().mean() < 0.8

    def gradient(noise):
        return torch.cat([g.flatten() for g in torch.autograd.grad(model.after(model.a(x) + noise), model.a.weight)])

    exact, measured, draws = gradient(0.0), 0.0, 40
    for _ in range(draws):
        noisy = F.conv2d(rounded(x), rounded(model.a.weight.detach(), (1, 2, 3)), model.a.bias.detach())
        measured += float((gradient(noisy - z) - exact).square().sum()) / draws
    assert len(found.flips) == (1 if isinstance(rectifier, nn.Identity) else 2)
    predicted = sum(sign_change_variance(flips, found.noise[name]) for name, flips in found.flips.items())
    assert predicted / measured == pytest.approx(1, abs=0.15)


def test_noise_of_gaps_is_seen_per_image_and_channel():
    torch.manual_seed(0)
    model, x = Pooled(nn.ReLU(), 0.0), torch.randn(8, 6, 12, 12)
    with torch.no_grad():
        model.a.weight[:24] *= 100.0
    input_noise = noisy_passes(model, lambda: model(x)).input_noise["pool/max_pool2d"]
    (spread,) = input_noise.spread
    assert spread.shape == (8, 48, 1)
    by_channel = spread.view(8, 48).mean(0)
    assert by_channel[:24].min() > 100 * by_channel[24:].max()


def test_pools_of_a_captured_model_are_in_the_sensitivities():
    torch.manual_seed(0)
    model, x = Pooled(nn.Identity(), 0.0), torch.randn(8, 6, 12, 12)
    graph = capture(model, (x,))
    found = collect_statistics(model, [(x,)], graph=graph, probes=2)
    (pool,) = (operator.name for operator in graph if operator.op_type == "max_pool2d")
    assert all(found.signals[pool].flips)
    assert found.signals[pool].noise_ratio > 0
    details = sensitivities(graph, found, device_formats("cpu")).details["a/conv2d"]
    assert details["INT8"].flips > details["BF16"].flips > 0
