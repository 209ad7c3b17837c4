"""Predicted beside measured step time and peak memory of hybrid clusters, for plans that nobody has run before.

A cluster is two GPUs of one host: rank 0 is a whole one of fixed precision, rank 1 a partition (a green context) under
a plan, or whole too. The threads of a worker that launch work have a core of their own each, and no garbage is
collected while steps are recorded or timed. Each worker records its own steps by itself; then both train together with
DistributedDataParallel over NCCL, case by case. Writes ``benchmarks/results/predictor.json``. With ``--workers 1`` the
worker under the plan trains by itself, without DistributedDataParallel, and torch's own estimators are asked too
(``predictor-alone.json``). Every case is measured twice, minutes apart: their distance is what the machine's own speed
changes by, which no prediction can know.

    python benchmarks/predictor.py [--device cuda|cpu] [--graphs DIR] [--deadline-s 600] [--output PATH]
    python benchmarks/predictor.py --merge PART [--merge PART ...]

Every case is written to ``OUTPUT.part.json`` as soon as it is measured; ``--merge`` makes one record of several such
parts, complete or not, or of finished records.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))

from predictor_cases import COMBINATIONS, Combination
from predictor_models import LARGE, MEDIUM, SMALL
from predictor_worker import run_worker
from rank_correlation import spearman

from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.ddp import free_port

RESULTS = Path(__file__).parent / "results"
FAR = 1.25
"""A step's device time this many times above its host time cannot be upset by the host's noise."""


def errors(cases: list[dict[str, Any]], predicted: str, measured: str) -> dict[str, Any]:
    """Mean, worst and signed extremes of relative errors over the cases that have both."""
    found = [case[predicted] / case[measured] - 1 for case in cases if case.get(predicted) and case.get(measured)]
    if not found:
        return {"cases": 0}
    return {
        "cases": len(found),
        "mean_absolute": statistics.fmean(map(abs, found)),
        "worst": max(map(abs, found)),
        "lowest": min(found),
        "highest": max(found),
        "within_2_percent": sum(abs(e) <= 0.02 for e in found),
        "within_5_percent": sum(abs(e) <= 0.05 for e in found),
    }


def alone(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """Residuals of the recorded plans, each worker by itself, and how long recording took."""
    plans = [plan for profile in profiles for plan in profile["plans"]]
    rows = [{"one": 1.0, "time": 1 + plan["time_error"], "memory": 1 + plan["memory_error"]} for plan in plans]
    return {
        "profile_seconds_most": max((profile["seconds"] for profile in profiles), default=None),
        "time_of_recorded_plans_alone": errors(rows, "time", "one"),
        "memory_of_recorded_plans_alone": errors(rows, "memory", "one"),
    }


def grouped(cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Cases by model and cluster."""
    found: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        found.setdefault(f"{case['model']} {case['cluster']}", []).append(case)
    return found


def summarize(cases: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the benchmark is for; all are of eager steps but those named after another way."""
    everything = [case for case in cases if case["predicted_ms"] is not None]
    captured = [case for case in everything if case.get("way") == "captured"]
    compiled = [case for case in everything if case.get("way") == "compiled"]
    predicted = [case for case in everything if case.get("way", "eager") == "eager"]
    new = [case for case in predicted if not case["plan_recorded_alone"]]
    device_bound = [case for case in predicted if case["bound_by"] == "device"]
    far = [case for case in predicted if case["device_ms"] >= FAR * case["host_ms"]]
    by_cluster = grouped(predicted)
    correlations = {
        name: spearman([c["predicted_ms"] for c in group], [c["measured_ms"] for c in group])
        for name, group in by_cluster.items()
    }
    memory = [worker for case in predicted for worker in case["workers"]]
    return {
        "time": errors(predicted, "predicted_ms", "measured_ms"),
        "time_by_cluster": {name: errors(group, "predicted_ms", "measured_ms") for name, group in by_cluster.items()},
        "time_captured": errors(captured, "predicted_ms", "measured_ms"),
        "time_compiled": errors(compiled, "predicted_ms", "measured_ms"),
        "time_compiled_by_cluster": {
            name: errors(group, "predicted_ms", "measured_ms") for name, group in grouped(compiled).items()
        },
        "time_compiled_plans_never_run": errors(
            [c for c in compiled if not c["plan_recorded_alone"]], "predicted_ms", "measured_ms"
        ),
        "time_compiled_device_far_above_host": errors(
            [c for c in compiled if c["device_ms"] >= FAR * c["host_ms"]], "predicted_ms", "measured_ms"
        ),
        "spearman_compiled": spearman([c["predicted_ms"] for c in compiled], [c["measured_ms"] for c in compiled]),
        "memory_compiled": errors(
            [worker for c in compiled for worker in c["workers"]], "predicted_peak_bytes", "measured_peak_bytes"
        ),
        "memory_compiled_by_code": errors(
            [worker for c in compiled for worker in c["workers"]], "code_peak_bytes", "measured_peak_bytes"
        ),
        "time_plans_never_run": errors(new, "predicted_ms", "measured_ms"),
        "time_bound_by_device": errors(device_bound, "predicted_ms", "measured_ms"),
        "time_device_far_above_host": errors(far, "predicted_ms", "measured_ms"),
        "time_bound_by_host": errors([c for c in predicted if c not in device_bound], "predicted_ms", "measured_ms"),
        "time_naive": errors(predicted, "naive_ms", "measured_ms"),
        "time_problem_rows": errors(predicted, "problem_ms", "measured_ms"),
        "time_torch_operators_benchmarked": errors(predicted, "torch_benchmark_ms", "measured_ms"),
        "time_torch_roofline": errors(predicted, "torch_roofline_ms", "measured_ms"),
        "memory_torch_tracker": errors(predicted, "torch_peak_bytes", "measured_peak_bytes"),
        "memory": errors(memory, "predicted_peak_bytes", "measured_peak_bytes"),
        "memory_workers": len({(c["model"], c["cluster"], i) for c in predicted for i in range(len(c["workers"]))}),
        "repeatability": statistics.fmean(case["spread"] for case in predicted) if predicted else None,
        "repeatability_worst": max((case["spread"] for case in predicted), default=None),
        "cases_within_their_spread": sum(abs(case["time_error"]) <= case["spread"] for case in predicted),
        "spearman": spearman([c["predicted_ms"] for c in predicted], [c["measured_ms"] for c in predicted]),
        "spearman_by_cluster": correlations,
        **alone([profile for profile in profiles if not profile.get("compiled")]),
        "compiled": alone([profile for profile in profiles if profile.get("compiled")]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2, help="1: the planned worker by itself")
    parser.add_argument("--graphs", type=Path, help="folder of captured graphs; what is missing is captured")
    parser.add_argument("--only", action="append", help="names of combinations, as cluster:model")
    parser.add_argument("--size", choices=(SMALL, MEDIUM, LARGE), help="another batch than the combination's own")
    parser.add_argument(
        "--precisions", nargs="+", help="that plans may use beside FP32; the fewer, the sooner recorded"
    )
    parser.add_argument("--deadline-s", type=float, default=900.0)
    parser.add_argument(
        "--peers-s", type=float, default=25.0, help="how long torch's estimators may go on after the deadline"
    )
    parser.add_argument("--keep", type=Path, help="folder for the recorded step costs")
    parser.add_argument("--output", type=Path, default=RESULTS / "predictor.json")
    parser.add_argument("--merge", type=Path, action="append", help="parts of earlier runs, instead of running")
    arguments = parser.parse_args()
    if arguments.merge:
        write_record(merged([json.loads(path.read_text()) for path in arguments.merge]), arguments)
        return
    chosen: list[Combination] = [
        c
        for c in COMBINATIONS
        if (c.subject.model == "gpt-tiny") == (arguments.device == "cpu")
        and (not arguments.only or c.name in arguments.only)
    ]
    if arguments.size is not None:
        chosen = [replace(c, subject=replace(c.subject, size=arguments.size)) for c in chosen]
    if arguments.precisions:
        chosen = [replace(c, precisions=tuple(arguments.precisions)) for c in chosen]
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    mp.spawn(
        run_worker,
        args=(
            free_port(),
            arguments.device,
            chosen,
            arguments.graphs,
            arguments.deadline_s,
            arguments.output.with_suffix(".part.json"),
            arguments.keep,
            arguments.workers,
            arguments.peers_s,
        ),
        nprocs=arguments.workers,
    )
    path = arguments.output.with_suffix(".part.json")
    write_record(json.loads(path.read_text()), arguments)
    path.unlink()


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One part of several: lists behind one another, hardware and collectives of the first with the most workers.

    Profiles keep how many workers their run had. Slowdowns measured again on the same cluster are numbered.
    """
    counts = {len(case["workers"]) for part in parts for case in part["cases"]}
    first = max(parts, key=lambda part: max((len(case["workers"]) for case in part["cases"]), default=0))
    told: dict[str, Any] = {"workers": " and ".join(map(str, sorted(counts))), "device": first.get("device", "cuda")}
    if any("again" in part or "fitted again" in part.get("command", "") for part in parts):
        told["again"] = True
    told["date"] = max(part["date"] for part in parts)
    lists = ("profiles", "baselines", "cases", "skipped")
    slowdowns: dict[str, Any] = {}
    for part in parts:
        for name, shares in part.get("slowdowns", {}).items():
            times = sum(known.partition(", run ")[0] == name for known in slowdowns)
            slowdowns[f"{name}, run {times + 1}" if times else name] = shares
        own = {len(case["workers"]) for case in part["cases"]}
        if len(own) == 1:
            part["profiles"] = [{"workers": min(own)} | profile for profile in part["profiles"]]
    found = {name: [entry for part in parts for entry in part[name]] for name in lists}
    return first | found | {"slowdowns": slowdowns} | told


def write_record(part: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Summarize and write."""
    write_json(
        arguments.output,
        {
            "format": "qsync-bench-predictor/1",
            "date": part["date"],
            "command": f"python benchmarks/predictor.py --device {part['device']} --workers {part['workers']}"
            + ("; costs fitted again by python benchmarks/predictor_again.py" if "again" in part else ""),
            "hardware": part["hardware"],
            "versions": part["versions"],
            "summary": summarize(part["cases"], part["profiles"]),
            **{key: part[key] for key in ("collectives", "slowdowns", "profiles", "baselines", "cases", "skipped")},
        },
    )
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
