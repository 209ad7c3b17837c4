"""Planning a job that was planned before: from its job file, and from kept measurements alone.

python benchmarks/planning_again.py [--models "decoder full,vit full"] [--output FILE]

Every start is a process of its own. The first one has nothing and writes a job file; the second one has that file, the
third one has measurements and compiled code alone. Records are those of `by_hand_worker.py`, among them seconds of
planning and of the first step, in which the model is compiled. Writes ``benchmarks/results/planning-again.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from by_hand_worker import PLANNED, run
from results_head import asked_row, processors, results_head

from qsync_opt.io import write_json

MODELS = ("decoder full", "encoder-decoder full", "vit full")
STARTS = ("nothing", "job file", "measurements")
"""What a start has."""
MOST_S = {"nothing": 90.0, "job file": 30.0}
"""Seconds of planning that were asked for, by start."""
LIMIT_S = 600.0
"""Seconds after which a start is given up."""


def start(model: str, folder: Path, how: str) -> dict[str, Any]:
    """Plan in this process and train some steps."""
    options = {} if how == "measurements" else {"job_file": folder / "job.json"}
    return run(model, PLANNED, cache_dir=folder / "measurements", **options)


def start_afresh(model: str, folder: Path, how: str) -> dict[str, Any]:
    """The record of a start in a new process."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in caches.items()}}
    command = [sys.executable, __file__, "--start", model, str(folder), how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    record = {"model": model, "start": how}
    if ended.returncode:
        return record | {"failure": ended.stderr.strip().splitlines()[-1][:300]}
    return record | json.loads(ended.stdout.strip().splitlines()[-1])


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked of planning, by model and start."""
    rows = []
    for record in records:
        if (most := MOST_S.get(record["start"])) is not None:
            seconds = record.get("planning_s")
            met = seconds is not None and seconds <= most
            what = f"{record['model']}, start with {record['start']}: seconds of planning"
            rows.append(asked_row(what, f"<= {most:.0f}", seconds, met))
    return rows


def main() -> None:
    """Start every model three times and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "planning-again.json")
    parser.add_argument("--start", nargs=3, metavar=("MODEL", "FOLDER", "HOW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        model, folder, how = arguments.start
        print(json.dumps(start(model, Path(folder), how)))
        return
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else processors()
    records: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for how in STARTS:
                records.append(start_afresh(model, Path(folder), how))
                print(json.dumps(records[-1]), flush=True)
                head = results_head(hardware, {"torch": torch.__version__})
                write_json(arguments.output, {**head, "asked": asked(records), "records": records})


if __name__ == "__main__":
    main()
