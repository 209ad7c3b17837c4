"""Section model: one training step of a whole model, BF16 autocast beside uniform INT8 and FP8 plans.

Forward and backward pass and a fused AdamW. ``eager``: launched by the host, as a training script does it, by the wall
clock. ``graph``: the same step captured and replayed, which leaves the device's time alone. ``compiled``: the model
under ``torch.compile``, launched by the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measuring import median_s
from torch import Tensor, nn

import qsync_opt
from qsync_opt.kernels import ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.runtimes.torch.apply import ApplyOptions, operator_kind
from qsync_opt.runtimes.torch.interception import intercepted

WARM_UPS, STEPS = 4, 12
EIGHT = {"backward": "eight", "weights": "step", "weight_granularity": "tensor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a decoder-only transformer and its batch."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    vocabulary: int = 50304


MODELS = {
    "GPT, 12 layers of width 768, 8 x 1024 tokens": Sizes(layers=12, width=768, heads=12, length=1024, batch=8),
    "GPT, 12 layers of width 2048, 8 x 1024 tokens": Sizes(layers=12, width=2048, heads=16, length=1024, batch=8),
}


class Block(nn.Module):
    """Attention and MLP, each behind a normalization, as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Gpt(nn.Module):
    """Tokens to mean cross-entropy of the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def _plan(model: nn.Module, tokens: Tensor, precision: str) -> dict[str, str]:
    names: list[str] = []
    with torch.no_grad(), intercepted(model, lambda call: (names.append(call.name), call.run())[1]):
        model(tokens[:1])
    kinds = {name: kind for name in names if (kind := operator_kind(name)) is not None}
    return {name: precision if ops.supports(kind, precision, tokens.device) else "BF16" for name, kind in kinds.items()}


def _wall_s(step: Callable[[], Any]) -> float:
    for _ in range(WARM_UPS):
        step()
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def training_step(sizes: Sizes, precision: str, *, compiled: bool = False) -> tuple[Callable[[], Tensor], nn.Module]:
    """A function that trains one step in ``"BF16"`` autocast or under a uniform plan, and the model."""
    torch.manual_seed(0)
    model: nn.Module = Gpt(sizes).cuda()
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    if precision != "BF16":
        noise = torch.zeros(1, dtype=torch.int64, device="cuda")
        kernels = KernelOptions(step=noise, **EIGHT)  # type: ignore[arg-type]
        model = qsync_opt.apply(model, _plan(model, tokens, precision), options=ApplyOptions(kernels=kernels))
    run: Any = torch.compile(model, dynamic=False) if compiled else model

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "BF16"):
            loss: Tensor = run(tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if precision != "BF16":
            noise.add_(1)
        return loss

    return step, model


def _graph_s(step: Callable[[], Any]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return median_s(step, calls=1)


def _measured(name: str, sizes: Sizes, how: str) -> list[dict[str, Any]]:
    found = []
    half = None
    for precision in ("BF16", "INT8", "FP8"):
        torch.compiler.reset()
        step, _ = training_step(sizes, precision, compiled=how == "compiled")
        seconds = _graph_s(step) if how == "graph" else _wall_s(step)
        record: dict[str, Any] = {"model": name, "how": how, "precision": precision, "seconds": seconds}
        if precision == "BF16":
            half = seconds
            record["precision"] = "BF16 autocast"
        else:
            assert half is not None
            record["speed_up"] = half / seconds
        found.append(record)
        del step
        torch.cuda.empty_cache()
    return found


def records(quick: bool) -> list[dict[str, Any]]:
    """One record per model, way to launch, and precision."""
    return [
        record
        for name, sizes in list(MODELS.items())[: 1 if quick else None]
        for how in ("eager", "graph", "compiled")
        for record in _measured(name, sizes, how)
    ]
