"""Compression problems from what was measured: times of schemes by bucket size, and statistics of gradients."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from qsync_opt.errors import ProblemError
from qsync_opt.gradients.compression import BucketStatistics, GradientScheme, scheme
from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Bucket, Choice, Objective, Problem
from qsync_opt.io import Extras, Json, check_fields, decode, encode, freeze, read_json, split_extras, write_json

TIMES_FORMAT = "qsync-gradients-times/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeTimes:
    """Measured nanoseconds of reducing buckets of some sizes, by scheme; codec included.

    Reductions were timed alone. `ns` interpolates between sizes, and beyond the largest continues with the slope of the
    two largest.

    Attributes:
        slowdowns: Shares of the time of a reduction beside computation by which that takes longer, where they were
            measured.
        stretches: How many times as long a reduction takes beside computation, where that was measured.
    """

    workers: Annotated[int, Json(minimum=2)]
    elements: tuple[int, ...]
    times_ns: Mapping[str, tuple[int, ...]]
    slowdowns: Annotated[Mapping[str, float], Json(omitted=True, empty=True)] = field(default_factory=dict)
    stretches: Annotated[Mapping[str, float], Json(omitted=True, empty=True)] = field(default_factory=dict)
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "times of schemes")
        freeze(self, "times_ns", "slowdowns", "stretches", "extras")
        for name, share in self.slowdowns.items():
            if name not in self.times_ns or not 0.0 <= share <= 1.0:
                raise ProblemError(
                    f"times of schemes: the slowdown of {name!r} is {share}, but a share from 0 to 1 of a scheme that "
                    "was timed is needed"
                )
        for name, factor in self.stretches.items():
            if name not in self.times_ns or not 1.0 <= factor < math.inf:
                raise ProblemError(
                    f"times of schemes: the stretch of {name!r} is {factor}, but a factor of at least 1 of a scheme "
                    "that was timed is needed"
                )
        if len(self.elements) < 2 or any(a >= b for a, b in zip(self.elements, self.elements[1:], strict=False)):
            raise ProblemError(f"times of schemes: elements are {list(self.elements)}, but two that rise are needed")
        for name, times in self.times_ns.items():
            if len(times) != len(self.elements):
                raise ProblemError(
                    f"times of schemes: {name!r} has {len(times)} times for {len(self.elements)} sizes, but needs one "
                    "for each"
                )

    def ns(self, name: str, elements: int) -> int:
        """Nanoseconds of one bucket under the scheme of that name."""
        sizes, times = self.elements, self.times_ns[name]
        k = min(max(bisect.bisect_left(sizes, elements), 1), len(sizes) - 1)
        slope = (times[k] - times[k - 1]) / (sizes[k] - sizes[k - 1])
        estimate = times[k - 1] + slope * (elements - sizes[k - 1])
        return round(max(min(times), estimate)) if elements else 0

    def network(self, plan: Plan, elements: Sequence[int]) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Each bucket's time beside computation under a plan, and the share of it by which that takes longer.

        They are the ``allreduce_ns`` and ``share`` of `qsync_opt.steps.slowed_segments`, `network_tails` and
        `cluster_step`; ``elements`` are the buckets' sizes. A slowdown that was not measured is 0, a stretch 1.

        Raises:
            ProblemError: The plan has other buckets, or a scheme that was not timed.
        """
        names = list(plan.schemes.values())
        if len(names) != len(elements):
            raise ProblemError(f"the plan has {len(names)} buckets, but sizes are given of {len(elements)}")
        missing = next((name for name in names if name not in self.times_ns), None)
        if missing is not None:
            raise ProblemError(f"scheme {missing!r} was not timed; timed are {', '.join(self.times_ns)}")
        times_ns = tuple(
            round(self.stretches.get(name, 1.0) * self.ns(name, size))
            for name, size in zip(names, elements, strict=True)
        )
        return times_ns, tuple(self.slowdowns.get(name, 0.0) for name in names)

    @classmethod
    def from_json(cls, data: Any, where: str = "times of schemes") -> SchemeTimes:
        """Build them from the data of a file; ``where`` names the data in errors."""
        clean, extras = split_extras(data)
        return decode(cls, clean, where, version=TIMES_FORMAT, extras=extras)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return encode(self, version=TIMES_FORMAT)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)


def load_scheme_times(path: str | os.PathLike[str]) -> SchemeTimes:
    """Read and check a file of `SchemeTimes`.

    Raises:
        ProblemError: The file is missing, truncated, or holds anything else.
    """
    return SchemeTimes.from_json(read_json(path, (TIMES_FORMAT,)), os.fspath(path))


def build_problem(
    statistics: Sequence[BucketStatistics],
    times: SchemeTimes,
    ready_ns: Sequence[int],
    compute_end_ns: int,
    *,
    name: str = "gradients",
    tail_ns: int = 0,
    latency_limit_ns: int | None = None,
    noise_share: float | None = None,
    weights: Sequence[float] | None = None,
    schemes: Iterable[GradientScheme | str] | None = None,
) -> Problem:
    """The compression problem of a step.

    Args:
        statistics: Of each bucket, in the order of reduction.
        times: Of the schemes on the job's links.
        ready_ns: When the backward pass has each bucket ready.
        compute_end_ns: When the backward pass ends.
        name: Of the problem.
        tail_ns: What follows the last reduction, such as the optimizer's step.
        latency_limit_ns: Minimise the variance with iterations no longer than this.
        noise_share: Minimise the iteration with no more variance than this share of the gradients' own noise.
        weights: What a bucket's variance counts, to bring it into the units of a sensitivity; 1 by default.
        schemes: Those to choose from; all that were timed by default.

    Raises:
        ProblemError: Numbers of buckets differ, both or no limits are given, or a scheme was not timed.

    Source: ours.
    """
    if len(statistics) != len(ready_ns) or (weights is not None and len(weights) != len(statistics)):
        raise ProblemError(
            f"{len(statistics)} buckets have statistics, {len(ready_ns)} a time at which they are ready"
            + ("" if weights is None else f" and {len(weights)} a weight")
            + "; each bucket needs all of them"
        )
    if (latency_limit_ns is None) == (noise_share is None):
        raise ProblemError("give either latency_limit_ns or noise_share: the other quantity is minimised")
    chosen = [scheme(each) for each in (times.times_ns if schemes is None else schemes)]
    for each in chosen:
        if each.name not in times.times_ns:
            raise ProblemError(f"scheme {each.name!r} was not timed; timed are {', '.join(times.times_ns)}")
    usable = [each for each in chosen if each.supports(times.workers)]
    factors = [1.0] * len(statistics) if weights is None else list(weights)
    buckets = tuple(
        Bucket(
            name=f"b{k}",
            ready_ns=ready,
            choices={
                each.name: Choice(
                    time_ns=times.ns(each.name, bucket.elements),
                    variance=factor * each.mean_variance(bucket, times.workers),
                )
                for each in usable
            },
        )
        for k, (bucket, ready, factor) in enumerate(zip(statistics, ready_ns, factors, strict=True))
    )
    limit = None
    if noise_share is not None:
        limit = noise_share * sum(f * bucket.noise for f, bucket in zip(factors, statistics, strict=True))
    return Problem(
        name=name,
        compute_end_ns=compute_end_ns,
        tail_ns=tail_ns,
        latency_limit_ns=latency_limit_ns,
        variance_limit=limit,
        objective=Objective.VARIANCE if noise_share is None else Objective.LATENCY,
        buckets=buckets,
        extras={("x-workers",): times.workers, ("x-elements",): [bucket.elements for bucket in statistics]},
    )


def uniform_plan(name: str, elements: Sequence[int], workers: int) -> Plan:
    """The plan that gives every bucket one scheme.

    Raises:
        UnsupportedError: No such scheme.
    """
    scheme(name)
    return Plan(schemes={f"b{k}": name for k in range(len(elements))}, workers=workers, elements=tuple(elements))
