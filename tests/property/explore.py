"""Property tests on examples that no run has tried: ``python -P tests/property/explore.py --seconds 110``.

Rounds of all tests of `FOLDERS` that Hypothesis drives, each with a seed of its own, until the time is up; a round that
has begun is finished. The first seed is drawn anew and printed; a failure prints its example, and this repeats it:

    pytest --hypothesis-profile explore --hypothesis-seed SEED tests/...
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/property", "tests/formulations", "tests/qsync_opt")


def files_with_properties() -> list[str]:
    """The test files of `FOLDERS` that import Hypothesis: pytest takes as long to read the others as these to run."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "hypothesis" in path.read_text(encoding="utf-8")]


def main() -> int:
    """Explore; the exit status is pytest's of the round that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="no round begins after so long")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="of the first round")
    parser.add_argument("pytest", nargs="*", help="further options of pytest, after --")
    arguments = parser.parse_args()
    files = files_with_properties()
    ends, seed = time.monotonic() + arguments.seconds, arguments.seed
    while True:
        print(f"Hypothesis explores with seed {seed}", flush=True)
        options = ["-q", "-m", "hypothesis and not gpu and not slow", "--hypothesis-profile", "explore"]
        command = [sys.executable, "-m", "pytest", *options, f"--hypothesis-seed={seed}", *arguments.pytest, *files]
        begin = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        # A round takes as long as the one before: none that could not end in time.
        if status or time.monotonic() + (time.monotonic() - begin) > ends:
            return status
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
