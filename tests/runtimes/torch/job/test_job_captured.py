"""Captured passes among the ways of a job: what is chosen, told and refused; on two cards, training with them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply
from qsync_opt.runtimes.torch.job import Way, choose, everywhere
from qsync_opt.runtimes.torch.job import timing as job_timing
from qsync_opt.runtimes.torch.support import TrainingExample

LIMIT = 1 << 40


def way(name, pass_ns, sensitivity, **more):
    return Way(name=name, precisions={"a/linear": "BF16"}, pass_ns=pass_ns, sensitivity=sensitivity, **more)


def test_captured_passes_are_taken_only_where_nothing_else_is_as_fast():
    eager, quick = way("BF16 autocast", 30, 1.0), way("BF16 autocast", 20, 1.0, captured=True)
    assert choose({"a": [eager, quick]}, {"a": LIMIT}) == {"a": quick}
    slow = way("FP32", 40, 0.5)
    found = choose({"a": [eager, quick], "b": [slow]}, {"a": LIMIT, "b": LIMIT})
    assert found["a"] is eager  # it waits for the other anyway
    fine = way("FP32", 20, 0.5, captured=True)
    both = {"a": [eager, quick], "b": [slow, fine]}
    assert choose(both, {"a": LIMIT, "b": LIMIT}) == {"a": quick, "b": fine}  # all of them or none
    near = replace(quick, pass_ns=30)
    assert choose({"a": [eager, near]}, {"a": LIMIT}) == {"a": eager}
    assert choose(both, {"a": LIMIT, "b": LIMIT}, balanced=True) == {"a": quick, "b": fine}
    out_of_memory = way("BF16 autocast", 20, 1.0, captured=True, needed_bytes=None)
    assert choose({"a": [eager, out_of_memory]}, {"a": LIMIT}) == {"a": eager}
    assert everywhere({"a": [eager, quick]}, {"a": LIMIT}) == {"BF16 autocast": 30, "BF16 autocast, captured": 20}


def test_a_captured_way_is_told_in_full():
    quick = way("BF16 autocast", 20, 1.0, captured=True, autocast="BF16")
    assert Way.from_json(quick.to_json(), "a way") == quick
    assert not way("FP32", 1, 0.0, captured=True).is_plain
    data = {**quick.to_json(), "captured": "yes"}
    with pytest.raises(ProblemError, match="captured is 'yes'"):
        Way.from_json(data, "a way")


def test_every_way_is_timed_captured():
    ways = [way("FP32", 0, 0.0), way("plan", 0, 1.0)]
    assert [found.label for found in job_timing.captured_too(ways)[2:]] == ["FP32, captured", "plan, captured"]
    assert job_timing.has_captured({"a": job_timing.captured_too(ways)})
    assert not job_timing.has_captured({"a": ways})


def test_on_a_cpu_nothing_is_captured():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(UnsupportedError, match="CUDA graphs need a model on a card"):
        apply(model, {"0/linear": "BF16"}, options=ApplyOptions(captured=True))
    assert applied_plan(model) is None
    example = TrainingExample(model=model, args=(torch.randn(4, 8),), loss=torch.Tensor.sum)
    ways = [Way(name="BF16", precisions={"0/linear": "BF16"}, captured=captured) for captured in (False, True)]
    eager, captured = job_timing.time_ways(model, example, ways, None, ApplyOptions().kernels)
    assert eager.pass_ns > 0
    assert captured.needed_bytes is None


def test_layers_that_wait_for_other_workers_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    with pytest.raises(UnsupportedError, match="'1' is a SyncBatchNorm"):
        apply(model, {"0/linear": "BF16"}, options=ApplyOptions(captured=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_captured_training_on_two_cards(tmp_path, run_workers):
    seen = run_workers("captured_worker.py", tmp_path, "nccl", flags=("-W", "ignore"))
    for case, first in seen[0].items():
        for how, mine in first.items() if case != "planned" else ():
            other = seen[1][case][how]
            assert mine["weights"] == other["weights"], (case, how)
            for rank, found in enumerate((mine, other)):
                eager = seen[rank][case]["eager"]
                assert found["replayed"] is (how != "eager" and (case != "one_rank_alone" or rank == 1)), (case, how)
                torch.testing.assert_close(
                    torch.tensor(found["losses"]), torch.tensor(eager["losses"]), rtol=0.02, atol=0.02
                )
    for results in seen:
        scales = results["scaled"]["first pass"]["scales"]
        assert scales == results["scaled"]["eager"]["scales"]
        assert scales[0] < 2.0**30
        assert scales[-1] == scales[-2]
    planned = [results["planned"] for results in seen]
    assert planned[0]["digest"] == planned[1]["digest"]
    assert planned[0]["weights"] == planned[1]["weights"]
    assert any(label.endswith(", captured") for label in planned[0]["timed"])
    assert all(found["replayed"] is found["captured"] for found in planned)
