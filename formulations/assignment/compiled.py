"""Inner loops that numba compiles; until that pays, or where numba is missing, the same functions run as plain Python.

Each loop is written once. Both forms give the same numbers to the last bit (no fast mathematics), so a plan does not
depend on what is installed; without numba large problems are solved tens of times more slowly.

Loading numba and its cached code takes about a second, so a process begins in Python and switches when its loops have
taken `LOADING_S`; where nothing has been compiled yet, when they have taken `COMPILING_S`. `prepare` switches at once.

numba keeps machine code in the folder of ``NUMBA_CACHE_DIR`` if that is set, else in ``__pycache__`` beside the source,
or in the user's cache folder where that cannot be written. It compiles anew for another processor or a changed source
file; processes may start at the same time. A loop may call others of its own file only: numba does not see changes
elsewhere.

``QSYNC_COMPILED_LOOPS`` in the environment: 0 leaves numba alone; 1 compiles at once, and is an error where numba is
not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from qsync_opt.errors import NotInstalledError, ProblemError
from qsync_opt.io import delayed_interrupts

SWITCH = "QSYNC_COMPILED_LOOPS"
LOADING_S = 0.8
"""CPU seconds of loops in Python after which kept machine code is loaded, which takes about a second."""
COMPILING_S = 4.0
"""CPU seconds of loops in Python after which they are compiled if no machine code is kept, which takes over ten."""
_LOGGER = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
LOOPS: list[Loop[..., Any]] = []
"""Every loop, in the order of definition."""


@functools.cache
def compiled_by() -> str | None:
    """What compiles loops in this process, as ``numba 0.68.1``; None if they run in Python.

    Raises:
        NotInstalledError: ``QSYNC_COMPILED_LOOPS`` is 1 and numba is not installed.
        ProblemError: ``QSYNC_COMPILED_LOOPS`` is something else than 0 or 1.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ProblemError(f"{SWITCH} is {value!r}; allowed are 0 and 1, or leave it unset to use numba if it is there")
    if value == "0":
        return None
    if importlib.util.find_spec("numba") is None:
        if value == "1":
            raise NotInstalledError(
                f"{SWITCH}=1 asks for compiled loops and numba is not installed: pip install 'qsync-opt[solvers]'"
            )
        return None
    return f"numba {importlib.metadata.version('numba')}"


class Loop(Generic[_P, _R]):
    """A function that is compiled as soon as that pays; see the module.

    Attributes:
        py_func: The function as Python.
        signature: The types that it is compiled for, as numba writes them.
    """

    __slots__ = ("_machine", "_run", "py_func", "signature")
    python_s = 0.0
    """CPU seconds that loops have run in Python in this process."""

    def __init__(self, py_func: Callable[_P, _R], signature: str) -> None:
        self.py_func, self.signature = py_func, signature
        self._machine: Callable[_P, _R] | None = None
        self._run: Callable[_P, _R] = self._interpreted
        LOOPS.append(self)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Run it."""
        try:
            return self._run(*args, **kwargs)
        except SystemError as failure:
            # Machine code calls Python to make its results; an interrupt that arrives there comes out like this.
            cause: BaseException | None = failure
            while isinstance(cause, SystemError):  # one for each layer that did not expect it
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from failure
            raise
        except TypeError:
            if self._run is not self._machine:
                raise
            laid_out = [
                np.require(each, requirements=["C", "W"]) if isinstance(each, np.ndarray) else each for each in args
            ]
            return self._run(*laid_out, **kwargs)  # type: ignore[arg-type]

    def _interpreted(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if compiling_pays():
            self._run = self.compiled()
            return self._run(*args, **kwargs)
        started = time.thread_time()
        try:
            with np.errstate(all="ignore"):  # machine code does not warn either
                return self.py_func(*args, **kwargs)
        finally:
            Loop.python_s += time.thread_time() - started

    def prepare(self) -> None:
        """Compile or load it now, if there is a compiler."""
        if compiled_by() is not None:
            self._run = self.compiled()

    def forget(self) -> None:
        """Decide anew how it runs."""
        self._run = self._interpreted

    def compiled(self) -> Callable[_P, _R]:
        """Its machine code, from the cache if it is there."""
        if self._machine is None:
            # The compiler calls back into Python, where an interrupt would be printed and lost.
            with delayed_interrupts():
                self._machine = self._compile()
        return self._machine

    def _compile(self) -> Callable[_P, _R]:
        numba = importlib.import_module("numba")
        options = {"error_model": "numpy"}
        try:
            run: Callable[_P, _R] = numba.njit(self.signature, cache=True, **options)(self.py_func)
        except Exception as failure:  # a folder without room or rights, a damaged file: numba raises what comes
            # If the cache was not to blame, the same error comes again here.
            run = numba.njit(self.signature, **options)(self.py_func)
            _LOGGER.warning(
                "compiled loops are not kept for other runs (%s: %s); let NUMBA_CACHE_DIR name a folder that can be "
                "written, or set %s=0",
                type(failure).__name__, failure, SWITCH,
            )  # fmt: skip
        return run


def compiling_pays() -> bool:
    """True if loops are to run compiled from now on: enough time was spent in Python, or the environment says so."""
    if compiled_by() is None:
        return False
    if os.environ.get(SWITCH) == "1" or Loop.python_s >= COMPILING_S:
        return True
    return Loop.python_s >= LOADING_S and machine_code_is_kept()


@functools.cache
def machine_code_is_kept() -> bool:
    """True if some process has compiled loops here before, so that they need only be loaded. Loads numba."""
    with delayed_interrupts():
        numba = importlib.import_module("numba")
        for loop in LOOPS:
            try:
                folder = Path(numba.njit(cache=True)(loop.py_func).stats.cache_path)
            except Exception:  # no folder can be written: numba raises what comes, and `Loop.compiled` logs it
                return False
            if any(folder.glob(f"*.{loop.py_func.__name__}-*.nbi")):
                return True
    return False


def prepare() -> str | None:
    """Compile, or load, every loop of the solvers now.

    Useful where a first solve must be quick, and when an installation is made that will not be writeable.

    Returns:
        What `compiled_by` gives.
    """
    importlib.import_module("qsync_opt.formulations.training.exact")
    for loop in LOOPS:
        loop.prepare()
    Loop.python_s = COMPILING_S
    return compiled_by()


class _Decorator(Protocol):
    def __call__(self, py_func: Callable[_P, _R], /) -> Loop[_P, _R]: ...


def compiled(signature: str) -> _Decorator:
    """Decorate a function of plain loops over arrays.

    Args:
        signature: The only types that it is compiled for, as ``float64(float64[::1], int64)``. Arrays that are not
            writeable or laid out otherwise are copied at every call; what a loop writes to must be as it says.

    Source: ours, over numba.
    """

    def wrap(py_func: Callable[_P, _R]) -> Loop[_P, _R]:
        return Loop(py_func, signature)

    return wrap
