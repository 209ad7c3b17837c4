"""The fastest plan of a device type by itself: for jobs in which none waits for another."""

import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.model import Role
from qsync_opt.runtimes.torch.job import OWN, OWN_UNSCALED, SIZED_NOISE, Way, everywhere, own_plans, own_ways, ways_of
from qsync_opt.testing import buckets, random_problem
from qsync_opt.training import evaluate_device, propagate, uniform_plan


def evaluated(problem, device, plan):
    return evaluate_device(problem, device, propagate(problem, device, plan))


def every_plan(problem, device):
    names = [o.name for o in problem.operators if o.role is Role.ADJUSTABLE]
    for chosen in itertools.product(*(device.operators[name] for name in names)):
        yield dict(zip(names, chosen, strict=True))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_no_plan_that_fits_is_faster_and_of_those_as_fast_none_is_finer(seed):
    problem = random_problem(random.Random(seed))
    found = own_plans(problem)
    for device in problem.devices:
        fitting = [
            (one, "FP16" in plan.values())
            for plan in every_plan(problem, device)
            if (one := evaluated(problem, device, plan)).memory_kib <= device.memory_limit_kib
        ]
        unscaled = [one for one, scaled in fitting if not scaled]
        for name, others in ((OWN, [one for one, _ in fitting]), (OWN_UNSCALED, unscaled)):
            plan = found[device.name].get(name)
            if plan is None:  # none fits, or the first one has no FP16 anyway
                assert not others or (name == OWN_UNSCALED and "FP16" not in found[device.name][OWN].values())
                continue
            own, quickest = evaluated(problem, device, plan), min(one.backward_end_ns for one in others)
            assert own.memory_kib <= device.memory_limit_kib
            assert own.backward_end_ns <= (1 + SIZED_NOISE) * quickest + 1
            finest = min(one.sensitivity for one in others if one.backward_end_ns <= (1 + SIZED_NOISE) * quickest)
            assert own.sensitivity <= 1.03 * finest + 1e-12  # what `greedy` leaves at most
            assert name == OWN or "FP16" not in plan.values()


def test_what_is_known_already_is_no_way_of_its_own():
    problem = buckets().problem
    ways = ways_of(
        problem, {device.name: uniform_plan(problem, "FP32").devices[device.name] for device in problem.devices}
    )
    first = own_ways(problem, ways, slack=0.0)
    known = {name: [*mine, *first[name]] for name, mine in ways.items()}
    assert not any(own_ways(problem, known, slack=0.0).values())
    for name, mine in first.items():
        assert all(way.is_solved and way.precisions not in [other.precisions for other in ways[name]] for way in mine)


def test_own_plans_are_of_one_device_type_and_never_the_same_everywhere():
    timed = {
        n: [replace(Way(name="INT8", precisions={}), pass_ns=9), replace(Way(name=OWN, precisions={}), pass_ns=7)]
        for n in ("big", "small")
    }
    assert everywhere(timed, {"big": 1, "small": 1}) == {"INT8": 9}
