"""From an optimizer to the weight of the gradient's variance."""

import pytest
import torch
from torch import nn

from qsync_opt import noise_horizon
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.runtimes.torch.sensitivity import collect_statistics


def test_adam_counts_squared_rates():
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters(), lr=1e-2)
    assert noise_horizon(optimizer, steps=100) == pytest.approx(1e-2)
    assert noise_horizon(optimizer, steps=100, learning_rate=1e-3) == pytest.approx(1e-4)


def test_sgd_counts_the_gradient_too():
    model = nn.Linear(3, 2)
    batches = [torch.randn(8, 3) for _ in range(2)]
    statistics = collect_statistics(model, batches, step=lambda net, x: net(x).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    assert statistics.gradient_noise is not None
    mean_square = statistics.gradient_noise.mean_square_norm / 8
    assert noise_horizon(optimizer, steps=10, statistics=statistics) == pytest.approx(10 * 0.04 * mean_square)
    with pytest.raises(ProblemError, match="two batches"):
        noise_horizon(optimizer, steps=10)


def test_other_optimizers_are_refused_by_name():
    optimizer = torch.optim.Adagrad(nn.Linear(3, 2).parameters())
    with pytest.raises(UnsupportedError, match="Adagrad"):
        noise_horizon(optimizer, steps=10)
