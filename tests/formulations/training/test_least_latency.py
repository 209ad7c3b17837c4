"""The least iteration time is exact: against every plan, and over a start from nothing."""

import itertools
import math
import random

import pytest

from qsync_opt.formulations.assignment import PASSES, Effort
from qsync_opt.formulations.training import collapse, least_latency
from qsync_opt.testing import random_problem
from qsync_opt.training import Plan, evaluate


def least_by_hand(problem, device):
    """Least iteration time of one device type over all its plans within memory."""
    names = [operator.name for operator in problem.adjustable]
    best = math.inf
    for choices in itertools.product(*(tuple(device.operators[name]) for name in names)):
        found = evaluate(
            problem, Plan(problem=problem.name, devices={device.name: dict(zip(names, choices, strict=True))})
        )
        if found.memory_kib[device.name] <= device.memory_limit_kib:
            best = min(best, found.iteration_ns)
    return best


@pytest.mark.parametrize("seed", range(25))
def test_least_latency_is_that_of_the_best_of_all_plans(seed):
    problem = random_problem(random.Random(seed), max_operators=5, max_devices=1)
    device = problem.devices[0]
    truth = least_by_hand(problem, device)
    collapsed = collapse(problem, device)
    low, high, labels = least_latency(collapsed, math.inf, Effort(passes=PASSES))
    assert (low, high) == (truth, truth)
    assert (labels is None) == (truth == math.inf)
    # With a precision asked for, or no time, the ends still hold the truth between them.
    for effort, deadline in ((Effort(gap=0.3, passes=PASSES[:1], max_nodes=1), math.inf), (Effort(), 0.0)):
        low, high, _ = least_latency(collapsed, deadline, effort)
        assert low <= truth <= high
