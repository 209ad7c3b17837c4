"""A check that every CUDA source compiles and links for every target, as quickly as the compiler can; nothing is kept.

A source is compiled once for all of its targets; only those whose host part depends on the targets (they name
``QSYNC_HAS_``) are compiled for each target separately, as in a build. Expensive optimizations are off where the
compiler has an option for that: speed and size of the code are not those of a build.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path

from qsync_opt.kernels.compilation import builder, compiler


def check(units: Sequence[str], folder: Path, jobs: int | None = None) -> int:
    """Compile all sources of some units for all of their targets into a folder, and link each unit for each target.

    ``jobs`` compilers run at once; None takes ``QSYNC_KERNEL_JOBS`` or the number of CPUs.

    Returns:
        How many pairs of a source and a target were compiled.

    Raises:
        NotInstalledError: nvcc or torch's headers are missing.
        NotReadyError: A source does not compile or a unit does not link; the text holds the compiler's first error.
    """
    nvcc = compiler.find_toolchain().nvcc
    # The option is younger than the oldest compiler that builds.
    usage = subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=False).stdout
    quick = ["--Ofast-compile=max"] if "--Ofast-compile" in usage else []
    compiles: dict[Path, tuple[Path, tuple[str, ...]]] = {}  # by object: source and targets
    for unit in units:
        for path, targets in builder.sources(unit, builder.TARGETS).items():
            alone = "QSYNC_HAS_" in path.read_text(encoding="utf-8")
            for group in [(target,) for target in targets] if alone else [targets]:
                compiles[folder / f"{path.name}-{'-'.join(group)}.o"] = (path, group)

    def compile_part(output: Path) -> None:
        path, group = compiles[output]
        options = [*(flag for flag in compiler.flags(group, builder.CSRC) if flag != "-O3"), *quick]
        compiler.compile_source(path, group, output, options)

    def link(unit: str, target: str) -> None:
        paths, linked = builder.sources(unit, (target,)), folder / f"{unit}-{target}.so"
        parts = [output for output, (path, group) in compiles.items() if path in paths and target in group]
        compiler.run([nvcc, "-shared", *parts, "-o", linked, compiler.code(target)], f"unit {unit} for {target}")

    with concurrent.futures.ThreadPoolExecutor(compiler.jobs(jobs)) as pool:
        # Those for most targets first: they take longest, and all processors are busy to the end.
        list(pool.map(compile_part, sorted(compiles, key=lambda output: -len(compiles[output][1]))))
        list(pool.map(link, *zip(*itertools.product(units, builder.TARGETS), strict=True)))
    return sum(len(group) for _, group in compiles.values())
