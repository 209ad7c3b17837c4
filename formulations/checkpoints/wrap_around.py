"""Wrap-around: the relaxation's shares, laid over the pieces one writer after the other, cut at rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qsync_opt.checkpoints import Part, Piece, Plan, Problem
from qsync_opt.formulations.checkpoints.fractional import Fractional, least_time
from qsync_opt.formulations.checkpoints.moves import Counts, improve
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
        best = improve(problem, _shared_out(problem, relaxed, by_levels=False), bound)
        objective = _seconds(problem, best)
        others = [_whole_pieces(problem)] if objective > bound * (1.0 + PROOF_GAP) else []
        if objective > bound * (1.0 + CLOSE):
            others.append(_shared_out(problem, relaxed, by_levels=True))
        for counts in others:
            improved = improve(problem, counts, bound)
            if (seconds := _seconds(problem, improved)) < objective:
                best, objective = improved, seconds
        gap = relative_gap(objective, bound) or 0.0
        return Answer(
            termination=TerminationStatus.OPTIMAL if gap <= PROOF_GAP else TerminationStatus.FEASIBLE,
            plan=plan_of_counts(problem, best),
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


def _seconds(problem: Problem, counts: Counts) -> float:
    """Of the slowest writer or host, before there is a plan to evaluate."""
    writers, hosts = dict.fromkeys(problem.writers, 0), dict.fromkeys(problem.hosts, 0)
    for piece, rows in zip(problem.pieces, counts, strict=True):
        for name, count in rows.items():
            writers[name] += count * piece.row_bytes
    for name, num_bytes in writers.items():
        hosts[problem.writers[name].host] += num_bytes
    seconds = [num_bytes / problem.writers[name].bytes_per_s for name, num_bytes in writers.items()]
    return max([*seconds, *(num_bytes / problem.hosts[name] for name, num_bytes in hosts.items())], default=0.0)


def _shared_out(problem: Problem, relaxed: Fractional, *, by_levels: bool) -> Counts:
    """Rows of each writer by its shares: in one pass over the pieces, or in one for each size of rows."""
    counts: Counts = [{} for _ in problem.pieces]
    for numbers, shares in zip(relaxed.classes, relaxed.bytes_CW, strict=True):
        ordered = sorted(numbers, key=lambda number: -problem.pieces[number].row_bytes)
        levels = [ordered]
        if by_levels:
            groups = itertools.groupby(ordered, key=lambda number: problem.pieces[number].row_bytes)
            levels = [list(group) for _, group in groups]
        rest = dict(shares)
        for level in levels:
            _wrap(problem.pieces, level, rest, counts)
    return counts


def _wrap(pieces: Sequence[Piece], numbers: Sequence[int], rest: dict[str, float], counts: Counts) -> None:
    """Lay pieces over writers one after the other, in proportion to what is left for each, which is reduced."""
    shares = {name: amount for name, amount in rest.items() if amount > 0} or dict.fromkeys(rest, 1.0)
    total = sum(pieces[number].num_bytes for number in numbers)
    scale = total / sum(shares.values())
    names = list(shares)
    ends = list(itertools.accumulate(amount * scale for amount in shares.values()))
    ends[-1] += total  # the last one takes all that rounding left
    place, begin, writer = 0, 0, 0
    for number in numbers:
        piece = pieces[number]
        row_bytes, left = piece.row_bytes, piece.rows
        while (rows := round((ends[writer] - place) / row_bytes)) < left:
            if rows > 0:
                counts[number][names[writer]] = rows
                place += rows * row_bytes
                left -= rows
            rest[names[writer]] -= place - begin
            begin, writer = place, writer + 1
        counts[number][names[writer]] = left
        place += left * row_bytes
    rest[names[writer]] -= place - begin


def _whole_pieces(problem: Problem) -> Counts:
    """Each piece, in order, to the writer that has least to do: how ``torch.distributed.checkpoint`` does it."""
    names = list(problem.writers)
    places = {name: place for place, name in enumerate(names)}
    loads = np.zeros(len(names), dtype=np.int64)
    holders: dict[tuple[str, ...], NDArray[np.intp]] = {}  # thousands of pieces share thousands of writers
    counts: Counts = []
    for piece in problem.pieces:
        if (own := holders.get(piece.writers)) is None:
            own = holders[piece.writers] = np.array([places[name] for name in piece.writers], dtype=np.intp)
        writer = own[loads[own].argmin()]
        loads[writer] += piece.num_bytes
        counts.append({names[writer]: piece.rows})
    return counts
