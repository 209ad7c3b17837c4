"""Recorded plans predicted from the other plans of the same recording: no GPU is needed to do it again.

Each recorded plan is left out in turn, costs are fitted to the others, and its step time and peak are predicted. What
only the plan left out had is scaled, as for a plan that did not fit into memory. Writes
``benchmarks/results/predictor-held-out.json``.

    python benchmarks/predictor_held_out.py [--compiled] [--graphs DIR] [--output PATH]

With ``--compiled`` for the recordings of compiled steps: ``predictor-held-out-compiled.json``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from predictor import errors
from predictor_models import BATCHES, Subject
from predictor_records import records_from_json
from rank_correlation import spearman

from qsync_opt.errors import ProblemError
from qsync_opt.io import write_json
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.steps import StepRecords
from qsync_opt.steps import StepPredictor

HERE = Path(__file__).parent
PHASES = ("backward|end", "optimizer", "zero_grad")


def held_out(records: StepRecords, graph: OpGraph) -> list[dict[str, Any]]:
    """One case per recorded plan; the host's time beside its own measurement too."""
    cases = []
    for left_out in records.samples:
        others = tuple(sample for sample in records.samples if sample is not left_out)
        costs = replace(records, samples=others).fit(graph)
        predictor = StepPredictor(graph, costs)
        try:
            step = predictor.plan(left_out.precisions)
        except ProblemError as error:  # what only this plan had, and nothing that it could be scaled from
            print(f"{graph.name} {left_out.name}: {error}")
            continue
        predicted, peak = predictor.steady_ns(step), predictor.memory(step).peak_bytes
        cases.append(
            {
                "model": graph.name,
                "device": records.device.name,
                "plan": left_out.name,
                "predicted_ms": predicted / 1e6,
                "measured_ms": left_out.iteration_ns / 1e6,
                "time_error": predicted / left_out.iteration_ns - 1,
                "spread": (max(left_out.latencies_ns) - min(left_out.latencies_ns)) / left_out.iteration_ns,
                "predicted_host_ms": (step.host_ns + sum(costs.phases[label].host for label in PHASES)) / 1e6,
                "measured_host_ms": sum(left_out.host_ns.values()) / 1e6,
                "naive_ms": sum(cost.kernel_ns for cost in step.costs) / 1e6,
                "predicted_peak_bytes": peak,
                "measured_peak_bytes": left_out.peak_bytes,
                "memory_error": peak / left_out.peak_bytes - 1,
                "scaled_costs": sum(bool(cost.scaled_from) for cost in step.costs),
            }
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, help="folder of captured graphs; what is missing is captured")
    parser.add_argument("--compiled", action="store_true", help="recordings of compiled steps")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    suffix = "-compiled" * arguments.compiled
    output = arguments.output or HERE / "results" / f"predictor-held-out{suffix}.json"
    folder = HERE / "records" / ("compiled" if arguments.compiled else "")
    cases: list[dict[str, Any]] = []
    hardware: set[str] = set()
    dates: set[str] = set()
    versions: dict[str, str] = {}
    for path in sorted(folder.glob("*.json.gz")):
        stored = json.loads(gzip.decompress(path.read_bytes()))
        subject = next(
            Subject(model=model, size=size)
            for model, sizes in BATCHES.items()
            for size in sizes
            if Subject(model=model, size=size).name == stored["subject"]
        )
        records = records_from_json(stored)
        hardware.add(records.device.name)
        dates.add(stored["date"])
        versions |= {name: records.device.versions[name] for name in ("python", "torch")}
        cases += held_out(records, subject.graph(arguments.graphs))
    measured = [case for case in cases if not case["scaled_costs"]]
    scaled = [case for case in cases if case["scaled_costs"]]
    write_json(
        output,
        {
            "format": "qsync-bench-predictor-held-out/1",
            "date": ", ".join(sorted(dates)),
            "command": f"python benchmarks/predictor_held_out.py{' --compiled' * arguments.compiled}",
            "hardware": ", ".join(sorted(hardware)),
            "versions": versions,
            "summary": {
                "time": errors(cases, "predicted_ms", "measured_ms"),
                "time_of_measured_costs": errors(measured, "predicted_ms", "measured_ms"),
                "time_of_scaled_costs": errors(scaled, "predicted_ms", "measured_ms"),
                "time_naive": errors(cases, "naive_ms", "measured_ms"),
                "host": errors(cases, "predicted_host_ms", "measured_host_ms"),
                "memory_of_measured_costs": errors(measured, "predicted_peak_bytes", "measured_peak_bytes"),
                "memory_of_scaled_costs": errors(scaled, "predicted_peak_bytes", "measured_peak_bytes"),
                "spearman": spearman([c["predicted_ms"] for c in cases], [c["measured_ms"] for c in cases]),
                "repeatability": statistics.fmean(case["spread"] for case in cases),
            },
            "cases": cases,
        },
    )
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
