"""Which casts can a plan need on the edges of a graph, and at which sizes are they to be measured?"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_opt.model.graph import OpGraph, TensorSpec
from qsync_opt.numerics.formats import PrecisionFormats

MAX_SIZES = 6
"""Sizes that a cast is measured at: the smallest, the largest, and some between."""


def cast_pairs(formats: Mapping[str, PrecisionFormats]) -> tuple[tuple[str, str], ...]:
    """Pairs of unlike formats that can meet on an edge, forward or backward."""
    forward = [(borders.output, precision) for borders in formats.values() for precision in formats]
    backward = [(v.gradient_output, u.gradient_input) for v in formats.values() for u in formats.values()]
    return tuple(dict.fromkeys((a, b) for a, b in (*forward, *backward) if a != b))


def edge_sizes(graph: OpGraph) -> tuple[TensorSpec, ...]:
    """Results of the graph to measure casts on: real shapes, their sizes spread over the range that edges have."""
    read = {source for operator in graph for source in operator.inputs}
    by_size: dict[int, TensorSpec] = {}
    for operator in graph:
        if operator.name in read:
            for spec in operator.output_specs:
                if spec.is_floating and spec.elements:
                    by_size.setdefault(spec.elements, spec)
    sizes = sorted(by_size)
    if len(sizes) > MAX_SIZES:
        sizes = [sizes[round(i * (len(sizes) - 1) / (MAX_SIZES - 1))] for i in range(MAX_SIZES)]
    return tuple(by_size[size] for size in sizes)
