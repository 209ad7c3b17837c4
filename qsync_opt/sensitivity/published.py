"""QSync's indicator as it was released with the paper, to compare with; `sensitivities` has better ones.

Known mistakes, which are kept: norms are not squared where their squares are meant; the product of a norm and a number
of elements is too large by the contraction length, which differs between operators; the exponent itself stands for the
step of a floating-point grid, without its sign and at most 5; 9 mantissa bits stand for the 10 of FP16; the gradient's
exponent in 8 bits is that of the input; the weight's gradient stands for that of the output, and nothing for the noise
that goes on to operators before; an operator without weights has no value. Depths are layers by the shortest path, so
that a residual branch makes an operator shallow. (The release pairs some depths with other operators, and leaves them
out of convolutional networks; here every operator has its own.)

Source: QSync (IPDPS 2024), the indicator GVAR of its public release.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

from qsync_opt.model import OpGraph
from qsync_opt.numerics import number_format
from qsync_opt.sensitivity.statistics import OperatorStatistics

_LARGEST_EXPONENT = 5
_BITS = {"FP16": 9}
"""Mantissa bits that the release assumes, where they are not those of the format."""


class PublishedScore(NamedTuple):
    """The two terms of the indicator, each with its factor of depth."""

    forward: float
    backward: float


def layers(graph: OpGraph) -> Mapping[str, int]:
    """Layer of every operator: the number of edges of the shortest path from an operator that reads none."""
    depth: dict[str, int] = {}
    for operator in graph:
        depth[operator.name] = 1 + min((depth[source] for source in operator.inputs), default=-1)
    return depth


def published_score(
    statistics: OperatorStatistics, precision: str, layer: int, last_layer: int, gamma: float
) -> PublishedScore:
    """``gamma * (L - d) * forward + d * backward`` of one operator.

    ``layer`` and ``last_layer`` are d and L of `layers`, ``gamma`` the release's 4. Zero in FP32 and without weights,
    so that such an operator is never raised.
    """
    if precision == "FP32" or statistics.second_parameter is None or statistics.second_gradient is None:
        return PublishedScore(0.0, 0.0)
    x, w, gradient = statistics.first, statistics.second, statistics.second_gradient
    norm_x, norm_w, norm_g = (math.sqrt(tensor.square_sum) for tensor in (x, w, gradient))
    e_x, e_w = (_exponent(math.sqrt(norm / tensor.elements)) for norm, tensor in ((norm_x, x), (norm_w, w)))
    form = number_format(precision)
    if form.is_integer:
        step_x, step_w = x.amax / 127, w.amax / 127
        grid = 2.0 ** (-2 * _BITS["FP16"])  # the backward pass is in FP16
        forward = norm_w * step_x**2 * x.elements + norm_x * step_w**2 * w.elements
        backward = norm_g * step_x**2 * x.elements + norm_x * 4.0**e_x * grid * statistics.output.elements
    else:
        grid = 2.0 ** (-2 * _BITS.get(precision, form.mantissa_bits))
        forward = grid * (norm_w * x.elements * e_x + norm_x * w.elements * e_w)
        e_g = _exponent(gradient.amax)
        backward = grid * (norm_g * x.elements * e_x + norm_x * statistics.output.elements * e_g)
    return PublishedScore(gamma * (last_layer - layer) * forward / 6, layer * backward / 6)


def _exponent(value: float) -> int:
    """Magnitude of the binary exponent of a number in FP16, at most 5."""
    half = struct.unpack("e", struct.pack("e", min(value, 65504.0)))[0]
    return min(_LARGEST_EXPONENT, abs(math.frexp(half)[1]))
