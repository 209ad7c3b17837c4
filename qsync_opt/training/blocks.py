"""Operators at the same place of identical blocks, which may be tied to one precision.

Module paths of repeated blocks differ in their numbers only: ``layers.3.mlp/linear`` and ``layers.7.mlp/linear``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from qsync_opt.errors import ProblemError
from qsync_opt.training.problem import Problem

_NUMBER = re.compile(r"\d+")


def identical_blocks(problem: Problem) -> tuple[tuple[str, ...], ...]:
    """Groups of at least two adjustable operators at the same place of identical blocks, for ``tied`` of `solve`.

    Two operators belong together if their names differ only in the numbers of the module path, and if type, elements of
    output and the precisions of every device type agree. Costs may differ: measured ones always do. Names are in
    forward order.

    Source: ours.
    """
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for operator in problem.adjustable:
        path, own = operator.name.rsplit("/", 1) if "/" in operator.name else (operator.name, "")
        precisions = tuple(tuple(sorted(device.operators[operator.name])) for device in problem.devices)
        key = (_NUMBER.sub("#", path), own, operator.type, operator.output_elements, precisions)
        groups[key].append(operator.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def merge_groups(groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Merge the groups that share a name, since a tie is transitive; those merged last come at the end.

    Raises:
        ProblemError: A group is empty.

    Source: ours.
    """
    result: list[dict[str, None]] = []
    for group in groups:
        if not group:
            raise ProblemError("tied operators: a group is empty; name at least two operators in it, or leave it out")
        merged = dict.fromkeys(group)
        disjoint = []
        for other in result:
            if merged.keys() & other.keys():
                merged = {**other, **merged}
            else:
                disjoint.append(other)
        result = [*disjoint, merged]
    return tuple(tuple(group) for group in result)
