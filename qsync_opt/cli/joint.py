"""Problems and plans of precisions, with or without schemes of gradient buckets, as commands read and show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsync_opt.cli.console import print_table, signed
from qsync_opt.errors import ProblemError
from qsync_opt.io import format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qsync_opt.gradients import BucketExplanation, JointPlan, JointProblem, Reduction
    from qsync_opt.training import Plan, Problem


def load_either(problem: str) -> Any:
    """The training problem or joint problem of a file."""
    from qsync_opt.systems import load_problem

    loaded = load_problem(problem)
    if type(loaded).__name__ != "JointProblem" and not _is_training(loaded):
        raise ProblemError(
            f"{problem} is a problem of another system, whose commands are qsync-opt NAME ...; a problem of precisions "
            "is needed, or one of precisions and schemes"
        )
    return loaded


def _is_training(loaded: Any) -> bool:
    from qsync_opt.training import Problem

    return isinstance(loaded, Problem)


def load_with_schemes(
    problem: str, plan: str, recorded: str | None = None
) -> tuple[Problem, Plan, tuple[BucketExplanation, ...], tuple[Reduction, ...]]:
    """A problem and plan of precisions; where schemes are planned too, each bucket explained, and as ``recorded``.

    Raises:
        ProblemError: A file is no such problem or plan, or they do not belong together.
    """
    loaded = load_either(problem)
    if _is_training(loaded):
        from qsync_opt.training import load_plan

        if recorded is not None:
            raise ProblemError(f"{problem} has no schemes of buckets that {recorded} could stand beside")
        return loaded, load_plan(plan), (), ()
    joint: JointProblem = loaded
    from qsync_opt.gradients import (
        JointPlan,
        communication_problem,
        explain_buckets,
        load_recorded_reductions,
        training_part,
    )
    from qsync_opt.systems import load_plan as load_any

    both: JointPlan = load_any(plan)
    if not isinstance(both, JointPlan):
        raise ProblemError(f"{plan} is a plan of precisions or schemes alone, but problem {problem} is of both")
    buckets = explain_buckets(communication_problem(joint, both.precisions), both.schemes)
    measured: tuple[Reduction, ...] = ()
    if recorded is not None:
        steps = load_recorded_reductions(recorded)
        measured = steps.under([each.scheme for each in buckets], joint.training.optimizer_ns)
    return training_part(joint, both), both.precisions, buckets, measured


def print_measured(predicted: Sequence[Any], measured: Sequence[Reduction]) -> None:
    """Predicted and measured times of each bucket; ``predicted`` are reductions, or explanations of buckets."""
    rows = []
    for k, (before, after) in enumerate(zip(predicted, measured, strict=True)):
        pairs = ((before.ready_ns, after.ready_ns), (before.start_ns, after.start_ns), (before.time_ns, after.time_ns))
        rows.append((f"  b{k}", after.scheme, *(format_time(value) for pair in pairs for value in pair)))
    header = ("  bucket", "scheme", "ready", "measured", "begins", "measured", "takes", "measured")
    print_table(header, rows)
    end, real = predicted[-1].end_ns, measured[-1].end_ns
    share = f" ({end / real - 1:+.1%})" if real else ""
    print(f"  the last bucket ends at {format_time(end)} as predicted, {format_time(real)} as measured{share}")


def print_buckets(buckets: tuple[BucketExplanation, ...]) -> None:
    """Each bucket's scheme and times, and what the next one with less variance or time would change."""
    print("gradient buckets, in the order of reduction")
    rows = []
    for each in buckets:
        faster = min((o for o in each.others if o.time_change_ns < 0), key=lambda o: o.variance_change, default=None)
        instead = ("-", "-", "-")
        if faster is not None:
            change = signed(format_time, faster.iteration_change_ns)
            instead = (faster.scheme, change, signed(lambda value: f"{value:.4g}", faster.variance_change))
        times = (each.ready_ns, each.start_ns, each.time_ns)
        rows.append((f"  {each.bucket}", each.scheme, *map(format_time, times), f"{each.variance:.4g}", *instead))
    header = ("  bucket", "scheme", "ready", "begins", "takes", "variance", "faster", "iteration", "variance")
    print_table(header, rows)
    for each in buckets:
        print(f"  {each.bucket}: {each.reason}")
