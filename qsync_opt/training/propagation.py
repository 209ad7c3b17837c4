"""Precisions of the operators that a plan does not decide on, and the casts that can therefore occur.

A dependent operator runs in the lowest precision of its table whose rank is at least the highest rank that its inputs
deliver; in the table's highest if none is; in its lowest if it has no inputs. A fixed operator has one precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from qsync_opt.errors import ProblemError
from qsync_opt.model import Role

if TYPE_CHECKING:  # problem.py checks itself with these rules
    from qsync_opt.training.problem import Problem, ProblemDevice, ProblemOperator


def precisions_by_rank(problem: Problem, device: ProblemDevice, operator: str) -> tuple[str, ...]:
    """Precisions of an operator's table on a device, from the lowest rank to the highest."""
    return tuple(sorted(device.operators[operator], key=problem.rank))


def follow_inputs(problem: Problem, steps: tuple[str, ...], delivered: int) -> str:
    """Precision that a dependent operator takes.

    ``steps`` are its precisions, lowest rank first (`precisions_by_rank`), ``delivered`` is the highest rank among the
    formats that its inputs deliver; -1 if it has no inputs.

    Source: the problem file format of this package; torch's type promotion follows the same rule.
    """
    return next((step for step in steps if problem.rank(step) >= delivered), steps[-1])


def propagate(problem: Problem, device: ProblemDevice, choices: Mapping[str, str]) -> dict[str, str]:
    """Operator to precision on a device, in forward order.

    ``choices`` has the precision of every adjustable operator; further entries are ignored.

    Raises:
        ProblemError: An adjustable operator is missing, or gets a precision that its table lacks.
    """
    result: dict[str, str] = {}
    by_table: dict[tuple[tuple[str, ...], int], str] = {}  # operators have few kinds of tables
    output_rank = {name: problem.rank(precision.output) for name, precision in device.precisions.items()}
    for operator in problem.operators:
        table = device.operators[operator.name]
        if operator.role is Role.ADJUSTABLE:
            chosen = choices.get(operator.name)
            if chosen is None or chosen not in table:
                raise ProblemError(
                    f"device {device.name!r}: operator {operator.name!r} is planned at {chosen!r}, "
                    f"but its table allows {', '.join(table)}; choose one of them"
                )
            result[operator.name] = chosen
        elif operator.role is Role.FIXED:
            result[operator.name] = next(iter(table))
        else:
            delivered = max((output_rank[result[source]] for source in operator.inputs), default=-1)
            key = (tuple(table), delivered)
            if key not in by_table:
                by_table[key] = follow_inputs(problem, precisions_by_rank(problem, device, operator.name), delivered)
            result[operator.name] = by_table[key]
    return result


def missing_casts(problem: Problem, device: ProblemDevice) -> Iterator[tuple[str, str, str, str]]:
    """Yield (from, to, producer, consumer) for each cast that some plan needs and ``device`` has no cost for.

    The formats that the inputs of a join deliver count as independent; where two of them always agree this may yield a
    cast that no plan uses.

    Source: ours.
    """
    possible: dict[str, tuple[str, ...]] = {}
    for operator in problem.operators:
        pairs = _pairs(problem, device, operator, possible)
        if pairs:
            possible[operator.name] = tuple(dict.fromkeys(own for by_input in pairs.values() for _, own in by_input))
        else:
            steps = precisions_by_rank(problem, device, operator.name)
            possible[operator.name] = steps[:1] if operator.role is Role.DEPENDENT else steps
        for source, by_input in pairs.items():
            for theirs, own in by_input:
                before, after = device.precisions[theirs], device.precisions[own]
                for start, end in ((before.output, own), (after.gradient_output, before.gradient_input)):
                    if start != end and (start, end) not in device.casts:
                        yield start, end, source, operator.name


def _pairs(
    problem: Problem, device: ProblemDevice, operator: ProblemOperator, possible: Mapping[str, tuple[str, ...]]
) -> dict[str, list[tuple[str, str]]]:
    """For each input, the (its precision, own precision) pairs that can occur together."""
    steps = precisions_by_rank(problem, device, operator.name)
    if operator.role is not Role.DEPENDENT:
        return {source: [(x, y) for x in possible[source] for y in steps] for source in operator.inputs}
    ranks = {
        source: {x: problem.rank(device.precisions[x].output) for x in possible[source]} for source in operator.inputs
    }
    lowest = max((min(r.values()) for r in ranks.values()), default=-1)
    result = {}
    for source, own in ranks.items():
        others = {rank for other, r in ranks.items() if other != source for rank in r.values()}
        pairs: dict[tuple[str, str], None] = {}
        for x, rank in own.items():
            for delivered in sorted({rank} | {r for r in others if r > rank}):
                if delivered >= lowest:
                    pairs[x, follow_inputs(problem, steps, delivered)] = None
        result[source] = list(pairs)
    return result
