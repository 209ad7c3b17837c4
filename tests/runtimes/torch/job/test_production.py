"""All of ordinary training on two workers under different plans; see ``production_worker.py`` for the cases."""

import warnings

import pytest
import torch
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.ddp import free_port, process_group
from qsync_opt.runtimes.torch.execution import LossScaler, apply


@pytest.fixture(scope="module")
def seen(tmp_path_factory, run_workers):
    return run_workers("production_worker.py", tmp_path_factory.mktemp("cpu"), "gloo", flags=("-W", "ignore"))


def check_equal_weights(seen):
    for case, first in seen[0].items():
        second = seen[1][case]
        if "weights" in first:
            assert first["weights"] == second["weights"], case


def check_learning(seen, *cases):
    for results in seen:
        for case in cases:
            assert results[case]["last"] < 0.75 * results[case]["first"], case


def check_gradients(seen):
    for results in seen:
        assert results["accumulation"]["error"] < 1e-5
        assert results["clipping"]["after"] == pytest.approx(0.5, rel=1e-4)
        assert results["clipping"]["before"] > 1
        assert results["unused_branch"]["unused"]


def check_scaler(seen):
    for results in seen:
        scaling = results["loss_scaling"]
        assert scaling["scales"] == [1024.0, 512.0, 512.0, 1024.0]
        assert scaling["skipped"] == [False, True, False, False]
        assert scaling["skipped_by_fused"] == [True, False]
        assert scaling["weights_by_fused"] == seen[0]["loss_scaling"]["weights_by_fused"]
        assert scaling["norm_error"] < 1e-5
        assert scaling["restored"]
        assert not scaling["automatic"]  # nothing computes in FP16 here


def test_ranks_with_different_plans_keep_equal_weights(seen):
    check_equal_weights(seen)
    check_learning(seen, "plain", "normalization", "sharded")


def test_options_of_ddp_change_nothing(seen):
    for results in seen:
        assert len(set(results["ddp_options"].values())) == 1
    assert seen[0]["ddp_options"] == seen[1]["ddp_options"]


def test_accumulation_clipping_and_unused_branches(seen):
    check_gradients(seen)


def test_an_overflow_on_one_rank_makes_all_skip(seen):
    check_scaler(seen)


def test_evaluation_frozen_and_tied_weights(seen):
    for results in seen:
        assert results["normalization"]["repeats"]
        assert results["tied_and_frozen"]["frozen"]
        assert results["tied_and_frozen"]["tied"]


@pytest.mark.parametrize("how", ["reentrant", "modules", "function"])
def test_activation_checkpointing_rounds_the_same_way_twice(seen, how):
    plain, checkpointed = seen[0]["activation_checkpointing"][how]
    assert plain == checkpointed
    assert seen[1]["activation_checkpointing"][how] == [plain, checkpointed]


def test_a_compiled_model_learns_inside_and_outside_of_ddp(seen):
    for results in seen:
        for how in ("inside", "outside"):
            assert results["compiled"][how]["last"] < 0.8 * results["compiled"][how]["first"]
    assert [results["compiled"]["inside"]["weights"] for results in seen] == [
        results["compiled"]["outside"]["weights"] for results in seen
    ]


def test_fully_sharded_training(seen):
    for results in seen:
        sharded = results["sharded"]
        assert sharded["again"][0] == sharded["again"][1]  # resumed bit for bit
        assert sharded["step"] == 8
        assert sharded["alone"]  # the checkpoint is one of the plain model too
        assert "leave param_dtype out of MixedPrecisionPolicy" in sharded["said"]


def test_autocast_is_refused(seen):
    assert "leave autocast while a plan is applied" in seen[1]["autocast"]["said"]


def test_a_checkpoint_of_ranks_that_disagree_is_not_written(seen):
    for result in seen:
        told = result["disagreeing"]
        assert len(told["said"]) == 2
        assert all("the step or the model to be saved differs between ranks" in text for text in told["said"])
        assert told["steps"] == []


def test_workers_that_are_numbered_anew_go_on_under_the_plan_of_their_type(seen):
    assert [result["renumbered"] for result in seen] == [{"replanned": False, "own": True}] * 2


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("two_cards")
def test_all_of_it_on_two_cards(tmp_path, run_workers):
    seen = run_workers("production_worker.py", tmp_path, "nccl", flags=("-W", "ignore"))
    check_equal_weights(seen)
    check_learning(seen, "plain", "normalization", "sharded", "synchronized_normalization")
    check_gradients(seen)
    check_scaler(seen)
    for results in seen:
        scales = results["half_precision"]["scales"]
        assert results["half_precision"]["enabled"]
        assert scales[0] < 2.0**30  # the first steps overflow
        assert scales[-1] == scales[-2]
    assert seen[0]["half_precision"]["scales"] == seen[1]["half_precision"]["scales"]
    assert seen[0]["synchronized_normalization"]["mean"] == seen[1]["synchronized_normalization"]["mean"]


def test_a_scaler_alone_and_a_model_without_a_plan():
    model = torch.nn.Linear(4, 4)
    assert not LossScaler(model).is_enabled()
    scaler = LossScaler(model, enabled=True, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(before - model.weight, torch.full((4, 4), 0.5))


def test_flattened_parameters_are_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with process_group(0, 1, free_port()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about sharding to one worker
        wrapped = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4)), device_id=torch.device("cpu"))
        with pytest.raises(UnsupportedError, match="use fully_shard"):
            apply(wrapped, {"0/linear": "BF16"})


def test_loss_scaling_among_workers_that_join_is_refused(monkeypatch):
    with process_group(0, 1, free_port()):
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        scaler = LossScaler(model, enabled=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(model(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        monkeypatch.setattr("qsync_opt.runtimes.torch.execution.loss_scaling.world", lambda: (0, 2))
        with model.join(), pytest.raises(UnsupportedError, match=r"inside of join\(\).*as many batches"):
            scaler.scale(model(torch.ones(3, 4)).sum()).backward()
            scaler.step(optimizer)
