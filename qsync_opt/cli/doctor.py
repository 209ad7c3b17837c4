"""What this machine can do and what to install for more; a missing package is noticed without importing anything."""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from qsync_opt.registry import Entry, Kind, entries

DOCTOR_FORMAT = "qsync-doctor/1"
_COMPILERS = {
    "C++ compiler": (("c++", "g++", "clang++"), "install g++ or clang++ to build the compiled kernels"),
    "nvcc": (("nvcc",), "install the CUDA toolkit to build the compiled GPU kernels"),
}
"""Programs, and what to do without any of them."""
_VERSION_SECONDS = 30


class Health(enum.StrEnum):
    """State of one thing that was examined."""

    OK = "ok"
    MISSING = "missing"
    """Not there; something cannot be done without it."""
    BROKEN = "broken"
    """There, but it does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One examined thing: what it is for, its version or place, and what to do if it is missing or broken."""

    area: str
    name: str
    health: Health
    detail: str = ""
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        own = asdict(self)
        return {**own.pop("data"), **own}


_PACKAGES: tuple[tuple[str, str, str, str], ...] = (
    # area, distribution, module, what to do without it
    ("core", "numpy", "numpy", "pip install numpy"),
    ("core", "onnx", "onnx", "pip install onnx"),
    ("core", "PyYAML", "yaml", "pip install pyyaml"),
    ("core", "rich", "rich", "pip install rich"),
    ("core", "typer", "typer", "pip install typer"),
    ("torch", "torch", "torch", "pip install 'qsync-opt[torch]'; needed to capture, profile and apply"),
    ("torch", "onnxscript", "onnxscript", "pip install 'qsync-opt[torch]'; needed to capture a torch model"),
    ("onnxruntime", "onnxruntime", "onnxruntime", "pip install 'qsync-opt[onnxruntime]'"),
    ("solvers", "numba", "numba", "pip install 'qsync-opt[solvers]'; the same plans, much sooner on large problems"),
    ("figures", "matplotlib", "matplotlib", "pip install 'qsync-opt[figures]'; needed for qsync_opt.report.figures"),
    ("figures", "pandas", "pandas", "pip install 'qsync-opt[figures]'; needed for to_pandas"),
)


def examine() -> tuple[Finding, ...]:
    """Examine packages, solvers, plug-ins, compilers and devices.

    Returns:
        Findings in reading order. An installed package that fails to load is a finding, not an error.

    Source: ours.
    """
    findings = [
        Finding(
            area="core",
            name="python",
            health=Health.OK,
            detail=platform.python_version(),
            data={"platform": platform.platform(), "processors": os.cpu_count()},
        )
    ]
    findings += [_package(*row) for row in _PACKAGES]
    for kind in Kind:
        findings += _attempt(kind, "registry", partial(_plugins, kind))
    findings += [_compiler(name, *row) for name, row in _COMPILERS.items()]
    if importlib.util.find_spec("torch") is not None:
        findings += _attempt("device", "torch devices", _devices)
    if importlib.util.find_spec("onnxruntime") is not None:
        findings += _attempt("onnxruntime", "execution providers", _providers)
    return tuple(findings)


def _package(area: str, distribution: str, module: str, advice: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(area=area, name=distribution, health=Health.MISSING, advice=advice)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding(area=area, name=distribution, health=Health.OK, detail=version)


def _plugins(kind: Kind) -> list[Finding]:
    """Every registered name: those of this package need packages, those of others must be importable."""
    findings = []
    for entry in entries(kind).values():
        if entry.origin != "qsync_opt":

            def load(entry: Entry = entry) -> list[Finding]:
                entry.load()
                return [Finding(area=kind, name=entry.name, health=Health.OK, detail=f"from {entry.origin}")]

            findings += _attempt(kind, entry.name, load)
        elif entry.available:
            versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in entry.packages)
            findings.append(Finding(area=kind, name=entry.name, health=Health.OK, detail=versions or "built in"))
        else:
            needs = "needs " + ", ".join(p for p in entry.packages if importlib.util.find_spec(p) is None)
            findings.append(
                Finding(area=kind, name=entry.name, health=Health.MISSING, detail=needs, advice=entry.install)
            )
    return findings


def _attempt(area: str, name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What ``look`` returns, or the error that stops it as a finding."""
    try:
        return look()
    except Exception as failure:  # a broken installation can fail in any way, and is reported
        reason = " ".join(f"{type(failure).__name__}: {failure}".split())
        advice = "reinstall it; the command pip check names packages that do not fit together"
        return [Finding(area=area, name=name, health=Health.BROKEN, detail=reason, advice=advice)]


def _compiler(name: str, programs: tuple[str, ...], advice: str) -> Finding:
    path = next(filter(None, map(shutil.which, programs)), None)
    if path is None:
        return Finding(area="compiler", name=name, health=Health.MISSING, advice=advice)
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as failure:
        return Finding(area="compiler", name=name, health=Health.BROKEN, detail=str(failure), advice=f"repair {path}")
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    version = next((line for line in lines if "release" in line), lines[0] if lines else "version unknown")
    return Finding(area="compiler", name=name, health=Health.OK, detail=f"{version.strip()} ({path})")


def _devices() -> list[Finding]:
    torch_doctor = importlib.import_module("qsync_opt.runtimes.torch.doctor")  # runtimes are reached by name
    findings = []
    for device in torch_doctor.describe_devices():
        detail = f"{device['name']}: {', '.join(device['precisions'])}"
        findings.append(Finding(area="device", name=device["device"], health=Health.OK, detail=detail, data=device))
    build = torch_doctor.describe_build()
    if not build["cuda_available"]:
        cause = "this torch is built without CUDA" if build["cuda"] is None else "torch sees no card"
        advice = "install a driver and a torch with CUDA to profile GPUs; plans from profiles or estimates need none"
        findings.append(Finding(area="device", name="cuda", health=Health.MISSING, detail=cause, advice=advice))
    return findings


def _providers() -> list[Finding]:
    providers = importlib.import_module("onnxruntime").get_available_providers()
    return [Finding(area="onnxruntime", name="execution providers", health=Health.OK, detail=", ".join(providers))]
