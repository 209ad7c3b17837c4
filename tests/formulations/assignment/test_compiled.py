"""Loops that numba compiles: when they are, and what happens where numba or its cache is missing."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qsync_opt.errors import NotInstalledError, ProblemError
from qsync_opt.formulations.assignment import compiled as module
from qsync_opt.formulations.assignment.compiled import SWITCH, Loop, compiled_by


@pytest.fixture
def switched(monkeypatch):
    """Set the switch for one test; what was decided before is forgotten, and again afterwards."""

    def switch(value):
        monkeypatch.setenv(SWITCH, value)
        compiled_by.cache_clear()

    monkeypatch.setattr(Loop, "python_s", 0.0)
    yield switch
    compiled_by.cache_clear()


def _total(values):
    total = 0.0
    for value in values:
        total += value
    return total


def _loop(monkeypatch) -> Loop:
    monkeypatch.setattr(module, "LOOPS", [])
    return Loop(_total, "float64(float64[::1])")


def test_without_numba_python_runs(monkeypatch, switched):
    switched("")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert compiled_by() is None
    assert _loop(monkeypatch)(np.array([0.1, 0.2, 0.3])) == 0.1 + 0.2 + 0.3


def test_numba_that_is_asked_for_must_be_there(monkeypatch, switched):
    switched("1")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalledError, match=r"pip install 'qsync-opt\[solvers\]'"):
        compiled_by()


def test_the_switch_turns_it_off_and_takes_nothing_else(switched):
    switched("0")
    assert compiled_by() is None
    switched("yes")
    with pytest.raises(ProblemError, match="'yes'; allowed are 0 and 1"):
        compiled_by()


def test_compiled_by_names_the_compiler(switched):
    pytest.importorskip("numba")
    switched("1")
    assert compiled_by().startswith("numba ")


def test_a_short_process_does_without(monkeypatch, switched):
    """Loading the compiler takes longer than a small problem."""
    pytest.importorskip("numba")
    switched("")
    monkeypatch.setattr(module, "LOADING_S", 3600.0)  # on a busy machine, too
    monkeypatch.setattr(module, "COMPILING_S", 7200.0)
    loop = _loop(monkeypatch)
    monkeypatch.setattr(Loop, "compiled", lambda self: lambda values: -1.0)
    assert loop(np.ones(3)) == 3.0
    assert Loop.python_s > 0.0
    assert not module.compiling_pays()
    monkeypatch.setattr(Loop, "python_s", module.LOADING_S)
    monkeypatch.setattr(module, "machine_code_is_kept", lambda: False)
    assert not module.compiling_pays()  # compiling takes much longer than loading
    assert loop(np.ones(3)) == 3.0
    monkeypatch.setattr(module, "machine_code_is_kept", lambda: True)
    assert module.compiling_pays()
    monkeypatch.setattr(module, "machine_code_is_kept", lambda: False)
    monkeypatch.setattr(Loop, "python_s", module.COMPILING_S)
    assert module.compiling_pays()
    assert loop(np.ones(3)) == -1.0
    loop.forget()
    switched("0")
    assert loop(np.ones(3)) == 3.0


def test_arrays_laid_out_otherwise_are_taken_too(monkeypatch, switched):
    pytest.importorskip("numba")
    switched("1")
    loop = _loop(monkeypatch)
    values = np.arange(6.0)
    values.flags.writeable = False
    assert loop(values) == 15.0
    assert loop(values[::2]) == 6.0
    with pytest.raises(TypeError):
        loop("text")


def test_a_cache_that_fails_is_logged_and_not_used(monkeypatch, switched, caplog):
    numba = pytest.importorskip("numba")
    switched("1")
    real = numba.njit

    def njit(*args, cache=False, **options):
        if cache:
            raise OSError(28, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    loop = _loop(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert loop(np.array([1.0, 2.0])) == 3.0
    assert "not kept for other runs (OSError" in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_a_second_process_does_not_compile_again(tmp_path):
    """Machine code is kept; a process that may not write finds it all the same."""
    pytest.importorskip("numba")
    code = (
        "import numpy as np\n"
        "from qsync_opt.formulations.assignment import compiled\n"
        "from qsync_opt.formulations.assignment.model import price\n"
        "compiled.LOOPS[:] = [price]\n"
        "print(compiled.machine_code_is_kept(), end=' ')\n"
        "run = price.compiled()\n"
        "print(sum(run.stats.cache_hits.values()), sum(run.stats.cache_misses.values()))\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def start() -> str:
        ended = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    assert start() == "False 0 1"
    kept = sorted(path.name for path in Path(tmp_path).rglob("*.nb*"))
    assert kept
    assert start() == "True 1 0"
    assert sorted(path.name for path in Path(tmp_path).rglob("*.nb*")) == kept


def test_an_interrupt_within_machine_code_is_one(monkeypatch, switched):
    """Machine code asks Python for the types of its results, and says nothing but that something was raised there."""
    pytest.importorskip("numba")
    switched("1")
    loop = _loop(monkeypatch)
    cause: BaseException = KeyboardInterrupt()

    def interrupted(values):
        inner = SystemError("returned a result with an exception set")
        inner.__cause__ = cause
        raise SystemError("returned a result with an exception set") from inner

    monkeypatch.setattr(Loop, "compiled", lambda self: interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop(np.ones(3))
    cause = ValueError()
    with pytest.raises(SystemError):
        loop(np.ones(3))
