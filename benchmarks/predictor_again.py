"""Predict measured cases again: costs are fitted anew to the kept recordings, no GPU is needed.

A folder has what one run of ``predictor.py --keep`` left: its record, and the recorded steps of both workers. What was
measured stays as it is, and the plans are those that ran. Writes one record of all folders.

    python benchmarks/predictor_again.py FOLDER [FOLDER ...] --graphs DIR [--output PATH]
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from predictor import RESULTS, merged, write_record
from predictor_cases import COMBINATIONS, FIXED, Combination
from predictor_models import BATCHES, Subject
from predictor_prediction import MS, Predictor
from predictor_records import records_from_json

from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import formats_for
from qsync_opt.runtimes.torch.ddp import CollectiveCost
from qsync_opt.steps import StepCosts, nearest_available

MEASURED = ("torch_benchmark_ms", "torch_roofline_ms", "torch_peak_bytes", "torch_refuses")
PRECISIONS = ("INT8", "FP8", "FP16", "BF16", "TF32", "FP32")


def blocks_of(case: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What the workers measured, block by block, as the run had it."""
    return [
        [
            {
                "steps": [time * MS for time in worker["measured_steps_ms"][i]],
                "peak": worker["measured_peak_bytes"],
                "host": {name: time * MS for name, time in worker["measured_host_ms"][i].items()},
                "unit": worker["host_unit_us"][i] * 1e3,
                "stolen_s": worker["stolen_s"][i],
            }
            for worker in case["workers"]
        ]
        for i in range(len(case["rounds_ms"]))
    ]


def collective_of(data: dict[str, Any] | None) -> CollectiveCost | None:
    """The fit of the run."""
    return data and CollectiveCost(
        sizes_bytes=tuple(data["sizes_bytes"]),
        measured_ns=tuple(time * 1e3 for time in data["measured_us"]),
        latency_s=data["latency_us"] / 1e6,
        bandwidth_bytes_per_s=data["bandwidth_gb_per_s"] * 1e9,
        relative_residual=data["relative_residual"],
    )


def again(folder: Path, graphs: Path) -> dict[str, Any]:
    """The part of one run, predicted anew."""
    (path,) = [path for path in folder.glob("predictor*.json")]
    part: dict[str, Any] = json.loads(path.read_text())
    part.setdefault("device", "cuda")
    part.setdefault("workers", len(list(folder.glob("records-*.json.gz"))))
    first = part["cases"][0]
    combination = next(c for c in COMBINATIONS if first["key"].startswith(f"{c.name} "))
    combination = replace(combination, subject=subject_of(first["model"]))
    graph = combination.subject.graph(graphs)
    costs, available = fitted(folder, graph)
    refused = [
        p for p in PRECISIONS if combination.allowed([p]) and not any(p in there for there in available[-1].values())
    ]
    predictor = Predictor(
        graph,
        costs,
        collective_of(part["collectives"]),
        combination,
        formats_for(PRECISIONS, "BF16"),
        refused,
        part.get("slowdowns", {}).get(f"{combination.subject.name} {combination.cluster}", ()),
    )
    predictor.make_problem()
    fixed = {name: nearest_available(there, FIXED) for name, there in available[0].items()}
    names = [operator.name for operator in graph.by_role(Role.ADJUSTABLE)]
    part["cases"] = [one(predictor, combination, case, names, fixed) for case in part["cases"]]
    for profile, cost in zip(part["profiles"], costs, strict=True):
        profile["plans"] = [
            {
                "plan": c.plan,
                "time_error": c.time_error,
                "memory_error": c.memory_error,
                "measured_ms": c.measured_ns / MS,
            }
            for c in cost.checks
        ]
    return part


def subject_of(name: str) -> Subject:
    """Of its name, with the batch."""
    known = [Subject(model=model, size=size) for model, sizes in BATCHES.items() for size in sizes]
    return next(subject for subject in known if subject.name == name)


def fitted(folder: Path, graph: OpGraph) -> tuple[list[StepCosts], list[dict[str, Any]]]:
    """Costs of the workers, and which precisions their operators have there."""
    costs, available = [], []
    for path in sorted(folder.glob("records-*.json.gz"), key=lambda path: path.name.rpartition("-r")[2]):
        records = records_from_json(json.loads(gzip.decompress(path.read_bytes())))
        costs.append(records.fit(graph))
        available.append(dict(records.available))
    return costs, available


def one(
    predictor: Predictor, combination: Combination, case: dict[str, Any], names: list[str], fixed: dict[str, str]
) -> dict[str, Any]:
    """One case."""
    plan = dict(zip(names, case["precisions"].split(), strict=True))
    first = plan if combination.multiprocessors is None else fixed
    found = predictor.case(case["plan"], [first, plan][-len(case["workers"]) :], blocks_of(case))
    return found | {name: case[name] for name in MEASURED if name in case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--graphs", type=Path, required=True, help="folder of captured graphs")
    parser.add_argument("--output", type=Path, default=RESULTS / "predictor.json")
    arguments = parser.parse_args()
    parts = [again(folder, arguments.graphs) for folder in arguments.folders]
    write_record(merged(parts) | {"again": True}, arguments)


if __name__ == "__main__":
    main()
