"""Where is a node of the search tree split? At a join that the dual's plans disagree about, or at the widest choice.

Axes: Z table entries.

Source: ours.
"""

import numpy as np

from qsync_opt.formulations.assignment.core.condense import Condensed
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


def split_count(model: AssignmentModel, core: Condensed, dual: DualResult) -> tuple[Ints, Ints] | None:
    """Entries to forbid on either side of a split by how many copies of a part take a label at one of its nodes.

    Equal parts can be exchanged. So either at least k copies take the label, and then those may be the first k, or
    all but k - 1 do not, and then those may be the copies from number k - 1 on. The label and k are chosen where the
    dual's plans take a fraction of a copy on average, and its weight in the objective is large.

    Args:
        model: The problem.
        core: A core of all that is undecided, condensed.
        dual: The dual, with its plans and their weights.

    Returns:
        The two sides, or None if no class is split by the dual's plans.

    Source: orbital branching (Ostrowski et al. 2011), for copies of equal parts.
    """
    used = [(w, p) for w, p in zip(dual.weights_I, dual.plans, strict=True) if w > SHARE]
    if not used or not core.classes:
        return None
    weight_I = np.array([w for w, _ in used])
    weight_I /= weight_I.sum()
    labels_IN = np.stack([p.labels_N for _, p in used])
    nodes = core.original.nodes
    best: tuple[float, Ints, int, int] | None = None
    for copies in core.classes:
        for place in range(copies.shape[1]):
            labels_A = nodes[copies[0, place]].labels_A
            if any(not np.array_equal(nodes[c].labels_A, labels_A) for c in copies[:, place].tolist()):
                continue
            numbers = np.array([nodes[c].node for c in copies[:, place].tolist()])
            offset = model.offset_N[numbers[0]]
            for label in labels_A.tolist():
                mean = float(weight_I @ (labels_IN[:, numbers] == label).sum(axis=1))
                swing = abs(float(model.objective_Z[offset + label] - model.objective_Z[offset + labels_A[0]]))
                score = min(mean % 1.0, 1.0 - mean % 1.0) * (
                    swing or float(np.ptp(model.objective_Z[offset + labels_A]))
                )
                if score > 1e-6 * swing and (best is None or score > best[0]):
                    best = score, numbers, label, int(mean) + 1
    if best is None:
        return None
    _, numbers, label, least = best
    others = [a for a in range(int(model.sizes_N[numbers[0]])) if a != label]
    forced = (model.offset_N[numbers[:least], None] + np.array(others, dtype=np.int64)).ravel()
    return forced, model.offset_N[numbers[least - 1 :]] + label
