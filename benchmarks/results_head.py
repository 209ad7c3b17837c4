"""What all results files hold: when, by which command and on what they were measured, and what was asked."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def processors() -> str:
    """The kind and number of this machine's processors, as results files name them."""
    return f"{platform.machine()}, {os.cpu_count()} processors"


def results_head(hardware: str, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields before ``asked`` and ``records``, for the script that runs; see ``qsync-results/1``.

    Args:
        hardware: What it was measured on.
        versions: Of packages, beside Python's.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    script = Path(sys.argv[0]).name
    return {
        "format": "qsync-results/1",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/{script} {' '.join(sys.argv[1:])}".strip(),
        "commit": commit.stdout.strip(),
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **(versions or {})},
    }


def asked_row(what: str, asked: str, measured: Any, met: bool, note: str = "") -> dict[str, Any]:
    """One row of ``asked``: a figure that was set as a target, and what was measured (None: nothing was)."""
    return {"what": what, "asked": asked, "measured": measured, "met": met, "note": note}
