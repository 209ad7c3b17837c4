import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(folder):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr + done.stdout  # with --quiet, which hides warnings, it would be 0


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The documentation, built as `make docs` builds it: any warning fails. Once for all processes of a run."""
    pytest.importorskip("mkdocs")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(unfinished := shared / "site.unfinished")
            unfinished.rename(folder)
    return folder
