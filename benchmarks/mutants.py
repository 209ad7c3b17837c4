"""Small wrong changes ("mutants") to the modules that compute, and whether the tests notice.

Samples changes of comparisons, constants, arithmetic, extremes, terms, returned values and conditions, makes each in a
copy of the tree, and runs the tests that execute the changed line, the nearest first:

    python benchmarks/mutants.py --seed 1 --count 240      # about half an hour
    python benchmarks/mutants.py --again                   # what survived in the results file, after tests were added
    python benchmarks/mutants.py --add --seed 2 --count 60 # mutants that nobody has looked at, to the same file

A mutant is caught if a test fails, or if the tests run past a limit of several times what they need. Those that
compute the same as the original are listed by hand, with the reason, in mutants_equivalent.json. Tests are added for
what survives, so a sample says most before that: the file keeps what it missed as ``missed_at_first``. Mutants of lines
that have changed since are dropped, whatever became of them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutants_changes import Change, changes_of  # noqa: E402
from mutants_running import ROOT, Chosen, Copy, coverage_map, idle_asserts  # noqa: E402
from results_head import processors, results_head  # noqa: E402

WORK = Path(tempfile.gettempdir()) / f"qsync-mutants-{os.getuid()}"
ASKED = 0.95
CAUGHT = ("caught", "timed out")
MODULES = {
    "sensitivities": ("qsync_opt/sensitivity/*.py",),
    "times": (
        "qsync_opt/training/evaluation.py",
        "qsync_opt/training/propagation.py",
        "qsync_opt/training/timeline.py",
        "qsync_opt/steps/predictor.py",
        "qsync_opt/steps/queues.py",
        "qsync_opt/steps/cluster.py",
        "qsync_opt/steps/costs.py",
        "qsync_opt/steps/audit.py",
        "qsync_opt/steps/trace.py",
        "qsync_opt/costs/roofline.py",
    ),
    "memory": (
        "qsync_opt/training/memory.py",
        "qsync_opt/steps/memory.py",
        "qsync_opt/steps/memory_timeline.py",
    ),
    "bounds": (
        "qsync_opt/solving.py",
        "formulations/assignment/dual.py",
        "formulations/gradients/joint.py",
        "formulations/messages/threshold.py",
    ),
    "quantizers": (
        "qsync_opt/numerics/formats.py",
        "qsync_opt/gradients/compression.py",
        "kernels/quantize/formats.py",
        "kernels/quantize/operators.py",
        "kernels/quantize/quantize.py",
        "kernels/quantize/random_bits.py",
        "kernels/gradients/reference.py",
        "kernels/messages/rows.py",
        "kernels/weight_only/layout.py",
    ),
}
TESTS = [
    *(f"tests/qsync_opt/{name}" for name in ("sensitivity", "training", "steps", "costs", "numerics", "gradients")),
    "tests/qsync_opt/report/test_report_data.py",
    *(f"tests/kernels/{name}" for name in ("quantize", "gradients", "messages", "weight_only")),
    *(f"tests/formulations/{name}" for name in ("gradients", "messages", "assignment/test_parts.py")),
]
NEAREST_FILES = 2
"""Test files that are tried first; only what survives them meets the others."""
MOST_S = 20.0
"""Recorded seconds of tests in each of these two stages."""


def all_changes() -> tuple[dict[str, list[Change]], dict[str, str]]:
    """Every change that can be made, by group of modules, and the sources."""
    sources, changes = {}, {}
    for group, patterns in MODULES.items():
        files = sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))
        files = [file for file in files if not file.endswith("__init__.py")]
        sources.update({file: (ROOT / file).read_text() for file in files})
        changes[group] = [change for file in files for change in changes_of(file, sources[file])]
    return changes, sources


def sample(changes: dict[str, list[Change]], seed: int, count: int) -> list[Change]:
    """Changes to try, as many from every group of modules."""
    random_ = random.Random(seed)
    chosen = []
    for place, group in enumerate(changes.values()):
        here = count // len(changes) + (place < count % len(changes))
        chosen += random_.sample(group, min(here, len(group)))
    return chosen


def tests_of(change: Change, tests: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Tests that run the changed lines: the nearest, and others, as many as there is time for."""
    lines = set(range(change.line, change.end_line + 1))
    folder = Path(change.file).parent.name

    def order(test: str) -> tuple[bool, bool, float]:
        path = Path(test.partition("::")[0])
        near = Path(change.file).stem in path.stem
        return not near, path.parent.name != folder, tests[test]["seconds"]

    # What runs at import matters to every test of the module.
    covering = [
        test
        for test in tests
        if (ran := tests[test]["lines"].get(change.file)) and (change.at_import or lines & set(ran))
    ]
    covering.sort(key=order)
    files = list(dict.fromkeys(test.partition("::")[0] for test in covering))
    stages: tuple[list[str], list[str]] = ([], [])
    spent = [0.0, 0.0]
    for test in covering:
        stage = int(test.partition("::")[0] not in files[:NEAREST_FILES])
        spent[stage] += tests[test]["seconds"]
        if not stages[stage] or spent[stage] <= MOST_S:
            stages[stage].append(test)
    return stages


def attempt(change: Change, copy: Copy, tests: dict[str, Any]) -> tuple[str, str]:
    """What became of a mutant, ``caught``, ``timed out``, ``survived`` or ``not covered``, and by which test."""
    path = copy.folder / change.file
    source, stamp = path.read_text(), path.stat()
    stages = tests_of(change, tests)
    if not stages[0]:
        return "not covered", ""
    try:
        path.write_text(change.made(source))
        os.utime(path, (stamp.st_atime, stamp.st_mtime + 10))  # never taken for what was compiled before
        for stage in filter(None, stages):
            needed = sum(tests[test]["seconds"] for test in stage)
            files = list(dict.fromkeys(test.partition("::")[0] for test in stage))
            status = copy.pytest(files, Chosen(stage), 60 + 6 * needed)
            if status is None:
                return "timed out", ""
            if status != 0:
                return "caught", _failure(copy.log.read_text(errors="replace")) or f"exit status {status}"
    finally:
        path.write_text(source)
        os.utime(path, (stamp.st_atime, stamp.st_mtime))
    return "survived", ""


def _failure(log: str) -> str:
    """The test or file that a log of pytest names as failed."""
    lines = [line.split(" - ")[0] for line in log.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[-1].partition(" ")[2] if lines else ""


def record_of(change: Change, seed: int, source: str, outcome: str, by: str, seconds: float) -> dict[str, Any]:
    """One row of the results file."""
    place = f"{change.file}:{change.line}"
    record = {"change": change.name, "seed": seed, "kind": change.kind, "place": place, "outcome": outcome}
    if outcome in CAUGHT:
        return {**record, "by": by, "seconds": round(seconds, 1)}
    lines = difflib.unified_diff(source.splitlines(), change.made(source).splitlines(), lineterm="", n=0)
    return {**record, "diff": list(lines)[2:], "seconds": round(seconds, 1)}


def asked(
    records: list[dict[str, Any]], samples: list[dict[str, Any]], equivalent: dict[str, str]
) -> list[dict[str, Any]]:
    """The figures that were set as targets."""

    def share(what: str, tried: int, missed: list[str]) -> dict[str, Any]:
        same = sum(name in equivalent for name in missed)
        counted, caught = tried - same, tried - len(missed)
        measured = round(caught / counted, 4) if counted else None
        met = measured is not None and measured >= ASKED
        note = f"{caught} of {counted}, without {same} that compute the same"
        return {"what": what, "asked": f">= {ASKED}", "measured": measured, "met": met, "note": note}

    tried = len(records)
    return [
        {"what": "mutants tried", "asked": ">= 200", "measured": tried, "met": tried >= 200, "note": ""},
        share(
            "share of mutants that the tests catch",
            tried,
            [record["change"] for record in records if record["outcome"] not in CAUGHT],
        ),
        *(
            share(
                f"the same of the sample of seed {each['seed']}, before anyone saw what survived",
                each["tried"],
                each["missed_at_first"],
            )
            for each in samples
            if "missed_at_first" in each
        ),
    ]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all; the package's own function would load what is changed."""
    path.with_suffix(".part").write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".part").replace(path)


def main() -> None:
    """Try the sample and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=240)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--again", action="store_true", help="only what was not caught in the results file")
    what.add_argument("--add", action="store_true", help="add the sample to those in the results file")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the copy; one run at a time")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "mutants.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a test run ends with this one
    changes, sources = all_changes()
    by_name = {change.name: change for group in changes.values() for change in group}
    before = json.loads(arguments.output.read_text()) if arguments.again or arguments.add else {}
    samples: list[dict[str, Any]] = before.get("samples", [])
    known = {record["change"]: record for record in before.get("records", []) if record["change"] in by_name}
    seeds = {name: record["seed"] for name, record in known.items()}
    if not arguments.again:
        this = {"seed": arguments.seed, "count": arguments.count, "changes": len(by_name)}
        samples = [*samples, this]
        for change in sample(changes, arguments.seed, arguments.count):
            seeds.setdefault(change.name, arguments.seed)
    print(f"{len(seeds)} of {len(by_name)} changes in {len(sources)} modules", flush=True)
    equivalent = json.loads((HERE / "mutants_equivalent.json").read_text())
    copy = Copy(arguments.work)
    tests = coverage_map(copy, sorted(sources), TESTS)
    idle = idle_asserts(copy, tests)
    print(f"asserts that no test reaches: {', '.join(idle) or 'none'}", flush=True)
    head = {
        **results_head(processors()),
        "samples": samples,
        "idle_asserts": idle,
    }
    records: list[dict[str, Any]] = []
    for number, (name, seed) in enumerate(seeds.items(), 1):
        begin, change, record = time.monotonic(), by_name[name], known.get(name)
        if name in equivalent:
            record = record_of(change, seed, sources[change.file], "equivalent", "", 0.0)
            record["reason"] = equivalent[name]
        elif record is None or (arguments.again and record["outcome"] not in CAUGHT):
            outcome, by = attempt(change, copy, tests)
            record = record_of(change, seed, sources[change.file], outcome, by, time.monotonic() - begin)
            print(f"{number}: {outcome} {change.file}:{change.line} {name} {by}", flush=True)
        records.append(record)
        if not arguments.again:
            tried = [record for record in records if record["seed"] == arguments.seed]
            this["tried"] = len(tried)
            this["missed_at_first"] = [record["change"] for record in tried if record["outcome"] not in CAUGHT]
        # Kept if this run is ended.
        write_json(arguments.output, {**head, "asked": asked(records, samples, equivalent), "records": records})
    for each in asked(records, samples, equivalent):
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
