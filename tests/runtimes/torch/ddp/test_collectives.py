from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from qsync_opt.errors import NotReadyError, ProblemError
from qsync_opt.runtimes.torch.ddp import (
    CollectiveCost,
    collectives,
    measure_collectives,
    measure_slowdown,
    never_falling,
)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
COST = CollectiveCost(
    sizes_bytes=(1 << 10, 1 << 20),
    measured_ns=(600.0, 600.0),
    latency_s=1e-6,
    bandwidth_bytes_per_s=1e9,
    relative_residual=0.0,
)


def test_one_worker_has_no_all_reduce_to_measure():
    with pytest.raises(NotReadyError, match="at least two workers"):
        measure_collectives((1 << 10, 1 << 12))
    with pytest.raises(NotReadyError, match="at least two workers"):
        measure_slowdown(COST)


@pytest.mark.parametrize(("longer_ns", "share"), [(300.0, 0.5), (0.0, 0.0), (-50.0, 0.0), (900.0, 1.0)])
def test_the_slowdown_is_the_time_that_all_reduces_add_to_what_is_computed_beside_them(monkeypatch, longer_ns, share):
    """Two made-up workers: every all-reduce makes the computation beside it longer by some nanoseconds."""
    pending, waited = [], []

    class Handle:
        def wait(self):
            waited.append(self)

    def all_reduce(tensor, *, op=dist.ReduceOp.SUM, group=None, async_op=False):
        pending.extend([Handle()] * async_op)
        return pending[-1] if async_op else None

    def timed(run, device):
        before = len(pending)
        run()
        return 1e6 + longer_ns * (len(pending) - before)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(collectives, "_timed", timed)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    computed = []
    monkeypatch.setattr(torch, "tanh", lambda x: computed.append(len(pending)))
    assert measure_slowdown(COST, num_bytes=1 << 12, repeats=3, device=torch.device("cpu")) == pytest.approx(share)
    assert len(waited) == len(pending) == 2 * 4 * 8  # two turns of one block to warm up and three that count
    # The first turn is the other worker's: this one only takes part in its all-reduces.
    assert set(computed[: 3 + 8]) == {0}
    assert min(computed[3 + 8 :]) > 4 * 8
    assert len(computed) == 3 + 8 + 7 * 8


def test_the_time_of_an_all_reduce_never_falls_with_its_size():
    """Chance may make a larger one faster; what was measured in order is followed as it is."""
    cost = replace(COST, sizes_bytes=(1000, 2000, 4000), measured_ns=(100.0, 300.0, 500.0))
    assert [cost.ns(size) for size in (0, 1000, 1500, 2000, 3000, 4000, 6000)] == [100, 100, 200, 300, 400, 500, 700]
    dip = replace(cost, measured_ns=(300.0, 100.0, 500.0))
    assert [dip.ns(size) for size in (1000, 2000, 2001, 4000)] == [200, 200, 200, 500]
    # The two largest say nothing about more: the fitted bandwidth does (1 ns per byte).
    flat = replace(cost, measured_ns=(100.0, 520.0, 480.0))
    assert [flat.ns(size) for size in (2000, 4000, 1_004_000)] == [500, 500, 1_000_500]
    for times in ((5.0,), (3.0, 1.0, 2.0), (1.0, 2.0, 3.0), (4.0, 1.0, 1.0, 6.0, 5.0)):
        found = never_falling(times)
        assert found == sorted(found)
        assert sum(found) == pytest.approx(sum(times))


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((100,), (5.0,)),
        ((100, 100), (5.0, 6.0)),
        ((200, 100), (5.0, 6.0)),
        ((1, 2), (1.0,)),
        ((1, 2), (1.0, float("nan"))),
    ],
)
def test_measurements_that_make_no_sense_are_refused(sizes, times):
    with pytest.raises(ProblemError, match="all-reduce"):
        replace(COST, sizes_bytes=sizes, measured_ns=times)
