"""Kernels for CPUs: C++ sources that g++ compiles once per processor, loaded as plain functions.

A source is ``csrc/cpu/<unit>.cpp`` and offers ``extern "C"`` functions; it knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from qsync_opt.errors import NotInstalledError, NotReadyError
from qsync_opt.kernels.compilation import builder, compiler

COMPILER_VARIABLE = "CXX"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")


def _compiler() -> str:
    name = os.environ.get(COMPILER_VARIABLE) or "g++"
    path = shutil.which(name)
    if path is None:
        raise NotInstalledError(f"no C++ compiler {name!r} on PATH: install g++, or name one in {COMPILER_VARIABLE}")
    return path


def _build(unit: str) -> Path:
    source, program = builder.CSRC / "cpu" / f"{unit}.cpp", _compiler()
    # What "native" stands for: the cache may be shared by unlike processors.
    target = subprocess.run([program, "-march=native", "-Q", "--help=target"], capture_output=True, check=False)
    version = subprocess.run([program, "--version"], capture_output=True, check=False)
    digest = hashlib.sha256(b"\0".join([target.stdout, version.stdout, source.read_bytes(), " ".join(_FLAGS).encode()]))
    output = builder.cache_folder() / f"{unit}-cpu-{digest.hexdigest()[:20]}.so"
    if output.is_file():
        return output
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{unit}-cpu-") as folder:
            linked = Path(folder) / output.name
            compiler.run([program, *_FLAGS, source, "-o", linked], f"{source.name} for this processor")
            linked.replace(output)
    except OSError as error:
        raise NotReadyError(
            f"cannot keep kernels in {output.parent}: {error.strerror}; name another folder in {builder.CACHE_VARIABLE}"
        ) from error
    return output


@functools.cache
def load(unit: str) -> ctypes.CDLL | str:
    """The library of a unit, compiled on first use; or why it cannot be had."""
    try:
        return ctypes.CDLL(str(_build(unit)))
    except (NotInstalledError, NotReadyError, OSError) as error:
        return str(error)
