"""The fluid program of one order of stages: groups of a kind in a few classes by harm, divisible and in any place.

With z[c,j,s] groups of class c on stage j in scheme s, it is the linear program of `ilp` for a fixed order, with as
many groups of each kind on a stage as of every other, in proportion, instead of contiguity. It is small, so that a
dense simplex solves it in milliseconds. Its prices begin the bounds of `search` close to their optimum, and its numbers
of groups by stage begin the local search; neither claims anything that is not checked there.

Source: ours; the simplex method is textbook (Dantzig 1953).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.formulations.serving.tables import Array, Tables, stages_of

_CLASSES = 4
"""Classes of a kind's groups, and of those on a stage that is given."""
_UNSERVED = 100.0
"""Cost of a group that is left out, in units of the objective."""
_MOST_UNSERVED = 1e-3
_MOST_PIVOTS = 600
_TOLERANCE = 1e-9
_EVEN = 0.1
"""How far a kind may stray from its share of the groups so far, relative to its number, and count as spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fluid:
    """What the program says, about an optimum of real plans: a value, prices as in `search`, and whole groups.

    By stage: shares of the two maxima, memory prices, numbers of groups and where they end. ``schemes`` is None where
    stages were free.
    """

    objective: float
    prefill_J: Array
    decode_J: Array
    theta: float
    memory_J: Array
    harm: float
    groups_J: Array
    ends: tuple[int, ...]
    schemes: tuple[int, ...] | None


def solve_fluid(
    tables: Tables, order: tuple[int, ...], unit: float, ends: tuple[int, ...] | None = None
) -> Fluid | None:
    """The fluid program of one order, with stages as given by ``ends`` or free; None where the groups do not fit.

    ``unit`` is about the objective's size in nanoseconds.
    """
    t, stages, unit = tables.in_order(order), len(order), max(unit, 1.0)
    room_J, fixed_J2 = t.limit_T.copy(), np.zeros((stages, 2))
    room_J[0] -= t.first_memory_T[0]
    room_J[-1] -= t.last_memory_T[-1]
    if (room_J <= 0).any():
        return None
    fixed_J2[0] += t.first_T2[0]
    fixed_J2[-1] += t.last_T2[-1]
    if stages > 1:
        fixed_J2 += t.link_TT2[np.arange(stages), (np.arange(stages) + 1) % stages]
    stage_G = None if ends is None else stages_of(ends)
    class_G = _classes(t, stage_G)
    first_C = np.unique(class_G, return_index=True)[1]
    kind_C, size_C = t.kind_G[first_C], np.bincount(class_G).astype(np.float64)
    classes, schemes = len(kind_C), t.memory_KS.shape[1]
    harm_CS = np.stack([np.bincount(class_G, t.harm_GS[:, s]) for s in range(schemes)], axis=1) / size_C[:, None]
    # Which class may be on which stage: the columns are pairs of them, by scheme.
    if stage_G is None:
        class_X, stage_X = np.repeat(np.arange(classes), stages), np.tile(np.arange(stages), classes)
    else:
        class_X, stage_X = np.arange(classes), stage_G[first_C]
    pairs = len(class_X)
    at_JX = stage_X == np.arange(stages)[:, None]
    time_XS2 = t.time_KTS2[kind_C[class_X], stage_X] / unit
    memory_XS = t.memory_KS[kind_C[class_X]] / room_J[stage_X, None]
    limited = math.isfinite(t.harm_limit)
    harm_unit = max(t.harm_limit, 1e-12) if limited else 1.0
    steps, parts = t.steps, t.decode_parts
    served, extra = (1.0 if steps else 0.0), max(steps - 1, 0)
    # The columns of the two maxima and of a decode round count from their least values.
    least = fixed_J2.max(0) / unit
    least_round = max(float(fixed_J2[:, 1].sum()) / unit, parts * float(least[1]))
    weights = np.asarray([t.prefill_parts - 1, served * (parts - 1), extra], dtype=np.float64)
    even = _even_kinds(t) if stage_G is None else []
    upper = 3 * stages + 2 + int(limited)
    count = upper + classes + len(even) * (stages - 1)
    z_columns = pairs * schemes
    matrix = np.zeros((count, z_columns + 3 + count))
    right = np.ones(count)
    body = matrix[:, :z_columns].reshape(count, pairs, schemes)
    body[:stages] = at_JX[:, :, None] * memory_XS
    for phase in range(2):
        rows = slice((1 + phase) * stages, (2 + phase) * stages)
        body[rows] = at_JX[:, :, None] * time_XS2[..., phase]
        matrix[rows, z_columns + phase] = -1.0
        right[rows] = least[phase] - fixed_J2[:, phase] / unit
    body[3 * stages] = time_XS2[..., 1]
    matrix[3 * stages : 3 * stages + 2, z_columns + 2] = -1.0
    matrix[3 * stages + 1, z_columns + 1] = parts
    right[3 * stages] = least_round - fixed_J2[:, 1].sum() / unit
    right[3 * stages + 1] = least_round - parts * least[1]
    if limited:
        body[upper - 1] = harm_CS[class_X] / harm_unit
        right[upper - 1] = t.harm_limit / harm_unit
    body[upper + class_X, np.arange(pairs)] = 1.0
    right[upper : upper + classes] = size_C
    row = upper + classes
    for kind in even:
        shares = [(kind_C == k) / size_C[kind_C == k].sum() * size_C.mean() for k in (kind, int(t.kind_G[0]))]
        body[row : row + stages - 1] = (at_JX[:-1] * (shares[0] - shares[1])[class_X])[:, :, None]
        right[row : row + stages - 1] = 0.0
        row += stages - 1
    matrix[:, z_columns + 3 :] = np.eye(count)
    costs = np.zeros(matrix.shape[1])
    costs[:z_columns] = (time_XS2[..., 0] + served * time_XS2[..., 1]).ravel()
    costs[z_columns : z_columns + 3] = weights
    costs[z_columns + 3 + upper :] = _UNSERVED
    # Many equal right sides stop a simplex method for long; a little more on each row does not.
    basis, values, prices = simplex(matrix, right + 1e-7 * (1 + np.arange(count) % 7), costs)
    if values[basis >= z_columns + 3 + upper].sum() > _MOST_UNSERVED:
        return None
    amounts = np.zeros(matrix.shape[1])
    amounts[basis] = values
    z_XS = amounts[:z_columns].reshape(pairs, schemes)
    paid = np.maximum(-prices[:upper], 0.0)
    theta = min(float(paid[3 * stages] / extra), 1.0) if extra else 0.0
    emphasis = (extra * (1 - theta) * parts + parts - 1) if steps else 0.0
    constant = float(fixed_J2[:, 0].sum() + served * fixed_J2[:, 1].sum()) / unit + weights @ [*least, least_round]
    groups_J = np.bincount(stage_X, z_XS.sum(1), stages).astype(np.float64)
    chosen = stage_ends(groups_J, t.groups) if ends is None else ends
    return Fluid(
        objective=float(costs @ amounts + constant) * unit,
        prefill_J=paid[stages : 2 * stages] / max(t.prefill_parts - 1, 1),
        decode_J=paid[2 * stages : 3 * stages] / emphasis if emphasis > 0 else np.zeros(stages),
        theta=theta,
        memory_J=paid[:stages] * unit / room_J,
        harm=float(paid[upper - 1] * unit / harm_unit) if limited else 0.0,
        groups_J=groups_J,
        ends=chosen,
        schemes=None if stage_G is None else _schemes(t, stage_G, class_G, z_XS),
    )


def _classes(t: Tables, stage_G: NDArray[np.intp] | None) -> NDArray[np.intp]:
    """The class of each group: groups of a kind (and stage, where it is known) with about the same harm."""
    class_G = np.zeros(t.groups, dtype=np.intp)
    key_G = t.kind_G if stage_G is None else t.kind_G + t.groups * stage_G
    weight_G, count = t.harm_GS.max(1), 0
    for key in np.unique(key_G):
        members = np.flatnonzero(key_G == key)
        members = members[np.argsort(weight_G[members], kind="stable")]
        for part in np.array_split(members, min(_CLASSES, len(members))):
            class_G[part] = count
            count += 1
    return class_G


def _even_kinds(t: Tables) -> list[int]:
    """Kinds, beside the first group's, that come as often as that one wherever the model is cut."""
    share = np.arange(1, t.groups + 1) / t.groups
    result = []
    for kind in np.unique(t.kind_G):
        done = np.cumsum(t.kind_G == kind)
        if kind != t.kind_G[0] and np.abs(done / done[-1] - share).max() <= _EVEN + 1 / done[-1]:
            result.append(int(kind))
    return result


def simplex(matrix: Array, right: Array, costs: Array) -> tuple[NDArray[np.intp], Array, Array]:
    """Minimise ``costs`` with ``matrix x = right >= 0``, x >= 0, from the basis of the last columns.

    Returns the basis, its values and the prices of the rows.
    """
    count, columns = matrix.shape
    basis = np.arange(columns - count, columns)
    # The rows in terms of the basis, right sides in the last column, reduced costs in the last row.
    tableau = np.zeros((count + 1, columns + 1))
    tableau[:-1, :-1], tableau[:-1, -1] = matrix, right
    tableau[-1, :-1] = costs
    tableau[-1] -= costs[basis] @ tableau[:-1]
    reduced, values = tableau[-1, :-1], tableau[:-1, -1]
    # Reduced costs count by how far a column moves all others at the start: a third fewer pivots.
    scale = 1 / np.sqrt(1 + (matrix * matrix).sum(0))
    change, ratios = np.empty_like(tableau), np.empty(count)
    for _ in range(_MOST_PIVOTS):
        enter = int((reduced * scale).argmin())
        if reduced[enter] >= -_TOLERANCE:
            break
        direction = tableau[:, enter].copy()
        ratios.fill(np.inf)
        np.divide(values, direction[:-1], out=ratios, where=direction[:-1] > _TOLERANCE)
        leave = int(ratios.argmin())
        if ratios[leave] == np.inf:
            break
        tableau[leave] /= direction[leave]
        direction[leave] = 0.0
        # A product of matrices: ten times as fast as one by broadcasting.
        np.dot(direction[:, None], tableau[leave : leave + 1], out=change)
        tableau -= change
        np.maximum(values, 0.0, out=values)
        basis[leave] = enter
    return basis, values, costs[columns - count :] - reduced[columns - count :]


def stage_ends(groups_J: Array, groups: int) -> tuple[int, ...]:
    """Where stages end that have about so many groups, at least one each."""
    stages = len(groups_J)
    ends = np.round(np.cumsum(groups_J) * groups / max(float(groups_J.sum()), 1e-9)).astype(np.intp)
    ends[-1] = groups
    for j in range(stages):
        ends[j] = min(max(ends[j], (ends[j - 1] if j else 0) + 1), groups - (stages - 1 - j))
    return tuple(map(int, ends))


def _schemes(t: Tables, stage_G: NDArray[np.intp], class_G: NDArray[np.intp], z_CS: Array) -> tuple[int, ...]:
    """Whole groups: on each stage the schemes of a kind in their numbers, the least harmful for the most sensitive."""
    schemes = np.zeros(t.groups, dtype=np.intp)
    weight_G = t.harm_GS.max(1)
    likes = np.argsort(t.harm_GS.mean(0), kind="stable")
    key_G = t.kind_G + t.groups * stage_G
    for key in np.unique(key_G):
        members = np.flatnonzero(key_G == key)
        members = members[np.argsort(-weight_G[members], kind="stable")]
        amount_S = np.cumsum(z_CS[np.unique(class_G[members])].sum(0)[likes])
        borders = np.round(amount_S / max(float(amount_S[-1]), 1e-9) * len(members)).astype(int)
        for s, begin, end in zip(likes, [0, *borders[:-1]], borders, strict=True):
            schemes[members[begin:end]] = s
    return tuple(map(int, schemes))
