"""Small networks for the indicator's check: the whole gradient's variance, measured against the sensitivities.

One operator at a time in low precision with the package's kernels, at initialization and after some training; and
random plans, where the sum of sensitivities is the prediction.
"""

from __future__ import annotations

import itertools
import math
import statistics as python_statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from rank_correlation import spearman
from torch import Tensor, nn

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.interception import OperatorCall, intercept
from qsync_opt.runtimes.torch.sensitivity import collect_statistics
from qsync_opt.sensitivity import IndicatorKind, SensitivityTable, sensitivities


def squared_distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().sum())


class Mlp(nn.Module):
    """Rectifiers, no residuals."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


class ResidualMlp(nn.Module):
    """Normalized residual blocks."""

    def __init__(self, width: int = 64, layers: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return F.cross_entropy(self.head(x), y)


class Cnn(nn.Module):
    """Convolutions with batch normalization, rectifiers, residuals, stride and groups."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16, 1, 1), (16, 16, 1, 1), (16, 32, 2, 1), (32, 32, 1, 4), (32, 32, 1, 1))
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1, groups=g) for i, o, s, g in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _, _ in sizes)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            branch = torch.relu(norm(conv(x)))
            x = x + branch if branch.shape == x.shape else branch
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Block(nn.Module):
    """A transformer block, its attention by two products or by the fused function."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) * (d // self.heads) ** -0.5
            mask = torch.ones(t, t, dtype=torch.bool).triu(1)
            mixed = torch.matmul(torch.softmax(scores.masked_fill(mask, -1e4), -1), v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small language model."""

    def __init__(self, *, fused: bool, vocabulary: int = 64, width: int = 48, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4, fused=fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def vectors(generator: torch.Generator) -> tuple[Tensor, ...]:
    y = torch.randint(0, 10, (256,), generator=generator)
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(9))
    return centres[y] + 1.5 * torch.randn(256, 64, generator=generator), y


def images(generator: torch.Generator) -> tuple[Tensor, ...]:
    y = torch.randint(0, 10, (32,), generator=generator)
    centres = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(9))
    return centres[y] + 2 * torch.randn(32, 3, 16, 16, generator=generator), y


def texts(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Every other token follows from the one before, the rest is random."""
    tokens = torch.randint(0, 64, (8, 25), generator=generator)
    tokens[:, 1::2] = (tokens[:, :-1:2] * 7 + 3) % 64
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, ...]]]] = {
    "mlp": (Mlp, vectors),
    "residual mlp": (ResidualMlp, vectors),
    "cnn": (Cnn, images),
    "gpt, products": (lambda: Gpt(fused=False), texts),
    "gpt, fused attention": (lambda: Gpt(fused=True), texts),
}
TRAINING_STEPS = (0, 60)


def gradient(model: nn.Module, batch: tuple[Tensor, ...], plan: Mapping[str, str], draw: int) -> list[Tensor]:
    """Gradient of all parameters with some operators in low precision, by the real kernels."""

    def handler(call: OperatorCall) -> Any:
        precision = plan.get(call.name)
        if precision is None:
            return call.run()
        options = KernelOptions(seed=hash_of(call.name), offset=draw)
        return ops.execute(call.op_type, precision, call.function, call.args, call.kwargs, options).float()

    with intercept(model, handler):
        loss = model(*batch)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def hash_of(name: str) -> int:
    """A seed per operator, the same in every run."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(name)) % (1 << 31)


def added_variance(
    model: nn.Module, batch: tuple[Tensor, ...], exact: list[Tensor], plan: Mapping[str, str], draws: int
) -> float:
    """Mean squared distance of the noisy gradient from the exact one."""
    repeats = draws if "INT8" in plan.values() else 1
    total = 0.0
    for draw in range(repeats):
        noisy = gradient(model, batch, plan, draw + 1)
        total += sum(squared_distance(a, b) for a, b in zip(noisy, exact, strict=True)) / repeats
    return total


def agreement(predicted: list[float], measured: list[float]) -> dict[str, float | None]:
    logs = sorted(math.log(p / m) for p, m in zip(predicted, measured, strict=True))
    return {
        "cases": len(logs),
        "spearman": spearman(predicted, measured),
        "ratio_median": math.exp(python_statistics.median(logs)),
        "ratio_lowest": math.exp(logs[0]),
        "ratio_highest": math.exp(logs[-1]),
    }


def trained(name: str, steps: int) -> tuple[nn.Module, tuple[Tensor, ...], float]:
    """A network after some steps on fresh batches, and a further batch with its loss."""
    make, draw = NETWORKS[name]
    torch.manual_seed(0)
    model, generator = make(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*draw(generator)).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    batch = draw(generator)
    return model, batch, float(model(*batch).detach())


def random_plans(graph: OpGraph, count: int) -> list[dict[str, str]]:
    """Plans that leave about half of the operators in FP32."""
    generator = torch.Generator().manual_seed(3)
    plans = []
    for _ in range(count):
        plan = {}
        for operator in graph.by_role(Role.ADJUSTABLE):
            choices = [p for p in ("INT8", "BF16") if ops.supports(operator.op_type, p, "cpu")] + ["FP32"]
            choice = choices[int(torch.randint(0, len(choices), (), generator=generator))]
            if choice != "FP32":
                plan[operator.name] = choice
        plans.append(plan)
    return plans


def network_rows(draws: int) -> Iterator[dict[str, Any]]:
    """Per network and amount of training: agreement per indicator and precision, and of whole plans."""
    formats = device_formats("cpu")
    for name, steps in itertools.product(NETWORKS, TRAINING_STEPS):
        model, batch, loss = trained(name, steps)
        graph = capture(model, batch)
        started = time.perf_counter()
        statistics = collect_statistics(model, [batch], graph=graph, probes=4, whole_batches=True)
        collect_s = time.perf_counter() - started
        exact = gradient(model, batch, {}, 0)
        keys = [
            (operator.name, precision)
            for operator in graph.by_role(Role.ADJUSTABLE)
            for precision in ("INT8", "BF16")
            if ops.supports(operator.op_type, precision, "cpu")
        ]
        measured = {key: added_variance(model, batch, exact, {key[0]: key[1]}, draws) for key in keys}
        plans = random_plans(graph, 6)
        measured_plans = [added_variance(model, batch, exact, plan, draws) for plan in plans]
        for kind in IndicatorKind:
            table = sensitivities(graph, statistics, formats, kind=kind)
            yield {
                "network": name,
                "training_steps": steps,
                "loss": loss,
                "indicator": str(kind),
                "collect_s": collect_s,
                **network_agreement(table, measured, plans, measured_plans),
            }


def network_agreement(
    table: SensitivityTable,
    measured: Mapping[tuple[str, str], float],
    plans: list[dict[str, str]],
    measured_plans: list[float],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in ("INT8", "BF16", "all"):
        keys = [key for key in measured if precision in (key[1], "all")]
        found[precision] = agreement([table[o][p] for o, p in keys], [measured[key] for key in keys])
    sums = [sum(table[o][p] for o, p in plan.items()) for plan in plans]
    # Additivity apart from the quality of the single sensitivities: the sum of what was measured one at a time.
    single = [sum(measured[o, p] for o, p in plan.items()) for plan in plans]
    found["plans"] = agreement(sums, measured_plans)
    found["plans_sum_of_measured"] = agreement(single, measured_plans)
    return found
