"""Reference of the command line, from the argument parser itself."""

from __future__ import annotations

import argparse
import re

from qsync_opt.cli.app import build_parser


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    if action.choices and not isinstance(action, argparse._SubParsersAction):
        listed = ", ".join(f"`{choice}`" for choice in action.choices)
        text += f" (one of {listed})"
    return _cell(text)


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        shown = action.metavar if isinstance(action.metavar, str) else action.dest
        return f"`{shown}`"
    if action.nargs == 0:
        return ", ".join(f"`{option}`" for option in action.option_strings)
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return ", ".join(f"`{option} {value}`" for option in action.option_strings)


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = [
        f"| {_name(action)} | {_help(action)} |"
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction) and action.help != argparse.SUPPRESS
    ]
    return "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _usage(parser: argparse.ArgumentParser) -> str:
    # The width of the terminal that builds the site must not show.
    words = re.sub(r"\s+", " ", parser.format_usage()).removeprefix("usage: ").strip()
    return f'```text title="Usage"\n{words}\n```\n'


def command_line_page() -> str:
    """Markdown of the page."""
    parser = build_parser()
    commands = _commands(parser)
    parts = [
        "# Command line\n\n"
        "This page is generated from the argument parser. With `--json` exactly one JSON value goes to standard "
        "output; progress and logs go to standard error.\n\n"
        "| exit status | meaning |\n|---|---|\n"
        "| 0 | done; where a plan was wanted: there is a feasible one |\n"
        "| 1 | `diff --exit-code`: the plans differ; `doctor`: something is broken or a required name is missing |\n"
        "| 2 | unusable arguments or file; one line on standard error says what, where, and what is allowed |\n"
        "| 3 | no feasible plan; the reason names the limit, the device and the least value that could be met |\n"
        "| 130 | interrupted |\n",
        f"## qsync-opt\n\n{_usage(parser)}\n{_arguments(parser)}",
    ]
    for name, command in commands.items():
        description = (command.description or "").strip().rstrip(".")
        parts.append(f"## qsync-opt {name}\n\n{_cell(description)}.\n\n{_usage(command)}\n{_arguments(command)}")
        if command.epilog:
            parts.append(f"{_cell(command.epilog)}\n")
    return "\n".join(parts)
