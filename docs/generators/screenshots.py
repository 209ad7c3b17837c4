"""Pictures of a report's page for the documentation: ``python docs/generators/screenshots.py``; needs Chromium.

The page is that of a recorded problem, so that the pictures can be made again at any time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from qsync_opt import load_problem, make_report, solve, write_report

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
PROBLEM = ROOT / "tests" / "data" / "instances" / "bertl-mix.json"
SHOTS = (
    ("report-wide.png", 1280, 900, "light"),
    ("report-wide-dark.png", 1280, 900, "dark"),
    ("report-narrow.png", 390, 844, "light"),
)
"""File, width and height in pixels, colour scheme."""


def main() -> None:
    """Write every picture."""
    browser_path = os.environ.get("QSYNC_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    problem = load_problem(PROBLEM)
    solution = solve(problem, "exact")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as tool:
        page_path = Path(folder) / "report.html"
        write_report(make_report(problem, solution.plan), page_path)
        browser = tool.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, width, height, scheme in SHOTS:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(page_path.as_uri())
            page.wait_for_timeout(500)
            page.screenshot(path=ASSETS / name)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
