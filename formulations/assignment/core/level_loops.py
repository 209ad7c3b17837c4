"""The inner loops of `levels`: tables of least costs over points and levels, and the paths that have them.

Levels below a table count as its first one; the last level stands for itself and all above, so nothing is ever taken
from it. Axes: S points, M levels, K arcs, T steps.
"""

import numpy as np

from qsync_opt.formulations.assignment.compiled import compiled
from qsync_opt.formulations.assignment.model import Floats, Ints


def _after(num_levels: int, weight: int) -> Ints:
    """Where an arc leads from each level."""
    after: Ints = np.clip(np.arange(num_levels) - weight, 0, num_levels - 1)
    after[-1] = num_levels - 1
    return after


def _completions_plain(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, lowest: int,
    table_SM: Floats,
) -> None:  # fmt: skip
    num_levels = table_SM.shape[1]
    table_SM[-1] = np.where(np.arange(num_levels) + lowest >= 0, 0.0, np.inf)
    for step in range(len(first_T1) - 2, -1, -1):
        table_SM[point_T1[step] : point_T1[step + 1]] = np.inf
        for arc in range(first_T1[step], first_T1[step + 1]):
            after = _after(num_levels, weight_K[arc])
            row = table_SM[source_K[arc]]
            np.minimum(row, table_SM[target_K[arc]][after] + cost_K[arc], out=row)


@compiled(
    "void(int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])",
    plain=_completions_plain,
)
def completions(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, lowest: int,
    table_SM: Floats,
) -> None:  # fmt: skip
    """Least cost from each point to the end for each level of the row left, in place."""
    num_levels = table_SM.shape[1]
    for level in range(num_levels):
        table_SM[len(table_SM) - 1, level] = 0.0 if level + lowest >= 0 else np.inf
    for step in range(len(first_T1) - 2, -1, -1):
        for point in range(point_T1[step], point_T1[step + 1]):
            table_SM[point, :] = np.inf
        for arc in range(first_T1[step], first_T1[step + 1]):
            weight, cost = weight_K[arc], cost_K[arc]
            row, after = table_SM[source_K[arc]], table_SM[target_K[arc]]
            low = max(0, min(num_levels - 1, weight))
            high = max(low, min(num_levels - 1, num_levels + weight))
            value = after[0] + cost
            for level in range(low):
                row[level] = min(row[level], value)
            # Slices of their own: numbers from 0 on need no care for negative ones, and the loop becomes vectors.
            here, there = row[low:high], after[low - weight : high - weight]
            for level in range(high - low):
                here[level] = min(here[level], there[level] + cost)
            value = after[num_levels - 1] + cost
            here = row[high:]
            for level in range(num_levels - high):
                here[level] = min(here[level], value)


def _path_plain(
    first_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int, table_SM: Floats
) -> Ints:
    last = table_SM.shape[1] - 1
    arcs_T = np.zeros(len(first_T1) - 1, dtype=np.int64)
    point = 0
    for step in range(len(arcs_T)):
        arcs = np.arange(first_T1[step], first_T1[step + 1])
        arcs = arcs[source_K[arcs] == point]
        after = np.clip(level - weight_K[arcs], 0, last) if level < last else np.full(len(arcs), last)
        best = int((cost_K[arcs] + table_SM[target_K[arcs], after]).argmin())
        arcs_T[step] = arcs[best]
        point, level = int(target_K[arcs[best]]), int(after[best])
    return arcs_T


@compiled(
    "int64[::1](int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])", plain=_path_plain
)
def path(
    first_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int, table_SM: Floats
) -> Ints:
    """The arcs of a least path from the first point and a level; its cost must be finite."""
    last = table_SM.shape[1] - 1
    arcs_T = np.zeros(len(first_T1) - 1, dtype=np.int64)
    point = 0
    for step in range(len(arcs_T)):
        best, chosen = np.inf, first_T1[step]
        for arc in range(first_T1[step], first_T1[step + 1]):
            if source_K[arc] == point:
                after = max(0, min(last, level - weight_K[arc])) if level < last else last
                value = cost_K[arc] + table_SM[target_K[arc], after]
                if value < best:
                    best, chosen = value, arc
        arcs_T[step] = chosen
        if level < last:
            level = max(0, min(last, level - weight_K[chosen]))
        point = target_K[chosen]
    return arcs_T


def _least_plain(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int,
    table_SM: Floats,
) -> Floats:  # fmt: skip
    num_levels = table_SM.shape[1]
    least_K = np.full(len(source_K), np.inf)
    before_SM = np.full((point_T1[1], num_levels), np.inf)
    before_SM[0, level] = 0.0
    for step in range(len(first_T1) - 1):
        here, there = point_T1[step], point_T1[step + 1]
        end = point_T1[step + 2] if step + 2 < len(point_T1) else there + 1
        after_SM = np.full((end - there, num_levels), np.inf)
        for arc in range(first_T1[step], first_T1[step + 1]):
            to = _after(num_levels, weight_K[arc])
            reached = before_SM[source_K[arc] - here] + cost_K[arc]
            least_K[arc] = (reached + table_SM[target_K[arc]][to]).min()
            np.minimum.at(after_SM[target_K[arc] - there], to, reached)
        before_SM = after_SM
    return least_K


@compiled(
    "float64[::1](int64[::1],int64[::1],int64[::1],int64[::1],int64[::1],float64[::1],int64,float64[:,::1])",
    plain=_least_plain,
)
def least_through(
    first_T1: Ints, point_T1: Ints, source_K: Ints, target_K: Ints, weight_K: Ints, cost_K: Floats, level: int,
    table_SM: Floats,
) -> Floats:  # fmt: skip
    """Least cost of a path from the first point and a level to the end that takes each arc."""
    num_levels = table_SM.shape[1]
    least_K = np.full(len(source_K), np.inf)
    before_SM = np.full((point_T1[1], num_levels), np.inf)
    before_SM[0, level] = 0.0
    sums, lanes = np.empty(num_levels), np.full(8, np.inf)
    for step in range(len(first_T1) - 1):
        first, second = point_T1[step], point_T1[step + 1]
        end = point_T1[step + 2] if step + 2 < len(point_T1) else second + 1
        after_SM = np.full((end - second, num_levels), np.inf)
        for arc in range(first_T1[step], first_T1[step + 1]):
            weight, cost, least = weight_K[arc], cost_K[arc], np.inf
            before, after = before_SM[source_K[arc] - first], after_SM[target_K[arc] - second]
            rest = table_SM[target_K[arc]]
            low = max(0, min(num_levels - 1, weight))
            high = max(low, min(num_levels - 1, num_levels + weight))
            for level_before in range(low):
                reached = before[level_before] + cost
                least = min(least, reached + rest[0])
                after[0] = min(after[0], reached)
            # As in `completions`; the sums stand apart from their least one, which takes one after the other.
            here, there, to = before[low:high], rest[low - weight : high - weight], after[low - weight : high - weight]
            for level_before in range(high - low):
                reached = here[level_before] + cost
                sums[level_before] = reached + there[level_before]
                to[level_before] = min(to[level_before], reached)
            for level_before in range(0, high - low - 7, 8):
                for lane in range(8):
                    lanes[lane] = min(lanes[lane], sums[level_before + lane])
            for level_before in range((high - low) // 8 * 8, high - low):
                least = min(least, sums[level_before])
            for lane in range(8):
                least = min(least, lanes[lane])
                lanes[lane] = np.inf
            for level_before in range(high, num_levels):
                reached = before[level_before] + cost
                least = min(least, reached + rest[num_levels - 1])
                after[num_levels - 1] = min(after[num_levels - 1], reached)
            least_K[arc] = least
        before_SM = after_SM
    return least_K
