"""The commands of serving beside ``solve`` and ``evaluate``."""

import typer

from qsync_opt.cli import serving_engine, serving_planning

app = typer.Typer(rich_markup_mode=None)
app.registered_commands.extend([*serving_planning.app.registered_commands, *serving_engine.app.registered_commands])
