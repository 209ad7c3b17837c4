import contextlib
import copy
import importlib.resources
import importlib.util
import json
import operator
import os
import random
import shutil
import sys
from pathlib import Path

import hypothesis
import pytest

# A test must not fail because the machine is busy, nor by chance: every run tries the same examples. Others are tried
# with --hypothesis-profile explore, where a failure is one more example to write down.
CALM = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("any-machine", derandomize=True, **CALM)
hypothesis.settings.register_profile("explore", derandomize=False, **CALM)
hypothesis.settings.load_profile("any-machine")
with contextlib.suppress(ImportError, AttributeError):  # not in every version
    # Hypothesis also tries constants of the modules that are loaded, which depends on the tests that ran before.
    from hypothesis.internal.conjecture import providers

    _NO_CONSTANTS = type(providers._local_constants)()
    providers._get_local_constants = lambda: _NO_CONSTANTS

ROOT = Path(__file__).resolve().parent.parent

# With the repository root on the path, its folder kernels/ would shadow an installed package of that name.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


def _browser() -> str | None:
    """Path of a Chromium: what QSYNC_CHROMIUM names, else the first on the PATH."""
    names = (os.environ.get("QSYNC_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for found in map(shutil.which, filter(None, names)) if found), None)


def _present(name: str) -> bool:
    if name == "chromium":
        return _browser() is not None
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
    """Skip GPU and browser tests, visibly, where what they need is not present."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not (importlib.util.find_spec("torch") and _present("cuda")):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    missing = [name for name in ("playwright", "axe_playwright_python", "chromium") if not _present(name)]
    for item in items:
        if missing and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=f"no {', '.join(missing)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Let what several tests share draw the same numbers in every order of the tests."""
    if fixturedef.scope != "function":
        random.seed(0)
        for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
            if name in sys.modules:
                operator.attrgetter(seed)(sys.modules[name])(0)


@pytest.fixture(scope="session")
def browser_path() -> str:
    """Path of the Chromium that browser tests start."""
    found = _browser()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def accessibility_violations():
    """Function of an open page: what axe finds wrong in it, as texts."""
    source = (importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    # Without the elements that passed, of which there are thousands.
    check = """axe.run(document, {resultTypes: ["violations"]}).then(
        results => ({passes: results.passes.length, violations: results.violations})
    )"""

    def violations(page):
        page.evaluate(source)
        results = page.evaluate(check)
        assert results["passes"] > 10  # the checks did run
        return [
            f"{violation['id']}: {violation['help']}: {node['html'][:200]} {node['failureSummary']}"
            for violation in results["violations"]
            for node in violation["nodes"]
        ]

    return violations


@pytest.fixture(scope="session")
def textbook():
    """The module of the textbook program, a baseline of the benchmarks."""
    spec = importlib.util.spec_from_file_location("textbook", ROOT / "benchmarks" / "textbook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INSTANCES = ROOT / "tests" / "data" / "instances"


@pytest.fixture
def instance_path():
    """Path of a recorded problem by its name."""
    return lambda name: INSTANCES / f"{name}.json"


@pytest.fixture
def tiny_data():
    """The JSON data of the tiny problem, free to be spoiled."""
    return copy.deepcopy(json.loads((INSTANCES / "tiny.json").read_text()))
