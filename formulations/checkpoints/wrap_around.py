"""Wrap-around: the relaxation's shares, laid over the pieces one writer after the other, cut at rows."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qsync_opt.checkpoints import Part, Plan, Problem
from qsync_opt.formulations.checkpoints.fractional import Fractional, least_time
from qsync_opt.formulations.checkpoints.moves import Counts, has_few_choices, improve
from qsync_opt.solving import PROOF_GAP, Answer, SolveOptions, TerminationStatus, relative_gap

CLOSE = 1e-3
"""A gap up to which few cuts count for more than a better balance."""


class WrapAroundFormulation:
    """Split pieces by McNaughton's wrap-around rule, within the shares of the exact relaxation, with its bound.

    Rows are then moved away from the slowest writer while this helps. If more than `CLOSE` remains between plan and
    bound, pieces of coarse rows are shared out first, and those of finer rows make up for what rounding left. Whole
    pieces to the least loaded writer, as ``torch`` assigns them, are compared too: the plan is never worse than that.

    Source: McNaughton, "Scheduling with deadlines and loss functions" (Management Science, 1959); unlike rates, hosts
    and rounding are ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Split every piece; see `qsync_opt.formulations.base.Formulation`."""
        started = time.monotonic()
        if (reason := nobody_writes(problem)) is not None:
            return Answer(termination=TerminationStatus.INFEASIBLE, reason=reason)
        relaxed = least_time(problem)
        bound = bound_of(problem, relaxed)
        sharing, few = _Sharing(problem, relaxed), has_few_choices(problem)

        def after_moves(parts: _Parts) -> _Parts:
            return sharing.parts(improve(problem, sharing.counts(parts), bound)) if few else parts

        best = after_moves(sharing.shared_out(by_levels=False))
        objective = sharing.seconds(best)
        others = [sharing.whole_pieces()] if objective > bound * (1.0 + PROOF_GAP) else []
        if objective > bound * (1.0 + CLOSE):
            others.append(sharing.shared_out(by_levels=True))
        for other in map(after_moves, others):
            if (seconds := sharing.seconds(other)) < objective:
                best, objective = other, seconds
        gap = relative_gap(objective, bound) or 0.0
        return Answer(
            termination=TerminationStatus.OPTIMAL if gap <= PROOF_GAP else TerminationStatus.FEASIBLE,
            plan=plan_of_counts(problem, sharing.counts(best)),
            objective=objective,
            bound=bound,
            solve_seconds=time.monotonic() - started,
        )


def nobody_writes(problem: Problem) -> str | None:
    """Why there is no plan: pieces that no writer holds; None if there are none."""
    names = [piece.name for piece in problem.pieces if not piece.writers]
    if not names:
        return None
    return f"no writer holds {len(names)} of the pieces, the first of them {names[0]!r}; name a writer of each"


def bound_of(problem: Problem, relaxed: Fractional) -> float:
    """A proved lower bound: of the relaxation, and of a single row of each piece at the best rate."""
    rates = {name: min(writer.bytes_per_s, problem.hosts[writer.host]) for name, writer in problem.writers.items()}
    bound = relaxed.seconds
    for numbers in relaxed.classes:
        fastest = max(rates[name] for name in problem.pieces[numbers[0]].writers)
        bound = max(bound, max(problem.pieces[number].row_bytes for number in numbers) / fastest)
    return bound


def plan_of_counts(problem: Problem, counts: Counts) -> Plan:
    """The plan that gives each writer so many rows of each piece, in the order of the counts."""
    writes = {}
    for piece, rows in zip(problem.pieces, counts, strict=True):
        parts, begin = [], 0
        for name, count in rows.items():
            if count:
                parts.append(Part(writer=name, begin=begin, end=begin + count))
                begin += count
        writes[piece.name] = tuple(parts)
    return Plan(writes=writes)


class _Parts(NamedTuple):
    """Rows of writers, sorted by pieces; pieces and writers are given by number."""

    piece_N: NDArray[np.intp]
    writer_N: NDArray[np.intp]
    rows_N: NDArray[np.int64]


class _Sharing:
    """A problem as arrays: pieces P, writers W, classes C of the relaxation, and the writers S of all classes."""

    def __init__(self, problem: Problem, relaxed: Fractional) -> None:
        self._problem = problem
        self._names = list(problem.writers)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._row_bytes_P = np.array([piece.row_bytes for piece in problem.pieces], dtype=np.int64)
        self._rows_P = np.array([piece.rows for piece in problem.pieces], dtype=np.int64)
        self._bytes_P = self._row_bytes_P * self._rows_P
        self._class_P = np.zeros(len(problem.pieces), dtype=np.intp)
        for number, numbers in enumerate(relaxed.classes):
            self._class_P[list(numbers)] = number
        self._class_S = np.repeat(np.arange(len(relaxed.classes)), [len(shares) for shares in relaxed.bytes_CW])
        self._writer_S = np.array([self._places[name] for own in relaxed.bytes_CW for name in own], dtype=np.intp)
        self._bytes_S = np.array([share for own in relaxed.bytes_CW for share in own.values()])

    def seconds(self, parts: _Parts) -> float:
        """Of the slowest writer or host, before there is a plan to evaluate."""
        writers, hosts = self._problem.writers, self._problem.hosts
        places = {name: place for place, name in enumerate(hosts)}
        rate_W = np.array([writer.bytes_per_s for writer in writers.values()])
        host_W = np.array([places[writer.host] for writer in writers.values()], dtype=np.intp)
        bytes_N = parts.rows_N * self._row_bytes_P[parts.piece_N]
        bytes_W = np.bincount(parts.writer_N, bytes_N, minlength=len(writers))
        bytes_H = np.bincount(host_W, bytes_W, minlength=len(hosts))
        return float(max((bytes_W / rate_W).max(initial=0.0), (bytes_H / list(hosts.values())).max(initial=0.0)))

    def counts(self, parts: _Parts) -> Counts:
        """Rows by piece and the writer's name."""
        counts: Counts = [{} for _ in self._problem.pieces]
        for piece, writer, rows in zip(*(array.tolist() for array in parts), strict=True):
            counts[piece][self._names[writer]] = rows
        return counts

    def parts(self, counts: Counts) -> _Parts:
        """The inverse of `counts`."""
        rows = [(piece, self._places[name], count) for piece, own in enumerate(counts) for name, count in own.items()]
        return _Parts(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def shared_out(self, *, by_levels: bool) -> _Parts:
        """Parts by the relaxation's shares: in one pass over the pieces, or in one for each size of rows in a class."""
        order_P = np.lexsort((-self._row_bytes_P, self._class_P))
        level_P = np.zeros(len(order_P), dtype=np.intp)
        if by_levels:
            changes_P = np.diff(self._row_bytes_P[order_P], prepend=0) != 0
            first_C = np.searchsorted(self._class_P[order_P], np.arange(self._class_P.max(initial=-1) + 1))
            changes_P[first_C] = True
            level_P = np.cumsum(changes_P)
            level_P -= level_P[first_C][self._class_P[order_P]]
        rest_S = self._bytes_S.copy()
        passes = [self._wrap(order_P[level_P == level], rest_S) for level in range(level_P.max(initial=0) + 1)]
        parts = _Parts(*map(np.concatenate, zip(*passes, strict=True)))
        order_N = np.argsort(parts.piece_N, kind="stable")
        return _Parts(*(array[order_N] for array in parts))

    def _wrap(self, order_P: NDArray[np.intp], rest_S: NDArray[np.float64]) -> _Parts:
        """Lay pieces, sorted by class, over the writers of their class one after the other.

        Each gets a share in proportion to what is left for it, ``rest_S``, which is reduced.
        """
        row_bytes_P, bytes_P, class_P = (all_P[order_P] for all_P in (self._row_bytes_P, self._bytes_P, self._class_P))
        class_S = self._class_S
        # All classes lie one behind the other, each between two bytes that are known exactly.
        share_S = np.maximum(rest_S, 0.0)
        none_C = np.bincount(class_S, share_S) == 0
        share_S[none_C[class_S]] = 1.0
        bytes_C = np.bincount(class_P, bytes_P, minlength=len(none_C))
        end_C = np.cumsum(bytes_C)
        share_C = np.bincount(class_S, share_S)
        end_S = np.cumsum(share_S * (bytes_C / share_C)[class_S])
        end_S = np.clip(end_S, (end_C - bytes_C)[class_S], end_C[class_S])
        last_S = np.diff(class_S, append=-1) != 0
        end_S[last_S] = end_C
        # Cut at the nearest row.
        start_P = np.cumsum(bytes_P) - bytes_P
        piece_S = np.searchsorted(start_P, end_S, side="right") - 1
        row_S = np.rint((end_S - start_P[piece_S]) / row_bytes_P[piece_S]).astype(np.int64)
        cut_S = start_P[piece_S] + np.minimum(row_S * row_bytes_P[piece_S], bytes_P[piece_S])
        begin_N = np.union1d(start_P, cut_S[cut_S < bytes_P.sum()])
        size_N = np.diff(begin_N, append=bytes_P.sum())
        piece_N = np.searchsorted(start_P, begin_N, side="right") - 1
        holder_N = np.searchsorted(cut_S, begin_N, side="right")
        rest_S -= np.bincount(holder_N, size_N, minlength=len(rest_S))
        return _Parts(order_P[piece_N], self._writer_S[holder_N], size_N // row_bytes_P[piece_N])

    def whole_pieces(self) -> _Parts:
        """Each piece, in order, to the writer that has least to do: how ``torch.distributed.checkpoint`` does it."""
        loads = np.zeros(len(self._names), dtype=np.int64)
        holders: dict[int, NDArray[np.intp]] = {}  # by identity: pieces of one job share their writers
        writers = []
        for piece, num_bytes in zip(self._problem.pieces, self._bytes_P.tolist(), strict=True):
            if (own := holders.get(id(piece.writers))) is None:
                own = np.array([self._places[name] for name in piece.writers], dtype=np.intp)
                holders[id(piece.writers)] = own
            writer = own[loads.take(own).argmin()]
            loads[writer] += num_bytes
            writers.append(writer)
        return _Parts(np.arange(len(writers)), np.array(writers, dtype=np.intp), self._rows_P)
