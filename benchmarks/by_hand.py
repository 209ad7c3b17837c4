"""Plans beside what people run by hand: models of unlike kinds, each way of training in a process of its own, in turn.

python benchmarks/by_hand.py [--models "u-net full,decoder small"] [--ways "BF16 compiled,plan"] [--rounds N]
                             [--cards 2] [--seconds 3000] [--each 120] [--resume FILE] [--output FILE]

With several cards each has models of its own. What ``--seconds`` do not suffice for is left out and said so; a later
call with ``--resume`` keeps what the file has and measures what is missing, so that the whole can be measured in parts.
Writes ``benchmarks/results/by-hand.json``. By hand are FP32, TF32, BF16 and FP16 autocast, each eager, compiled,
captured, and compiled and captured; ``plan`` is `auto_plan` with default options, and ``BF16 compiled by blocks``
compiles repeated blocks once. A time is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from by_hand_worker import BY_BLOCKS, BY_HAND, PLANNED
from results_head import results_head
from unlike_models import KINDS, SIZES

from qsync_opt.io import write_json

HERE = Path(__file__).resolve().parent
MODELS = tuple(f"{kind} {size}" for kind in KINDS for size in SIZES)
ASKED = 1.02
"""Most that a planned step may take, in steps of the best way by hand."""


LEAST_S = 15.0
"""Nothing begins with less time left."""
LATE = ("not begun for lack of time", "not finished for lack of time")


def measure(model: str, way: str, card: int | None, left_s: float) -> dict[str, Any]:
    """The record of one model and way, from a fresh process that is given up after some seconds."""
    command = [sys.executable, "by_hand_worker.py", model, way]
    own = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
    if left_s < LEAST_S:
        return {"model": model, "way": way, "failure": LATE[0]}
    try:
        done = subprocess.run(
            command,
            cwd=HERE,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
            timeout=left_s if math.isfinite(left_s) else None,
        )
    except subprocess.TimeoutExpired:
        return {"model": model, "way": way, "failure": LATE[1]}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"model": model, "way": way, "failure": f"exit status {done.returncode}: {reason}"[:300]}
    record: dict[str, Any] = json.loads(lines[-1])
    return record


def medians(records: list[dict[str, Any]], model: str) -> dict[str, float]:
    """Milliseconds of a step by way, over the rounds, without ways that failed in some round."""
    times: dict[str, list[float]] = {}
    for record in records:
        if record["model"] == model:
            times.setdefault(record["way"], []).append(record.get("step_ms", math.nan))
    return {way: statistics.median(own) for way, own in times.items() if not any(map(math.isnan, own))}


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per model: the planned step beside the best by hand."""
    rows = []
    for model in dict.fromkeys(record["model"] for record in records):
        times = medians(records, model)
        ways = {way: time for way, time in times.items() if way in BY_HAND}
        ratio = times[PLANNED] / min(ways.values()) if PLANNED in times and ways else None
        best = min(ways, key=lambda way: ways[way]) if ways else "nothing"
        rows.append(
            {
                "what": f"{model}: step of the default plan over that of the best by hand",
                "asked": f"<= {ASKED}",
                "measured": None if ratio is None else round(ratio, 3),
                "met": ratio is not None and ratio <= ASKED,
                "note": f"best by hand: {best}" if ratio is not None else "not measured",
            }
        )
    return rows


def kept(path: Path, hardware: str, versions: dict[str, str]) -> list[dict[str, Any]]:
    """The records of an earlier file that a call on this hardware need not measure again."""
    earlier = json.loads(path.read_text())
    before = {"hardware": earlier["hardware"], "torch": earlier["versions"]["torch"]}
    if before != {"hardware": hardware, **versions}:
        raise SystemExit(f"{path} is of {before}, but this is {hardware} with {versions}: give another --resume")
    return [record for record in earlier["records"] if record.get("failure") not in LATE]


def _names(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        unknown = [name for name in names if name not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: allowed are {', '.join(allowed)}")
        return names

    return parse


def main() -> None:
    """Measure and write the file."""
    ways = (*BY_HAND, BY_BLOCKS, PLANNED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_names(MODELS), default=MODELS)
    parser.add_argument("--ways", type=_names(ways), default=ways)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cards", type=int, default=1, help="that are used at the same time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which what runs is given up")
    parser.add_argument("--each", type=float, default=math.inf, help="seconds after which one way is given up")
    parser.add_argument("--resume", type=Path, help="file of an earlier call on the same hardware")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "by-hand.json")
    arguments = parser.parse_args()
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"torch": torch.__version__}
    records = [] if arguments.resume is None else kept(arguments.resume, hardware, versions)
    done = {(record["round"], record["model"], record["way"]) for record in records}
    cards: list[int | None] = [*range(arguments.cards)] if arguments.cards > 1 else [None]
    end, lock = time.monotonic() + arguments.seconds, threading.Lock()

    def write() -> None:
        head = results_head(hardware, versions)
        write_json(arguments.output, {**head, "asked": asked(records), "records": records})

    def lane(card: int | None, models: tuple[str, ...]) -> None:
        for turn in range(arguments.rounds):
            for model in models:
                for way in arguments.ways:
                    if (turn, model, way) in done:
                        continue
                    left_s = end - time.monotonic()
                    record = {"round": turn, **measure(model, way, card, min(arguments.each, left_s))}
                    if record.get("failure") == LATE[1] and arguments.each < left_s:
                        record["failure"] = f"given up after {arguments.each:g} s"
                    with lock:
                        records.append(record)
                        write()
                        names = ("model", "way", "step_ms", "peak_mib", "planning_s", "taken", "failure")
                        print(json.dumps({name: record[name] for name in names if name in record}), flush=True)

    threads = [
        threading.Thread(target=lane, args=(card, arguments.models[place :: len(cards)]))
        for place, card in enumerate(cards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = sum(record.get("failure") in LATE for record in records)
    print(f"{late} of {len(records)} are left for a later call with --resume" if late else "complete", flush=True)


if __name__ == "__main__":
    main()
