"""The command line ``qsync-opt``: one module per family of commands.

The console script calls `main`; the commands of a further system share the options and the printing of `console`.
"""

from typing import TYPE_CHECKING

from qsync_opt.cli.app import main
from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.cli.app import COMMANDS, GROUPS, command_line
    from qsync_opt.cli.console import (
        EXIT_INFEASIBLE,
        EXIT_OK,
        EXIT_UNUSABLE,
        Json,
        Quiet,
        TimeLimit,
        Verbose,
        check_outputs,
        gap_text,
        number,
        print_json,
        print_table,
    )

__all__ = [
    "COMMANDS", "EXIT_INFEASIBLE", "EXIT_OK", "EXIT_UNUSABLE", "GROUPS", "Json", "Quiet", "TimeLimit", "Verbose",
    "check_outputs", "command_line", "gap_text", "main", "number", "print_json", "print_table",
]  # fmt: skip

__getattr__, __dir__ = lazy(__name__)
