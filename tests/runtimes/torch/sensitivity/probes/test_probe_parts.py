"""Some samples of a batch for all: the same gains on average, in the memory of a training step."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import ModelError
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.runtimes.torch.sensitivity.probes import parts_of
from qsync_opt.runtimes.torch.support import allocation_of


class Net(nn.Module):
    """Samples that no operator mixes, and a table that they share."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.shared, self.reduction = nn.Parameter(torch.randn(7, 6)), reduction

    def forward(self, x, labels):
        x = torch.tanh(self.a(x.unsqueeze(1) + self.shared)) + torch.relu(self.a(self.shared))
        return F.cross_entropy(self.c(torch.relu(self.b(x))).mean(1), labels, reduction=self.reduction)


def batch(samples):
    torch.manual_seed(1)
    return torch.randn(samples, 6), torch.randint(0, 5, (samples,))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("option", ["probes", "adaptive_probes"])
def test_parts_have_the_gains_of_the_whole(reduction, option):
    torch.manual_seed(0)
    model = Net(reduction)
    # All quarters are alike, so that two of them differ from the whole in nothing but what parts are scaled by.
    x, labels = batch(8)
    every = x.repeat_interleave(4, 0), labels.repeat_interleave(4, 0)
    found = [collect_statistics(model, [every], whole_batches=whole, **{option: 10}) for whole in (True, False)]
    gains = "gains" if option == "probes" else "adaptive_gains"
    for whole, parts in zip(*(statistics.operators for statistics in found), strict=True):
        known, estimated = getattr(whole, gains), getattr(parts, gains)
        assert known.keys() == estimated.keys()
        for name, gain in known.items():
            assert estimated[name].uniform == pytest.approx(gain.uniform, rel=0.15, abs=1e-12), (whole.name, name)
            assert estimated[name].floating == pytest.approx(gain.floating, rel=0.15, abs=1e-12), (whole.name, name)
    for name, signal in found[0].signals.items():
        other = found[1].signals[name]
        flips = "flips" if option == "probes" else "adaptive_flips"
        assert getattr(other, flips) == pytest.approx(getattr(signal, flips), rel=0.3)


def test_samples_that_differ_are_counted_as_often_as_they_are():
    """The weight's gain holds what samples have in common and what they have not, in the right shares."""
    torch.manual_seed(0)
    model, ratios = Net(), []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)
        whole, parts = (
            collect_statistics(model, [data], probes=16, whole_batches=whole)["c/linear"].gains["second"].uniform
            for whole in (True, False)
        )
        ratios.append(parts / whole)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.3)


def test_parts_are_every_fourth_sample_and_as_many_as_normalizations_need():
    x, labels = batch(32)
    first, second, *_ = parts_of(nn.Linear(2, 2), {"x": x, "labels": labels, "flag": True})
    assert torch.equal(first.batch["x"], x[::4])
    assert torch.equal(second.batch["labels"], labels[1::4])
    assert (first.batch["flag"], first.share) == (True, 0.25)
    assert len(parts_of(nn.BatchNorm1d(2), (batch(16)))[0].batch[0]) == 8
    assert parts_of(nn.BatchNorm1d(2), batch(15)) is None
    assert parts_of(nn.BatchNorm1d(2).eval(), batch(15)) is not None
    assert parts_of(nn.Linear(2, 2), batch(1)) is None
    assert parts_of(nn.Linear(2, 2), (torch.ones(4, 2), torch.ones(3))) is None


def test_batches_that_cannot_be_divided_are_probed_as_a_whole(caplog):
    model = Net()
    x, labels = batch(8)

    def step(model, x):  # the labels of the whole batch
        return model(x, labels)

    with caplog.at_level(logging.INFO, "qsync_opt"):
        found = collect_statistics(model, [x], step=step, probes=2)
    assert "the batch is probed as a whole" in caplog.text
    whole = collect_statistics(model, [x], step=step, probes=2, whole_batches=True)
    assert found.operators == whole.operators


class Pairs(nn.Module):
    """Each of the first half of the samples belongs to one of the second half; the others are negatives."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.b, self.dropout = nn.Linear(6, 16), nn.Linear(16, 8), nn.Dropout(dropout)

    def forward(self, x, labels):
        anchors, others = F.normalize(self.b(self.dropout(torch.tanh(self.a(x)))), dim=-1).chunk(2)
        return F.cross_entropy(20 * anchors @ others.T, torch.arange(len(anchors)))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("option", ["probes", "adaptive_probes"])
def test_losses_over_pairs_are_probed_as_a_whole(dropout, option, caplog):
    torch.manual_seed(0)
    model, batches = Pairs(dropout), [batch(8), batch(8)]
    with caplog.at_level(logging.INFO, "qsync_opt"):
        found = collect_statistics(model, batches, **{option: 2})
    assert caplog.text.count("the loss couples samples") == 1
    assert found.operators == collect_statistics(model, batches, whole_batches=True, **{option: 2}).operators


class Tokens(nn.Module):
    """A mean over the tokens that count, of which samples have unlike numbers; dropout and a normalization."""

    def __init__(self, norm=None):
        super().__init__()
        self.a, self.b, self.norm, self.dropout = nn.Linear(6, 16), nn.Linear(16, 5), norm, nn.Dropout(0.3)

    def forward(self, x, labels):
        x = self.a(x).transpose(1, 2)
        x = torch.relu(x if self.norm is None else self.norm(x)).transpose(1, 2)
        return F.cross_entropy(self.b(self.dropout(x)).flatten(0, 1), labels.flatten(), ignore_index=-1)


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False)])
def test_means_over_what_counts_are_divided(norm, caplog):
    torch.manual_seed(0)
    x, labels = torch.randn(35, 7, 6), torch.randint(0, 5, (35, 7))
    labels[torch.rand(35, 7) > torch.linspace(0.2, 0.9, 35)[:, None]] = -1
    with caplog.at_level(logging.INFO, "qsync_opt"):
        collect_statistics(Tokens(norm), [(x, labels)], probes=1)
    assert "as a whole" not in caplog.text


class Deep(nn.Module):
    """Activations weigh more than parameters."""

    def __init__(self, activation):
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), activation())]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(64, 5)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.layers(x)), labels)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
@pytest.mark.parametrize("option", ["probes", "adaptive_probes"])
def test_probes_take_no_more_memory_than_a_training_step(activation, option):
    torch.manual_seed(0)
    model = Deep(activation)
    data = torch.randn(2048, 64), torch.randint(0, 5, (2048,))

    def step():
        torch.autograd.grad(model(*data), list(model.parameters()))

    def scored(probes):
        return allocation_of(lambda: collect_statistics(model, [data], **{option: probes}), torch.device("cpu"))[1]

    scored(1)
    taken, without = allocation_of(step, torch.device("cpu"))[1], scored(0)
    assert scored(1).peak_bytes < 1.1 * max(taken.peak_bytes, without.peak_bytes)


def test_missing_memory_is_called_so():
    class Large(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled() and len(x) == 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return super().forward(x)

    model = nn.Sequential(Large(3, 4), nn.Linear(4, 1))
    with pytest.raises(ModelError, match=r"not enough memory .*CUDA out of memory.* smaller batches"):
        collect_statistics(model, [torch.ones(8, 3)], step=lambda m, x: m(x).square().mean(), probes=1)
