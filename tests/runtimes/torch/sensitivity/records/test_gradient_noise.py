import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.records import GradientScatter
from qsync_opt.sensitivity import merge_statistics


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        return F.mse_loss(self.b(torch.tanh(self.a(x))), y)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def direct(model, found):
    gradients = []
    for x, y in found:
        grads = torch.autograd.grad(model(x, y), list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in grads]).double())
    stacked = torch.stack(gradients)
    return float(stacked.square().sum(1).mean()), float(stacked.var(0, unbiased=True).sum())


def test_noise_is_the_unbiased_variance_between_batches():
    torch.manual_seed(0)
    model, data = Net(), batches(5)
    noise = collect_statistics(model, data).gradient_noise
    mean_square, variance = direct(model, data)
    assert noise.mean_square_norm == pytest.approx(mean_square, rel=1e-5)
    assert noise.variance == pytest.approx(variance, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_batch_says_nothing_about_scatter():
    assert collect_statistics(Net(), batches(1)).gradient_noise is None


def test_equal_batches_do_not_scatter():
    noise = collect_statistics(Net(), batches(1) * 3).gradient_noise
    assert noise.variance == pytest.approx(0.0, abs=1e-6 * noise.mean_square_norm)


def test_ranks_pool_their_scatter():
    torch.manual_seed(0)
    model = Net()
    parts = [collect_statistics(model, batches(n, seed)) for n, seed in ((3, 1), (5, 2))]
    merged = merge_statistics(parts).gradient_noise
    variances = [part.gradient_noise.variance for part in parts]
    assert merged.variance == pytest.approx((2 * variances[0] + 4 * variances[1]) / 6)


def test_gradients_of_sparse_embeddings_count():
    table = nn.Embedding(10, 4, sparse=True)
    scatter = GradientScatter(table)
    for index in (1, 2):
        with scatter.batch():
            table(torch.tensor([index, index])).sum().backward()
    noise = scatter.noise()
    assert noise.mean_square_norm == pytest.approx(16.0)  # 4 elements of 2 each
    assert noise.variance == pytest.approx(16.0)
