"""Inner loops that are compiled where numba is installed; without it the same work is done in numpy or plain Python.

A loop is written twice: as plain loops over arrays, which numba compiles, and as the ``plain`` form, which runs where
there is no numba. Both give the same numbers to the last bit, so a plan does not depend on what is installed: sums are
formed in the same order, and nothing is contracted or reordered (no fast mathematics).

Loading numba and its code takes about a second, so a process begins in plain form and changes over when its plain
forms have taken half as long; `prepare` does so at once. Where nothing was compiled yet, that takes more than ten
seconds, and a process changes over when its plain forms have taken as long. That changes when a result is there, never
the result.

Machine code is kept by numba: in the folder of ``NUMBA_CACHE_DIR`` if that is set, else in ``__pycache__`` beside the
source, or in the user's cache folder where that cannot be written. It is made anew for another processor or a changed
source file; files are written under other names and renamed, so processes may start at the same time. A loop may call
others of its own file only: numba does not see changes elsewhere.

``QSYNC_COMPILED_LOOPS`` in the environment: 0 leaves numba alone; 1 compiles at once, and is an error where numba is
not installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from qsync_opt.errors import NotInstalledError, ProblemError
from qsync_opt.io import held_interrupts

SWITCH = "QSYNC_COMPILED_LOOPS"
_LOGGER = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")
LOOPS: list[Loop[..., Any]] = []
"""Every loop there is, in the order of definition; tests walk it."""


@functools.cache
def compiled_by() -> str | None:
    """What compiles loops in this process, as ``numba 0.68.1``; None if they run in their plain form.

    Raises:
        NotInstalledError: ``QSYNC_COMPILED_LOOPS`` is 1 and numba is not installed.
        ProblemError: ``QSYNC_COMPILED_LOOPS`` is something else than 0 or 1.
    """
    asked = os.environ.get(SWITCH, "")
    if asked not in ("", "0", "1"):
        raise ProblemError(f"{SWITCH} is {asked!r}; allowed are 0 and 1, or leave it unset to use numba if it is there")
    if asked == "0":
        return None
    if importlib.util.find_spec("numba") is None:
        if asked == "1":
            raise NotInstalledError(
                f"{SWITCH}=1 asks for compiled loops and numba is not installed: pip install 'qsync-opt[fast]'"
            )
        return None
    return f"numba {importlib.metadata.version('numba')}"


class _Plain:
    """Seconds that plain forms have taken in this process since they could have been compiled."""

    seconds = 0.0


PATIENCE_S = 0.5
"""Loading numba takes about twice as long; a process that has less to do is quicker without it."""
COMPILING_S = 12.0
"""About what compiling takes; a process that begins when it has worked for as long takes at most twice the least."""


def loops_pay() -> bool:
    """True if loops are to run compiled from now on: plain forms have taken long enough, or it was asked for."""
    if compiled_by() is None:
        return False
    if os.environ.get(SWITCH) == "1" or _Plain.seconds >= COMPILING_S:
        return True
    return _Plain.seconds >= PATIENCE_S and machine_code_is_kept()


@functools.cache
def machine_code_is_kept() -> bool:
    """True if some process has compiled loops here before, so that they need only be loaded. Loads numba."""
    with held_interrupts():
        numba = importlib.import_module("numba")
        for loop in LOOPS:
            try:
                folder = Path(numba.njit(cache=True)(loop.loops).stats.cache_path)
            except Exception:  # no folder can be written: numba raises what comes, and `Loop.compiled` tells of it
                return False
            if any(folder.glob(f"*.{loop.loops.__name__}-*.nbi")):
                return True
    return False


@contextlib.contextmanager
def plain_work() -> Iterator[None]:
    """Count what is done in a plain form; see `loops_pay`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _Plain.seconds += time.perf_counter() - started


class Loop(Generic[_P, _R]):
    """A function that is compiled as soon as that pays; see the module.

    Attributes:
        loops: The loops as Python, very slow without a compiler.
        plain: What runs where they are not compiled.
        signature: The types that they are compiled for, as numba writes them.
    """

    __slots__ = ("_machine", "_run", "loops", "plain", "signature")

    def __init__(self, loops: Callable[_P, _R], plain: Callable[_P, _R], signature: str) -> None:
        self.loops, self.plain, self.signature = loops, plain, signature
        self._machine: Callable[_P, _R] | None = None
        self._run: Callable[_P, _R] = self._undecided
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

    def _undecided(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if compiled_by() is None:
            self._run = self.plain
        elif loops_pay():
            self._run = self.compiled()
        else:
            with plain_work():
                return self.plain(*args, **kwargs)
        return self._run(*args, **kwargs)

    def prepare(self) -> None:
        """Compile it or load it now, if there is a compiler."""
        if compiled_by() is not None:
            self._run = self.compiled()

    def forget(self) -> None:
        """Decide anew how it runs."""
        self._run = self._undecided

    def compiled(self) -> Callable[_P, _R]:
        """Machine code of the loops, from the cache if it is there."""
        if self._machine is not None:
            return self._machine
        # The compiler calls back into Python, where an interrupt would be printed and lost.
        with held_interrupts():
            self._machine = self._compile()
        return self._machine

    def _compile(self) -> Callable[_P, _R]:
        numba = importlib.import_module("numba")
        options = {"error_model": "numpy"}
        try:
            run: Callable[_P, _R] = numba.njit(self.signature, cache=True, **options)(self.loops)
        except Exception as failure:  # a folder without room or rights, a damaged file: numba raises what comes
            # If the cache was not to blame, the same error comes again here.
            run = numba.njit(self.signature, **options)(self.loops)
            _LOGGER.warning(
                "compiled loops are not kept for other runs (%s: %s); let NUMBA_CACHE_DIR name a folder that can be "
                "written, or set %s=0",
                type(failure).__name__, failure, SWITCH,
            )  # fmt: skip
        return run


def prepare() -> str | None:
    """Compile, or load, every loop of the solvers now; otherwise each one is once that pays.

    Useful where a first solve must be quick, and when an installation is made that will not be writeable.

    Returns:
        What `compiled_by` gives.
    """
    importlib.import_module("qsync_opt.formulations.training.exact")
    for loop in LOOPS:
        loop.prepare()
    _Plain.seconds = COMPILING_S
    return compiled_by()


class _Wrap(Protocol):
    def __call__(self, loops: Callable[_P, _R], /) -> Loop[_P, _R]: ...


@overload
def compiled(signature: str) -> _Wrap: ...


@overload
def compiled(signature: str, *, plain: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Loop[_P, _R]]: ...


def compiled(signature: str, *, plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Decorate a function of plain loops over arrays.

    Args:
        signature: The only types that it is compiled for, as ``float64(float64[::1], int64)``. Arrays that are not
            writeable or laid out otherwise are copied at every call; what a loop writes to must be as it says.
        plain: The same in numpy or Python, with equal results to the last bit; None where the caller has another way,
            which it takes while `loops_pay` says no.

    Source: ours, over numba.
    """

    def wrap(loops: Callable[..., Any]) -> Loop[..., Any]:
        return Loop(loops, plain or loops, signature)

    return wrap
