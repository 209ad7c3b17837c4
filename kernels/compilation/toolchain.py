"""What it takes to compile the CUDA kernels, and what of it is present: nvcc and torch's headers."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qsync_opt.errors import NotInstalledError

# The stable C++ interface of torch that the sources are written against; a library built so also loads in later ones.
OLDEST_TORCH = (2, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """The compiler and the folders it needs.

    Attributes:
        nvcc: Path of the compiler.
        nvcc_version: Release and build, as ``nvcc --version`` names them.
        torch_version: Version of the installed torch.
        torch_folder: Folder of the package torch, with ``include`` and ``lib`` in it.
    """

    nvcc: Path
    nvcc_version: str
    torch_version: str
    torch_folder: Path


def _find_nvcc() -> Path | None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(variable)
        if root and (Path(root) / "bin" / "nvcc").is_file():
            return Path(root) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    usual = Path("/usr/local/cuda/bin/nvcc")
    return usual if usual.is_file() else None


def _nvcc_version(nvcc: Path) -> str:
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\S+), (V\S+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise NotInstalledError(f"{nvcc} --version answers {done.returncode}: install a working CUDA toolkit")
    return f"{found[1]} {found[2]}"


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
    return Toolchain(
        nvcc=nvcc, nvcc_version=_nvcc_version(nvcc), torch_version=version, torch_folder=Path(spec.origin).parent
    )
