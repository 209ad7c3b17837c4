"""The build of the CUDA kernels: one shared library per unit and list of targets, kept on disk.

A unit is the sources ``csrc/cuda/<unit>*.cu`` and ``.cpp``. A source whose name ends in ``_sm75``, ``_sm80``, ``_sm89``
or ``_sm90`` (or has it followed by another word: ``matmul_sm90_int8.cu``) is compiled only for the targets of that code
path. A library's name holds a digest of everything it depends on; processes that build at the same time build once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from qsync_opt.errors import NotReadyError, QSyncError, UnsupportedError
from qsync_opt.io import default_cache_folder
from qsync_opt.kernels.compilation import compiler

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CACHE_VARIABLE = "QSYNC_KERNEL_CACHE"
TARGET_VARIABLE = "QSYNC_KERNEL_TARGET"
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")
# Which targets compile a source that belongs to one code path.
_PATHS: dict[str, tuple[str, ...]] = {
    "75": ("sm_75",),
    "80": ("sm_80", "sm_86", "sm_89"),
    "89": ("sm_89",),
    "90": ("sm_90a",),
}
# Stems of the sources' names: kernels that are compiled and loaded together.
UNITS = (
    "quantize", "matmul", "convolution", "gradients", "messages", "weight_only", "cross_entropy", "paged_attention",
    "decoder",
)  # fmt: skip


def target_of(capability: tuple[int, int]) -> str:
    """The target whose code runs on a card of a compute capability.

    ``QSYNC_KERNEL_TARGET`` overrides it, for trying an older target's code path on a newer card (through PTX).

    Raises:
        UnsupportedError: The card is older than every target, or the variable names none.
    """
    forced = os.environ.get(TARGET_VARIABLE)
    if forced:
        if forced not in TARGETS:
            raise UnsupportedError(f"{TARGET_VARIABLE}={forced!r}: allowed are {', '.join(TARGETS)}")
        return forced
    if capability[0] == 9:
        return "sm_90a"  # code for 9.0a runs nowhere else, not even on later cards
    fitting = [target for target in TARGETS[:-1] if divmod(int(target[3:]), 10) <= capability]
    if not fitting:
        raise UnsupportedError(
            f"a card of compute capability {'.'.join(map(str, capability))}: kernels need 7.5 or later"
        )
    return fitting[-1]


def cache_folder() -> Path:
    """Where libraries are kept: ``QSYNC_KERNEL_CACHE``, else ``kernels`` in `default_cache_folder`."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else default_cache_folder() / "kernels"


def sources(unit: str, targets: Sequence[str]) -> dict[Path, tuple[str, ...]]:
    """The unit's source files, each with those of ``targets`` that it is compiled for."""
    result: dict[Path, tuple[str, ...]] = {}
    for path in sorted(path for path in (CSRC / "cuda").glob(f"{unit}*") if path.suffix in (".cu", ".cpp")):
        match = re.search(r"_sm(\d+)(?:_|$)", path.stem)
        allowed = _PATHS[match[1]] if match else TARGETS
        if fitting := tuple(target for target in targets if target in allowed):
            result[path] = fitting
    return result


def _headers(unit: str) -> list[Path]:
    """Headers that the unit's sources may include: all but those that bear another unit's name."""
    others = tuple(name for name in UNITS if name != unit)
    headers = (path for path in CSRC.rglob("*") if path.suffix in (".h", ".cuh"))
    return [path for path in headers if not path.name.startswith(others)]


def library_path(unit: str, targets: Sequence[str]) -> Path:
    """File of the unit's library for some targets, whether it is built yet or not."""
    tools = compiler.find_toolchain()
    facts = [unit, *targets, tools.nvcc_version, tools.torch_version]
    digest = hashlib.sha256("\0".join(facts).encode())
    contents = [*sources(unit, targets), *_headers(unit), Path(__file__), Path(compiler.__file__)]
    for path in sorted(contents, key=lambda path: path.name):  # wherever the package is installed
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    return cache_folder() / f"{unit}-{'-'.join(targets)}-{digest.hexdigest()[:20]}.so"


def _compile(unit: str, targets: Sequence[str], output: Path, jobs: int) -> None:
    tools = compiler.find_toolchain()
    flags = compiler.flags(targets, CSRC)
    paths = sources(unit, targets)
    if not paths:
        raise NotReadyError(f"unit {unit} has no source for {', '.join(targets)} in {CSRC / 'cuda'}")
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f"{unit}-") as folder:
        objects = {path: Path(folder) / f"{path.name}.o" for path in paths}
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compiler.compile_source, paths, paths.values(), objects.values(), itertools.repeat(flags)))
        linked, libraries = Path(folder) / output.name, tools.torch_folder / "lib"
        names = (
            name for name in ("torch", "torch_cpu", "torch_cuda", "c10") if (libraries / f"lib{name}.so").is_file()
        )
        # Only libraries that the result names are searched when it is loaded, used or not at link time.
        options = ["-Xlinker=--no-as-needed", f"-L{libraries}", *(f"-l{name}" for name in names)]
        options += map(compiler.code, targets)
        compiler.run([tools.nvcc, "-shared", *objects.values(), "-o", linked, *options], f"unit {unit}")
        linked.replace(output)


def build(unit: str, targets: Sequence[str], jobs: int | None = None) -> Path:
    """The unit's library for some targets, compiled if the cache has none.

    Args:
        unit: One of :data:`UNITS`.
        targets: Of :data:`TARGETS`; the library holds code for each.
        jobs: Compilers to run at once; None takes ``QSYNC_KERNEL_JOBS`` or the number of CPUs.

    Returns:
        Path of a shared library for ``torch.ops.load_library``.

    Raises:
        NotInstalledError: nvcc or torch's headers are missing.
        NotReadyError: A source does not compile; the text holds the compiler's first error.
        UnsupportedError: An unknown target, or none.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        allowed = ", ".join(TARGETS)
        raise UnsupportedError(f"unit {unit} for {', '.join(unknown) or 'no target'}: allowed are {allowed}")
    output = library_path(unit, targets)
    if output.is_file():
        return output
    import fcntl  # only where there is a compiler: Windows has none of it

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here until the first has built
            if not output.is_file():
                _compile(unit, targets, output, compiler.jobs(jobs))
    except OSError as error:
        raise NotReadyError(
            f"cannot keep kernels in {output.parent}: {error.strerror}; name another folder in {CACHE_VARIABLE}"
        ) from error
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    """Build units ahead of time, each target as a library of its own; or only check that they compile."""
    parser = argparse.ArgumentParser(prog="qsync_opt.kernels.compilation", description=main.__doc__)
    parser.add_argument("--unit", action="append", choices=UNITS, help="default: every unit that has sources")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: every target")
    parser.add_argument("--jobs", type=int, help="compilers to run at once")
    parser.add_argument("--check", action="store_true", help="compile every unit for every target and keep nothing")
    options = parser.parse_args(arguments)
    try:
        if options.check:
            from qsync_opt.kernels.compilation.compile_check import check

            with tempfile.TemporaryDirectory(prefix="qsync-kernels-") as folder:
                count = check(UNITS, Path(folder), options.jobs)
            sys.stdout.write(f"{count} pairs of source and target compile; all units link for {', '.join(TARGETS)}\n")
            return 0
        for unit in options.unit or [unit for unit in UNITS if sources(unit, TARGETS)]:
            for target in options.target or TARGETS:
                begin = time.perf_counter()
                path = build(unit, (target,), options.jobs)
                sys.stdout.write(f"{unit} {target}: {path} ({time.perf_counter() - begin:.0f} s)\n")
                sys.stdout.flush()
    except QSyncError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
