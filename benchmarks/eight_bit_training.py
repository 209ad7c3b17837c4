"""Whole training steps in 8 bits, compiled, beside compiled BF16 autocast and torchao's FP8 recipes.

python benchmarks/eight_bit_training.py [--only "GPT 2048"] [--rounds N] [--budget SECONDS] [--tiny]

Writes ``benchmarks/results/eight-bit-training.json``. A step is forward and backward pass and a fused AdamW; its model
is compiled as a whole. Each candidate runs in a process of its own: up to three compile side by side, then they are
timed in turn, one at a time. ``INT8`` and ``FP8`` are uniform plans with an 8-bit backward pass under the options that
plans have by default, the loss in chunks. ``--tiny`` runs small models, on any device, to check the benchmark itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from results_head import results_head
from torch import Tensor, nn

from qsync_opt.io import write_json
from qsync_opt.kernels import backend, layers, ops
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, operator_kind
from qsync_opt.runtimes.torch.interception import intercept

HERE = Path(__file__).resolve().parent
BY_HAND, PLANS, RECIPES = "BF16 autocast", ("INT8", "FP8"), ("tensorwise", "rowwise")
WAVES = ((BY_HAND, *PLANS), tuple(f"torchao {recipe}" for recipe in RECIPES))
"""Candidates whose processes run side by side; memory of a card suffices for three."""
WARM_UPS, STEPS = 3, 8
ASKED_SPEED, ASKED_MEMORY = {2048: 1.30, 4096: 1.5}, 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a decoder and its batch."""

    kind: str
    width: int
    layers: int
    batch: int
    length: int = 1024
    vocabulary: int = 32000
    head: int = 128


SUBJECTS = {
    "GPT 2048": Sizes(kind="GPT", width=2048, layers=6, batch=16),
    "Llama 2048": Sizes(kind="Llama", width=2048, layers=6, batch=16),
    "GPT 4096": Sizes(kind="GPT", width=4096, layers=3, batch=16),
    "Llama 4096": Sizes(kind="Llama", width=4096, layers=3, batch=16),
}
TINY = {
    f"{kind} tiny": Sizes(kind=kind, width=64, layers=1, batch=2, length=32, vocabulary=256, head=16)
    for kind in ("GPT", "Llama")
}


def _heads(x: Tensor, width: int) -> Tensor:
    """(batch, heads, length, width) of (batch, length, heads * width)."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)


class GptBlock(nn.Module):
    """Attention and MLP with GELU, each behind a layer normalization."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head = sizes.width, sizes.head
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, _: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, length, width) of the same."""
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (_heads(part, self.head) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class LlamaBlock(nn.Module):
    """Attention with rotary positions and half as many key heads, and a gated MLP, behind root-mean-square norms."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head = sizes.width, sizes.head
        hidden = -(-8 * width // 3 // 256) * 256
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, length, width) of the same."""
        y = self.before_attention(x)
        q, k, v = (_heads(part(y), self.head) for part in (self.q, self.k, self.v))
        q, k = (_rotated(part, rotation) for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Decoder(nn.Module):
    """Tokens to the mean cross-entropy of the next token; ``loss_layer``: last layer and loss are one module."""

    def __init__(self, sizes: Sizes, loss_layer: bool) -> None:
        super().__init__()
        is_gpt = sizes.kind == "GPT"
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width)) if is_gpt else None
        self.blocks = nn.ModuleList((GptBlock if is_gpt else LlamaBlock)(sizes) for _ in range(sizes.layers))
        self.norm = (nn.LayerNorm if is_gpt else nn.RMSNorm)(sizes.width)
        head = layers.LinearCrossEntropy if loss_layer else nn.Linear
        self.head = head(sizes.width, sizes.vocabulary, bias=False)
        half = sizes.head // 2
        angles = torch.outer(torch.arange(sizes.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of (batch, length) tokens."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x, (self.cosine, self.sine))
        x, targets = self.norm(x), tokens.roll(-1, 1)
        if isinstance(self.head, layers.LinearCrossEntropy):
            return self.head(x, targets)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def uniform_plan(model: nn.Module, tokens: Tensor, precision: str) -> dict[str, str]:
    """A precision for all operators that have it, BF16 for the others."""
    names: list[str] = []
    with torch.no_grad(), intercept(model, lambda call: (names.append(call.name), call.run())[1]):
        model(tokens[:1])
    kinds = {name: kind for name in names if (kind := operator_kind(name)) is not None}
    return {name: precision if ops.supports(kind, precision, tokens.device) else "BF16" for name, kind in kinds.items()}


def training_step(sizes: Sizes, candidate: str) -> Callable[[], None]:
    """One step of a candidate; the first call compiles."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model: nn.Module = Decoder(sizes, loss_layer=candidate in PLANS)
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length), device=device)
    autocast = candidate not in PLANS
    if candidate in PLANS:
        if candidate not in backend.device_precisions(device):
            raise SystemExit(f"{device} has no {candidate}")
        plan = uniform_plan(model, tokens, f"{candidate}-BWD8")
        model = apply(model, plan, options=ApplyOptions(compiled=True))
    elif candidate != BY_HAND:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = candidate.removeprefix("torchao ")
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if autocast:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        optimizer.step()

    return step


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _block() -> dict[str, Any]:
    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None}


def worker(subject: str, candidate: str) -> None:
    """Compile; then, for every line that is read, time some steps and print a line of JSON."""
    began = time.perf_counter()
    step = training_step({**SUBJECTS, **TINY}[subject], candidate)
    for _ in range(WARM_UPS):
        step()
    _synchronize()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    for _ in sys.stdin:
        step()
        _synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            _synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        print(json.dumps({"step_ms": statistics.median(times), **_block()}), flush=True)


class Process:
    """One candidate in a process of its own."""

    def __init__(self, subject: str, candidate: str) -> None:
        self.subject, self.candidate = subject, candidate
        command = [sys.executable, __file__, "--worker", subject, candidate]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.failure = ""

    def line(self) -> dict[str, Any]:
        """The next line of the process; empty, with ``failure`` set, if it has ended."""
        assert self._process.stdout is not None and self._process.stderr is not None
        text = self._process.stdout.readline()
        while text and not text.startswith("{"):
            text = self._process.stdout.readline()
        if text:
            result: dict[str, Any] = json.loads(text)
            return result
        errors = self._process.stderr.read().strip().splitlines() or ["no output"]
        self.failure = f"exit status {self._process.wait()}: {errors[-1]}"[:300]
        return {}

    def measured(self) -> dict[str, Any]:
        """Some more steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self.line()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def absent(candidate: str) -> str:
    """Why a candidate cannot run here, an empty text if it can."""
    if candidate.startswith("torchao") and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if candidate in PLANS and candidate not in backend.device_precisions(device):
        return f"{device} has no {candidate}"
    if candidate.startswith("torchao") and "FP8" not in backend.device_precisions(device):
        return f"{device} has no FP8"
    return ""


def wave(subject: str, candidates: tuple[str, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Compile candidates side by side, and time them in turn: one record per round and candidate."""
    for candidate in candidates:
        if reason := absent(candidate):
            yield {"subject": subject, "candidate": candidate, "failure": reason}
    processes = [Process(subject, candidate) for candidate in candidates if not absent(candidate)]
    try:
        ready = {process.candidate: process.line() for process in processes}
        for number in range(rounds):
            for process in processes:
                record = {"subject": subject, "candidate": process.candidate, "round": number}
                figures = {} if process.failure else process.measured()
                if process.failure and number:
                    continue
                yield record | ({"failure": process.failure} if process.failure else figures | ready[process.candidate])
    finally:
        for process in processes:
            process.end()


def medians(records: list[dict[str, Any]], subject: str, what: str) -> dict[str, float]:
    """Median over rounds of ``step_ms`` or ``peak_mib`` by candidate, of those that ran."""
    values: dict[str, list[float]] = {}
    for record in records:
        if record["subject"] == subject and record.get(what) is not None:
            values.setdefault(record["candidate"], []).append(record[what])
    return {candidate: statistics.median(own) for candidate, own in values.items()}


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three rows per subject: speed and memory beside BF16 autocast, and speed beside torchao."""
    rows = []
    for subject, sizes in SUBJECTS.items():
        times, peaks = (medians(records, subject, what) for what in ("step_ms", "peak_mib"))
        best = min((name for name in times if name in PLANS), key=lambda name: times[name], default="")
        recipe = min((name for name in times if name.startswith("torchao")), key=lambda name: times[name], default="")
        least, most = ASKED_SPEED[sizes.width], ASKED_MEMORY
        speed = _ratio(times, BY_HAND, best)
        against = _ratio(times, recipe, best)
        memory = _ratio(peaks, best, BY_HAND)
        for what, wanted, measured, met in (
            ("speed over BF16 autocast", f">= {least}", speed, speed is not None and speed >= least),
            ("speed over the faster recipe of torchao", "> 1", against, against is not None and against > 1),
            ("peak memory over BF16 autocast", f"<= {most}", memory, memory is not None and memory <= most),
        ):
            rows.append(
                {
                    "what": f"{subject}, compiled step: {what}",
                    "asked": wanted,
                    "measured": None if measured is None else round(measured, 3),
                    "met": met,
                    "note": f"of the plans the faster is {best}" if measured is not None else "not measured",
                }
            )
    return rows


def _ratio(values: dict[str, float], first: str, second: str) -> float | None:
    return values[first] / values[second] if first in values and second in values else None


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="subjects with this in their name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=180.0, help="seconds after which nothing further begins")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", nargs=2, metavar=("SUBJECT", "CANDIDATE"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "eight-bit-training.json")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    began = time.perf_counter()
    if torch.cuda.is_available():
        backend.explain("cuda")  # builds the kernels, once for all processes
    built_s, records = time.perf_counter() - began, []
    subjects = [name for name in (TINY if arguments.tiny else SUBJECTS) if arguments.only in name]
    for candidates in WAVES:
        for subject in subjects:
            if time.perf_counter() - began - built_s > arguments.budget:
                late = {"subject": subject, "failure": "not measured: the time was over"}
                records += [{**late, "candidate": candidate} for candidate in candidates]
                continue
            for record in wave(subject, candidates, arguments.rounds):
                records.append(record)
                print(json.dumps(record), flush=True)
    write_json(
        arguments.output,
        {
            **results_head(
                torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
                {"torch": torch.__version__},
            ),
            "asked": [] if arguments.tiny else asked(records),
            "records": records,
        },
    )
    print(f"{time.perf_counter() - began:.0f} s, of which {built_s:.0f} s for building kernels")


if __name__ == "__main__":
    main()
