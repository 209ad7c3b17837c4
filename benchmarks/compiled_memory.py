"""Memory of compiled training steps: what the compiler's code says that they need, beside what they then took.

Plans are drawn at random, operator by operator; nothing is recorded before. For each, the model is compiled as
far as the code (`qsync_opt.runtimes.torch.steps.compiled.peak`), then compiled in earnest and stepped, and the
allocator asked.

    python benchmarks/compiled_memory.py [--only vit-short] [--plans 6] [--part 0/2] [--device cuda|cpu] [--output PATH]
    python benchmarks/compiled_memory.py --merge PART [--merge PART ...] [--output PATH] [--onto RECORD]

Every case is written as soon as it is measured. With ``--cases`` plans come from a record of the predictor's benchmark;
with ``--onto`` peaks are noted there as ``code_peak_bytes``, beside what was measured of the same plan in that run.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import gzip
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from predictor import RESULTS, errors, summarize
from predictor_models import BATCHES, MEDIUM, SMALL, Subject
from predictor_partition import partition

from qsync_opt.errors import QSyncError
from qsync_opt.io import write_json
from qsync_opt.kernels import ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, device_formats, undo
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.steps.compiled import peak as compiled_peak
from qsync_opt.runtimes.torch.support import TrainingExample

MODELS = ("vit-short", "bert-short", "gpt-short", "gpt-tiny")
STARTED = time.perf_counter()


def say(*words: object) -> None:
    """Print with the time since the start."""
    print(f"[{time.perf_counter() - STARTED:6.1f}]", *words, flush=True)


def drawn(subject: Subject, graph: OpGraph, arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Plans by label: each operator's precision by itself."""
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    if arguments.cases is not None:
        found = {}
        for case in json.loads(arguments.cases.read_text())["cases"]:
            if case["model"] == subject.name:
                plan = dict(zip(names, case["precisions"].split(), strict=True))
                if plan not in found.values():
                    found[case["plan"]] = plan
        return found
    device = torch.device(arguments.device)
    allowed = [p for p in device_formats(device) if p == "FP32" or p in arguments.precisions]
    available = {o.name: [p for p in allowed if ops.supports(o.op_type, p, device)] for o in graph if o.name in names}
    generator = random.Random(f"{subject.name} compiled memory")
    return {f"drawn {k}": {n: generator.choice(available[n]) for n in names} for k in range(arguments.plans)}


class Measured:
    """A model in training, and what its steps take."""

    def __init__(self, subject: Subject, graph: OpGraph, device: torch.device) -> None:
        model, kwargs = subject.build(device)
        self.graph, self.device = graph, device
        self.example = TrainingExample(model=model, kwargs=kwargs)
        self.optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(2):  # states of the optimizer and workspaces of libraries come into being
            _, self.optimizer_peak = self.step()
        self.resident = self.used()

    def used(self) -> int:
        """Bytes in use; 0 without a card."""
        gc.collect()
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def step(self) -> tuple[int, int]:
        """One step; most bytes in use in its passes, and in its optimizer."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.example.forward().backward()
        passes = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.optimizer.step()
        optimizer = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        self.optimizer.zero_grad()
        return passes, optimizer

    def case(self, label: str, plan: dict[str, str], subject: Subject, dump: Path) -> dict[str, Any]:
        """One record: what the code says, then what was measured."""
        begin = time.perf_counter()
        texts: dict[str, str] = {}
        peak = None
        try:
            peak = told(self.example, self.graph, plan, texts)
        except QSyncError as error:
            say(f"{subject.name} {label}: {error}")
        asked = time.perf_counter()
        for name, text in texts.items():
            (dump / f"{subject.name}-{label.replace(' ', '-')}-{name}.py.gz").write_bytes(gzip.compress(text.encode()))
        before = self.used()
        apply(self.example.model, plan, graph=self.graph, options=ApplyOptions())
        try:
            with compiled_inside(self.example.model):
                self.step()
                resident = self.used()
                passes, optimizer = self.step()
        finally:
            undo(self.example.model)
        predicted = None if peak is None else max(self.resident + peak.peak_bytes, self.optimizer_peak)
        return {
            "model": subject.name,
            "plan": label,
            "precisions": " ".join(plan.values()),
            "predicted_peak_bytes": predicted,
            "measured_peak_bytes": max(passes, optimizer),
            "predicted_passes_bytes": peak and peak.peak_bytes,
            "measured_passes_bytes": passes - resident,
            "predicted_resident_bytes": self.resident,
            "measured_resident_bytes": resident,
            "resident_before_bytes": before,
            "optimizer_bytes": self.optimizer_peak,
            "phase": peak and peak.phase,
            "asked_seconds": asked - begin,
            "compiled_seconds": time.perf_counter() - asked,
        }


def told(example: TrainingExample, graph: OpGraph, plan: dict[str, str], texts: dict[str, str]) -> Any:
    """What the compiler's code says; ``texts`` receives the code."""
    follow = compiled_peak.step_peak

    def noted(forward: Any, backward: Any, **options: Any) -> Any:
        texts.update(forward=forward.text, backward=backward.text, sizes=json.dumps([forward.sizes, backward.sizes]))
        return follow(forward, backward, **options)

    compiled_peak.step_peak = noted
    try:
        return compiled_peak.compiled_plan_peak(example, graph, plan)
    finally:
        compiled_peak.step_peak = follow


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of this process."""
    cuda = arguments.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cases": [],
        "skipped": [],
    }
    part, parts = map(int, arguments.part.split("/"))
    dump = arguments.dump or arguments.output.parent
    dump.mkdir(parents=True, exist_ok=True)
    for model in arguments.only:
        size = arguments.size or (SMALL if SMALL in BATCHES[model] else MEDIUM)
        subject = Subject(model=model, size=size)
        graph = subject.graph(arguments.graphs)
        plans = list(drawn(subject, graph, arguments).items())[part::parts]
        with partition(device, arguments.multiprocessors):
            run_plans(subject, graph, plans, device, dump, found, arguments)
    return found


def run_plans(
    subject: Subject,
    graph: OpGraph,
    plans: list[tuple[str, dict[str, str]]],
    device: torch.device,
    dump: Path,
    found: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    """Some plans of a model, as long as there is time."""
    measured = Measured(subject, graph, device)
    say(subject.name, len(plans), "plans; resident", measured.resident, "optimizer", measured.optimizer_peak)
    for label, plan in plans:
        if time.perf_counter() - STARTED > arguments.deadline_s:
            found["skipped"].append(f"{subject.name} {label}")
            continue
        try:
            case = measured.case(label, plan, subject, dump) | {"multiprocessors": arguments.multiprocessors}
        except (RuntimeError, QSyncError) as error:
            found["skipped"].append(f"{subject.name} {label}: {type(error).__name__}: {str(error)[:300]}")
            say(found["skipped"][-1])
            measured.optimizer.zero_grad()
            continue
        found["cases"].append(case)
        predicted = case["predicted_peak_bytes"] or 0
        error = predicted / case["measured_peak_bytes"] - 1 if device.type == "cuda" else 0.0
        say(
            f"{subject.name} {label}: {predicted / 1e6:.1f} / "
            f"{case['measured_peak_bytes'] / 1e6:.1f} MB ({100 * error:+.2f}%), asked in "
            f"{case['asked_seconds']:.1f} s, compiled in {case['compiled_seconds']:.1f} s"
        )
        write(found, arguments)


def write(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the record, with its summary."""
    cases = found["cases"]
    by_model = {model: [case for case in cases if case["model"] == model] for model in {c["model"]: 0 for c in cases}}
    passes = [
        {what: case[f"{what}_resident_bytes"] + case[f"{what}_passes_bytes"] for what in ("predicted", "measured")}
        for case in cases
        if case["predicted_passes_bytes"] is not None
    ]
    summary: dict[str, Any] = {
        "memory": errors(cases, "predicted_peak_bytes", "measured_peak_bytes"),
        "memory_of_passes": errors(passes, "predicted", "measured"),
        "memory_by_model": {
            model: errors(own, "predicted_peak_bytes", "measured_peak_bytes") for model, own in by_model.items()
        },
        "asked_seconds_most": max((case["asked_seconds"] for case in cases), default=None),
    }
    data = {"format": "qsync-bench-compiled-memory/1", "command": "python benchmarks/compiled_memory.py"}
    write_json(arguments.output, data | {"summary": summary} | found)


def note(cases: list[dict[str, Any]], path: Path) -> None:
    """Put what the code says into a record of the predictor's benchmark, where one worker ran the same plan alone."""
    record = json.loads(path.read_text())
    told = {
        (case["model"], case["multiprocessors"], case["precisions"]): case["predicted_peak_bytes"] for case in cases
    }
    for case in record["cases"]:
        part = case["cluster"].split()[0]
        key = (case["model"], None if part == "whole" else int(part), case["precisions"])
        if len(case["workers"]) == 1 and key in told:
            case["workers"][0]["code_peak_bytes"] = told[key]
    record["summary"] = summarize(record["cases"], record["profiles"])
    write_json(path, record)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS[:3]))
    parser.add_argument("--size", help="another batch than the smallest")
    parser.add_argument("--multiprocessors", type=int, help="of a part of the card; else all")
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the plans")
    parser.add_argument("--precisions", nargs="+", default=["INT8", "BF16"])
    parser.add_argument("--cases", type=Path, help="record of the predictor's benchmark whose plans are taken")
    parser.add_argument("--graphs", type=Path, help="folder of captured graphs; what is missing is captured")
    parser.add_argument("--dump", type=Path, help="folder for the code; beside the record")
    parser.add_argument("--deadline-s", type=float, default=600.0, help="after which no plan is begun")
    parser.add_argument("--output", type=Path, default=RESULTS / "compiled-memory.json")
    parser.add_argument("--merge", type=Path, action="append", help="records of earlier runs, instead of running")
    parser.add_argument("--onto", type=Path, help="record of the predictor's benchmark to note merged peaks in")
    arguments = parser.parse_args()
    if not arguments.merge:
        write(run(arguments), arguments)
        return
    parts = [json.loads(path.read_text()) for path in arguments.merge]
    first = {name: parts[0][name] for name in ("date", "hardware", "versions")}
    merged = {name: [entry for part in parts for entry in part[name]] for name in ("cases", "skipped")}
    for case in merged["cases"]:
        case.setdefault("multiprocessors", None)
    write(first | merged, arguments)
    if arguments.onto is not None:
        note(merged["cases"], arguments.onto)


if __name__ == "__main__":
    main()
