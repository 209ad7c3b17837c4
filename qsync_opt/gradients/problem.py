"""The compression problem of one training step: each gradient bucket takes one scheme, by its time and variance.

Buckets are reduced in order on one stream. Times are integer nanoseconds; a variance is that of the averaged gradient,
in squared units of the gradient (or weighted, in units of the sensitivity: all buckets alike).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    LARGEST_INTEGER,
    Document,
    Extras,
    Json,
    Name,
    Optimum,
    check_fields,
    freeze,
)

PROBLEM_FORMAT = "qsync-gradients/1"


class Objective(enum.StrEnum):
    """What is minimised."""

    VARIANCE = "variance"
    """The sum of variances, with iterations no longer than ``latency_limit_ns``."""
    LATENCY = "latency"
    """The time of an iteration, with a sum of variances no larger than ``variance_limit``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one scheme costs in one bucket: nanoseconds, codec included, and variance of the averaged gradient."""

    time_ns: int
    variance: float

    def __post_init__(self) -> None:
        check_fields(self, "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A gradient bucket: when the backward pass has it ready, and its choices by the name of the scheme."""

    name: Name
    ready_ns: int
    choices: Mapping[Name, Choice]

    def __post_init__(self) -> None:
        check_fields(self, f"bucket {self.name!r}")
        if not self.choices:
            raise ProblemError(f"bucket {self.name!r}: choices is empty, but a bucket needs at least one scheme")
        freeze(self, "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Document):
    """A compression problem, checked.

    ``compute_end_ns`` is when the backward pass ends, ``tail_ns`` what follows the last all-reduce. Only the limit on
    what is not the objective counts; None is no limit.

    Raises:
        ProblemError: A rule of the format is broken; the text names the bucket.

    Source: the file format of this package, "qsync-gradients/1".
    """

    FORMAT: ClassVar = PROBLEM_FORMAT
    KIND: ClassVar = "problem"

    name: Name
    compute_end_ns: int
    tail_ns: int
    latency_limit_ns: int | None
    variance_limit: float | None
    objective: Objective
    buckets: tuple[Bucket, ...]
    optimum: Annotated[Optimum | None, Json(optional=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "problem")
        object.__setattr__(self, "buckets", tuple(self.buckets))
        freeze(self, "extras")
        if not self.buckets:
            raise ProblemError(f"problem {self.name!r} has no buckets; there is nothing to reduce")
        names = [bucket.name for bucket in self.buckets]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ProblemError(f"bucket {twice!r} is named twice; names must be unique")
        longest = sum(max(choice.time_ns for choice in bucket.choices.values()) for bucket in self.buckets)
        longest += max(self.compute_end_ns, *(bucket.ready_ns for bucket in self.buckets)) + self.tail_ns
        if longest > LARGEST_INTEGER // 2:
            raise ProblemError(f"times add up to {longest:.1e} ns, but sums must be below 2**62; check units")
        largest = math.fsum(max(c.variance for c in bucket.choices.values()) / len(names) for bucket in self.buckets)
        if not math.isfinite(largest * len(names)):
            raise ProblemError("the variances add up to infinity; scale all of them by one factor")
