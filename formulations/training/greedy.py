"""The default method: precision by priced gains, with repair, fill and exchange, and a bound.

Prices of latency and memory come from the Lagrangian dual. At these prices the gain of every operator and cast is
known, so the plan takes what is worth its price, and the few choices near the prices are searched together: taking
them back where a limit breaks (repair), adding where there is room (fill), and trading one for another (exchange) are
all moves of that search. The dual's value is the bound.
"""

from __future__ import annotations

from qsync_opt.formulations.assignment import Effort, Pass
from qsync_opt.formulations.linear import LinearSolver
from qsync_opt.formulations.training.certified import plan_certified
from qsync_opt.registry import Kind, create
from qsync_opt.training import Answer, Problem, SolveOptions

_GAP = 1e-3
"""Relative gap at which the default stops."""
EFFORT_PASSES = (
    Pass(60, 64, True),
    Pass(150, 64, True),
    Pass(600, 64, True),
    Pass(300, 512, True),
)
_TREE_PASSES = (Pass(60, 64), Pass(600, 256))
"""In the larger trees of small problems many quick nodes gain more than few thorough ones."""
_TREE_GAP = 5e-3
_MAX_NODES = 12
"""Small problems have larger trees, see `certified`."""

_SOLVER_PASS = Pass(150, 0, solver_nodes=100)
"""The pass that a named solver adds: the nodes nearest to a change, with a bounded tree."""


def greedy_effort(gap: float, solver: LinearSolver | None = None) -> Effort:
    """Effort of the default for a relative gap."""
    passes = EFFORT_PASSES if solver is None else (*EFFORT_PASSES, _SOLVER_PASS)
    return Effort(
        gap=gap or _GAP,
        passes=passes,
        tree_passes=_TREE_PASSES if solver is None else None,
        max_nodes=_MAX_NODES,
        join_passes=2,
        tree_gap=max(gap, 0.0) or _TREE_GAP,
        solver=solver,
    )


class GreedyFormulation:
    """Priced allocation with a certificate; see the module.

    It needs no solver. A named one works on the choices nearest to a change where the other searches
    have not reached the gap.

    Source: in the spirit of QSync's allocator (IPDPS 2024), which takes the largest sensitivity first whatever it
        costs; prices, search and certificate are ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        solver: LinearSolver | None = None if options.solver is None else create(Kind.SOLVER, options.solver)
        return plan_certified(problem, [greedy_effort(options.gap, solver)], options)
