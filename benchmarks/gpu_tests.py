"""Run the GPU tests and record what passed, on which card, in ``benchmarks/results/gpu-tests.json``.

python benchmarks/gpu_tests.py [--workers N] [--output PATH]
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

from qsync_opt.io import write_json

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
# Tests that look at times, which other tests on the card would disturb.
TIMED = ("tests/gpu/test_cuda_profile.py",)


def _outcome(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


def _files() -> list[str]:
    """Test files with the marker, so that nothing else need be importable where the card is."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in found if "pytest.mark.gpu" in path.read_text())


def _run(files: list[str], workers: int) -> tuple[int, list[ElementTree.Element]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Without the plug-in that warns about parallel runs, and warnings are errors.
        parallel = ("-n", str(workers), "-p", "no:benchmark") if workers > 1 else ()
        command = [sys.executable, "-P", *COMMAND, *parallel, f"--junitxml={report}", *files]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        return status, list(ElementTree.parse(report).iter("testcase"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the card (pytest-xdist)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu-tests.json")
    arguments = parser.parse_args()
    files = _files()
    together, cases = _run([name for name in files if name not in TIMED], arguments.workers)
    alone, timed = _run([name for name in files if name in TIMED], 1)
    tests = {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases + timed}
    counts = {outcome: list(tests.values()).count(outcome) for outcome in ("passed", "failure", "error", "skipped")}
    write_json(
        arguments.output,
        {
            "format": "qsync-bench-gpu-tests/1",
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "hardware": torch.cuda.get_device_name(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "counts": counts,
            "tests": tests,
        },
    )
    print(counts)
    return together or alone


if __name__ == "__main__":
    sys.exit(main())
