"""Step time and peak memory of plans that nobody has run, predicted in a committed file before they are measured.

    python benchmarks/predictor_unseen.py --predict      writes benchmarks/predictions/steps-cpu.json: commit it
    python benchmarks/predictor_unseen.py --measure      writes benchmarks/results/predictor-unseen-cpu.json

For one thread of a processor. It computes at once what its program asks for: host and device are one, so that the two
limits of a card, its own and its host's, cannot be told apart here. Models are such that the predictor was never tried
on. ``--predict`` records steps under uniform plans and a few mixed ones (`profile_steps`) and predicts others from
them; ``--measure`` refuses predictions that are not committed as they are.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "quality_bench"))

import digits
from predictor import errors
from rank_correlation import spearman
from results_head import results_head

import qsync_opt
from qsync_opt.io import read_json, write_json
from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.steps import RecordingOptions

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions" / "steps-cpu.json"
RESULTS = HERE / "results" / "predictor-unseen-cpu.json"
FORMAT = "qsync-results/1"
PRECISIONS = ("INT8", "BF16", "FP32")
PLANS = 14
"""Of each model."""
CASES = 40
"""Asked for, of all models together."""
REPEATS = 9


class Mixer(nn.Module):
    """Products over patches and over channels in turn, without attention or convolution."""

    def __init__(self, width: int = 96, tokens: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.over_tokens = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, digits.CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss over images (B, 1, 8, 8)."""
        x = self.patches(F.unfold(x, 2, stride=2).transpose(1, 2))
        for i, (tokens, up, down) in enumerate(zip(self.over_tokens, self.up, self.down, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + down(torch.tanh(up(self.norms[2 * i + 1](x))))
        return F.cross_entropy(self.head(x.mean(1)), y)


MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    "mixer": (Mixer, 192),
    "digits-cnn": (lambda: digits.Cnn(32), 96),
    "digits-vit": (lambda: digits.Vit(64, 2), 64),
}
"""Model and its batch."""


def subject(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with fixed weights, and its batch."""
    make, rows = MODELS[name]
    torch.manual_seed(0)
    return make().train(), digits.batch(0, rows)


def unseen(name: str, graph: OpGraph) -> dict[str, dict[str, str]]:
    """Plans that mix precisions: drawn at random, and one precision per part of the model."""
    source = random.Random(f"{name} unseen")
    menu = {
        o.name: [p for p in PRECISIONS if ops.supports(o.op_type, p, "cpu")] for o in graph.by_role(Role.ADJUSTABLE)
    }
    names, found = list(menu), {}
    for k in range(PLANS):
        if k % 2 == 0:
            found[f"random {k}"] = {n: source.choice(menu[n]) for n in names}
            continue
        cut = source.randrange(1, len(names))
        low, high = source.sample(PRECISIONS, 2)
        wanted = {n: low if i < cut else high for i, n in enumerate(names)}
        found[f"cut {k}"] = {n: p if p in menu[n] else "BF16" for n, p in wanted.items()}
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=True)


def processor() -> str:
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "unknown") + ", one thread"


def predict(path: Path) -> None:
    """Record steps of every model and predict its unseen plans."""
    cases: list[dict[str, Any]] = []
    recorded: list[dict[str, Any]] = []
    for name in MODELS:
        model, batch = subject(name)
        graph = qsync_opt.capture(model, batch)
        costs = qsync_opt.profile_steps(
            qsync_opt.TrainingExample(model=model, args=batch),
            graph,
            optimizer_of(model),
            precisions=["INT8", "BF16"],
            options=RecordingOptions(warm_up=2, repeats=7, traced=2),
        )
        recorded += [
            {"model": name, "plan": c.plan, "time_error": c.time_error, "memory_error": c.memory_error}
            for c in costs.checks
        ]
        predictor = qsync_opt.StepPredictor(graph, costs)
        for label, plan in unseen(name, graph).items():
            step = predictor.plan(plan)
            cases.append(
                {
                    "model": name,
                    "plan": label,
                    "precisions": plan,
                    "predicted_ms": predictor.steady_ns(step) / 1e6,
                    "predicted_peak_bytes": predictor.memory(step).peak_bytes,
                }
            )
        print(f"{name}: {len(cases)} predictions", flush=True)
    head = results_head(processor(), {"torch": torch.__version__})
    path.parent.mkdir(exist_ok=True)
    write_json(path, {**head, "asked": [], "records": cases, "recorded": recorded})


def committed(path: Path) -> str:
    """The commit that the predictions stand in.

    Raises:
        SystemExit: They are in none as they are.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()

    if git("status", "--porcelain", "--", str(path)):
        raise SystemExit(f"{path.name} is not committed as it is: predictions count if they stood in a commit before")
    return git("log", "-1", "--format=%h", "--", str(path))


def measure(path: Path, output: Path) -> None:
    """Run every predicted plan; a further round is added to those that the output has of the same predictions."""
    commit, predictions = committed(path), read_json(path, (FORMAT,))
    before = read_json(output, (FORMAT,)) if output.is_file() else {"predictions_commit": ""}
    known = before["records"] if before["predictions_commit"] == commit else []
    cases = []
    for number, case in enumerate(predictions["records"]):
        gc.collect()  # a model under a plan refers to itself
        model, batch = subject(case["model"])
        graph = qsync_opt.capture(model, batch)
        apply(model, case["precisions"], graph=graph)
        example = qsync_opt.TrainingExample(model=model, args=batch)
        found = qsync_opt.measure_iteration(example, optimizer_of(model), repeats=REPEATS, warm_up=2)
        rounds = [*(known[number]["rounds_ms"] if known else []), found.iteration_ns / 1e6]
        measured = statistics.fmean(rounds)
        case = {
            **case,
            "measured_ms": measured,
            "rounds_ms": rounds,
            "spread": (max(rounds) - min(rounds)) / measured,
            "measured_peak_bytes": found.peak_memory_bytes,
            "time_error": case["predicted_ms"] / measured - 1,
            "memory_error": case["predicted_peak_bytes"] / found.peak_memory_bytes - 1,
        }
        cases.append(case)
        print(
            f"{case['model']:11s} {case['plan']:10s} {case['predicted_ms']:7.2f} / {measured:7.2f} ms "
            f"{100 * case['time_error']:+5.1f} %, memory {100 * case['memory_error']:+5.1f} %",
            flush=True,
        )
    write_record(output, commit, cases)


def write_record(output: Path, commit: str, cases: list[dict[str, Any]]) -> None:
    """The cases with their errors, by model and all together."""
    models = list(dict.fromkeys(case["model"] for case in cases))
    groups = {"all": cases, **{m: [c for c in cases if c["model"] == m] for m in models}}
    head = results_head(processor(), {"torch": torch.__version__})
    distinct = len({(case["model"], *case["precisions"].items()) for case in cases})
    asked = {
        "what": "unseen plans, each counted once, predicted before they were measured",
        "asked": f">= {CASES}",
        "measured": distinct,
        "met": distinct >= CASES,
        "note": "on a processor, where host and device are one: host-bound and device-bound cannot be told apart",
    }
    summary = {
        name: {
            "time": errors(group, "predicted_ms", "measured_ms"),
            "memory": errors(group, "predicted_peak_bytes", "measured_peak_bytes"),
            "spearman": spearman([c["predicted_ms"] for c in group], [c["measured_ms"] for c in group]),
            "spread_of_rounds": statistics.fmean(c["spread"] for c in group),
            "worst_spread": max(c["spread"] for c in group),
            "median_time_error": statistics.median(c["time_error"] for c in group),
        }
        for name, group in groups.items()
    }
    write_json(
        output,
        {**head, "asked": [asked], "predictions_commit": commit, "summary": summary, "records": cases},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.predict == arguments.measure:
        parser.error("give --predict or --measure")
    torch.set_num_threads(1)
    if arguments.predict:
        predict(arguments.predictions)
    else:
        measure(arguments.predictions, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
