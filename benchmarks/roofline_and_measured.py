"""Estimates from a data sheet beside what was measured on the device: how far can a plan without a profile be trusted?

Takes the measured iterations of ``results/predicted-cuda.json`` (run ``predicted_and_measured.py`` on a GPU first),
captures the same model here, and estimates the same uniform plans by the roofline; no GPU is used.
Writes ``benchmarks/results/roofline.json``.

    python benchmarks/roofline_and_measured.py [--output PATH]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import Assumptions
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig

RESULTS = Path(__file__).parent / "results"
MEASURED = RESULTS / "predicted-cuda.json"
UNIFORM = "uniform "


def estimate(measured: dict[str, Any], assumptions: Assumptions) -> list[dict[str, Any]]:
    """One row for each uniform plan that was measured."""
    sheet = qsync_opt.data_sheet(measured["hardware"].split()[-1])
    config = GptConfig(**measured["model"])
    tokens = torch.randint(0, config.vocabulary, (measured["batch"], config.context))
    graph = qsync_opt.capture(Gpt(config), (tokens, tokens), name="gpt")
    profile = qsync_opt.roofline_profile(graph, sheet, assumptions=assumptions)
    worker = DeviceType(name="worker", count=1, memory_limit_bytes=1 << 40, precisions=tuple(sheet.peak_flops))
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="a single worker sends nothing")
    cluster = Cluster(name="one", devices=(worker,), network=network)
    table = qsync_opt.weight_sensitivities(graph, profile.formats)
    problem = qsync_opt.build_problem(graph, {"worker": profile}, table, cluster, latency_limit_ns=2**60)
    rows = []
    for row in measured["rows"]:
        if not row["plan"].startswith(UNIFORM):
            continue
        plan = qsync_opt.uniform_plan(problem, row["plan"].removeprefix(UNIFORM))
        found = qsync_opt.evaluate(problem, plan)
        milliseconds, mebibytes = found.iteration_ns / 1e6, found.memory_kib["worker"] / 1024
        rows.append(
            {
                "plan": row["plan"],
                "estimated_ms": milliseconds,
                "measured_ms": row["measured_ms"],
                "time_error": milliseconds / row["measured_ms"] - 1,
                "estimated_mib": mebibytes,
                "measured_mib": row["measured_mib"],
                "memory_error": mebibytes / row["measured_mib"] - 1,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "roofline.json")
    arguments = parser.parse_args()
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = estimate(measured, Assumptions())
    write_json(
        arguments.output,
        {
            "format": "qsync-bench-roofline/1",
            "date": datetime.date.today().isoformat(),
            "command": "python benchmarks/roofline_and_measured.py",
            "hardware": f"{measured['hardware']} (measured on {measured['date']}; estimated without a GPU)",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "model": measured["model"],
            "batch": measured["batch"],
            "rows": rows,
        },
    )
    for row in rows:
        print(
            f"{row['plan']:<14} {row['estimated_ms']:6.1f} ms estimated, {row['measured_ms']:6.1f} measured "
            f"({100 * row['time_error']:+.0f} %); {row['estimated_mib']:6.0f} MiB, {row['measured_mib']:6.0f} "
            f"({100 * row['memory_error']:+.0f} %)"
        )


if __name__ == "__main__":
    main()
