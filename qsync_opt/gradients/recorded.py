"""What a run recorded of its compressed reductions: when each bucket was ready, began and ended, step by step."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from qsync_opt.errors import ProblemError
from qsync_opt.gradients.evaluation import evaluate
from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Problem
from qsync_opt.io import Document, Extras, Json, Name, check_fields, freeze, read_json
from qsync_opt.training import COMMUNICATION, COMPUTE, Timeline, TimelineEvent

RECORDED_FORMAT = "qsync-gradients-recorded/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One bucket in one step, in nanoseconds since the end of the last reduction of the step before.

    The backward pass has it ready, its reduction begins once that of the bucket before has ended, and it ends when the
    mean is there.
    """

    scheme: Name
    ready_ns: int
    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        check_fields(self, "reduction")
        if not self.ready_ns <= self.start_ns <= self.end_ns:
            raise ProblemError(
                f"a reduction is ready at {self.ready_ns} ns, begins at {self.start_ns} and ends at {self.end_ns}, but "
                "these must follow one another"
            )

    @property
    def time_ns(self) -> int:
        """Nanoseconds of the reduction, codec included."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedReductions(Document):
    """The reductions of some steps of one worker, bucket by bucket.

    ``elements`` are the buckets' sizes. A step lasts from the end of the last reduction of the step before to the end
    of its own last one, so that optimizer and forward pass are in the time before the first bucket is ready.

    Raises:
        ProblemError: There is no step, a step has another number of buckets, or reductions overlap; the text says
            where.
    """

    FORMAT: ClassVar = RECORDED_FORMAT
    KIND: ClassVar = "recorded reductions"

    workers: Annotated[int, Json(minimum=1)]
    elements: tuple[int, ...]
    steps: tuple[tuple[Reduction, ...], ...]
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "recorded reductions")
        freeze(self, "extras")
        if not self.steps or not self.elements:
            raise ProblemError("recorded reductions: there is no step with a bucket; record at least one step")
        for k, step in enumerate(self.steps):
            if len(step) != len(self.elements):
                raise ProblemError(
                    f"recorded reductions: step {k} has {len(step)} buckets, but sizes are given of "
                    f"{len(self.elements)}"
                )
            for b in range(1, len(step)):
                if step[b].start_ns < step[b - 1].end_ns:
                    raise ProblemError(
                        f"recorded reductions: in step {k} bucket b{b} begins at {step[b].start_ns} ns, before the "
                        f"bucket before it ends at {step[b - 1].end_ns}"
                    )

    @property
    def iteration_ns(self) -> int:
        """Median time of a step."""
        return round(statistics.median(step[-1].end_ns for step in self.steps))

    def usual(self) -> tuple[Reduction, ...]:
        """Each bucket's median times over the steps.

        Raises:
            ProblemError: A bucket had more than one scheme.
        """
        result = []
        for k, column in enumerate(zip(*self.steps, strict=True)):
            schemes = {each.scheme for each in column}
            if len(schemes) > 1:
                raise ProblemError(
                    f"recorded reductions: bucket b{k} was reduced under {', '.join(sorted(schemes))}; record steps "
                    "under one plan"
                )
            # Medians of numbers that follow one another in every step do so too.
            result.append(
                Reduction(
                    scheme=schemes.pop(),
                    ready_ns=round(statistics.median(each.ready_ns for each in column)),
                    start_ns=round(statistics.median(each.start_ns for each in column)),
                    end_ns=round(statistics.median(each.end_ns for each in column)),
                )
            )
        return tuple(result)

    def under(self, schemes: Sequence[str], tail_ns: int = 0) -> tuple[Reduction, ...]:
        """Each bucket's median times, to stand beside those predicted of a plan: zero is the end of the optimizer.

        Args:
            schemes: Of each bucket, as planned.
            tail_ns: What is predicted to follow the last reduction, such as the optimizer's step.

        Raises:
            ProblemError: The steps were recorded under another plan; the text names the bucket.
        """
        usual = self.usual()
        if len(usual) != len(schemes):
            raise ProblemError(
                f"{len(usual)} buckets were recorded, but the plan has {len(schemes)}; record steps under this plan"
            )
        for k, (each, name) in enumerate(zip(usual, schemes, strict=True)):
            if each.scheme != name:
                raise ProblemError(
                    f"bucket b{k} was recorded under {each.scheme}, but the plan says {name}; record steps under this "
                    "plan"
                )
        return tuple(
            Reduction(
                scheme=each.scheme,
                ready_ns=max(0, each.ready_ns - tail_ns),
                start_ns=max(0, each.start_ns - tail_ns),
                end_ns=max(0, each.end_ns - tail_ns),
            )
            for each in usual
        )


def load_recorded_reductions(path: str | os.PathLike[str]) -> RecordedReductions:
    """Read and check a file of `RecordedReductions`.

    Raises:
        ProblemError: The file is missing, truncated, or holds anything else.
    """
    return RecordedReductions.from_json(read_json(path, (RECORDED_FORMAT,)), os.fspath(path))


def predicted_reductions(problem: Problem, plan: Plan) -> tuple[Reduction, ...]:
    """When each bucket is ready, begins and ends under a plan, as its evaluation says.

    Raises:
        ProblemError: The plan does not fit the problem.
    """
    evaluation = evaluate(problem, plan)
    rows = zip(problem.buckets, evaluation.start_ns, evaluation.end_ns, strict=True)
    return tuple(
        Reduction(scheme=plan.schemes[bucket.name], ready_ns=bucket.ready_ns, start_ns=start, end_ns=end)
        for bucket, start, end in rows
    )


def reductions_timeline(name: str, steps: Mapping[str, Sequence[Reduction]]) -> Timeline:
    """Steps beside one another as a timeline for `qsync_opt.training.write_trace`.

    Each step, such as ``"predicted"`` and ``"measured"``, has a lane of what is computed up to each bucket, and one of
    reductions.
    """
    events = [event for worker, reductions in steps.items() for event in _lanes(worker, reductions)]
    return Timeline(name=name, iteration_ns=max((event.end_ns for event in events), default=0), events=tuple(events))


def _lanes(worker: str, reductions: Sequence[Reduction]) -> Iterator[TimelineEvent]:
    clock = 0
    for k, each in enumerate(reductions):
        yield TimelineEvent(
            worker=worker,
            stream=COMPUTE,
            name=f"until bucket {k} is ready",
            kind=COMPUTE,
            start_ns=clock,
            duration_ns=max(0, each.ready_ns - clock),
        )
        clock = max(clock, each.ready_ns)
        yield TimelineEvent(
            worker=worker,
            stream=COMMUNICATION,
            name=f"all-reduce {k} ({each.scheme})",
            kind="all-reduce",
            start_ns=each.start_ns,
            duration_ns=each.time_ns,
            details={"bucket": k, "scheme": each.scheme},
        )
