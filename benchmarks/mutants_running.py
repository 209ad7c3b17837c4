"""Tests in a copy of the tree: which test covers which line, and what tests say about a changed file.

Every run is a fork of this process, which has loaded the heavy packages and nothing of the project.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_HEAVY = ("numpy", "torch", "onnx", "numba", "ortools.math_opt.python.mathopt")
_MARKERS = "not gpu and not slow and not browser"
_MOST_MEMORY_BYTES = 6 << 30
_MOST_WAITING = 15
"""Multiple of the limit, which is in processor time, after which a run is ended that may be waiting for ever."""


class Copy:
    """A copy of the tracked files in a folder of its own, and test runs in it.

    The folder is kept from run to run, with what numba has compiled there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        names = [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]
        for name in names:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        for path in [*self.folder.rglob("*.py")]:
            if path.relative_to(self.folder).as_posix() not in names:
                path.unlink()
        for room in ("formulations", "runtimes", "kernels"):
            _link(self.folder / "qsync_opt" / room, Path("..", room))
        # A folder of its own on the path: the root itself would offer kernels/ as a package.
        for name in ("path", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        _link(folder / "path" / "qsync_opt", self.folder / "qsync_opt")
        self._settings = {
            "PYTHONPATH": str(folder / "path"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        self.log = folder / "log"
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        assert "qsync_opt" not in sys.modules

    def pytest(self, tests: Iterable[str], plugin: object, limit_s: float) -> int | None:
        """Exit status of pytest on tests, files or folders; None where it ran past the limit, in processor time."""
        options = [
            "-q",
            "-x",
            "-m",
            _MARKERS,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--timeout=0",  # the limit here is in processor time
            "--rootdir",
            str(self.folder),
        ]
        return self._fork(lambda: _pytest([*options, *tests], plugin), limit_s)

    def _fork(self, work: Callable[[], int], limit_s: float) -> int | None:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 99
            try:
                self._enter()
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s),) * 2)
                status = work()
            except BaseException:  # reported by the status; nothing may return into the parent's code
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        ends = time.monotonic() + _MOST_WAITING * limit_s
        try:
            while True:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    return None if -code in (signal.SIGXCPU, signal.SIGKILL) else code
                if time.monotonic() > ends:
                    return None
                time.sleep(0.02)
        finally:
            # Processes that tests began and left, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)

    def _enter(self) -> None:
        """Make a fresh fork a process of the copy."""
        os.setsid()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(self.folder)
        os.environ.update(self._settings)
        sys.dont_write_bytecode = True
        sys.path.insert(0, self._settings["PYTHONPATH"])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_MEMORY_BYTES,) * 2)


def _link(place: Path, target: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _pytest(arguments: list[str], plugin: object) -> int:
    import pytest

    return int(pytest.main(arguments, plugins=[plugin]))


def _processor_seconds() -> float:
    return sum(os.times()[:4])


class Recorder:
    """A plugin of pytest that notes the lines which each test runs, and its time; written at the end."""

    def __init__(self, folder: Path, modules: list[str], output: Path) -> None:
        self._folder, self._modules, self._output = folder, modules, output
        self._seconds: dict[str, float] = {}

    def pytest_sessionstart(self) -> None:
        """Begin."""
        import coverage

        include = [str(self._folder / name) for name in self._modules] + [str(self._folder / "tests" / "*")]
        self._coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """From here on lines are this test's, those of its fixtures included."""
        self._began = _processor_seconds()
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note the processor time of a test and of the processes that it started; a busy machine does not matter."""
        self._seconds[nodeid] = _processor_seconds() - self._began

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {}
        for file in data.measured_files():
            name = Path(file).resolve().relative_to(self._folder.resolve()).as_posix()
            for line, tests in data.contexts_by_lineno(file).items():
                for test in filter(None, tests):
                    lines.setdefault(test, {}).setdefault(name, []).append(line)
        tests = {
            test: {"seconds": round(seconds, 3), "lines": lines.get(test, {})}
            for test, seconds in self._seconds.items()
        }
        self._output.write_text(json.dumps(tests))


class Chosen:
    """A plugin of pytest that runs the named tests only, in their order."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Drop the rest."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def coverage_map(copy: Copy, modules: list[str], folders: list[str]) -> dict[str, Any]:
    """Tests by their id with seconds and the lines of modules that they run.

    Kept beside the copy; test files that have changed since are run again, all of them where a module has.
    """
    sources = {name: _digest(copy.folder / name) for name in modules}
    kept = copy.folder.parent / "map.json"
    known = json.loads(kept.read_text()) if kept.exists() else {"sources": {}, "files": {}}
    if known["sources"] != sources:
        known = {"sources": sources, "files": {}}
    files = [
        path.relative_to(copy.folder).as_posix()
        for folder in folders
        for path in (
            [copy.folder / folder] if folder.endswith(".py") else sorted((copy.folder / folder).rglob("test_*.py"))
        )
    ]
    for file in files:
        digest = _digest(copy.folder / file)
        if known["files"].get(file, {}).get("digest") == digest:
            continue
        output = copy.folder.parent / "recorded.json"
        output.unlink(missing_ok=True)
        status = copy.pytest([file], Recorder(copy.folder, modules, output), 1200)
        if status not in (0, 5) or not output.exists():
            raise SystemExit(f"{file} fails before anything is changed:\n{copy.log.read_text()[-3000:]}")
        tests = json.loads(output.read_text())
        known["files"][file] = {"digest": digest, "tests": tests}
        kept.write_text(json.dumps(known))
        print(f"map: {file}, {len(tests)} tests, {sum(test['seconds'] for test in tests.values()):.1f} s", flush=True)
    return {test: found for file in files for test, found in known["files"][file]["tests"].items()}


def idle_asserts(copy: Copy, tests: dict[str, Any]) -> list[str]:
    """Places of asserts in the mapped test files that no test reached: they cannot fail."""
    reached: dict[str, set[int]] = {}
    for test, found in tests.items():
        reached.setdefault(test.partition("::")[0], set())
        for file, lines in found["lines"].items():
            reached.setdefault(file, set()).update(lines)
    places = []
    for file, lines in sorted(reached.items()):
        if file.startswith("tests/"):
            nodes = [n for n in ast.walk(ast.parse((copy.folder / file).read_text())) if isinstance(n, ast.Assert)]
            places += [f"{file}:{n.lineno}" for n in nodes if not lines & set(range(n.lineno, (n.end_lineno or 0) + 1))]
    return places
