"""Predicted beside measured iteration time and peak memory of one worker, for uniform and solved plans.

A GPT is captured, profiled and solved on this device, then trained for some iterations, plain and under each plan.
On a GPU, what was allocated before a run began is not counted as its memory.
Writes ``benchmarks/results/predicted-DEVICE.json``.

    python benchmarks/predicted_and_measured.py [--device cpu|cuda] [--threads 1] [--output PATH]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

RESULTS = Path(__file__).parent / "results"
SIZES = {
    "cpu": (GptConfig(), 8),
    "cuda": (GptConfig(width=768, heads=12, layers=12, context=512), 8),
}
DEVICE_TYPE = "worker"
ROOMY_BYTES = 1 << 40
MEMORY_SHARE = 0.3
"""Where the second solved plan's memory budget lies between the most frugal uniform plan (0) and FP32 (1)."""


class Subject:
    """The model on a device, with everything that predicting needs."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.config, batch = SIZES[device]
        tokens = torch.randint(0, self.config.vocabulary, (batch, self.config.context), device=device)
        self.batch = (tokens, tokens)
        model = self.model()
        self.captured = qsync_opt.capture_model(model, self.batch, name="gpt")
        graph = self.captured.graph
        statistics = qsync_opt.collect_statistics(model, [self.batch], graph=graph, probes=1)
        example = qsync_opt.TrainingExample(model=model, args=self.batch)
        optimizer = torch.optim.AdamW(model.parameters())
        self.profile = qsync_opt.profile(self.captured, device, optimizer=optimizer, example=example)
        self.sensitivities = qsync_opt.sensitivities(graph, statistics, self.profile.formats)

    def model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(self.config).to(self.device)

    def problem(self, memory_bytes: int) -> qsync_opt.Problem:
        worker = DeviceType(
            name=DEVICE_TYPE, count=1, memory_limit_bytes=memory_bytes, precisions=tuple(self.profile.formats)
        )
        network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="a single worker sends nothing")
        cluster = Cluster(name="one", devices=(worker,), network=network)
        return qsync_opt.build_problem(
            self.captured.graph, {DEVICE_TYPE: self.profile}, self.sensitivities, cluster, slack=0.0
        )

    def measure(self, plan: qsync_opt.Plan | None, repeats: int) -> Any:
        gc.collect()  # a model under a plan refers to itself
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        model = self.model()
        if plan is not None:
            qsync_opt.apply(model, plan, DEVICE_TYPE, graph=self.captured.graph)
        example = qsync_opt.TrainingExample(model=model, args=self.batch)
        found = qsync_opt.measure_iteration(example, torch.optim.AdamW(model.parameters()), repeats=repeats)
        return replace(found, peak_memory_bytes=found.peak_memory_bytes - before)


def _row(label: str, evaluation: qsync_opt.Evaluation, measured: Any) -> dict[str, Any]:
    predicted_bytes = evaluation.memory_bytes[DEVICE_TYPE]
    row = {
        "plan": label,
        "sensitivity": evaluation.objective,
        "predicted_ms": evaluation.iteration_ns / 1e6,
        "measured_ms": measured.iteration_ns / 1e6,
        "time_error": evaluation.iteration_ns / measured.iteration_ns - 1,
        "predicted_mib": predicted_bytes / 2**20,
        "measured_mib": measured.peak_memory_bytes / 2**20,
        "memory_error": predicted_bytes / measured.peak_memory_bytes - 1,
    }
    print(
        f"{label:22s} {row['predicted_ms']:9.2f} / {row['measured_ms']:9.2f} ms ({100 * row['time_error']:+6.1f} %)  "
        f"{row['predicted_mib']:8.0f} / {row['measured_mib']:8.0f} MiB ({100 * row['memory_error']:+6.1f} %)",
        flush=True,
    )
    return row


def run(device: str, repeats: int) -> list[dict[str, Any]]:
    subject = Subject(device)
    roomy = subject.problem(ROOMY_BYTES)
    fp32 = qsync_opt.evaluate(roomy, qsync_opt.uniform_plan(roomy, "FP32"))
    rows = [_row("plain", fp32, subject.measure(None, repeats))]
    uniform = {name: qsync_opt.uniform_plan(roomy, name) for name in subject.profile.formats}
    evaluated = {name: qsync_opt.evaluate(roomy, plan) for name, plan in uniform.items()}
    for name, plan in uniform.items():
        rows.append(_row(f"uniform {name}", evaluated[name], subject.measure(plan, repeats)))
    lowest = min(evaluation.memory_bytes[DEVICE_TYPE] for evaluation in evaluated.values())
    share = round(lowest + MEMORY_SHARE * (fp32.memory_bytes[DEVICE_TYPE] - lowest))
    for label, problem in (("solved, fastest", roomy), ("solved, little memory", subject.problem(share))):
        solution = qsync_opt.solve(problem)
        if solution.plan is None:
            print(f"{label}: {solution.reason}")
            continue
        evaluation = qsync_opt.evaluate(problem, solution.plan)
        rows.append(_row(label, evaluation, subject.measure(solution.plan, repeats)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    hardware = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    rows = run(arguments.device, arguments.repeats)
    output = arguments.output or RESULTS / f"predicted-{arguments.device}.json"
    write_json(
        output,
        {
            "format": "qsync-bench-predicted/1",
            "date": datetime.date.today().isoformat(),
            "command": f"python benchmarks/predicted_and_measured.py --device {arguments.device} "
            f"--threads {arguments.threads} --repeats {arguments.repeats}",
            "hardware": hardware,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "model": asdict(SIZES[arguments.device][0]),
            "batch": SIZES[arguments.device][1],
            "rows": rows,
        },
    )
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
