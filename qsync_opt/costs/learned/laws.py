"""Laws: the time of a kernel as a sum of terms with weights that are not negative, in three widths of validity.

A *kernel* is a kind of operator in one precision and pass. Its law on a device is fitted to its times there, held near
the law of the same kernel on all devices of the kind, which is held near the law of all kernels of its class (products,
streams, ...). So few times move a law a little and many decide it, and whatever is unknown on one level has the next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qsync_opt.costs.learned.programs import LeafKind, Phase, Program
from qsync_opt.costs.learned.terms import Matrix
from qsync_opt.errors import NotInstalledError
from qsync_opt.numerics import number_format

PRIOR = 1.0
"""As how many measured times the wider law counts."""
_ROUNDS = 8
_RIDGE = 1e-9
_SMALL_ERROR = 0.05
"""Relative error below which it counts squared."""


def class_of(program: Program) -> str:
    """What the main work of a program is: ``product``, ``pointwise``, ``stream`` or ``view``; casts and sums are apart.

    On a card their times are those of the host where it takes longer, and so tell nothing about operators.
    """
    if program.phase in (Phase.CAST, Phase.SUM):
        return str(program.phase)
    if any(leaf.kind.is_product for leaf in program.leaves):
        return "product"
    if not program.moves_data:
        return "view"
    return "pointwise" if all(leaf.kind is LeafKind.POINTWISE for leaf in program.leaves) else "stream"


def kernel_of(program: Program) -> str:
    """The kernel of a program: kind of operator, precision (of a cast with its source) and pass; views are apart."""
    read = f"{program.leaves[0].number_format}>" if program.phase is Phase.CAST else ""
    form = number_format(program.precision)
    # Whether the backward pass is in 8 bits makes no difference to the forward pass.
    same = form.eight_bit_backward and program.phase is Phase.FORWARD
    view = " view" if program.leaves and not program.moves_data else ""
    return f"{program.family} {read}{form.operands if same else program.precision} {program.phase}{view}"


def class_name(program: Program) -> str:
    """The class of a kernel: what its main work is, in which format, and the pass (forward, of casts and sums).

    Views, which touch no data, have one class.
    """
    if class_of(program) == "view":
        return "view"
    formats = [leaf.number_format for leaf in program.leaves if leaf.kind.is_product]
    name = formats[0] if formats else program.leaves[0].number_format
    # Products in 8 bits of a backward pass are of the same class as those of forward passes.
    backward = program.phase is Phase.BACKWARD and not (formats and number_format(name).bits == 8)
    return f"{class_of(program)} {name} {Phase.BACKWARD if backward else Phase.FORWARD}"


def fit_law(terms_NT: Matrix, ns_N: Matrix, prior_T: Matrix | None = None) -> Matrix:
    """Weights that are not negative, shape (T,), with the least mean relative error, held near ``prior_T``.

    Large errors count by their size and not squared, so that disturbed times do not decide. The prior is scaled to the
    times first.

    Raises:
        NotInstalledError: scipy is missing.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as failure:
        raise NotInstalledError(
            "fitting learned costs needs the package 'scipy'; install it: pip install 'qsync-opt[learned]'"
        ) from failure
    shares_NT = terms_NT / ns_N[:, None]
    used = np.flatnonzero(shares_NT.max(axis=0) > 0)
    if prior_T is not None:
        used = np.union1d(used, np.flatnonzero(prior_T))
    shares_NU = shares_NT[:, used]
    held_UU, goal_U = np.zeros((len(used), len(used))), np.zeros(len(used))
    if prior_T is not None:
        scaled_U = prior_T[used] * _level(shares_NU @ prior_T[used], len(ns_N))
        held_UU = np.diag(PRIOR * np.maximum(shares_NU.mean(axis=0), 1e-9) ** 2)
        goal_U = held_UU @ scaled_U
    weight_N = np.ones(len(ns_N))
    for _ in range(_ROUNDS):
        # Least squares in as many rows as terms: the Cholesky factor of the normal equations, columns of one length.
        weighted_UN = shares_NU.T * (weight_N / weight_N.mean())
        normal_UU = weighted_UN @ shares_NU + held_UU
        length_U = np.sqrt(np.maximum(np.diag(normal_UU), 1e-300))
        normal_UU /= np.outer(length_U, length_U)
        factor_UU = np.linalg.cholesky(normal_UU + _RIDGE * np.eye(len(used)))
        right_U = np.linalg.solve(factor_UU, (weighted_UN.sum(axis=1) + goal_U) / length_U)
        weights_U = nnls(factor_UU.T, right_U)[0] / length_U
        ratio_N = np.maximum(shares_NU @ weights_U, 1e-6)
        weight_N = 1.0 / np.maximum(np.abs(np.log(ratio_N)), _SMALL_ERROR)
    result = np.zeros(terms_NT.shape[1])
    result[used] = weights_U * _level(shares_NU @ weights_U, len(ns_N))
    return result


def _level(ratios_N: NDArray[np.float64], count: int) -> float:
    """The factor that brings ratios of predicted over measured times to a median of one; near one for few."""
    middle = float(np.median(np.log(np.maximum(ratios_N, 1e-9))))
    return float(np.exp(-middle * count / (count + 1)))
