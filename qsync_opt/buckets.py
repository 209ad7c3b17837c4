"""Which gradients are all-reduced together, and in which order: the buckets of DistributedDataParallel.

DistributedDataParallel regroups parameters after its first iteration in the order in which gradients became ready, so
that order, not the one of registration, is what a training run sees. A bucket is closed once it has reached its size:
1 MiB for the first one, so that communication starts early, 25 MiB for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync_opt.graph import OpGraph
from qsync_opt.jsonio import check_integer

FIRST_BUCKET_BYTES = 1024 * 1024
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """How DistributedDataParallel groups gradients.

    ``first_bytes`` and ``cap_bytes`` are the sizes at which the first and the other buckets are closed (the latter is
    ``bucket_cap_mb``); with ``gradient_as_view`` gradients live in the buckets instead of beside them.
    """

    first_bytes: int = FIRST_BUCKET_BYTES
    cap_bytes: int = BUCKET_BYTES
    gradient_as_view: bool = False

    def __post_init__(self) -> None:
        check_integer(self.first_bytes, "buckets: first_bytes", minimum=1)
        check_integer(self.cap_bytes, "buckets: cap_bytes", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Gradients that are all-reduced in one go; ``operator`` is the one whose backward completes them."""

    parameters: tuple[str, ...]
    num_bytes: int
    operator: str


def gradient_users(graph: OpGraph) -> dict[str, tuple[int, int]]:
    """First and last position, in forward order, at which each used parameter is read.

    Backward runs in reverse, so the gradient starts to exist at the last position and is complete at the first.
    """
    users: dict[str, tuple[int, int]] = {}
    for position, operator in enumerate(graph):
        for parameter in operator.parameters:
            users[parameter] = (users.get(parameter, (position, position))[0], position)
    return users


def gradient_buckets(graph: OpGraph, options: BucketOptions | None = None) -> tuple[GradientBucket, ...]:
    """Buckets in the order in which they become ready and are launched.

    Parameters that no operator reads come last and are counted as ready at the end of backward.

    Args:
        graph: The model.
        options: Sizes at which buckets are closed.

    Returns:
        One bucket per group; gradients are counted in the parameters' own type. Empty for a model without parameters.

    Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2, and the observed regrouping of torch's reducer.
    """
    options = options or BucketOptions()
    users = gradient_users(graph)
    # Within one operator the later parameter (bias) is ready before the earlier one (weight).
    registration = list(reversed(graph.parameters))
    order = sorted(registration, key=lambda p: -users.get(p.name, (-1, -1))[0])
    buckets: list[GradientBucket] = []
    names: list[str] = []
    size = 0
    for i, parameter in enumerate(order):
        names.append(parameter.name)
        size += parameter.spec.num_bytes
        if size >= (options.cap_bytes if buckets else options.first_bytes) or i == len(order) - 1:
            position = max(0, users.get(parameter.name, (0, 0))[0])
            buckets.append(
                GradientBucket(parameters=tuple(names), num_bytes=size, operator=graph.operators[position].name)
            )
            names, size = [], 0
    return tuple(buckets)


def merge_by_operator(buckets: tuple[GradientBucket, ...]) -> tuple[tuple[GradientBucket, ...], ...]:
    """Group buckets that the same operator completes.

    They are ready at the same moment and go over the network one after the other, so one bucket with the sum of their
    times says the same; the problem format has room for one bucket per operator.

    Source: ours.
    """
    groups: dict[str, list[GradientBucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.operator, []).append(bucket)
    return tuple(tuple(group) for group in groups.values())


def operator_buckets(graph: OpGraph, groups: tuple[tuple[GradientBucket, ...], ...]) -> Mapping[str, int | None]:
    """Index of the group that waits for each operator, or None.

    The completing operator decides when a group is ready. Another operator with parameters is mapped to the group that
    holds the last of them, which is complete at the same time or later, so nothing is moved by it; an operator that
    completes one group and contributes to another keeps the one that it completes.
    """
    index = {parameter: k for k, group in enumerate(groups) for bucket in group for parameter in bucket.parameters}
    mapped: dict[str, int | None] = {
        operator.name: max((index[p] for p in operator.parameters), default=None) for operator in graph
    }
    for k, group in enumerate(groups):
        mapped[group[0].operator] = k
    return mapped
