"""Section model: one training step of a whole model, BF16 autocast beside uniform INT8 and FP8 plans.

Forward and backward pass and a fused AdamW. ``eager``: launched by the host, as a training script does it, by the wall
clock. ``graph``: the same step captured and replayed, which leaves the device's time alone. ``compiled``: the model
under ``torch.compile``, launched by the host. ``times_fastest_bf16`` compares with the fastest of the three in BF16.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import median_s
from torch import Tensor, nn

import qsync_opt
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.execution import ApplyOptions, operator_kind
from qsync_opt.runtimes.torch.interception import intercept

WARM_UPS, STEPS = 4, 12
PRECISIONS = ("BF16", "INT8", "FP8")
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
    with torch.no_grad(), intercept(model, lambda call: (names.append(call.name), call.run())[1]):
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


def training_step(sizes: Sizes, precision: str) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Two functions that train one step in ``"BF16"`` autocast or under a uniform plan: eager, and compiled."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: nn.Module = Gpt(sizes)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    if precision != "BF16":
        kernels = KernelOptions(**EIGHT)  # type: ignore[arg-type]
        model = qsync_opt.apply(model, _plan(model, tokens, precision), options=ApplyOptions(kernels=kernels))

    def train(run: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "BF16"):
            loss: Tensor = run(tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return functools.partial(train, model), functools.partial(train, torch.compile(model, dynamic=False))


def _graph_s(step: Callable[[], Any]) -> float:
    return median_s(step, calls=1)


def _prepared(sizes: Sizes, precision: str) -> Callable[[], dict[str, float | str]]:
    """Compile and warm up; what is returned measures, and wants the card for itself."""
    # Not the default stream: what is captured later must not have been used there.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step, compiled = training_step(sizes, precision)
        error = ""
        try:
            for _ in range(2):
                compiled()
        except Exception as failure:  # the other ways to launch are measured all the same, and this one is named
            error = f"{type(failure).__name__}: {failure}"[:300]
    stream.synchronize()
    torch.cuda.empty_cache()

    def measure() -> dict[str, float | str]:
        with torch.cuda.stream(stream):
            return {"compiled": error or _wall_s(compiled), "eager": _wall_s(step), "graph": _graph_s(step)}

    return measure


def _worker(name: str, precision: str) -> None:
    """Say when everything is compiled, wait for a line, measure, print the seconds as one line of JSON."""
    measure = _prepared(MODELS[name], precision)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure()), flush=True)


def _started(name: str, precision: str) -> subprocess.Popen[str]:
    # What lies beside this file is found, whatever the interpreter puts on its path by itself.
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, __file__, name, precision],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": path},
    )


def _as_records(name: str, measured: dict[str, dict[str, float | str]]) -> list[dict[str, Any]]:
    found = []
    half = {how: seconds for how, seconds in measured["BF16"].items() if isinstance(seconds, float)}
    for how, precision in itertools.product(("eager", "graph", "compiled"), PRECISIONS):
        seconds = measured[precision][how]
        record: dict[str, Any] = {"model": name, "how": how, "precision": precision}
        if isinstance(seconds, str):
            found.append({**record, "error": seconds})
            continue
        record["seconds"] = seconds
        if precision == "BF16":
            record["precision"] = "BF16 autocast"
        else:
            record["speed_up"] = half[how] / seconds if how in half else None
            record["times_fastest_bf16"] = min(half.values()) / seconds
        found.append(record)
    return found


def _records_of(name: str) -> list[dict[str, Any]]:
    """Compilations run beside each other, measurements one after another."""
    workers = {precision: _started(name, precision) for precision in PRECISIONS}
    try:
        for precision, worker in workers.items():
            assert worker.stdout is not None
            if worker.stdout.readline().strip() != "ready":
                raise SystemExit(f"{name} in {precision} ended with {worker.wait()} before it was measured")
        lines = {precision: worker.communicate("go\n")[0] for precision, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.kill()
    return _as_records(name, {precision: json.loads(line) for precision, line in lines.items()})


def records(quick: bool, only: str = "") -> Iterator[dict[str, Any]]:
    """One record per model (with ``only`` in its name), way to launch, and precision, as they are measured."""
    for name in list(MODELS)[: 1 if quick else None]:
        if only in name:
            yield from _records_of(name)


if __name__ == "__main__":
    _worker(*sys.argv[1:])
