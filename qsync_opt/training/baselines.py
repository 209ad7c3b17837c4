"""Plans that a user would pick without solving anything: one precision for the whole model."""

from __future__ import annotations

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import near_match
from qsync_opt.training.plan import Plan
from qsync_opt.training.problem import Problem


def uniform_plan(problem: Problem, precision: str | None = None) -> Plan:
    """Return the plan that gives every adjustable operator one precision, as far as its table has it.

    Args:
        problem: What the plan is for.
        precision: The format wanted everywhere; an operator whose table lacks it takes the lowest that it has above,
            or else the highest that it has. None: the lowest precision that each operator has.

    Raises:
        ProblemError: The problem has no such format.

    Source: the uniform-precision baseline of QSync (IPDPS 2024); the rule for missing entries is ours.
    """
    if precision is not None and precision not in problem.formats:
        near = near_match(precision, problem.formats)
        raise ProblemError(
            f"precision is {precision!r}{near}; problem {problem.name!r} has {', '.join(problem.formats)}"
        )
    ranks = {name: rank for rank, name in enumerate(problem.formats)}
    wanted = -1 if precision is None else ranks[precision]

    def choose(table: list[str]) -> str:
        above = [p for p in table if ranks[p] >= wanted]
        return min(above, key=ranks.__getitem__) if above else max(table, key=ranks.__getitem__)

    return Plan(
        problem=problem.name,
        devices={
            device.name: {o.name: choose(list(device.operators[o.name])) for o in problem.adjustable}
            for device in problem.devices
        },
    )
