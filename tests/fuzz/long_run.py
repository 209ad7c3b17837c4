"""Fuzz every loader for minutes: ``python -P tests/fuzz/long_run.py --seconds 600``.

A child process loads one spoiled file after the other under a memory limit and a time limit per file, so that a crash
in native code, a hang or a hunger for memory is found too. What fails is kept in ``--keep``, named by loader and seed.
Prints JSON at the end: files per loader, how many were taken and refused, and the failures.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from loader_corpus import loaders, run_loader
from mutations import mutated

MEMORY_BYTES = 2 * 2**30
"""What a file may take beyond what the process has after its imports."""
FILE_SECONDS = 10
CHILD_FILES = 3000


class TooSlow(BaseException):
    """A file took too long."""


def child(folder: Path, first: int, end: float) -> None:
    """Load files until the time is up or enough were loaded; report to standard output."""
    faulthandler.enable()
    logging.disable()
    known = loaders()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def stop(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    for number in range(first, first + CHILD_FILES):
        if time.time() > end:
            break
        loader = known[number % len(known)]
        source = random.Random(number)
        path = folder / "file"
        data = mutated(loader.kind, source.choice(loader.seeds), source)
        (folder / "last").write_bytes(data)
        path.write_bytes(data)
        print(json.dumps({"start": number, "loader": loader.name}), flush=True)
        faulthandler.dump_traceback_later(3 * FILE_SECONDS, exit=True)
        signal.setitimer(signal.ITIMER_REAL, FILE_SECONDS)
        try:
            outcome = run_loader(loader, path)
        except (Exception, TooSlow) as error:
            outcome = "failed"
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            print(json.dumps({"failure": text}), flush=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"end": number, "outcome": outcome}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, which seeds its changes")
    parser.add_argument("--keep", type=Path, help="folder for files that fail")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.first, options.end)
        return 0
    end = time.time() + options.seconds
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures: dict[str, int] = collections.Counter()
    first = options.first
    while time.time() < end:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            arguments = ["--child", str(folder), "--first", str(first), "--end", str(end)]
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, *arguments],
                stdout=subprocess.PIPE,
                stderr=(folder / "errors").open("wb"),
                text=True,
            )
            running, loader, failure = None, "", ""
            for line in process.stdout or ():
                event = json.loads(line)
                if "start" in event:
                    running, loader, failure = event["start"], event["loader"], ""
                elif "failure" in event:
                    failure = event["failure"]
                else:
                    counts[loader][event["outcome"]] += 1
                    if event["outcome"] == "failed":
                        note(failures, options.keep, loader, running, failure, folder)
                    first, running = event["end"] + 1, None
            if process.wait() != 0:
                last = (folder / "errors").read_text(errors="replace")
                last = last[max(last.rfind("Fatal Python error"), last.rfind("Traceback")) :]
                last = " | ".join(last.split("\n")[:12] + last.split("\n")[-3:])
                failure = f"the process ended with {process.returncode}: {last[:600]}"
                if running is None:
                    print(failure, file=sys.stderr)
                    return 1
                counts[loader]["failed"] += 1
                note(failures, options.keep, loader, running, failure, folder)
                first = running + 1
    total = sum(sum(counter.values()) for counter in counts.values())
    print(json.dumps({"files": total, "loaders": counts, "failures": failures}, indent=1))
    return 1 if failures else 0


def note(failures: dict[str, int], keep: Path | None, loader: str, number: int, failure: str, folder: Path) -> None:
    """Count a failure and keep the first file of each kind."""
    text = f"{loader}: {failure}"
    failures[text] += 1
    if failures[text] == 1:
        print(f"file {number}: {text}", file=sys.stderr, flush=True)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            os.replace(folder / "last", keep / f"{loader.replace(' ', '-')}-{number}")


if __name__ == "__main__":
    sys.exit(main())
