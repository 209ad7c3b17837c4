"""Indicators of other work, computed from the same statistics: baselines for benchmarks.

Their values add up over a plan, in units of their own (`IndicatorKind.unit`).
"""

from __future__ import annotations

import hashlib

from qsync_opt.numerics import number_format
from qsync_opt.sensitivity.rounding_variance import ElementNoise, OperatorVariances
from qsync_opt.sensitivity.statistics import OPERANDS, OperatorStatistics


def hessian_increase(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Expected increase of the loss from rounding an operator's forward pass, to second order.

    ``trace(H_t) * v_t / 2``, summed over the tensors t that are rounded. A negative estimate counts as 0.

    Source:
        HAWQ-V2 (Dong et al., NeurIPS 2020), eq. of the average Hessian trace; activations and noise shapes ours.
    """
    total = 0.0
    for tensor in (*OPERANDS, "output"):
        curvature = statistics.curvatures.get(tensor)
        if curvature is None:
            continue
        for variance, shape in noise.get(tensor, ()):
            total += 0.5 * variance * (curvature.floating if shape == "floating" else curvature.uniform)
    return max(0.0, total)


def fisher_score(statistics: OperatorStatistics, results: OperatorVariances) -> float:
    """Squared output gradient times squared output error, taken as independent and summed over the output's elements.

    In squared units of the loss. 0 for a frozen operator before the first trained parameter, whose output has no
    gradient.

    Source:
        The score of NVIDIA Model Optimizer's ``auto_quantize``; there from one run of the quantized operator, here from
        its error's variance.
    """
    return statistics.output_gradient.mean_square * results.output.total


def weight_variance(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Variance of the rounded weights of an operator, summed over their elements; 0 without weights.

    Source:
        Ours, as the plainest of baselines.
    """
    total = 0.0
    for operand in ("first", "second"):
        if getattr(statistics, f"{operand}_parameter") is not None:
            elements = getattr(statistics, operand).elements
            total += elements * sum(variance for variance, _ in noise.get(operand, ()))
    return total


def random_score(operator: str, precision: str, seed: int) -> float:
    """A number in [0, 1) by operator and seed, divided by 4 for every finer precision; 0 for FP32.

    The same on every machine.
    """
    if precision == "FP32":
        return 0.0
    digest = hashlib.sha256(f"{seed}:{operator}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 4.0 ** -number_format(precision).rank
