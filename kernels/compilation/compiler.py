"""The CUDA compiler: finding it, its options, running it, and the number of processes at once."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qsync_opt.errors import NotInstalledError, NotReadyError, UnsupportedError

# The stable C++ interface of torch that the sources are written against; a library built so also loads in later ones.
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The compiler, its release and build as ``nvcc --version`` names them, and the installed torch and its folder."""

    nvcc: Path
    nvcc_version: str
    torch_version: str
    torch_folder: Path


def _find_nvcc() -> Path | None:
    folders = [folder for name in ("CUDA_HOME", "CUDA_PATH") if (folder := os.environ.get(name))]
    paths = [*(f"{folder}/bin/nvcc" for folder in folders), shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((Path(path) for path in paths if Path(path).is_file()), None)


@functools.cache
def find_toolchain() -> Toolchain:
    """The compiler and headers of this environment.

    Raises:
        NotInstalledError: nvcc or torch is missing, or torch is too old; the text says what to install.
    """
    nvcc = _find_nvcc()
    if nvcc is None:
        raise NotInstalledError(
            "no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda: install the CUDA toolkit of torch's CUDA version"
        )
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotInstalledError("torch is missing: pip install 'qsync-opt[torch]'")
    version = importlib.metadata.version("torch")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        raise NotInstalledError(
            f"torch {version} lacks the stable C++ interface of {needed}: pip install 'torch>={needed}'"
        )
    process = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    match = re.search(r"release (\S+), (V\S+)", process.stdout)
    if process.returncode != 0 or match is None:
        raise NotInstalledError(f"{nvcc} --version answers {process.returncode}: install a working CUDA toolkit")
    release, folder = f"{match[1]} {match[2]}", Path(spec.origin).parent
    return Toolchain(nvcc=nvcc, nvcc_version=release, torch_version=version, torch_folder=folder)


JOBS_VARIABLE = "QSYNC_KERNEL_JOBS"


def code(target: str) -> str:
    """The option that makes the compiler generate code for a target."""
    number = target.removeprefix("sm_")
    # With PTX besides machine code, later cards can run it; that of 9.0a runs only on 9.0a.
    kinds = target if target.endswith("a") else f"[{target},compute_{number}]"
    return f"-gencode=arch=compute_{number},code={kinds}"


def flags(targets: Sequence[str], sources: Path) -> list[str]:
    """Options to compile a source with, except those of `code`.

    Args:
        targets: Which code paths its host part may call.
        sources: Folder that headers are included from.
    """
    include = find_toolchain().torch_folder / "include"
    return [
        *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-psabi"),
        *("-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DNDEBUG", "-diag-suppress=20012,20013,20015"),
        *(f"-DQSYNC_HAS_{target.upper().replace('_', '')}=1" for target in targets),
        *(f"-isystem={include}", f"-isystem={include / 'torch' / 'csrc' / 'api' / 'include'}", f"-I{sources}"),
    ]


def run(command: Sequence[str | os.PathLike[str]], what: str) -> None:
    """Run a compiler.

    Raises:
        NotReadyError: It failed; the text says ``what`` does not compile, and why.
    """
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        output = (process.stderr + process.stdout).splitlines()
        first = next((line for line in output if re.search(r"\berror\b|undefined reference|fatal", line)), None)
        reason = first or next(iter(output), f"nvcc ended with {process.returncode}")
        raise NotReadyError(f"{what} does not compile: {reason.strip()}")


def compile_source(path: Path, targets: Sequence[str], output: Path, options: Sequence[str]) -> None:
    """Compile a source to an object that holds code for some targets."""
    what = f"{path.name} for {', '.join(targets)}"
    run([find_toolchain().nvcc, "-c", path, "-o", output, *options, *map(code, targets)], what)


def jobs(requested: int | None) -> int:
    """Compilers to run at once: as requested, else by ``QSYNC_KERNEL_JOBS``, else one per CPU, 16 at most.

    Raises:
        UnsupportedError: The variable holds no number from 1.
    """
    text = os.environ.get(JOBS_VARIABLE)
    if requested is None and text is not None:
        if not text.isdigit() or int(text) < 1:
            raise UnsupportedError(f"{JOBS_VARIABLE}={text!r}: a number of processes from 1 is needed")
        requested = int(text)
    return requested or min(os.cpu_count() or 1, 16)
