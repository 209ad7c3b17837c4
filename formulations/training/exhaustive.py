"""Exhaustive search: every plan of a tiny problem, evaluated by the independent evaluator; the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.training.collapsed import collapse
from qsync_opt.formulations.training.infeasible import explain
from qsync_opt.training import (
    Answer,
    Problem,
    ProblemDevice,
    SolveOptions,
    TerminationStatus,
    evaluate_device,
    iteration_time,
    propagate,
)

MOST_PLANS = 200_000
"""Plans of one device type beyond which exhausting them is refused."""


class ExhaustiveFormulation:
    """Best of all plans, device type by device type: they share only the latency limit.

    Source: ours.
    """

    def solve(self, problem: Problem, options: SolveOptions) -> Answer:
        """Plan every device type; see `Formulation.solve`."""
        started = time.monotonic()
        deadline = math.inf if options.time_limit_s is None else started + options.time_limit_s
        devices: dict[str, dict[str, str]] = {}
        objective, late = 0.0, False
        without: ProblemDevice | None = None  # a device that has no plan
        for device in problem.devices:
            choices, sensitivity, complete = _best(problem, device, deadline)
            late = late or not complete
            if choices is None:
                without = device
            else:
                devices[device.name] = choices
                objective += sensitivity
        solved = len(devices) == len(problem.devices)
        termination = TerminationStatus.OPTIMAL if solved else TerminationStatus.INFEASIBLE
        proved = without is not None and not late
        return Answer(
            termination=TerminationStatus.TIME_LIMIT if late else termination,
            devices=devices if solved else None,
            objective=objective if solved else None,
            bound=objective if solved and not late else None,
            solve_seconds=time.monotonic() - started,
            reason=explain(problem, collapse(problem, without), deadline) if without and proved else None,
        )


def _best(problem: Problem, device: ProblemDevice, deadline: float) -> tuple[dict[str, str] | None, float, bool]:
    """Best plan of a device and its sensitivity, and whether every plan was evaluated in time."""
    tables = {operator.name: device.operators[operator.name] for operator in problem.adjustable}
    num_plans = math.prod(len(table) for table in tables.values())
    if num_plans > MOST_PLANS:
        raise UnsupportedError(
            f"method 'exhaustive' would evaluate {num_plans} plans for device {device.name!r}, but at most "
            f"{MOST_PLANS} are allowed; use method 'exact'"
        )
    best, least = None, math.inf
    for plan in itertools.product(*tables.values()):
        if time.monotonic() > deadline:
            return best, least, False
        choices = dict(zip(tables, plan, strict=True))
        evaluation = evaluate_device(problem, device, propagate(problem, device, choices))
        _, iteration_ns = iteration_time(problem, (evaluation,))
        fits = evaluation.memory_kib <= evaluation.memory_limit_kib and iteration_ns <= problem.latency_limit_ns
        if fits and evaluation.sensitivity < least:
            best, least = choices, evaluation.sensitivity
    return best, least, True
