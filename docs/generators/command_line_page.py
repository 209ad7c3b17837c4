"""Reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from typing import Any

from qsync_opt.cli import COMMANDS, GROUPS, command_line


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _section(context: Any) -> str:
    """Heading, description, usage and arguments of a command."""
    command = context.command
    # The width of the terminal that builds the site must not show.
    usage = re.sub(r"\s+", " ", command.get_usage(context)).removeprefix("Usage: ").strip()
    records = [record for param in command.get_params(context) if (record := param.get_help_record(context))]
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in records]
    table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
    return (
        f'## {context.command_path}\n\n{_cell(command.help or "")}\n\n```text title="Usage"\n{usage}\n```\n\n{table}\n'
    )


def command_line_page() -> str:
    """Markdown of the page."""
    program = command_line()
    context = program.make_context("qsync-opt", [], resilient_parsing=True)
    parts = [
        "# Command line\n\n"
        "This page is generated from the commands. With `--json` exactly one JSON value goes to standard output; "
        "progress and logs go to standard error.\n\n"
        "| exit status | meaning |\n|---|---|\n"
        "| 0 | done; where a plan was wanted: there is a feasible one |\n"
        "| 1 | `diff --exit-code`: the plans differ; `doctor`: something is broken or a required name is missing |\n"
        "| 2 | unusable arguments or file; one line on standard error says what, where, and what is allowed |\n"
        "| 3 | no feasible plan; the reason names the limit, the device and the least value that could be met |\n"
        "| 130 | interrupted |\n",
        _section(context),
    ]
    for name in COMMANDS:
        command = program.get_command(context, name)
        parts.append(_section(type(context)(command, parent=context, info_name=name)))
    for name in GROUPS:
        group = program.get_command(context, name)
        of_group = type(context)(group, parent=context, info_name=name)
        for part in group.list_commands(of_group):
            command = group.get_command(of_group, part)
            parts.append(_section(type(context)(command, parent=of_group, info_name=part)))
    return "\n".join(parts)
