"""Compressed reduce-scatter of FSDP between processes, beside the plain one."""

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def test_sharded_gradients(run_workers):
    outcomes = run_workers("sharded_worker.py")
    for outcome in outcomes:
        for name, most in (("two8", 0.02), ("two-fp8", 0.06), ("BF16", 0.01)):
            one = outcome[name]
            assert 0 < one["error"] < most, (name, one)
            assert one["fresh"] and one["resumed"]
            assert one["sum"] == outcomes[0][name]["sum"]
        assert outcome["spoiled"] is False
        assert outcome["bias"] < 2  # standard errors of the mean; 0.67 is expected
        errors = outcome["errors"]
        assert "sum8" in errors["sum"] and "allowed are the two-shot schemes" in errors["sum"]
        assert "'exponential' cannot be scattered" in errors["exponential"]
        assert "apply fully_shard first" in errors["plain"]
        assert "differs between ranks" in errors["unlike"]
        assert (
            f"the plan was made for {len(outcomes) + 1} workers, but {len(outcomes)} reduce here" in errors["workers"]
        )
        assert "'sum8' cannot be scattered" in errors["scheme of one"]
        assert "bucket 0 has" in errors["layout"] and "but the plan was made for 17" in errors["layout"]
        planned = outcome["planned"]
        assert planned["equal"]  # FP32 gives the bits of FSDP's own reduce-scatter
        assert planned["elements"] == planned["sampled"]
        assert len(planned["elements"]) == len(planned["plan"]) == 3
        assert planned["steps"] == [2, 2] and planned["workers"] == len(outcomes)
        assert planned["noise"] > 0 and planned["predicted"] > 0
        assert planned["mixed"] == ["two8", "FP32", "two8"]
        assert 0 < planned["close"] < 0.02
    for key in ("plan", "elements"):
        assert outcomes[0]["planned"][key] == outcomes[1]["planned"][key]
    assert "the other ranks do not answer" in outcomes[0]["lost"]
    assert outcomes[0]["untouched"]
