import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ModelError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.interception import intercept
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.support import allocation_of
from qsync_opt.sensitivity import SIGN_CHANGE_RATIOS, IndicatorKind, sensitivities


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), y)


def test_gains_are_the_squared_jacobian_of_the_gradient(probe_gains):
    model, x, y = Smooth(), torch.randn(5, 3), torch.randint(0, 2, (5,))
    gains = probe_gains(model, lambda: model(x, y), probes=300, seed=1).gains
    parameters = list(model.parameters())

    def gradient_with(noise_z, noise_x):
        z = F.linear(x + noise_x, model.a.weight, model.a.bias) + noise_z
        loss = F.cross_entropy(model.b(torch.tanh(z)), y)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])

    zeros = torch.zeros(5, 4), torch.zeros(5, 3)
    by_z, by_x = torch.autograd.functional.jacobian(gradient_with, zeros)
    assert gains["a/linear"]["output"].uniform == pytest.approx(float(by_z.square().sum()), rel=0.15)
    assert gains["a/linear"]["first"].uniform == pytest.approx(float(by_x.square().sum()), rel=0.15)
    weighted = (by_x.square() * x.square()).sum() / x.square().mean()
    assert gains["a/linear"]["first"].floating == pytest.approx(float(weighted), rel=0.15)


def test_noise_on_a_gradient_reaches_the_weights_before_it(probe_gains):
    model, x, y = Smooth(), torch.randn(5, 3), torch.randint(0, 2, (5,))
    gains = probe_gains(model, lambda: model(x, y), probes=300, seed=1).gains
    # The gradient of a's result enters a's own weight and bias gradients only: |x_n|^2 + 1 per element.
    wanted = 4 * float((x.square().sum(1) + 1).sum())
    assert gains["a/linear"]["output_gradient"].uniform == pytest.approx(wanted, rel=0.15)
    assert "first_gradient" not in gains["a/linear"]  # the input needs none
    assert gains["b/linear"]["first_gradient"].uniform > 0


def test_adaptive_gains_are_shares_of_the_progress_of_adam(probe_gains):
    model, x, y = Smooth(), torch.randn(5, 3), torch.randint(0, 2, (5,))
    gains = probe_gains(model, lambda: model(x, y), probes=300, seed=1, adaptive=True).gains
    plain = torch.autograd.grad(model(x, y), list(model.parameters()))
    roots = [g.square().mean().sqrt() for g in plain]
    progress = sum(root * g.numel() for root, g in zip(roots, plain, strict=True))
    # The gradient of a's result enters a's own weight and bias alone: |x_n|^2 and 1 per element.
    wanted = 4 * (x.square().sum() / roots[0] + len(x) / roots[1]) / (2 * progress)
    assert gains["a/linear"]["output_gradient"].uniform == pytest.approx(float(wanted), rel=0.15)


def test_adam_loses_the_share_of_its_progress_that_noise_has_beside_the_gradient():
    # A linear loss: what a step gains is its product with the mean gradient, whatever the place.
    generator = torch.Generator().manual_seed(0)
    mean = torch.tensor([0.3, 0.003]).repeat_interleave(4000).double()
    spread = 3 * mean  # a parameter of large gradients, and one of small ones

    def gained(added):
        weights = torch.zeros_like(mean).requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=1e-3, betas=(0.9, 0.99))
        for _ in range(300):
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
            weights.grad = mean + noise * (spread.square() + added).sqrt()
            optimizer.step()
        return -float((weights.detach() * mean).sum())

    mean_square = mean.square() + spread.square()
    added = 0.1 * mean_square[-1]  # the same on both: a tenth of the small one, next to nothing beside the large one
    small, large = mean_square[-1].sqrt(), mean_square[0].sqrt()
    share = float((added / (2 * small) + added / (2 * large)) / (small + large))
    assert 1 - gained(added) / gained(0.0) == pytest.approx(share, abs=0.004)
    alike = 0.1 * mean_square
    assert 1 - gained(alike) / gained(0.0) == pytest.approx(0.05, abs=0.006)


def test_flips_of_rectifiers_are_counted(probe_gains):
    class Rectified(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 256), nn.Linear(256, 1)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))).sum()  # linear but for the flips

    model, x = Rectified(), torch.randn(512, 16)
    found = probe_gains(model, lambda: model(x), probes=16)
    gain, (flips,) = found.gains["a/linear"]["output"], found.flips.values()
    z = model.a(x).detach()
    parameters = list(model.parameters())

    def gradient(noise):
        hidden = torch.relu(F.linear(x, model.a.weight, model.a.bias) + noise)
        return torch.autograd.grad(model.b(hidden).sum(), parameters)

    exact = gradient(torch.zeros_like(z))
    for ratio in (1e-4, 1e-2):
        variance = ratio * float(z.square().mean())
        measured = 0.0
        for _ in range(4):
            noisy = gradient(torch.randn_like(z) * variance**0.5)
            measured += sum(float((a - b).square().sum()) for a, b in zip(noisy, exact, strict=True)) / 4
        predicted = variance * gain.uniform + flips[SIGN_CHANGE_RATIOS.index(ratio)]
        assert predicted / measured == pytest.approx(1, abs=0.3)


def test_models_that_cannot_be_differentiated_twice_are_named(probe_gains):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    fc = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"cannot be differentiated twice, which probing needs .* probes=0"):
        probe_gains(fc, lambda: Once.apply(fc(torch.ones(3, 2))).sum(), probes=1)


class Attention(nn.Module):
    """A transformer block and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(23, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 23)

    def forward(self, tokens, targets):
        h = self.table(tokens)
        q, k, v = (p.view(*tokens.shape, 4, 8).transpose(1, 2) for p in self.qkv(self.norm(h)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.out(mixed)
        h = h + self.down(F.gelu(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def test_sensitivities_predict_what_the_kernels_do_to_the_gradient():
    model = Attention()
    batch = tuple(torch.randint(0, 23, (8, 12)) for _ in range(2))
    graph = capture(model, batch)
    statistics = collect_statistics(model, [batch], graph=graph, probes=8)
    table = sensitivities(graph, statistics, device_formats("cpu"))
    assert table.kind is IndicatorKind.PROBED

    def gradient(name=None, precision="FP32", draw=0):
        def handler(call):
            if call.name != name:
                return call.run()
            options = KernelOptions(offset=draw)
            return ops.execute(call.op_type, precision, call.function, call.args, call.kwargs, options).float()

        with intercept(model, handler):
            return torch.autograd.grad(model(*batch), list(model.parameters()))

    exact = gradient()
    pairs = []
    for name in table:
        for precision, draws in (("INT8", 6), ("BF16", 1)):
            if not ops.supports(graph[name].op_type, precision, "cpu"):
                continue
            measured = 0.0
            for draw in range(draws):
                noisy = gradient(name, precision, draw)
                measured += sum(float((a - b).square().sum()) for a, b in zip(noisy, exact, strict=True)) / draws
            pairs.append((table[name][precision], measured))
    ratios = sorted(predicted / measured for predicted, measured in pairs)
    assert len(ratios) == 12
    assert 0.8 < ratios[len(ratios) // 2] < 1.25
    assert ratios[0] > 0.5
    assert ratios[-1] < 2


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_nothing_of_the_passes_stays_in_memory(probe_gains, activation):
    model = nn.Sequential(nn.Linear(64, 256), activation(), nn.Linear(256, 1))
    x = torch.randn(512, 64)

    def probe():
        probe_gains(model, lambda: model(x).square().mean(), probes=2)

    probe()  # what is made once and kept, such as the backward threads' own buffers
    _, allocation = allocation_of(probe, torch.device("cpu"))
    assert allocation.peak_bytes > 10 * x.numel() * 4
    assert allocation.kept_bytes < x.numel()
