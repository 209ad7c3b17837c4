"""Moments of many tensors at once: those of each."""

import pytest
import torch

from qsync_opt.runtimes.torch.sensitivity.records import MomentQueue
from qsync_opt.runtimes.torch.sensitivity.records import operator as records


@pytest.mark.parametrize("together", [1 << 21, 30])
def test_each_gets_its_own(monkeypatch, together):
    monkeypatch.setattr(records, "_TOGETHER", together)
    torch.manual_seed(0)
    queue, results = MomentQueue(), {}
    tensors = [torch.randn(20), torch.randn(4, 5), torch.randn(100).double()]
    for i, x in enumerate(tensors):
        queue.add(x, lambda amax, root, i=i: results.setdefault(i, (amax, root)), root=i != 1)
    queue.flush()
    queue.flush()  # nothing waits any more
    for i, x in enumerate(tensors):
        amax, root = results[i]
        assert float(amax) == float(x.abs().max())
        assert root is None if i == 1 else float(root) == pytest.approx(float(x.double().norm()))
