"""Device types share the time: all of them before any goes further, and what one leaves goes to the others."""

import random
import time

import pytest

from qsync_opt import solve
from qsync_opt.formulations.training import certified, exact_effort, greedy_effort, plan_certified
from qsync_opt.testing import random_problem
from qsync_opt.training import SolveOptions, TerminationStatus

STAGES = [greedy_effort(0.0), exact_effort(0.0, None)]


@pytest.fixture
def problem():
    """One with a plan and at least two device types."""
    for seed in range(200):
        found = random_problem(random.Random(seed))
        if len(found.devices) > 1 and solve(found, "exhaustive").plan is not None:
            return found
    raise AssertionError("no random problem has two device types")


@pytest.fixture
def turns(monkeypatch, problem):
    """Which device type searched with which effort until when; the first one is cut short three times."""
    found = []
    advance = certified.DeviceSearch.advance

    def slowly(self, effort, aim, *, start=None, deadline):
        settled = advance(self, effort, aim, start=start, deadline=deadline)
        found.append((self.name, STAGES.index(effort), deadline))
        own = [name for name, _, _ in found if name == self.name]
        if self.name == problem.devices[0].name and len(own) <= 3:
            self.outcome.out_of_time = True
            return False
        return settled

    monkeypatch.setattr(certified.DeviceSearch, "advance", slowly)
    return found


def test_time_that_a_device_type_leaves_goes_to_those_cut_short(problem, turns):
    began = time.monotonic()
    answer = plan_certified(problem, STAGES, SolveOptions(time_limit_s=600.0))
    first, *others = [device.name for device in problem.devices]
    assert [turn[:2] for turn in turns] == [
        (first, 0), *((name, 0) for name in others), (first, 1), (first, 1), (first, 1),
    ]  # fmt: skip
    assert turns[0][2] < began + 500  # its share of 600
    assert all(deadline > began + 590 for _, number, deadline in turns if number)  # all that is left
    assert answer.termination is TerminationStatus.OPTIMAL
    assert answer.objective == pytest.approx(solve(problem, "exhaustive").objective)


def test_who_got_no_further_turn_is_out_of_time(problem, turns):
    answer = plan_certified(problem, STAGES, SolveOptions(time_limit_s=1e-9))
    assert {name for name, _, _ in turns} == {device.name for device in problem.devices}
    assert answer.termination is not TerminationStatus.FEASIBLE  # either proved, or cut short and said so
