"""Operators' precisions and buckets' schemes in one problem: both add variance, and share the time of an iteration.

    minimise    sensitivity of the precisions + sum of the schemes' variances
    subject to  the limits of the training problem, with each bucket's all-reduce taking its scheme's time

Variances must be in the units of the sensitivity.

Source: ours.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from qsync_opt import training
from qsync_opt.errors import ProblemError
from qsync_opt.gradients.build import SchemeTimes
from qsync_opt.gradients.compression import BucketStatistics, scheme
from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Bucket, Choice, Objective, Problem
from qsync_opt.io import (
    Document,
    Extras,
    Fields,
    Json,
    check_fields,
    decode,
    encode,
    freeze,
    read_json,
    write_json,
)

PROBLEM_FORMAT = "qsync-joint/1"
PLAN_FORMAT = "qsync-joint-plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class JointProblem:
    """A training problem, and the choices of each of its all-reduces, whose own times then do not count.

    Raises:
        ProblemError: There are no buckets, their numbers differ, or one has no choice.
    """

    training: training.Problem
    buckets: tuple[Mapping[str, Choice], ...]

    def __post_init__(self) -> None:
        expected = len(self.training.communication.allreduce_ns)
        if not expected:
            raise ProblemError(f"problem {self.training.name!r} reduces no buckets; solve it as a training problem")
        if len(self.buckets) != expected:
            raise ProblemError(
                f"{len(self.buckets)} buckets have choices, but problem {self.training.name!r} reduces {expected}"
            )
        for k, choices in enumerate(self.buckets):
            if not choices:
                raise ProblemError(f"bucket b{k} has no choices; a bucket needs at least one scheme")

    @property
    def name(self) -> str:
        """Name of the training problem."""
        return self.training.name

    @classmethod
    def from_json(cls, data: Any, where: str = "problem") -> JointProblem:
        """Build it from the data of a problem file; ``where`` names the data in errors."""
        fields = Fields(data, where)
        fields.version(PROBLEM_FORMAT)
        buckets = []
        for k, choices in enumerate(fields.sequence("buckets")):
            own = Fields(choices, f"{where}: buckets[{k}]")
            buckets.append({name: decode(Choice, own.take(name), f"{own.where} {name!r}") for name in own})
        result = cls(training=training.Problem.from_json(fields.take("training")), buckets=tuple(buckets))
        fields.finish()
        return result

    def to_json(self) -> dict[str, Any]:
        """The problem as plain JSON data."""
        return {
            "format": PROBLEM_FORMAT,
            "training": self.training.to_json(),
            "buckets": [{name: encode(choice) for name, choice in choices.items()} for choices in self.buckets],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the problem file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """Precisions of operators, and schemes of buckets ``b0``, ``b1``, ..."""

    precisions: training.Plan
    schemes: Plan

    @classmethod
    def from_json(cls, data: Any, where: str = "plan") -> JointPlan:
        """Build it from the data of a plan file; ``where`` names the data in errors."""
        fields = Fields(data, where)
        fields.version(PLAN_FORMAT)
        result = cls(
            precisions=training.Plan.from_json(fields.take("precisions"), f"{where}: precisions"),
            schemes=Plan.from_json(fields.take("schemes"), f"{where}: schemes"),
        )
        fields.finish()
        return result

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON data."""
        return {"format": PLAN_FORMAT, "precisions": self.precisions.to_json(), "schemes": self.schemes.to_json()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan file, whole or not at all."""
        write_json(path, self.to_json(), digest=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class JointEvaluation:
    """What a joint plan costs: ``objective`` is ``sensitivity`` of the precisions plus ``variance`` of the schemes."""

    objective: float
    feasible: bool
    violations: tuple[str, ...]
    iteration_ns: int
    sensitivity: float
    variance: float

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "objective": self.objective,
            "feasible": self.feasible,
            "violations": list(self.violations),
            "iteration_ns": self.iteration_ns,
            "sensitivity": self.sensitivity,
            "variance": self.variance,
        }


def under_schemes(
    problem: training.Problem, times_ns: Sequence[int], schemes: Sequence[str] | None = None
) -> training.Problem:
    """The training problem with these times of its all-reduces; traces and reports show ``schemes``, if given."""
    communication = replace(problem.communication, allreduce_ns=tuple(times_ns))
    extras = problem.extras if schemes is None else {**problem.extras, training.SCHEMES_KEY: list(schemes)}
    return replace(problem, communication=communication, optimum=None, extras=extras)


def training_part(problem: JointProblem, plan: JointPlan) -> training.Problem:
    """The training problem that the plan of precisions has under the plan's schemes.

    Raises:
        ProblemError: The plan does not fit the problem.
    """
    choices = plan.schemes.resolve(_chosen(problem))
    names = [plan.schemes.schemes[f"b{k}"] for k in range(len(choices))]
    return under_schemes(problem.training, [choice.time_ns for choice in choices], names)


def evaluate_joint(problem: JointProblem, plan: JointPlan) -> JointEvaluation:
    """Compute what a joint plan costs, by the evaluation of training plans.

    Raises:
        ProblemError: The plan does not fit the problem.
    """
    choices = plan.schemes.resolve(_chosen(problem))
    evaluation = training.evaluate(
        under_schemes(problem.training, [choice.time_ns for choice in choices]), plan.precisions
    )
    variance = math.fsum(choice.variance for choice in choices)
    return JointEvaluation(
        objective=evaluation.objective + variance,
        feasible=evaluation.feasible,
        violations=evaluation.violations,
        iteration_ns=evaluation.iteration_ns,
        sensitivity=evaluation.objective,
        variance=variance,
    )


def _chosen(problem: JointProblem) -> Problem:
    """The buckets as a compression problem, for reading plans."""
    return Problem(
        name=problem.name,
        compute_end_ns=0,
        tail_ns=0,
        latency_limit_ns=None,
        variance_limit=None,
        objective=Objective.VARIANCE,
        buckets=tuple(Bucket(name=f"b{k}", ready_ns=0, choices=own) for k, own in enumerate(problem.buckets)),
    )


def communication_problem(problem: JointProblem, precisions: training.Plan) -> Problem:
    """The compression problem that remains once the operators' precisions are fixed.

    Raises:
        ProblemError: The plan does not fit the training problem.
    """
    communication = problem.training.communication
    devices = training.evaluate(problem.training, precisions).devices.values()
    return Problem(
        name=problem.name,
        compute_end_ns=max((device.backward_end_ns for device in devices), default=0),
        tail_ns=problem.training.optimizer_ns,
        latency_limit_ns=problem.training.latency_limit_ns,
        variance_limit=None,
        objective=Objective.VARIANCE,
        buckets=tuple(
            Bucket(
                name=f"b{k}",
                ready_ns=max(communication.peer_ready_ns[k], *(device.bucket_ready_ns[k] for device in devices)),
                choices=own,
            )
            for k, own in enumerate(problem.buckets)
        ),
    )


def build_joint_problem(
    problem: training.Problem,
    statistics: Sequence[BucketStatistics],
    times: SchemeTimes,
    *,
    weight: float | Sequence[float] = 1.0,
    bucket_times_ns: Mapping[str, Sequence[int]] | None = None,
) -> JointProblem:
    """The joint problem of a training problem and measured schemes.

    Args:
        problem: The training problem; the times of its all-reduces are replaced.
        statistics: Of each bucket, in the order of reduction.
        times: Of the schemes on the job's links.
        weight: What a bucket's variance counts in units of the sensitivity; one number, or one per bucket.
        bucket_times_ns: Of each bucket by scheme, where they were recorded in training; they go before ``times``.

    Raises:
        ProblemError: The numbers of buckets differ.
    """
    if not len(statistics) == len(problem.communication.allreduce_ns):
        raise ProblemError(
            f"{len(statistics)} buckets have statistics, but problem {problem.name!r} reduces "
            f"{len(problem.communication.allreduce_ns)}; measure them on this model, with the same sizes of buckets"
        )
    weights = [float(weight)] * len(statistics) if isinstance(weight, int | float) else list(weight)
    if len(weights) != len(statistics):
        raise ProblemError(f"{len(weights)} weights were given for {len(statistics)} buckets; give one for each")
    usable = [each for each in map(scheme, times.times_ns) if each.supports(times.workers)]
    recorded = bucket_times_ns or {}
    return JointProblem(
        training=problem,
        buckets=tuple(
            {
                each.name: Choice(
                    time_ns=recorded[each.name][k] if each.name in recorded else times.ns(each.name, bucket.elements),
                    variance=factor * each.mean_variance(bucket, times.workers),
                )
                for each in usable
            }
            for k, (bucket, factor) in enumerate(zip(statistics, weights, strict=True))
        ),
    )


GRADIENT_COSTS_FORMAT = "qsync-gradient-costs/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCosts(Document):
    """What compressing a job's gradients costs: statistics of its buckets and measured times of the schemes.

    `qsync_opt.build_problem` takes it as ``communication`` and then builds a `JointProblem`. ``weight`` is what the
    variance of a bucket's mean gradient counts in units of the sensitivity: by default the squared number of workers,
    because sensitivities are variances of the workers' sum. ``bucket_times_ns`` are the times of each bucket by scheme,
    where they were recorded beside a backward pass: those go before ``times``, which are of reductions alone.

    Raises:
        ProblemError: Recorded times are of another number of buckets than the statistics; the text names the scheme.
    """

    FORMAT: ClassVar = GRADIENT_COSTS_FORMAT
    KIND: ClassVar = "gradient costs"

    statistics: tuple[BucketStatistics, ...]
    times: Annotated[SchemeTimes, Json(read=SchemeTimes.from_json, write=SchemeTimes.to_json)]
    weight: Annotated[float | None, Json(omitted=True)] = None
    bucket_times_ns: Annotated[Mapping[str, tuple[int, ...]], Json(omitted=True, empty=True)] = field(
        default_factory=dict
    )
    extras: Annotated[Extras, Json(stored=False)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, "gradient costs")
        object.__setattr__(self, "statistics", tuple(self.statistics))
        freeze(self, "bucket_times_ns", "extras")
        for name, own in self.bucket_times_ns.items():
            if len(own) != len(self.statistics):
                raise ProblemError(
                    f"gradient costs: {name!r} has {len(own)} recorded times for {len(self.statistics)} buckets, but "
                    "needs one for each"
                )

    def joint(self, problem: training.Problem) -> JointProblem:
        """The joint problem of a training problem and these costs; see `build_joint_problem`."""
        weight = float(self.times.workers**2) if self.weight is None else self.weight
        return build_joint_problem(
            problem, self.statistics, self.times, weight=weight, bucket_times_ns=self.bucket_times_ns
        )


def load_gradient_costs(path: str | os.PathLike[str]) -> GradientCosts:
    """Read and check a file of `GradientCosts`.

    Raises:
        ProblemError: The file is missing, truncated, or holds anything else.
    """
    return GradientCosts.from_json(read_json(path, (GRADIENT_COSTS_FORMAT,)), os.fspath(path))
