"""How long does a report take to write, and its page to open in Chromium?

For stacks of transformer blocks of about 1,000 and 5,000 operators on two device types. A page is opened from its file
in a fresh browser context, several times; *ready* is when its load event has ended and something has been painted,
whichever is later. Writes ``benchmarks/results/report.json`` and prints a table.

    python benchmarks/report_opening.py [--blocks 100 500] [--repeats 11] [--front greedy] [--output PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from results_head import processors

from qsync_opt.report import make_report, write_report
from qsync_opt.testing import stacked_problem
from qsync_opt.training import solve

RESULTS = Path(__file__).parent / "results" / "report.json"
_DEVICES = ("T4", "L4")
_PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"
_TIMES = """() => {
    const found = performance.getEntriesByType('navigation')[0];
    const paint = performance.getEntriesByName('first-contentful-paint')[0];
    return [found.loadEventEnd, paint.startTime];
}"""


def opening_ms(browser: Browser, path: Path) -> dict[str, float]:
    """Milliseconds from navigation to the end of the load event, and to the first contentful paint."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(path.as_uri())
    while not page.evaluate(_PAINTED):  # the page's policy forbids the evaluation that playwright's own waiting needs
        page.wait_for_timeout(5)
    load, paint = page.evaluate(_TIMES)
    context.close()
    return {"load": load, "paint": paint, "ready": max(load, paint)}


def measure(browser: Browser, blocks: int, front: str, repeats: int, folder: Path) -> dict[str, Any]:
    """One size."""
    problem = stacked_problem(blocks, devices=_DEVICES)
    solution = solve(problem)
    assert solution.plan is not None
    started = time.perf_counter()
    report = make_report(problem, solution.plan, front=front)
    made = time.perf_counter()
    path = folder / f"{blocks}.html"
    num_bytes = write_report(report, path)
    written = time.perf_counter()
    opening_ms(browser, path)  # warm-up
    rows = [opening_ms(browser, path) for _ in range(repeats)]
    row: dict[str, Any] = {
        "operators": len(problem.operators),
        "devices": len(problem.devices),
        "bytes": num_bytes,
        "make_s": round(made - started, 3),
        "write_s": round(written - made, 3),
    }
    for key in ("load", "paint", "ready"):
        values = [found[key] for found in rows]
        row[f"{key}_ms"] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    ready = row["ready_ms"]
    print(
        f"{row['operators']:6d} operators  {num_bytes / 1000:7.0f} kB  made in {row['make_s']:6.2f} s  "
        f"ready in {ready['median']:5.0f} ms (least {ready['least']:.0f}, most {ready['most']:.0f})",
        flush=True,
    )
    return row


def main() -> None:
    """Measure every size and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--front", default="greedy")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    executable = os.environ.get("QSYNC_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        record = {
            "format": "qsync-bench-report/1",
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python benchmarks/report_opening.py --repeats {arguments.repeats} --front {arguments.front}",
            "browser": f"Chromium {browser.version}, headless, 1280 x 900",
            "machine": processors(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "front": arguments.front,
            "repeats": arguments.repeats,
            "pages": [
                measure(browser, blocks, arguments.front, arguments.repeats, Path(folder))
                for blocks in arguments.blocks
            ],
        }
        browser.close()
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
