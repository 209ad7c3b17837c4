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
