"""Every plan of a tiny problem, evaluated one by one by the independent evaluator: the oracle of the tests."""

from __future__ import annotations

import itertools
import math
import time

from qsync_opt.errors import UnsupportedError
from qsync_opt.formulations.training.ilp import Least, describe_infeasible
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
        memories: dict[str, Least] = {}
        times: dict[str, Least] = {}
        for device in problem.devices:
            search = _Search(problem, device)
            late = not search.run(deadline) or late
            memories[device.name] = search.least(search.least_memory_kib)
            if search.least_memory_kib <= device.memory_limit_kib:
                times[device.name] = search.least(search.least_time_ns)
            if search.best is not None:
                devices[device.name] = search.best
                objective += search.objective
        held = len(devices) == len(problem.devices)
        verdict = None if held else describe_infeasible(problem, memories, times)
        if late:
            termination = TerminationStatus.TIME_LIMIT
        else:
            termination = TerminationStatus.OPTIMAL if held else TerminationStatus.INFEASIBLE
        return Answer(
            termination=termination,
            devices=devices if held else None,
            objective=objective if held else None,
            bound=objective if held and not late else None,
            solve_seconds=time.monotonic() - started,
            reason=None if verdict is None else verdict.reason,
        )


class _Search:
    def __init__(self, problem: Problem, device: ProblemDevice) -> None:
        self.problem, self.device = problem, device
        self.best: dict[str, str] | None = None
        self.objective = math.inf
        self.least_memory_kib: float = math.inf
        self.least_time_ns: float = math.inf
        self.seen_all = False
        sizes = [len(device.operators[operator.name]) for operator in problem.adjustable]
        if math.prod(sizes) > MOST_PLANS:
            raise UnsupportedError(
                f"method 'exhaustive' would evaluate {math.prod(sizes)} plans for device {device.name!r}, but at most "
                f"{MOST_PLANS} are allowed; use method 'exact'"
            )

    def run(self, deadline: float) -> bool:
        """Look at every plan; return False if the time was up before."""
        names = [operator.name for operator in self.problem.adjustable]
        for plan in itertools.product(*(self.device.operators[name] for name in names)):
            if time.monotonic() > deadline:
                return False
            choices = dict(zip(names, plan, strict=True))
            found = evaluate_device(self.problem, self.device, propagate(self.problem, self.device, choices))
            _, iteration_ns = iteration_time(self.problem, (found,))
            self.least_memory_kib = min(self.least_memory_kib, found.memory_kib)
            if found.memory_kib > found.memory_limit_kib:
                continue
            self.least_time_ns = min(self.least_time_ns, iteration_ns)
            if iteration_ns <= self.problem.latency_limit_ns and found.sensitivity < self.objective:
                self.best, self.objective = choices, found.sensitivity
        self.seen_all = True
        return True

    def least(self, value: float) -> Least:
        """A least value that was seen: proved once every plan has been looked at."""
        known = None if math.isinf(value) else int(value)
        bound = known if self.seen_all and known is not None else 0
        return Least(value=known, bound=bound, choices=None, proved=self.seen_all)
