"""The indicators that others use, from the same statistics: to compare with, or to plan by if a user prefers them.

Their values add up over a plan like the variance increment's, but in units of their own (`IndicatorKind.unit`):

- ``hessian``: expected increase of the loss to second order, ``trace(H_t) * v_t / 2`` summed over the tensors t that an
  operator rounds in its forward pass (HAWQ-V2's trace times perturbation, extended from weights to activations);
- ``fisher``: ``sum g^2 e^2`` over an operator's output, with its gradient g and its error e (the score by which NVIDIA
  Model Optimizer's ``auto_quantize`` ranks layers), the two taken as independent;
- ``weight``: variance of the rounded weights alone; operators without weights get 0;
- ``random``: a number per operator that means nothing, falling by 4 with every finer precision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from qsync_opt.numerics import number_format
from qsync_opt.sensitivity.rounding_variance import OperatorVariances
from qsync_opt.sensitivity.statistics import OPERANDS, OperatorStatistics

ElementNoise = Mapping[str, tuple[tuple[float, str], ...]]
"""Per tensor that an operator rounds: variance per element and shape of the noise, one pair per rounding."""


def hessian_increase(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Expected increase of the loss from rounding an operator's forward pass, to second order.

    A negative estimate counts as 0: rounding is not taken for a gain.

    Args:
        statistics: The operator's, with curvatures.
        noise: Variance per element of what it rounds.

    Returns:
        Units of the loss.

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


def fisher_score(statistics: OperatorStatistics, found: OperatorVariances) -> float:
    """Squared output gradient times squared output error, summed over the output's elements.

    0 for a frozen operator before the first trained parameter: in training its result gets no gradient.

    Args:
        statistics: The operator's.
        found: Its variances at the precision.

    Returns:
        Squared units of the loss.

    Source:
        The score of NVIDIA Model Optimizer's ``auto_quantize``; there from one run of the quantized operator, here from
        its error's variance.
    """
    return statistics.output_gradient.mean_square * found.output.total


def weight_variance(statistics: OperatorStatistics, noise: ElementNoise) -> float:
    """Variance of the rounded weights of an operator, summed over their elements; 0 without weights.

    Args:
        statistics: The operator's.
        noise: Variance per element of what it rounds.

    Returns:
        Squared units of the weights.

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
    """A number in [0, 1) that depends on operator and seed alone, divided by 4 for every finer precision.

    The same on every machine. FP32 is 0, as with every other indicator.
    """
    if precision == "FP32":
        return 0.0
    digest = hashlib.sha256(f"{seed}:{operator}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 4.0 ** -number_format(precision).rank
