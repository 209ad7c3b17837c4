"""Noise at rectifiers, and the shift of the mean gradient, against Monte Carlo in FP64 with a rounding of its own."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.interception import intercept
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.probes import InputNoise, NoiseMeasurement, noisy_passes
from qsync_opt.sensitivity import sensitivities, sign_change_variance

DRAWS = 60


class Masked(torch.autograd.Function):
    """A rectifier whose gradient passes where it is told."""

    @staticmethod
    def forward(ctx, z, mask):
        ctx.save_for_backward(mask)
        return z.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Net(nn.Module):
    """Two rectifiers after batch normalizations; half of the channels vary little around a large mean."""

    def __init__(self, rectifier=None):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(8, 32, 1, bias=False), nn.Conv2d(32, 16, 3, padding=1), nn.Linear(16, 5)
        self.first, self.second, self.rectifier = nn.BatchNorm2d(32), nn.BatchNorm2d(16), rectifier or torch.relu
        with torch.no_grad():
            self.a.weight[:16, 4:] = 0.0  # these read what hardly varies

    def forward(self, x, labels):
        x = self.rectifier(self.first(self.a(x)))
        x = self.rectifier(self.second(self.b(x)))
        return nn.functional.cross_entropy(self.c(x.mean((2, 3))), labels)


@pytest.fixture
def example():
    torch.manual_seed(0)
    model = Net().double()
    x = torch.randn(24, 8, 6, 6).double()
    x[:, :4] = 5.0 + 0.1 * x[:, :4]
    return model, (x, torch.randint(0, 5, (24,)))


def rounded(x, dims=None):
    """INT8 with a scale per slice, up or down at random."""
    scale = (x.abs().max() if dims is None else x.abs().amax(dims, keepdim=True)) / 127
    return (x / scale + torch.rand_like(x)).floor() * scale


def noisy_call(call):
    """A product of rounded operands, whose gradients pass as if nothing were rounded."""
    if call.op_type not in ("conv2d", "linear"):
        return call.run()
    x, weight, *rest = call.args
    x = x + (rounded(x) - x).detach()
    weight = weight + (rounded(weight, tuple(range(1, weight.dim()))) - weight).detach()
    return call.function(x, weight, *rest, **call.kwargs)


class Rectified:
    """Keeps what rectifiers read, or gives them masks."""

    def __init__(self, masks=None):
        self.read, self.masks = [], masks

    def __call__(self, z):
        self.read.append(z.detach())
        if self.masks is None:
            return torch.relu(z)
        return Masked.apply(z, self.masks[len(self.read) - 1])


def gradient(model, batch, rectifier, noise):
    """The whole gradient, with rounded operands or without."""
    model.rectifier = rectifier
    parameters = list(model.parameters())
    if not noise:
        return torch.cat([g.flatten() for g in torch.autograd.grad(model(*batch), parameters)])
    with intercept(model, noisy_call):
        loss = model(*batch)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def test_noise_flips_and_shift_are_those_of_many_draws(probe_gains, example):
    model, batch = example
    seen = noisy_passes(model, lambda: model(*batch))
    found = probe_gains(model, lambda: model(*batch), probes=48)
    exact = Rectified()
    true = gradient(model, batch, exact, noise=False)
    arrived = [torch.zeros_like(z) for z in exact.read]
    flipped, sums, squares = 0.0, torch.zeros_like(true), 0.0
    for _ in range(DRAWS):
        noisy = Rectified()
        deviation = gradient(model, batch, noisy, noise=True) - true
        sums, squares = sums + deviation, squares + float(deviation.square().sum())
        for known, z, y in zip(arrived, exact.read, noisy.read, strict=True):
            known += (z - y).square() / DRAWS
        masks = [(z > 0).double() for z in noisy.read]
        flipped += float((gradient(model, batch, Rectified(masks), noise=False) - true).square().sum()) / DRAWS
    ratios = [float(v.sum() / z.square().sum()) for v, z in zip(arrived, exact.read, strict=True)]
    assert list(found.noise.values()) == pytest.approx(ratios, rel=0.1)
    for (spread,), squared in zip((a.spread for a in seen.input_noise.values()), arrived, strict=True):
        few, many = spread.mean((0, 2, 3)), squared.mean((0, 2, 3))
        assert (few / many).log().abs().max() < 0.5
    channels = arrived[0].mean((0, 2, 3))
    assert channels[:16].min() > 3 * channels[16:].max()  # evenly spread noise would be another
    predicted = sum(sign_change_variance(found.flips[name], found.noise[name]) for name in found.flips)
    assert predicted / flipped == pytest.approx(1, abs=0.25)
    shift = (float(sums.square().sum()) - squares) / (DRAWS * (DRAWS - 1))
    assert seen.shift == pytest.approx(shift, abs=0.2 * squares / DRAWS)
    assert 0 <= found.shift <= max(0.0, seen.shift)


def test_noise_is_counted_where_it_is(probe_gains):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    x = torch.randn(32, 6)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(6)), model

        def forward(self, x):
            return self.inner(x * self.scale).square().mean()

    scaled = Scaled()
    found = probe_gains(scaled, lambda: scaled(x), probes=4)
    before, after = found.flips
    assert found.noise[before] == 0  # nothing is rounded before the first one
    assert not any(found.flips[before])
    assert found.noise[after] > 0
    assert all(found.flips[after])


@pytest.mark.parametrize("rectifier", [lambda z: z.relu_(), torch.relu_, nn.ReLU(inplace=True)])
def test_rectifiers_that_write_into_their_input_flip_too(probe_gains, rectifier):
    class Written(nn.Module):
        def __init__(self, rectifier):
            super().__init__()
            self.a, self.b, self.c, self.rectifier = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1), rectifier

        def forward(self, x):
            x = self.a(x)
            self.rectifier(x)
            x = self.b(x)
            self.rectifier(x)
            return self.c(x).square().mean()

    x, found = torch.randn(32, 6), []
    for chosen in (rectifier, lambda z: z.copy_(torch.relu(z))):
        torch.manual_seed(0)
        model = Written(chosen)
        found.append(probe_gains(model, lambda model=model: model(x), probes=2))
    written, plain = found
    assert len(written.flips) == 2
    assert sum(written.flips.values(), ()) == pytest.approx(sum(plain.flips.values(), ()))
    assert list(written.noise.values()) == pytest.approx(list(plain.noise.values()))
    for name, gains in plain.gains.items():
        for tensor, gain in gains.items():
            assert written.gains[name][tensor].uniform == pytest.approx(gain.uniform)


def test_random_numbers_of_the_model_are_its_own():
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(32, 6)
    state = torch.get_rng_state()
    seen = noisy_passes(model, lambda: model(x).mean())
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < seen.input_noise["4/relu"].ratio < 0.01  # another draw of dropout would be as large as the signal


def test_forward_passes_alone_see_the_same_noise(example):
    model, batch = example
    whole, forward = (noisy_passes(model, lambda: model(*batch), shift=shift) for shift in (True, False))
    assert (whole.shift != 0, forward.shift) == (True, 0.0)
    assert forward.input_noise.keys() == whole.input_noise.keys()
    for name, input_noise in whole.input_noise.items():
        assert forward.input_noise[name].ratio == pytest.approx(input_noise.ratio)


def test_models_without_rectifiers_are_run_once():
    model, passes = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)), []

    def loss():
        passes.append(0)
        return model(torch.ones(4, 6)).mean()

    assert noisy_passes(model, loss) == NoiseMeasurement({}, 0.0)
    assert len(passes) == 1


def test_checkpointed_parts_round_alike_when_they_run_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            self.head, self.again = nn.Linear(64, 1), False

        def forward(self, x):
            run = functools.partial(checkpoint, self.inner, use_reentrant=False) if self.again else self.inner
            return self.head(run(x)).square().mean()

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(32, 6)
    found = []
    for model.again in (False, True):
        found.append(noisy_passes(model, lambda: model(x)))
    plain, again = found
    assert again.shift == pytest.approx(plain.shift, rel=1e-4)
    assert {name: a.ratio for name, a in again.input_noise.items()} == {
        name: a.ratio for name, a in plain.input_noise.items()
    }


@pytest.mark.parametrize("rectifier", [functools.partial(nn.functional.relu, inplace=True), torch.relu_])
def test_rectifiers_that_write_into_their_input_bear_the_name_of_the_graph(rectifier):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x):
            return self.c(rectifier(self.b(rectifier(self.a(x))))).square().mean()

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(32, 6)
    graph = capture(model, (x,))
    found = collect_statistics(model, [(x,)], graph=graph, probes=2)
    rectifiers = [operator.name for operator in graph if operator.op_type == "relu_"]
    assert len(rectifiers) == 2
    assert all(found.signals[name].flips for name in rectifiers)
    table = sensitivities(graph, found, device_formats("cpu"))
    assert table.details["a/linear"]["INT8"].flips > 0
    assert found.signals[rectifiers[0]].elements == graph[rectifiers[0]].output_elements


def test_noise_of_some_samples_is_theirs_where_samples_are_told_apart():
    by_image, by_element, other = torch.rand(8, 3, 1, 1), torch.rand(1, 5), torch.rand(12, 2)
    seen = InputNoise(0.1, (by_image, by_element, other)).of_some(range(1, 9, 4), 2 / 8)
    assert seen.ratio == 0.1
    torch.testing.assert_close(seen.spread[0], by_image[[1, 5]])
    torch.testing.assert_close(seen.spread[1], by_element)
    torch.testing.assert_close(seen.spread[2], other.mean(0, keepdim=True))
