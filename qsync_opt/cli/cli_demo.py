"""The command ``qsync-opt demo``: the whole system on this machine, on a CPU."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qsync_opt.cli.app import print_json
from qsync_opt.errors import NotInstalledError, ProblemError

WIDTH = 120
"""Columns where the output is not a terminal, so that tables stay whole in a log."""
_SEEDS = 2**63
"""Workers read the seed from a file, which holds no larger numbers."""
NEEDED = ("torch", "onnxscript", "ortools")


def add_demo(parser: argparse.ArgumentParser) -> Any:
    """Train a small GPT on two workers, one of them under a plan, and show every step."""
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the files it writes")
    parser.add_argument("--steps", type=_steps, default=80, help="training steps of each of the three runs")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of weights and batches")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the steps go to standard error")
    parser.add_argument("--quiet", action="store_true", help="do not show the steps")
    return run_demo


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _steps(text: str) -> int:
    value = _whole(text)
    if value < 20:
        raise argparse.ArgumentTypeError(f"{value}: at least 20 steps are needed to time an iteration")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < _SEEDS:
        raise argparse.ArgumentTypeError(f"{text}: allowed are whole numbers from 0 to {_SEEDS - 1}")
    return value


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; the runtime is imported only now."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotInstalledError(f"the demo needs {', '.join(missing)}: pip install 'qsync-opt[all]'")
    if os.path.exists(arguments.output) and not os.path.isdir(arguments.output):
        raise ProblemError(f"--output {str(arguments.output)!r} is a file, but it must be a folder or a new name")
    # Runtimes are reached by name: the core does not depend on them.
    run = import_module("qsync_opt.runtimes.torch.demo.run")
    settings = import_module("qsync_opt.runtimes.torch.demo.settings")
    console = import_module("rich.console").Console(stderr=arguments.json, quiet=arguments.quiet)
    if not console.is_terminal:
        console.width = WIDTH
    options = settings.DemoOptions(steps=arguments.steps, seed=arguments.seed)
    result = run.run_demo(arguments.output, options, console)
    if arguments.json:
        print_json(import_module("qsync_opt.runtimes.torch.demo.report").result_json(result))
    return 0
