"""Why a bucket has its scheme: when it is reduced, and what every other scheme would change."""

from __future__ import annotations

from dataclasses import dataclass

from qsync_opt.gradients.evaluation import evaluate, evaluate_choices
from qsync_opt.gradients.plan import Plan
from qsync_opt.gradients.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherScheme:
    """Another scheme for one bucket, the rest of the plan unchanged; changes are new minus old."""

    scheme: str
    time_change_ns: int
    iteration_change_ns: int
    variance_change: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketExplanation:
    """One bucket under a plan: its scheme, when the gradient is ready and when it is reduced, and the alternatives."""

    bucket: str
    scheme: str
    ready_ns: int
    start_ns: int
    end_ns: int
    variance: float
    others: tuple[OtherScheme, ...]

    @property
    def time_ns(self) -> int:
        """Nanoseconds of the reduction, codec included."""
        return self.end_ns - self.start_ns

    @property
    def reason(self) -> str:
        """Why the bucket has its scheme, in one sentence."""
        better = [o for o in self.others if o.feasible and o.iteration_change_ns <= 0 and o.variance_change < 0]
        if better:
            best = min(better, key=lambda other: other.variance_change)
            return f"{best.scheme} would have less variance and make no iteration longer"
        exact = [o for o in self.others if o.variance_change < 0]
        if not exact:
            return "no scheme has less variance"
        least = min(exact, key=lambda other: other.iteration_change_ns)
        verb = "break the limit" if not least.feasible else "lengthen the iteration"
        return f"{least.scheme}, the cheapest with less variance, would {verb}"


def explain_buckets(problem: Problem, plan: Plan) -> tuple[BucketExplanation, ...]:
    """Explain every bucket of a plan, in the order of reduction.

    Raises:
        ProblemError: The plan does not fit the problem.
    """
    evaluation, choices = evaluate(problem, plan), plan.resolve(problem)
    result = []
    for k, bucket in enumerate(problem.buckets):
        others = []
        for name, choice in bucket.choices.items():
            if name == plan.schemes[bucket.name]:
                continue
            changed = evaluate_choices(problem, (*choices[:k], choice, *choices[k + 1 :]))
            others.append(
                OtherScheme(
                    scheme=name,
                    time_change_ns=choice.time_ns - choices[k].time_ns,
                    iteration_change_ns=changed.iteration_ns - evaluation.iteration_ns,
                    variance_change=choice.variance - choices[k].variance,
                    feasible=changed.feasible,
                )
            )
        result.append(
            BucketExplanation(
                bucket=bucket.name,
                scheme=plan.schemes[bucket.name],
                ready_ns=bucket.ready_ns,
                start_ns=evaluation.start_ns[k],
                end_ns=evaluation.end_ns[k],
                variance=choices[k].variance,
                others=tuple(others),
            )
        )
    return tuple(result)
