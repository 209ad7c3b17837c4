"""The command ``qsync-opt``: solve, evaluate and compare from a shell.

With ``--json`` exactly one JSON value goes to standard output; progress and logs go to standard error. Exit status: 0 a
feasible plan, 2 unusable arguments or file (one line says which), 3 no feasible plan.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import qsync_opt
from qsync_opt.errors import QSyncError
from qsync_opt.io import near_match

EXIT_OK, EXIT_UNUSABLE, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 0, 2, 3, 130

FIRST_STEPS = (
    "To begin with: 'qsync-opt demo' shows every step on this machine, 'qsync-opt doctor' what it can do, 'qsync-opt "
    "COMMAND --help' the options of a command."
)

Runner = Callable[[argparse.Namespace], int]
"""Does a command and returns the exit status; a QSyncError becomes one line and status 2."""

# Sub-command -> "module:function"; the function gets the sub-parser, adds arguments and returns a `Runner`. A module is
# imported only when a command line is parsed, so it must be cheap: heavy imports belong into its runner.
COMMANDS: dict[str, str] = {
    "solve": "qsync_opt.cli.solving:add_solve",
    "evaluate": "qsync_opt.cli.solving:add_evaluate",
    "compare": "qsync_opt.cli.solving:add_compare",
    "plan": "qsync_opt.cli.planning:add_plan",
    "explain": "qsync_opt.cli.inspecting:add_explain",
    "pareto": "qsync_opt.cli.cli_pareto:add_pareto",
    "report": "qsync_opt.cli.cli_report:add_report",
    "diff": "qsync_opt.cli.cli_diff:add_diff",
    "audit": "qsync_opt.cli.cli_audit:add_audit",
    "doctor": "qsync_opt.cli.machine:add_doctor",
    "completion": "qsync_opt.cli.completion:add_completion",
    "demo": "qsync_opt.cli.cli_demo:add_demo",
}


class _OneLineParser(argparse.ArgumentParser):
    """argparse, but an error is one line, and a misspelled choice gets the nearest one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            near = near_match(str(value), names)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}; allowed are {', '.join(names)}")

    def error(self, message: str) -> Any:
        self.exit(EXIT_UNUSABLE, f"{self.prog}: {message}; see {self.prog} --help\n")


class _CommandParser(_OneLineParser):
    """Parser of one command: what it does not know is told in its own name, not in that of the whole program."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, others = super().parse_known_args(args, namespace)
        if others:
            option = next((each.partition("=")[0] for each in others if each.startswith("-")), "")
            near = near_match(option, self._option_string_actions) if option else ""
            self.error(f"unrecognized arguments: {' '.join(others)}{near}")
        return known, others


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    # The rest of the docstring is for who imports the package.
    description = (qsync_opt.__doc__ or "").partition("\n\n")[0]
    parser = _OneLineParser(prog="qsync-opt", description=description, epilog=FIRST_STEPS)
    parser.add_argument("--version", action="version", version=f"qsync-opt {qsync_opt.__version__}")
    _add_verbose(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, target in COMMANDS.items():
        module, _, attribute = target.partition(":")
        add: Callable[[argparse.ArgumentParser], Runner] = getattr(importlib.import_module(module), attribute)
        help_text = (add.__doc__ or "").splitlines()[0].rstrip(".")
        subparser = subparsers.add_parser(name, help=help_text, description=help_text)
        subparser.set_defaults(run=add(subparser))
        # Without a default of its own, so that one given before the command is not forgotten.
        _add_verbose(subparser, default=argparse.SUPPRESS)
    return parser


def _add_verbose(parser: argparse.ArgumentParser, default: Any) -> None:
    """Let the option stand before the command or after it."""
    text = "log what is done to standard error"
    parser.add_argument("-v", "--verbose", action="store_true", default=default, help=text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        options = build_parser().parse_args(arguments)
    except KeyboardInterrupt:
        print("qsync-opt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING,
        stream=sys.stderr,
        format="%(levelname)s %(name)s: %(message)s",
    )
    try:
        with results_on_stdout():
            status: int = options.run(options)
    except QSyncError as failure:
        # A foreign text may hold line breaks; the promise is one line.
        print(f"qsync-opt {options.command}: {' '.join(str(failure).split())}", file=sys.stderr)
        return EXIT_UNUSABLE
    except KeyboardInterrupt as stop:
        # A command that keeps what it has done says so in the exception.
        kept = f"; {stop}" if str(stop) else ""
        print(f"qsync-opt {options.command}: interrupted{kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_OK  # the reader has gone; there is nobody left to tell
    except OSError as failure:  # a full disk, say
        print(f"qsync-opt {options.command}: the operating system refuses: {failure}", file=sys.stderr)
        return EXIT_UNUSABLE
    return status


@contextlib.contextmanager
def results_on_stdout() -> Iterator[None]:
    """Keep standard output for what Python prints; what native libraries write there goes to standard error.

    Solvers print notes of their own at times, and one line too many spoils a JSON output.
    """
    try:
        descriptor, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or without a descriptor: natives cannot reach it anyway
        yield
        return
    sys.stdout.flush()
    kept = os.dup(descriptor)
    os.dup2(errors, descriptor)
    try:
        # A name that the terminal has no letters for is no reason to fail.
        with (
            open(kept, "w", encoding=sys.stdout.encoding, errors="backslashreplace", closefd=False) as stream,
            contextlib.redirect_stdout(stream),
        ):
            yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def print_json(data: object) -> None:
    """Print one JSON value to standard output."""
    print(json.dumps(data, allow_nan=False))
