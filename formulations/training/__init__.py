"""Formulations of training plans: greedy with a bound, exact, integer program, exhaustive, the paper's heuristic.

The registry reaches each formulation by its name.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.formulations.training.certified import plan_certified
    from qsync_opt.formulations.training.collapsed import Collapsed, collapse
    from qsync_opt.formulations.training.exact import exact_effort
    from qsync_opt.formulations.training.exhaustive import ExhaustiveFormulation
    from qsync_opt.formulations.training.fastest import fastest_within
    from qsync_opt.formulations.training.front import FrontPoint, Sweep, latency_front, memory_front
    from qsync_opt.formulations.training.greedy import GreedyFormulation, greedy_effort
    from qsync_opt.formulations.training.latency import least_latency
    from qsync_opt.formulations.training.paper_greedy import (
        DeviceState,
        Move,
        QsyncFormulation,
        adjustable_positions,
        fast_start,
        keeps_limits,
        recover,
    )
    from qsync_opt.formulations.training.paper_start import PublishedFormulation, published_start, subgraphs
    from qsync_opt.formulations.training.tables import graph_tables, peers_ns, segments
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Collapsed", "DeviceState", "ExhaustiveFormulation", "FrontPoint", "GreedyFormulation", "Move",
    "PublishedFormulation", "QsyncFormulation", "Sweep", "adjustable_positions", "collapse", "exact_effort",
    "fast_start", "fastest_within", "graph_tables", "greedy_effort", "keeps_limits", "latency_front", "least_latency",
    "memory_front", "peers_ns", "plan_certified", "published_start", "recover", "segments", "subgraphs",
]  # fmt: skip
