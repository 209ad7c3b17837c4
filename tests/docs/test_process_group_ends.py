"""No thread of a process group outlives what the documentation shows.

One that lets go of a tensor while Python is closing aborts the process. That happens by chance, on a busy processor;
whether a thread is left does not.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
THREADS = Path("/proc/self/task")
TOLD = """
import os
from pathlib import Path

names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
Path(f"left-{os.environ['RANK']}").write_text(" ".join(name for name in names if "gloo" in name))
"""


@pytest.mark.slow
@pytest.mark.skipif(not THREADS.exists(), reason="the system does not name a process's threads in /proc")
@pytest.mark.parametrize(
    ("page", "title", "without", "left"),
    [
        ("several-device-types.md", "hybrid.py", "", False),
        ("several-device-types.md", "hybrid.py", "del parallel", True),  # without what the page says, some are
        ("unequal-batches.md", "unequal.py", "", False),
        ("unequal-batches.md", "unequal.py", "import torch.distributed.nn", True),
    ],
)
def test_no_thread_outlives_the_group(tmp_path, page, title, without, left):
    block = rf'^```python title="{re.escape(title)}"\n(.*?)^```$'
    script = re.search(block, (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)[1]
    if without:
        assert script.count(without) == 1
        script = "\n".join(line for line in script.split("\n") if not line.startswith(without))
    (tmp_path / title).write_text(script + TOLD)
    workers = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", title]
    done = subprocess.run(
        [sys.executable, "-P", *workers], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    told = [tmp_path / f"left-{rank}" for rank in range(2)]
    assert all(path.exists() for path in told), done.stderr
    assert [bool(path.read_text()) for path in told] == [left, left]
