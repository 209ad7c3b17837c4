"""Probed scoring on a card: its sums of many tensors at once, its second derivatives, and the memory that it takes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.runtimes.torch.sensitivity import collect_statistics, full_precision
from qsync_opt.runtimes.torch.sensitivity.probes import DerivativeSums, NoiseMeasurement, Probe
from qsync_opt.runtimes.torch.sensitivity.records import MomentQueue
from qsync_opt.runtimes.torch.support import allocation_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Net(nn.Module):
    """A residual network of a few convolutions, with a window, a step and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 1, stride=2)
        self.first, self.second, self.head = nn.BatchNorm2d(16), nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        x = x + torch.relu(self.first(self.a(x)))
        x = torch.relu(self.second(self.b(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _signs(x: Tensor, key: tuple[int, ...], count: int | None = None) -> Tensor:
    """Signs that are the same on all devices."""
    generator = torch.Generator().manual_seed(sum(part * 1009**i for i, part in enumerate(key)) + 2_000_000)
    drawn = torch.randint(0, 2, x.shape if count is None else (count,), generator=generator)
    return (drawn * 2 - 1).to(x)


def test_gains_are_those_of_the_host(monkeypatch):
    torch.manual_seed(0)
    model, batch = Net(), (torch.randn(32, 3, 12, 12), torch.arange(32) % 10)
    monkeypatch.setattr("qsync_opt.runtimes.torch.sensitivity.probes.gradient.signs_like", _signs)
    found = []
    for device in (torch.device("cpu"), CUDA):
        model.to(device)
        on_device = tuple(x.to(device) for x in batch)
        found.append(collect_statistics(model, [on_device], probes=1, whole_batches=True))
    for ours, theirs in zip(found[1].operators, found[0].operators, strict=True):
        assert ours.gains.keys() == theirs.gains.keys()
        for tensor, gain in theirs.gains.items():
            assert ours.gains[tensor].uniform == pytest.approx(gain.uniform, rel=0.02), (ours.name, tensor)
            assert ours.gains[tensor].floating == pytest.approx(gain.floating, rel=0.02), (ours.name, tensor)
    assert any(signal.flips for signal in found[1].signals.values())


def test_parts_of_a_batch_are_probed_on_a_card():
    torch.manual_seed(0)
    model = Net().to(CUDA)
    batch = torch.randn(32, 3, 12, 12, device=CUDA), torch.arange(32, device=CUDA) % 10
    parts, whole = (collect_statistics(model, [batch], probes=8, whole_batches=whole) for whole in (False, True))
    ratios = [
        a.gains[tensor].uniform / gain.uniform
        for a, b in zip(parts.operators, whole.operators, strict=True)
        for tensor, gain in b.gains.items()
        if gain.uniform
    ]
    assert 0.5 < torch.tensor(ratios).median() < 2


def test_sums_of_many_tensors_are_those_of_each():
    torch.manual_seed(0)
    sums, late, moments, given = DerivativeSums(None), MomentQueue(), {}, {}
    for i, shape in enumerate([(5, 60), (900,), (32, 16, 20, 20), (3_000_000,), (7,)]):
        d, v = torch.randn(shape, device=CUDA), torch.randn(shape, device=CUDA) * 10.0**i
        given["operator", "first", i] = d, v
        sums.add(("operator", "first", i), d, v)
        late.add(v, lambda amax, root, i=i: moments.setdefault(i, (amax, root)))
    sums.flush()
    late.flush()
    for key, names, values in sums.numbers:
        d, v = (x.double() for x in given[key])
        steps = (v.float() * (127 / v.float().abs().max())).frac().abs().double()
        fixed = steps - steps**2
        wanted = {
            "~plain": d.norm(),
            "~values": v.norm(),
            "~floating": (d * v).norm(),
            "fixed": (d**2 * fixed).sum(),
            "fixed_weight": fixed.sum(),
        }
        for name, value in zip(names, values.tolist(), strict=True):
            assert value == pytest.approx(float(wanted[name]), rel=1e-4), (key, name)
        amax, root = moments[key[2]]
        assert float(amax) == float(v.abs().max())
        assert float(root) == pytest.approx(float(v.norm()), rel=1e-5)


def test_probing_keeps_no_gradient_of_a_parameter():
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(2048, 2048), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(2048, 1)).to(CUDA)
    x = torch.randn(64, 2048, device=CUDA)

    def probe() -> None:
        with full_precision():
            Probe(operators=None, probes=1).run(model, lambda: model(x).square().mean(), NoiseMeasurement({}, 0.0))

    probe()  # workspaces
    _, allocation = allocation_of(probe, CUDA)
    assert allocation.peak_bytes < 0.7 * sum(p.numel() for p in model.parameters()) * 4
