"""Checkpoints of worlds of several sizes, loaded by each other; the cases are in ``reshard_worker.py``."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).resolve().parents[1] / "workers" / "reshard_worker.py"


def _reshard(folder, sizes, *kind):
    done = subprocess.run(
        [sys.executable, "-P", str(WORKER), str(folder), ",".join(map(str, sizes)), *kind],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("checked")]


def test_one_and_two_ranks_load_each_others_checkpoints(tmp_path):
    assert _reshard(tmp_path, [1, 2]) == [4, 8]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_any_number_of_ranks_loads_any_others_checkpoints(tmp_path):
    saved = (1 + 2 + 2 + 4 + 5) + 1  # of all layouts, and in the background of the own one
    assert _reshard(tmp_path, [1, 2, 3, 4, 8]) == [saved, 2 * saved, 2 * saved, 4 * saved, 5 * saved]


def test_files_of_several_chunks_are_read_once_by_all_ranks_together(tmp_path):
    shares = _reshard(tmp_path, [1, 2, 3], "large")
    assert len(shares) == 3 * 2 * 6
    assert max(shares) <= 1.02
