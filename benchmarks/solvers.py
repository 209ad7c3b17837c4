"""How near, how sure and how fast are the solvers? Measures, and writes results/solvers.json, tables and plots.

Sections, each measured by itself and merged into the results file:

* quality: ``greedy`` and ``exact`` on all problems, 50 to 20,000 operators
* baselines: the paper's greedy, ratio greedy without prices, rounding of the linear relaxation
* general: HiGHS, SCIP, CBC and CP-SAT on the whole formulation, beside ``exact`` under the same limit (the long one)
* front: fifty points, and a solve after a change of limits, against one solve
* memory: peak memory at 20,000 operators
* agreement: all exact ways on random small problems

Every measurement runs in a process of its own, bound to one core, one at a time on each core of ``--cores``; solvers
run single-threaded. Times are wall times; processor times stand beside them in the results.

    python -P benchmarks/solvers.py [SECTION ...] [--cores 0,1] [--sizes 50,200] [--families cnn,moe] [--output FILE]

Several runs can share the work, on cores of their own; their parts are then put together:

    python -P benchmarks/solvers.py --share FOLDER --cores 2 --output part2.json  # and so on
    python -P benchmarks/solvers.py --merge part*.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from solvers_cases import SEEDS
from solvers_jobs import KINDS, SECTIONS, SIZES, Job, Record, Settings
from solvers_parts import Share, joined, place, write_part
from solvers_summary import analyse, comparisons, flat

import qsync_opt
from qsync_opt.formulations.assignment import compiled_by

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "solvers.json"
FORMAT = "qsync-bench-solvers/2"


def run_jobs(
    jobs: Iterable[Job], cores: list[int], *, done: Callable[[list[Record]], None] | None = None
) -> list[Record]:
    """Every job in a process of its own, one at a time on each core; outcomes in the order of the jobs.

    Args:
        jobs: Taken one by one, when a core is free.
        cores: Where they run.
        done: Called with all outcomes so far after each of them.
    """
    waiting, lock = enumerate(jobs), threading.Lock()
    outcomes: dict[int, Record] = {}

    def work(core: int) -> None:
        while True:
            with lock:
                number, job = next(waiting, (0, None))
            if job is None:
                return
            outcome = run_job(job, core)
            with lock:
                outcomes[number] = outcome
                if done is not None:
                    done([outcomes[key] for key in sorted(outcomes)])

    with ThreadPoolExecutor(len(cores)) as pool:
        list(pool.map(work, cores))
    return [outcomes[key] for key in sorted(outcomes)]


def run_job(job: Job, core: int) -> Record:
    """One measurement: its worker process, and before it another one where a file is to be written first."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="qsync-bench-") as folder:
        if job["kind"] == "memory":
            path = str(Path(folder) / "problem.json")
            outcome = _work({**job, "kind": "write", "path": path}, core, Path(folder))
            if "failure" not in outcome:
                outcome = _work({**job, "path": path}, core, Path(folder))
        else:
            outcome = _work(job, core, Path(folder))
    outcome["job"] = job
    outcome["job_wall_s"] = time.perf_counter() - started
    print(f"core {core}  {outcome['job_wall_s']:7.1f} s  {_line(job, outcome)}", flush=True)
    return outcome


def _work(job: Job, core: int, folder: Path) -> Record:
    """The outcome of one worker process; what it could not finish is an outcome too."""
    output = folder / "outcome.json"
    worker = [sys.executable, "-P", str(HERE / "solvers_worker.py")]
    text = json.dumps({**job, "core": core, "output": str(output)})
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(
            worker, input=text, text=True, capture_output=True, timeout=job["stop_s"], env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"stopped after {job['stop_s']:.0f} s"}
    if ended.returncode:
        return {"failure": f"ended with {ended.returncode}: {ended.stderr[-2000:].strip()}"}
    outcome: Record = json.loads(output.read_text())
    return outcome


def _line(job: Job, outcome: dict[str, Any]) -> str:
    if "failure" in outcome:
        return f"{job['title']}: {outcome['failure']}"
    runs = {
        label: f"{run['wall_s']:.3g} s {run.get('gap') if run.get('gap') is None else format(run['gap'], '.1e')}"
        for label, run in outcome.get("runs", {}).items()
    }
    return f"{job['title']} {runs or ''}"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False).stdout.strip()


def revision() -> str | None:
    """The commit measured; marked where files differ from it, results apart.

    Outside of a clone what the file `REVISION` beside `benchmarks` says, or None.
    """
    told = HERE.parent / "REVISION"
    if told.exists():
        return told.read_text().strip()
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
    return f"{commit} and changes" if commit and changed else commit or None


def _command(words: list[str]) -> list[str]:
    """A command line without folders, which mean nothing elsewhere."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def environment(cores: list[int]) -> dict[str, Any]:
    """Date, hardware, versions, command and revision."""
    versions: dict[str, str | None] = {"qsync-opt": qsync_opt.__version__}
    for package in ("numpy", "numba", "ortools", "pulp"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": models[0].split(":")[1].strip() if models else platform.processor(),
        "cores": len(models),
        "cores_used": len(cores),
        "load_before": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
        "compiled_loops": compiled_by() is not None,
        "command": ["python", "-P", "benchmarks/solvers.py", *_command(sys.argv[1:])],
        "revision": revision(),
    }


def measure_again(section: str, titles: set[str], settings: Settings, cores: list[int], path: Path) -> dict[str, Any]:
    """A section of the results file in which some jobs are measured once more; their records say when and of what."""
    known = json.loads(path.read_text())["sections"][section]
    jobs = [job for job in SECTIONS[section](settings) if job["title"] in titles]
    places = {place(record["job"]): number for number, record in enumerate(known["records"])}
    missing = titles - {job["title"] for job in jobs if place(job) in places}
    if missing:
        raise SystemExit(f"--again: no job and record of section {section!r} is called {sorted(missing)[0]!r}")
    described = environment(cores)
    records = list(known["records"])
    for record in run_jobs(jobs, cores):
        record["again"] = {key: described[key] for key in ("date", "revision", "load_before")}
        records[places[place(record["job"])]] = record
    return {"environment": {**known["environment"], "probe_s": _probes(records)}, "records": records}


def measure(section: str, settings: Settings, cores: list[int]) -> dict[str, Any]:
    """One section of the results."""
    described = environment(cores)
    started = time.perf_counter()
    records = run_jobs(SECTIONS[section](settings), cores)
    described["seconds"] = round(time.perf_counter() - started, 1)
    return {"environment": {**described, "probe_s": _probes(records)}, "records": records}


def measure_part(section: str, settings: Settings, cores: list[int], share: Share, path: Path) -> None:
    """Measure what no other run has taken, and write it after every measurement."""
    described = environment(cores)
    started = time.perf_counter()

    def write(records: list[Record]) -> None:
        described["seconds"] = round(time.perf_counter() - started, 1)
        write_part(path, section, described, records)

    run_jobs((job for job in SECTIONS[section](settings) if share.take(section, job)), cores, done=write)


def merge_parts(paths: list[Path], settings: Settings, output: Path) -> None:
    """Put parts together into the results file; says what no part has measured."""
    for section, make in SECTIONS.items():
        found, missing = joined(paths, section, make(settings))
        if found is not None:
            found["environment"]["probe_s"] = _probes(found["records"])
            merge(output, {section: found})
        for title in missing:
            print(f"{section}: not measured: {title}", flush=True)


def _probes(records: list[dict[str, Any]]) -> dict[str, float] | None:
    """Least, median and most time of the workers' fixed piece of work: other load on the machine shows there."""
    times = [record[key] for record in records for key in ("probe_before_s", "probe_after_s") if key in record]
    if not times:
        return None
    return {"least_s": min(times), "median_s": statistics.median(times), "most_s": max(times)}


def merge(path: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """Put measured sections into the results file, beside those that it has."""
    known = json.loads(path.read_text()) if path.exists() else {}
    kept = known.get("sections", {}) if known.get("format") == FORMAT else {}
    merged = {name: {**kept, **sections}[name] for name in SECTIONS if name in {**kept, **sections}}
    report = analyse(merged)
    # What the file says of itself is what its summary comes from.
    latest = max((s["environment"] for s in merged.values()), key=lambda e: e["date"], default={})
    data = {
        "format": FORMAT,
        "environment": merged["quality"]["environment"] if "quality" in merged else latest,
        "summary": flat(report),
        "comparisons": comparisons(report),
        "report": report,
        "sections": merged,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(_json(data))
    temporary.replace(path)
    return data


def _json(data: dict[str, Any]) -> str:
    """One line per record, so that files stay readable and differences small."""
    parts = [f' "{key}": {json.dumps(value, indent=1)}' for key, value in data.items() if key != "sections"]
    sections = []
    for name, section in data["sections"].items():
        records = ",\n   ".join(json.dumps(_rounded(record)) for record in section["records"])
        described = json.dumps(section["environment"])
        sections.append(f'  "{name}": {{\n   "environment": {described},\n   "records": [\n   {records}\n  ]}}')
    joined = ",\n".join(sections)
    parts.append(f' "sections": {{\n{joined}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    """Times to microseconds: what is below is noise."""
    if isinstance(value, dict):
        return {k: round(v, 6) if k.endswith("_s") and isinstance(v, float) else _rounded(v) for k, v in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,1") from None


def _families(text: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown family {unknown[0]!r}; allowed are {', '.join(KINDS)}")
    return tuple(text.split(","))


def main() -> None:
    """Measure the chosen sections and write results, tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all if none is given"
    )
    parser.add_argument("--cores", type=_numbers, help="cores to run on, one measurement on each; default one")
    parser.add_argument("--sizes", type=_numbers, default=SIZES)
    parser.add_argument("--seeds", type=_numbers, default=SEEDS)
    parser.add_argument("--families", type=_families, default=KINDS, help=f"of {','.join(KINDS)}")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds, where a section's limit is longer")
    parser.add_argument("--problems", type=int, default=2000, help="random problems of section agreement")
    parser.add_argument("--points", type=int, default=50, help="points of a front")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--again", action="append", default=[], metavar="TITLE", help="only this job of the section, in its old place"
    )
    parser.add_argument("--report-only", action="store_true", help="measure nothing: tables and plots from the file")
    parser.add_argument("--share", type=Path, help="folder by which several runs take turns; the output is then a part")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="PART", help="measure nothing: put parts together")
    arguments = parser.parse_args()
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}; allowed are {', '.join(SECTIONS)}")
    settings = Settings(
        sizes=arguments.sizes, seeds=arguments.seeds, families=arguments.families, problems=arguments.problems,
        points=arguments.points, most_s=arguments.time_limit,
    )  # fmt: skip
    cores = list(arguments.cores or (min(os.sched_getaffinity(0)),))
    if arguments.share is not None:
        for name in arguments.sections or SECTIONS:
            measure_part(name, settings, cores, Share(arguments.share), arguments.output)
        return
    if arguments.merge:
        merge_parts(arguments.merge, settings, arguments.output)
    for name in () if arguments.report_only or arguments.merge else arguments.sections or SECTIONS:
        if arguments.again:
            section = measure_again(name, set(arguments.again), settings, cores, arguments.output)
        else:
            section = measure(name, settings, cores)
        merge(arguments.output, {name: section})
    from solvers_report import write_report  # loads matplotlib, which takes a while

    write_report(merge(arguments.output, {}), arguments.output)


if __name__ == "__main__":
    main()
