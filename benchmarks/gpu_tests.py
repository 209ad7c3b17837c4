"""Run the GPU tests and record what passed, on which card, in ``benchmarks/results/gpu-tests.json``.

python benchmarks/gpu_tests.py [--output PATH]
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from qsync_opt.jsonio import write_json

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")


def _outcome(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu-tests.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(
            [sys.executable, "-P", *COMMAND, f"--junitxml={report}"], cwd=ROOT, check=False
        ).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))
    tests = {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}
    counts = {outcome: list(tests.values()).count(outcome) for outcome in ("passed", "failure", "error", "skipped")}
    write_json(
        arguments.output,
        {
            "format": "qsync-bench-gpu-tests/1",
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join(COMMAND),
            "hardware": torch.cuda.get_device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "counts": counts,
            "tests": tests,
        },
    )
    print(counts)
    return status


if __name__ == "__main__":
    sys.exit(main())
