"""The methods ``chain`` (the default: a plan and its bound, fast) and ``exact`` (searched until it is proved)."""

from __future__ import annotations

import math
import time

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.serving.chain import MOST_STATES, count_states
from qsync_opt.formulations.serving.infeasible import harm_draft, simple_reason
from qsync_opt.formulations.serving.search import Search
from qsync_opt.formulations.serving.tables import build_tables, rough_ns, to_plan
from qsync_opt.serving import Problem, evaluate
from qsync_opt.solving import Answer, SolveOptions, TerminationStatus

_ROOT_STEPS = 24
_ROUNDS = 6
_FEW_STEPS, _FEW_DEVICES = 4, 5
"""Price steps on large problems, and up to how many devices they are cheap."""
_NODES = 40
"""Nodes that the default method may look at: it ends by itself, whatever the problem."""
_SMALL = 50
"""Groups times devices up to which the default method searches on: there a node costs next to nothing."""
_GOOD = 1e-3
"""Relative gap at which the default method stops."""
_WIDE = 0.05
"""Relative gap above which it searches on for large problems, too: memory that is nearly full leaves few good plans."""
_PATIENCE_S = 10.0
"""After which the default method ends in any case: plans may be hard to find, and a proof of none harder."""


class ChainFormulation:
    """Prices, a dynamic program over the chain of devices, and true transfers; a few nodes of the search of ``exact``.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan the stages; see `Formulation.solve`."""
        return _solve(problem, options, complete=False)


class ExactFormulation:
    """The same bounds, with the choices divided until nothing better can be left.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan the stages; see `Formulation.solve`."""
        return _solve(problem, options, complete=True)


def _solve(problem: Problem, options: SolveOptions, *, complete: bool) -> Answer:
    started = time.monotonic()
    limit_s = math.inf if options.time_limit_s is None else options.time_limit_s
    limit_s = limit_s if complete else min(limit_s, _PATIENCE_S)
    deadline = started + limit_s
    tables, types = build_tables(problem)
    if count_states(tables[0]) > MOST_STATES:
        raise UnsupportedError(
            f"problem {problem.name!r} has {len(problem.devices)} devices of {len(types)} different kinds, too many "
            "orders to search; leave some out, or give equal devices equal costs, memory and links"
        )
    built = time.monotonic()

    def answer(termination: TerminationStatus, search: Search | None = None, reason: str | None = None) -> Answer:
        best = None if search is None else search.best
        plan = None if best is None else to_plan(problem, types, best[0], best[1])
        bound = None if search is None else search.bound
        return Answer(
            plan=plan,
            termination=termination,
            objective=None if plan is None else evaluate(problem, plan).objective,
            bound=None if bound is None or math.isinf(bound) else float(bound),
            build_seconds=built - started,
            solve_seconds=time.monotonic() - built,
            reason=reason,
        )

    reason = simple_reason(problem, tables)
    if reason is not None:
        return answer(TerminationStatus.INFEASIBLE, reason=reason)
    gap = options.gap if complete else max(options.gap, _GOOD)
    search = Search(tables, deadline)
    search.begin(rough_ns(tables[0]))
    small = len(problem.groups) * len(problem.devices) <= _SMALL
    thorough = complete or small or search.best is None
    if not thorough:
        search.raise_bound(_FEW_STEPS if len(problem.devices) <= _FEW_DEVICES else 1)
        thorough = search.upper - search.bound > _WIDE * search.upper
    if thorough:
        search.root(_ROOT_STEPS)
        search.climb(_ROUNDS, gap)
    if search.best is None:
        draft, reason = harm_draft(problem, tables, deadline)
        if reason is not None:
            return answer(TerminationStatus.INFEASIBLE, reason=reason)
        if draft is not None:
            search.offer(tables[draft[0]], draft[1], pairs=True, again=True)
    if complete or search.best is None:
        search.run(gap)
    elif thorough:
        search.run(gap, most_nodes=_NODES)
    if search.best is None:
        if search.exhausted:
            return answer(TerminationStatus.INFEASIBLE, reason="every choice breaks the memory or the harm limit")
        more = "allow more time" if options.time_limit_s == limit_s else "method 'exact' may take longer"
        reason = f"no plan was found within {limit_s:g} s, which proves nothing; {more}"
        return answer(TerminationStatus.TIME_LIMIT, search, reason)
    if search.upper - search.bound <= 1e-6 * search.upper:
        return answer(TerminationStatus.OPTIMAL, search)
    if time.monotonic() > deadline:
        return answer(TerminationStatus.TIME_LIMIT, search)
    return answer(TerminationStatus.FEASIBLE, search)
