import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "quality_bench"


@pytest.fixture(scope="module")
def quality_modules():
    """The quality benchmark's modules import each other by their bare names."""
    folders = [str(FOLDER), str(FOLDER.parent)]
    sys.path[:0] = folders
    yield
    for folder in folders:
        sys.path.remove(folder)
