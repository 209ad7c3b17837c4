"""The commands doctor and demo: what this machine can do, and the whole system at work on it."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qsync_opt.cli.console import EXIT_DIFFERENT, EXIT_OK, Json, Verbose, option, print_json
from qsync_opt.errors import NotInstalledError, ProblemError, UnsupportedError
from qsync_opt.io import near_match

if TYPE_CHECKING:
    from qsync_opt.cli.doctor import Finding

EXIT_UNHEALTHY = EXIT_DIFFERENT
_SIGNS = {"ok": "ok     ", "missing": "missing", "broken": "BROKEN "}
_DEMO_PACKAGES = ("torch", "onnxscript", "ortools")
_DEMO_WIDTH = 120
"""Columns where the output is not a terminal, so that tables stay whole in a log."""
_SEEDS = 2**63
"""Workers read the seed from a file, which holds no larger numbers."""


def doctor(
    require: Annotated[
        str | None, option("NAMES", "names with commas between that must be there: torch,ortools,cuda")
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Say what this machine can do: solvers, devices, precisions, kernels, compilers, and what to install.

    Exit status: 0 if nothing is broken and all that --require names is there, 1 if not.
    """
    from qsync_opt.cli.doctor import DOCTOR_FORMAT, Health, examine

    findings = examine()
    required = [name.strip() for name in (require or "").split(",") if name.strip()]
    if require is not None and not required:  # an empty variable of a script, say
        raise UnsupportedError("--require names nothing; give at least one of the names that qsync-opt doctor lists")
    names = {finding.name for finding in findings} | {"cuda"}
    for name in required:
        if name not in names:
            raise UnsupportedError(
                f"--require names {name!r}{near_match(name, names)}; allowed are cuda and the names "
                "that qsync-opt doctor lists"
            )
    present = {f.name for f in findings if f.health is Health.OK}
    if any(f.area == "device" and f.name.startswith("cuda:") for f in findings):
        present.add("cuda")
    lacking = [name for name in required if name not in present]
    healthy = not lacking and not any(finding.health is Health.BROKEN for finding in findings)
    if json:
        print_json(
            {
                "format": DOCTOR_FORMAT,
                "healthy": healthy,
                "lacking": lacking,
                "findings": [finding.to_json() for finding in findings],
            }
        )
    else:
        _print_findings(findings)
        for name in lacking:
            print(f"required, but not here: {name}")
        print("healthy" if healthy else "not healthy")
    return EXIT_OK if healthy else EXIT_UNHEALTHY


_IN_HALF = ("product", "attention")
"""Kinds of operators whose kernels are in 16 bits."""


def _print_findings(findings: tuple[Finding, ...]) -> None:
    width = max(len(finding.name) for finding in findings)
    area = None
    for finding in findings:
        if finding.area != area:
            area = finding.area
            print(area)
        text = "; ".join(part for part in (finding.detail, finding.advice) if part)
        print(f"  {_SIGNS[finding.health]} {finding.name.ljust(width)}  {text}")
        for kind, kernel in finding.data.get("kernels", {}).items():
            print(f"          {'16-bit' if kind in _IN_HALF else '8-bit'} {kind}: {kernel}")


def demo(
    output: Annotated[Path, option("FOLDER", "folder for the files it writes")] = Path("demo-output"),
    steps: Annotated[int, option("N", "training steps of each of the three runs")] = 80,
    seed: Annotated[int, option("N", "seed of weights and batches")] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object; the steps go to standard error")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="do not show the steps")] = False,
    verbose: Verbose = False,
) -> int:
    """Train a small GPT on two workers, one of them under a plan, and show every step."""
    if steps < 20:
        raise UnsupportedError(f"--steps is {steps}: at least 20 steps are needed to time an iteration")
    if not 0 <= seed < _SEEDS:
        raise UnsupportedError(f"--seed is {seed}: allowed are whole numbers from 0 to {_SEEDS - 1}")
    missing = [name for name in _DEMO_PACKAGES if find_spec(name) is None]
    if missing:
        raise NotInstalledError(f"the demo needs {', '.join(missing)}: pip install 'qsync-opt[all]'")
    if os.path.exists(output) and not os.path.isdir(output):
        raise ProblemError(f"--output {str(output)!r} is a file, but it must be a folder or a new name")
    # Runtimes are reached by name: the core does not depend on them.
    torch_demo = import_module("qsync_opt.runtimes.torch.demo")
    console = import_module("rich.console").Console(stderr=json, quiet=quiet)
    if not console.is_terminal:
        console.width = _DEMO_WIDTH
    result = torch_demo.run_demo(output, torch_demo.DemoOptions(steps=steps, seed=seed), console)
    if json:
        print_json(torch_demo.result_json(result))
    return EXIT_OK
