"""Where is a node of the search tree split? At a join that the dual's plans disagree about, or at the widest choice.

Axes: Z table entries.

Source: ours.
"""

import numpy as np

from qsync_opt.formulations.assignment.dual import DualResult
from qsync_opt.formulations.assignment.model import AssignmentModel, Bools, Ints

SHARE = 1e-3
"""Plans with a smaller weight in the dual do not count."""


def fractional_join(model: AssignmentModel, dual: DualResult) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split at the middle join that the dual's plans disagree about.

    The first side keeps the value that has the larger share of the dual's plans.
    """
    used = [(w, p) for w, p in zip(dual.weights_I, dual.plans, strict=True) if w > SHARE]
    split = []
    for item in model.derived:
        share: dict[int, float] = {}
        for weight, plan in used:
            group = item.group_L[plan.labels_N[item.node]]
            share[group] = share.get(group, 0.0) + float(weight)
        if len(share) > 1:
            split.append((item, max(share, key=lambda group: (share[group], group))))
    if not split:
        return None
    item, group = split[len(split) // 2]
    inside = np.array(item.group_L) == group
    offset = model.offset_N[item.node]
    return offset + np.flatnonzero(~inside), offset + np.flatnonzero(inside)


def widest_choice(model: AssignmentModel, allowed_Z: Bools) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split at the undecided node with the largest swing in objective."""
    best: tuple[float, Ints] | None = None
    for node in range(model.num_nodes):
        entry = np.arange(model.sizes_N[node]) + model.offset_N[node]
        left = entry[allowed_Z[entry]]
        if len(left) > 1:
            swing = float(np.ptp(model.objective_Z[left]))
            if best is None or swing > best[0]:
                best = swing, left
    if best is None:
        return None
    cheap = best[1][model.objective_Z[best[1]].argmin()]
    return np.array([cheap]), best[1][best[1] != cheap]
