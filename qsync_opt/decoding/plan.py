"""Plans of speculation: one choice per regime, or plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.decoding.problem import Choice, Problem
from qsync_opt.errors import ProblemError
from qsync_opt.io import (
    Document,
    Extras,
    Json,
    Name,
    check_fields,
    freeze,
)

PLAN_FORMAT = "qsync-decoding-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A draft and how many of its tokens a cycle takes."""

    draft: Name
    length: int

    def __post_init__(self) -> None:
        check_fields(self, "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """Regime to selection; None: plain decoding.

    ``problem`` is the name of the problem it was made for, empty if that is not known.
    """

    FORMAT: ClassVar = PLAN_FORMAT
    KIND: ClassVar = "plan"

    choices: Mapping[Name, Selection | None]
    problem: Annotated[str, Json(omitted=True, empty=True)] = ""
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        freeze(self, "choices", "extras")

    def resolve(self, problem: Problem) -> dict[str, Choice | None]:
        """Regime to its choice in the problem, in the problem's order.

        Raises:
            ProblemError: A regime is missing or unknown, or its selection is none of its choices.
        """
        for name in self.choices:
            problem.regime(name)  # an unknown regime is an error there
        result: dict[str, Choice | None] = {}
        for regime in problem.regimes:
            if regime.name not in self.choices:
                raise ProblemError(
                    f"the plan has no regime {regime.name!r} of problem {problem.name!r}; add it, with null for plain "
                    "decoding"
                )
            selection = self.choices[regime.name]
            result[regime.name] = None if selection is None else regime.choice(selection.draft, selection.length)
        return result
