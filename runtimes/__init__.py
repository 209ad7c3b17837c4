"""Adapters to frameworks, in which models are profiled and plans are applied, and what the adapters share.

Runtimes never import a solver.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.host import free_port
    from qsync_opt.runtimes.plans import DevicePlans, precisions_of
    from qsync_opt.runtimes.timing import MAX_ROUNDS, Rounds, cast_pairs, steady_medians
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["MAX_ROUNDS", "DevicePlans", "Rounds", "cast_pairs", "free_port", "precisions_of", "steady_medians"]
