"""The command line ``qsync-opt``: one module per family of commands.

Other packages need only `main`, which the console script calls.
"""

from qsync_opt.cli.app import main

__all__ = ["main"]
