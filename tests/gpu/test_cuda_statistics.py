"""Statistics on a card: what is measured as replayed graphs is what is measured kernel by kernel."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.io import encode
from qsync_opt.numerics import formats_for
from qsync_opt.runtimes.torch.sensitivity import Replays, collect_statistics
from qsync_opt.sensitivity import NoiseOptions, variances

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Block(nn.Module):
    """Attention and two layers, with every kind of product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x + torch.softmax(x @ x.mT, -1) @ x


class Net(nn.Module):
    """Several blocks of one shape, so that the second is captured and the others are replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(64, 32), nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((x @ self.table.weight.T).flatten(0, 1), tokens.roll(-1, 1).flatten())


class Convolutions(nn.Module):
    """Windows and single positions, with and without steps and groups; several of one shape, and one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.Conv2d(16, 16, 1, stride=2)
        self.one = nn.ModuleList(nn.Conv2d(16, 16, 1, bias=False) for _ in range(3))
        self.three = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, groups=groups) for groups in (1, 1, 4))
        self.up, self.norm = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for one, three in zip(self.one, self.three, strict=True):
            x = x + three(one(x).relu())
        return self.up(self.last(x).relu()).square().mean()


def _numbers(value: object, path: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _numbers(item, f"{path}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, item in enumerate(value) for k, v in _numbers(item, f"{path}/{i}").items()}
    return {path: float(value)} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def test_replayed_graphs_measure_what_kernels_measure_one_by_one(monkeypatch):
    torch.manual_seed(0)
    model = Net().to(CUDA)
    batches = [(torch.randint(0, 64, (8, 24), device=CUDA),) for _ in range(2)]
    captured = []
    capture = Replays._captured
    monkeypatch.setattr(Replays, "_captured", lambda *a: captured.append(1) or capture(*a))
    replayed = _numbers(encode(collect_statistics(model, batches, probes=1)))
    assert captured
    monkeypatch.setattr("qsync_opt.runtimes.torch.sensitivity.replays._LARGEST", 0)
    captured.clear()
    plain = _numbers(encode(collect_statistics(model, batches, probes=1)))
    assert not captured
    assert replayed.keys() == plain.keys()
    wrong = {
        key: (replayed[key], plain[key])
        for key in plain
        if not math.isclose(replayed[key], plain[key], rel_tol=1e-4, abs_tol=1e-12)
    }
    assert not wrong


def test_statistics_on_a_card_are_those_of_a_cpu():
    torch.manual_seed(0)
    model = Net()
    batch = (torch.randint(0, 64, (8, 24)),)
    on_cpu = collect_statistics(model, [batch])
    on_card = collect_statistics(model.to(CUDA), [tuple(x.to(CUDA) for x in batch)])
    for ours, theirs in zip(on_card.operators, on_cpu.operators, strict=True):
        assert ours.output.square_sum == pytest.approx(theirs.output.square_sum, rel=1e-4)
        assert ours.output_gradient.square_sum == pytest.approx(theirs.output_gradient.square_sum, rel=1e-3)
        assert dict(ours.alignment) == pytest.approx(dict(theirs.alignment), rel=0.02)


@pytest.mark.parametrize("sample", [1 << 17, 1 << 12])
def test_convolutions_on_a_card_are_those_of_a_cpu(sample):
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(16, 3, 24, 24) * torch.rand(16, 1, 1, 1)
    on_cpu = collect_statistics(model, [(x,)], sample_elements=sample)
    on_card = collect_statistics(model.to(CUDA), [(x.to(CUDA),)], sample_elements=sample)
    formats = formats_for(("FP32", "INT8", "FP8", "BF16"), "BF16")
    for ours, theirs in zip(on_card.operators, on_cpu.operators, strict=True):
        assert dict(ours.nearest) == pytest.approx(dict(theirs.nearest), rel=0.05)
        for precision in ("INT8", "FP8", "BF16"):
            backward = "half" if precision == "BF16" or "transpose" in ours.op_type else "eight"
            options = NoiseOptions(activation_granularity="row", backward=backward)
            found, expected = (variances(s, precision, formats[precision], options) for s in (ours, theirs))
            for name in ("output", "first_gradient", "second_gradient"):
                if getattr(expected, name) is not None:
                    ratio = getattr(found, name).total / getattr(expected, name).total
                    assert ratio == pytest.approx(1, abs=0.03), (ours.name, precision, name)
