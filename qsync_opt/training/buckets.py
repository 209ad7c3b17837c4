"""Gradient buckets of DistributedDataParallel: what is all-reduced together, and in which order.

DistributedDataParallel regroups parameters after its first iteration in the order in which their gradients became
ready, so that order, not the one of registration, is what a training run sees. A bucket is closed once it has reached
its size: 1 MiB for the first one, so that communication starts early, 25 MiB for the others. With
``find_unused_parameters=True`` it never regroups, and the buckets are those of the registration order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from qsync_opt.errors import ProblemError
from qsync_opt.io import Json, check_fields, check_number
from qsync_opt.model import OpGraph, ParameterSpec

_TRANSPOSED = frozenset({"linear", "addmm"})
"""Kinds that transpose their weight first, so that its gradient takes one more node than that of the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """How DistributedDataParallel groups gradients.

    ``first_bytes`` and ``cap_bytes`` are the sizes at which the first and the other buckets are closed; with
    ``gradient_as_view`` gradients live in the buckets instead of beside them; with ``find_unused`` buckets keep the
    order of registration. `of_ddp` takes the arguments of DistributedDataParallel.
    """

    first_bytes: Annotated[int, Json(minimum=1)] = 2**20
    cap_bytes: Annotated[int, Json(minimum=1)] = 25 * 2**20
    gradient_as_view: bool = False
    find_unused: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "buckets")

    @classmethod
    def of_ddp(
        cls,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
    ) -> Self:
        """Options of a DistributedDataParallel that was built with these arguments.

        Only with its default cap is the first bucket smaller than the others. One whose graph is static regroups even
        if it is to find unused parameters.

        Raises:
            ProblemError: The cap is no number, or below one byte.
        """
        sizes = {}
        if bucket_cap_mb is not None:
            check_number(bucket_cap_mb, "buckets: bucket_cap_mb")
            if int(bucket_cap_mb * 2**20) < 1:
                raise ProblemError(
                    f"buckets: bucket_cap_mb is {bucket_cap_mb}, but at least one byte (2**-20) is needed"
                )
            sizes = dict.fromkeys(("first_bytes", "cap_bytes"), int(bucket_cap_mb * 2**20))
        return cls(
            gradient_as_view=gradient_as_bucket_view, find_unused=find_unused_parameters and not static_graph, **sizes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBucket:
    """Gradients that are all-reduced together; the backward of ``operator`` completes them."""

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

    A shared parameter is ready when the last of its users in the backward pass is done. Parameters that no operator
    reads come last and are counted as ready at the end of backward; DistributedDataParallel trains with such only with
    ``find_unused``, which has them ready before the backward pass.

    Gradients are counted in the parameters' own type. A bucket that is ready before its predecessor waits for it and
    has the predecessor's operator. There is none for a model without parameters.

    Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 3.2, and torch's reducer (``reducer.cpp``).
    """
    options = options or BucketOptions()
    users = gradient_users(graph)
    done = {name: first for name, (first, _) in users.items()}
    if options.find_unused:
        # Filled from the parameter that was registered first, then reversed, so that the small one is launched last.
        groups = _filled(graph.parameters, options)[::-1]
        early = len(graph) - 1
    else:
        groups = _filled(_by_readiness(graph, done), options)
        early = 0
    buckets: list[GradientBucket] = []
    position = len(graph) - 1
    for group in groups:
        position = min(position, *(done.get(parameter.name, early) for parameter in group))
        buckets.append(
            GradientBucket(
                parameters=tuple(parameter.name for parameter in group),
                num_bytes=sum(parameter.spec.num_bytes for parameter in group),
                operator=graph.operators[position].name,
            )
        )
    return tuple(buckets)


def _by_readiness(graph: OpGraph, done: Mapping[str, int]) -> list[ParameterSpec]:
    """Parameters in the order in which their gradients are ready; those that no operator reads come last."""
    within: dict[str, int] = {}
    for position, operator in enumerate(graph):
        names = reversed(operator.parameters) if operator.op_type in _TRANSPOSED else operator.parameters
        within |= {name: k for k, name in enumerate(names) if done[name] == position}
    registration = list(reversed(graph.parameters))
    return sorted(registration, key=lambda p: (-done.get(p.name, -1), within.get(p.name, 0)))


def _filled(order: Sequence[ParameterSpec], options: BucketOptions) -> list[list[ParameterSpec]]:
    groups: list[list[ParameterSpec]] = []
    free_bytes = 0
    for parameter in order:
        if free_bytes <= 0:
            free_bytes = options.cap_bytes if groups else options.first_bytes
            groups.append([])
        groups[-1].append(parameter)
        free_bytes -= parameter.spec.num_bytes
    return groups


def merge_by_operator(buckets: tuple[GradientBucket, ...]) -> tuple[tuple[GradientBucket, ...], ...]:
    """Group buckets that the same operator completes.

    They are ready at the same moment and are all-reduced one after the other, so one bucket with the sum of their times
    is equivalent; the problem format has one bucket per operator.

    Source: ours.
    """
    groups: dict[str, list[GradientBucket]] = {}
    for bucket in buckets:
        groups.setdefault(bucket.operator, []).append(bucket)
    return tuple(tuple(group) for group in groups.values())


def operator_buckets(graph: OpGraph, groups: tuple[tuple[GradientBucket, ...], ...]) -> Mapping[str, int | None]:
    """Index of the group that waits for each operator, or None.

    The completing operator decides when a group is ready. Any other operator with parameters is mapped to the group of
    the last of them, which is complete at the same time or later; an operator that completes one group and contributes
    to another is mapped to the one that it completes.
    """
    index = {parameter: k for k, group in enumerate(groups) for bucket in group for parameter in bucket.parameters}
    contributed: dict[str, int | None] = {
        operator.name: max((index[p] for p in operator.parameters), default=None) for operator in graph
    }
    return contributed | {group[0].operator: k for k, group in enumerate(groups)}
