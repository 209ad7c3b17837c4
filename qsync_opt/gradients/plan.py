"""Compression plans: the scheme of each gradient bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError, first_few
from qsync_opt.gradients.problem import Choice, Problem
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    check_fields,
    freeze,
    near_match,
)

PLAN_FORMAT = "qsync-gradients-plan/1"
_JOB_KEYS = ("x-workers", "x-elements")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """Bucket to scheme, in the order of reduction.

    ``workers`` is the number that it was made for and ``elements`` the buckets' sizes, where they are known: the scales
    of a sum depend on the first, and a job whose buckets differ from the second is refused.
    """

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    schemes: Mapping[Name, Name]
    workers: Annotated[int | None, Json(key="x-workers", omitted=True, minimum=1)] = None
    elements: Annotated[tuple[int, ...] | None, Json(key="x-elements", omitted=True)] = None
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.schemes:
            raise ProblemError("the plan has no schemes; it must name one for each bucket")
        check_fields(self, "plan")
        freeze(self, "schemes", "extras")
        if self.elements is not None and len(self.elements) != len(self.schemes):
            raise ProblemError(
                f"the plan has schemes for {len(self.schemes)} buckets and sizes of {len(self.elements)}, "
                "but both must be of the same buckets"
            )

    def resolve(self, problem: Problem) -> tuple[Choice, ...]:
        """The choice of each bucket, in the problem's order.

        Raises:
            ProblemError: The plan is for other buckets, or picks a scheme that a bucket lacks; the text names them.
        """
        known = {bucket.name: bucket for bucket in problem.buckets}
        unknown = [repr(name) for name in self.schemes if name not in known]
        absent = [repr(name) for name in known if name not in self.schemes]
        if unknown or absent:
            faults = [f"it names {first_few(unknown)}, which the problem lacks"] if unknown else []
            faults += [f"it lacks {first_few(absent)}"] if absent else []
            raise ProblemError(
                f"the plan does not fit problem {problem.name!r}: {'; '.join(faults)}; name a scheme for each bucket"
            )
        result = []
        for name, bucket in known.items():
            scheme = self.schemes[name]
            if scheme not in bucket.choices:
                raise ProblemError(
                    f"bucket {name!r}: the plan picks {scheme!r}{near_match(scheme, bucket.choices)}; allowed are "
                    f"{', '.join(bucket.choices)}"
                )
            result.append(bucket.choices[scheme])
        return tuple(result)

    @classmethod
    def reads_extra(cls, path: tuple[str, ...]) -> bool:
        """What the plan's job was stands under extension keys."""
        return len(path) == 1 and path[0] in _JOB_KEYS

    def made_for(self, problem: Problem) -> Plan:
        """The plan with the number of workers and the sizes that ``problem`` was built from, where it says so."""
        workers, elements = (problem.extras.get((key,)) for key in _JOB_KEYS)
        return replace(self, workers=workers, elements=None if elements is None else tuple(elements))
