"""Packing of workers where it was not measured."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qsync_opt
from qsync_opt.costs import estimate_lines
from qsync_opt.costs.learned import known_device, shipped_model
from qsync_opt.errors import ProblemError
from qsync_opt.messages import Exchange, Pair, Problem, variance_factor, with_learned_packing
from qsync_opt.testing import make_device_vector, without_laws

PAIRS = tuple(
    Pair(
        source=i, target=1 - i, fixed_ns=100, ns_per_byte=2.0, beta=[0.5, 0.1, 3.0], pack_ns_per_byte=7.0,
        unpack_ns_per_byte=5.0,
    )
    for i in range(2)
)  # fmt: skip
PROBLEM = Problem(
    name="two", time_limit_ns=5000, variance_weight=1.0, time_weight=None,
    bits={str(width): variance_factor(width) for width in (2, 4, 8, 32)},
    exchanges=(Exchange(name="forward", dim=64, rounds=(PAIRS,)),),
)  # fmt: skip


def test_only_named_workers_are_estimated_and_plans_say_so():
    filled = with_learned_packing(PROBLEM, {1: known_device("Intel Xeon, 1 thread")})
    there, back = filled.exchanges[0].pairs
    assert there.pack_ns_per_byte == 7.0 and back.unpack_ns_per_byte == 5.0
    assert 0 < there.unpack_ns_per_byte < 5 and 0 < back.pack_ns_per_byte < 7
    (line,) = estimate_lines(filled.extras)
    assert line.startswith("costs of packing on worker 1 are estimates: learned for Intel Xeon, 1 thread from casts")
    assert estimate_lines(qsync_opt.solve(filled).plan.extras) == (line,)
    assert Problem.from_json(filled.to_json()) == filled
    both = with_learned_packing(filled, {0: make_device_vector()}, without_laws(shipped_model()))
    assert [line.partition(": ")[2] for line in estimate_lines(both.extras)][1] == "roofline of device"
    assert with_learned_packing(PROBLEM, {}) == PROBLEM


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100))
def test_a_device_in_other_units_has_the_same_costs_in_these_units(scale):
    def cost(size):
        vector = make_device_vector("unseen", size)
        pair = with_learned_packing(PROBLEM, dict.fromkeys((0, 1), vector)).exchanges[0].pairs[0]
        assert min(pair.pack_ns_per_byte, pair.unpack_ns_per_byte) >= 1e9 / vector.cache_bytes_per_s
        return pair.pack_ns_per_byte, pair.unpack_ns_per_byte

    assert [x / scale for x in cost(1.0)] == pytest.approx(cost(scale), rel=1e-3)


def test_without_a_law_of_casts_bytes_pass_the_memory_once():
    vector = make_device_vector()
    (pair, _) = with_learned_packing(PROBLEM, {0: vector}, without_laws(shipped_model())).exchanges[0].pairs
    assert pair.pack_ns_per_byte == pytest.approx(1e9 / vector.bandwidth_bytes_per_s)


def test_an_unknown_worker_is_named():
    with pytest.raises(ProblemError, match="worker is 2, but problem 'two' has 0, 1"):
        with_learned_packing(PROBLEM, {2: known_device("T4")})
