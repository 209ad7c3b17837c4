import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# With the repository root on the path, its folder kernels/ would shadow an installed package of that name.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


def _present(name: str) -> bool:
    if name == "cuda":
        import torch

        return torch.cuda.is_available()
    return importlib.util.find_spec(name) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once where a dependency that this job must have is missing, so that skips cannot hide it."""
    required = [name for name in os.environ.get("QSYNC_REQUIRE", "").split(",") if name]
    missing = [name for name in required if not _present(name)]
    if missing:
        raise pytest.UsageError(f"QSYNC_REQUIRE names what is missing here: {', '.join(missing)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests, visibly, where no CUDA device is present."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not (importlib.util.find_spec("torch") and _present("cuda")):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
