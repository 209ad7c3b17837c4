"""The command ``qsync-opt``: its commands, its exit status, and one line on standard error for what goes wrong.

With ``--json`` exactly one JSON value goes to standard output; progress and logs go to standard error. Exit status: 0 a
feasible plan, 2 unusable arguments or file (one line says which), 3 no feasible plan.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

import qsync_opt
from qsync_opt.cli.console import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNUSABLE, Verbose
from qsync_opt.errors import QSyncError
from qsync_opt.io import near_match

COMMANDS: dict[str, str] = {
    "solve": "qsync_opt.cli.solving:solve",
    "evaluate": "qsync_opt.cli.inspecting:evaluate",
    "compare": "qsync_opt.cli.solving:compare",
    "plan": "qsync_opt.cli.planning:plan",
    "explain": "qsync_opt.cli.inspecting:explain",
    "pareto": "qsync_opt.cli.solving:pareto",
    "report": "qsync_opt.cli.inspecting:report",
    "diff": "qsync_opt.cli.inspecting:diff",
    "audit": "qsync_opt.cli.inspecting:audit",
    "doctor": "qsync_opt.cli.machine:doctor",
    "demo": "qsync_opt.cli.machine:demo",
}
"""Command -> ``"module:function"``. ``--help`` imports these modules: heavy imports stand in the functions."""
GROUPS: dict[str, tuple[str, str]] = {
    "costs": ("qsync_opt.cli.costs:app", "learned costs: collect, fit, predict, check, and choose what to profile"),
}
"""Group of commands -> ``"module:typer.Typer"`` and what it is for."""

# Of the exceptions that typer took over from click only this one has a public name.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.mro()[1])


class _Command(TyperCommand):
    """A command whose options of several values take all that follow, as in ``--costs A B``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        # The parser wants such an option before each of its values.
        lists = {name for param in self.params if str(param.metavar).endswith("...") for name in param.opts}
        option: str | None = None
        repeated: list[str] = []
        for arg in args:
            if arg.startswith("-"):
                option = arg if arg in lists else None
            elif option is not None and repeated[-1] != option:
                repeated.append(option)
            repeated.append(arg)
        try:
            return super().parse_args(ctx, repeated)
        except _UsageError as failure:
            failure.ctx = failure.ctx or ctx
            raise


class _Commands(TyperGroup):
    """The commands of this package and those of registered systems, each loaded when it is run."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*COMMANDS, *GROUPS, *_systems()]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        holder = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        if cmd_name in COMMANDS:
            holder.command(cmd_name, cls=_Command)(_load(COMMANDS[cmd_name]))
        elif cmd_name in GROUPS:
            target, description = GROUPS[cmd_name]
            holder.add_typer(_load(target), name=cmd_name, help=description)
        elif (system := _systems().get(cmd_name)) is not None:
            from qsync_opt.cli.systems import system_commands

            holder.add_typer(system_commands(system), name=cmd_name, help=system.description)
        elif ctx.resilient_parsing:  # a shell asks for completions
            return None
        else:
            names = self.list_commands(ctx)
            ctx.fail(f"no such command {cmd_name!r}{near_match(cmd_name, names)}; allowed are {', '.join(names)}")
        return typer.main.get_group(holder).commands[cmd_name]

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        rows = [(name, _load(target).__doc__.splitlines()[0]) for name, target in COMMANDS.items()]
        rows += [(name, description) for name, (_, description) in GROUPS.items()]
        rows += [(name, system.description) for name, system in _systems().items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            with results_on_stdout():
                return super().invoke(ctx)
        except QSyncError as failure:
            return _refuse(ctx.invoked_subcommand, str(failure))
        except KeyboardInterrupt as stop:
            # A command that keeps what it has done says so in the exception.
            _refuse(ctx.invoked_subcommand, f"interrupted; {stop}" if str(stop) else "interrupted")
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            return EXIT_OK  # the reader has gone; there is nobody left to tell
        except OSError as failure:  # a full disk, say
            return _refuse(ctx.invoked_subcommand, f"the operating system refuses: {failure}")


def _systems() -> dict[str, Any]:
    from qsync_opt.systems import systems

    return {
        name: system
        for name, system in systems().items()
        if name != "training" and (system.commands or system.plan_format)
    }


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _refuse(command: str | None, message: str) -> int:
    # Another package's text may hold line breaks; the promise is one line.
    place = f"qsync-opt {command}" if command else "qsync-opt"
    print(f"{place}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_UNUSABLE


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"qsync-opt {qsync_opt.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # The rest of the docstring is for who imports the package.
    help=(qsync_opt.__doc__ or "").partition("\n\n")[0],
    epilog="To begin with: 'qsync-opt demo' shows every step on this machine, 'qsync-opt doctor' what it can do, "
    "'qsync-opt COMMAND --help' the options of a command.",
    subcommand_metavar="COMMAND ...",
)


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Verbose = False,
) -> None: ...


def command_line() -> Any:
    """The whole command line as a command of click, which can be run and described."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        status = command_line().main(arguments, prog_name="qsync-opt", standalone_mode=False)
    except _UsageError as failure:
        place = failure.ctx.command_path if failure.ctx else "qsync-opt"
        print(f"{place}: {_usage_message(failure)}; see {place} --help", file=sys.stderr)
        return EXIT_UNUSABLE
    except QSyncError as failure:  # of a system that is listed
        return _refuse(None, str(failure))
    except KeyboardInterrupt:
        _refuse(None, "interrupted")
        return EXIT_INTERRUPTED
    return int(status or EXIT_OK)


def _usage_message(failure: typer.BadParameter) -> str:
    option = getattr(failure, "option_name", "")
    if possibilities := getattr(failure, "possibilities", None):
        return f"no such option {option!r}{near_match(option, possibilities)}"
    message = failure.format_message().strip().rstrip(".")
    return message[:1].lower() + message[1:]


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
