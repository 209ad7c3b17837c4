"""Plans beside what people run by hand: models of unlike kinds, each way of training in a process of its own, in turn.

python benchmarks/by_hand.py [--models "u-net full,decoder small"] [--ways "BF16 compiled,plan"] [--rounds N]
                             [--cards 2] [--side-by-side 4] [--seconds 3000] [--each 120] [--resume FILE]
                             [--output FILE]

With several cards each has models of its own. ``--side-by-side`` compiles that many ways at the same time on a card and
times them in turn while the others wait; the default plan, which measures by itself, is always made alone. What
``--seconds`` do not suffice for is left out and said so; a later call with ``--resume`` keeps what the file has and
measures what is missing, so that the whole can be measured in parts. Writes ``benchmarks/results/by-hand.json``. By
hand are FP32, TF32, BF16 and FP16 autocast, each eager, compiled, captured, and compiled and captured; ``plan`` is
`auto_plan` with default options, and ``BF16 compiled by blocks`` compiles repeated blocks once. A time is the median
over rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
DAY_S = 86400.0
"""Where no limit is given."""
LATE = ("not begun for lack of time", "not finished for lack of time")


class Worker:
    """One model and way in a process of its own, which waits to be timed once it is warm."""

    def __init__(self, model: str, way: str, card: int | None, each_s: float) -> None:
        self.what = {"model": model, "way": way}
        self._each_s, self._end = each_s, time.monotonic() + each_s
        own = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
        self._process = subprocess.Popen(
            [sys.executable, "by_hand_worker.py", model, way, "--held"],
            cwd=HERE,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._first = ""

    def wait(self) -> None:
        """Until it is warm, has failed, or its time is over."""
        assert self._process.stdout is not None
        left_s = max(0.0, self._end - time.monotonic())
        if select.select([self._process.stdout], [], [], left_s)[0]:
            self._first = self._process.stdout.readline()

    def record(self) -> dict[str, Any]:
        """Time it; a process that is late is ended."""
        try:
            output, errors = self._process.communicate("go\n", timeout=max(1.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return {**self.what, "failure": f"given up after {self._each_s:.0f} s"}
        lines = (self._first + output).strip().splitlines()
        if self._process.returncode or not lines:
            reason = (errors.strip().splitlines() or ["no output"])[-1]
            return {**self.what, "failure": f"exit status {self._process.returncode}: {reason}"[:300]}
        record: dict[str, Any] = json.loads(lines[-1])
        return record

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()


def measure(
    model: str, ways: tuple[str, ...], card: int | None, each_s: float, left_s: float
) -> Iterator[dict[str, Any]]:
    """The record of each way, from fresh processes that compile side by side and are timed in turn."""
    if left_s < LEAST_S:
        yield from ({"model": model, "way": way, "failure": LATE[0]} for way in ways)
        return
    end = time.monotonic() + left_s
    workers = [Worker(model, way, card, min(each_s, left_s)) for way in ways]
    try:
        for worker in workers:
            worker.wait()
        for worker in workers:
            record = worker.record()
            failure = record.get("failure", "")
            if failure.startswith("given up") and each_s >= left_s:
                record["failure"] = LATE[1]
            elif failure.startswith("OutOfMemoryError") and len(ways) > 1:
                for other in workers:
                    other.end()
                for way in ways[workers.index(worker) :]:
                    yield from measure(model, (way,), card, each_s, end - time.monotonic())
                return
            yield record
    finally:
        for worker in workers:
            worker.end()


def together(ways: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
    """Ways that are compiled side by side, in their order; the default plan is alone."""
    groups: list[tuple[str, ...]] = []
    for way in ways:
        if groups and len(groups[-1]) < most and PLANNED not in (way, groups[-1][0]):
            groups[-1] += (way,)
        else:
            groups.append((way,))
    return groups


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
    parser.add_argument("--side-by-side", type=int, default=1, help="ways that are compiled at the same time")
    parser.add_argument("--seconds", type=float, default=DAY_S, help="after which what runs is given up")
    parser.add_argument("--each", type=float, default=DAY_S, help="seconds after which one way is given up")
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
                missing = tuple(way for way in arguments.ways if (turn, model, way) not in done)
                for ways in together(missing, arguments.side_by_side):
                    for record in measure(model, ways, card, arguments.each, end - time.monotonic()):
                        with lock:
                            records.append({"round": turn, **record})
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
