"""How a CUDA source is compiled: options for targets, running the compiler, and how many compilers at once."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.kernels.compilation.toolchain import find_toolchain

JOBS_VARIABLE = "QSYNC_KERNEL_JOBS"


def code(target: str) -> str:
    """The option that makes the compiler generate code for a target."""
    number = target.removeprefix("sm_")
    # PTX beside the machine code lets later cards run it; that of 9.0a runs on 9.0a alone.
    kinds = target if target.endswith("a") else f"[{target},compute_{number}]"
    return f"-gencode=arch=compute_{number},code={kinds}"


def flags(targets: Sequence[str], sources: Path) -> list[str]:
    """Options to compile a source with, but those of `code`.

    Args:
        targets: Which code paths its host part may call.
        sources: Folder that headers are included from.
    """
    tools = find_toolchain()
    include = tools.torch_folder / "include"
    options = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-psabi"]
    options += [
        "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-DNDEBUG",
        "-diag-suppress=20012,20013,20015",
    ]
    options += [f"-DQSYNC_HAS_{target.upper().replace('_', '')}=1" for target in targets]
    options += [f"-isystem={include}", f"-isystem={include / 'torch' / 'csrc' / 'api' / 'include'}"]
    return [*options, f"-I{sources}"]


def run(command: Sequence[str | os.PathLike[str]], what: str) -> None:
    """Run a compiler.

    Raises:
        NotReadyError: It failed; the text says ``what`` does not compile, and why.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = (done.stderr + done.stdout).splitlines()
        first = next((line for line in output if re.search(r"\berror\b|undefined reference|fatal", line)), None)
        reason = first or next(iter(output), f"nvcc ended with {done.returncode}")
        raise NotReadyError(f"{what} does not compile: {reason.strip()}")


def jobs(requested: int | None) -> int:
    """Compilers to run at once: as requested, else by ``QSYNC_KERNEL_JOBS``, else one per CPU, 16 at most.

    Raises:
        UnsupportedError: The variable holds no number from 1.
    """
    given = os.environ.get(JOBS_VARIABLE)
    if requested is None and given is not None:
        if not given.isdigit() or int(given) < 1:
            raise UnsupportedError(f"{JOBS_VARIABLE}={given!r}: a number of processes from 1 is needed")
        requested = int(given)
    return requested or min(os.cpu_count() or 1, 16)
