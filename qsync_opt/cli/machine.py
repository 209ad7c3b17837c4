"""The command ``qsync-opt doctor``: what this machine can do, and what to install for more."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from qsync_opt.cli.app import EXIT_OK, Runner, print_json

if TYPE_CHECKING:
    from qsync_opt.cli.doctor import Finding

EXIT_UNHEALTHY = 1
_SIGNS = {"ok": "ok     ", "missing": "missing", "broken": "BROKEN "}


def add_doctor(parser: argparse.ArgumentParser) -> Runner:
    """Say what this machine can do: solvers, devices, precisions, kernels, compilers, and what to install."""
    parser.epilog = (
        f"exit status: 0 if nothing is broken and all that --require names is there, {EXIT_UNHEALTHY} if not"
    )
    parser.add_argument(
        "--require",
        metavar="NAMES",
        help="names with commas between that must be there: torch,ortools,cuda",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _doctor


def _doctor(options: argparse.Namespace) -> int:
    from qsync_opt.cli.doctor import DOCTOR_FORMAT, Health, examine
    from qsync_opt.errors import UnsupportedError
    from qsync_opt.io import near_match

    findings = examine()
    required = [name.strip() for name in (options.require or "").split(",") if name.strip()]
    if options.require is not None and not required:  # an empty variable of a script, say
        raise UnsupportedError("--require names nothing; give at least one of the names that qsync-opt doctor lists")
    known = {finding.name for finding in findings} | {"cuda"}
    for name in required:
        if name not in known:
            raise UnsupportedError(
                f"--require names {name!r}{near_match(name, known)}; allowed are cuda and the names "
                "that qsync-opt doctor lists"
            )
    present = {f.name for f in findings if f.health is Health.OK} | {
        "cuda" for f in findings if f.area == "device" and f.name.startswith("cuda:")
    }
    lacking = [name for name in required if name not in present]
    healthy = not lacking and not any(finding.health is Health.BROKEN for finding in findings)
    if options.json:
        print_json(
            {
                "format": DOCTOR_FORMAT,
                "healthy": healthy,
                "lacking": lacking,
                "findings": [finding.to_json() for finding in findings],
            }
        )
    else:
        _print(findings)
        for name in lacking:
            print(f"required, but not here: {name}")
        print("healthy" if healthy else "not healthy")
    return EXIT_OK if healthy else EXIT_UNHEALTHY


def _print(findings: tuple[Finding, ...]) -> None:
    width = max(len(finding.name) for finding in findings)
    area = None
    for finding in findings:
        if finding.area != area:
            area = finding.area
            print(area)
        text = "; ".join(part for part in (finding.detail, finding.advice) if part)
        print(f"  {_SIGNS[finding.health]} {finding.name.ljust(width)}  {text}")
        for kind, kernel in finding.data.get("kernels", {}).items():
            print(f"          8-bit {kind}: {kernel}")
