"""Costs of operators that were not measured, from those that were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from qsync_opt.costs.profile import MeasuredCost
from qsync_opt.costs.roofline import kept_for_backward
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role, base_kind

Pair = tuple[str, str]
"""Names of an operator and a precision."""


def scale_costs(
    graph: OpGraph, wanted: Iterable[Pair], measured: Mapping[Pair, MeasuredCost]
) -> dict[Pair, MeasuredCost]:
    """Costs of operators that were not measured, each scaled from the measured one that is most like it.

    That is one of the same kind in the same precision, else of the same sort (product, view or other) in the same
    precision, else of the same sort in another; among these the nearest in size. Times go with the floating-point
    operations of products and with the bytes of others. Where the kinds differ, what is kept for the backward pass
    follows from the kind.

    Args:
        graph: The model.
        wanted: Operators and precisions.
        measured: The measured costs, at least one.

    Returns:
        A cost for each pair, whose ``scaled_from`` names the measured one.

    Raises:
        ProblemError: Nothing was measured.

    Source: ours.
    """
    if not measured:
        raise ProblemError("no operator was measured, so that no cost can be scaled; allow more time")
    return {(name, precision): _scaled(graph, graph[name], precision, measured) for name, precision in wanted}


def _work(operator: Operator) -> int:
    """What the time of an operator grows with: operations of a product, bytes of any other, at least 1."""
    return max(1, operator.flops if operator.role is Role.ADJUSTABLE and operator.flops else operator.num_bytes)


def _sort(operator: Operator) -> str:
    if operator.role is Role.ADJUSTABLE and operator.flops:
        return "product"
    return "other" if operator.num_bytes else "view"


def _scaled(graph: OpGraph, operator: Operator, precision: str, measured: Mapping[Pair, MeasuredCost]) -> MeasuredCost:
    def unlike(pair: Pair) -> tuple[bool, bool, bool, float]:
        other = graph[pair[0]]
        return (
            _sort(other) != _sort(operator),
            pair[1] != precision,
            base_kind(other.op_type) != base_kind(operator.op_type),
            abs(math.log(_work(operator) / _work(other))),
        )

    nearest = min(measured, key=unlike)
    source, cost = graph[nearest[0]], measured[nearest]
    time = _work(operator) / _work(source)
    size = max(1, operator.num_bytes) / max(1, source.num_bytes)
    scaled = replace(
        cost,
        forward_ns=round(time * cost.forward_ns),
        backward_ns=round(time * cost.backward_ns),
        saved_bytes=round(size * cost.saved_bytes),
        saves_inputs=tuple(position for position in cost.saves_inputs if position < len(operator.inputs)),
        forward_workspace_bytes=round(size * cost.forward_workspace_bytes),
        backward_workspace_bytes=round(size * cost.backward_workspace_bytes),
        scaled_from=" in ".join(nearest),
    )
    if base_kind(source.op_type) == base_kind(operator.op_type) and nearest[1] == precision:
        return scaled
    saved_bytes, saves_inputs, saves_output = kept_for_backward(graph, operator, precision)
    return replace(
        scaled,
        saved_bytes=saved_bytes,
        saves_inputs=saves_inputs,
        saves_output=saves_output,
        alias_input=0 if operator.inputs and not operator.num_bytes else None,
    )
