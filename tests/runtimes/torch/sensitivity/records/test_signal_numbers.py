"""By how much a normalization makes variances grow: from its weights what the variances of its result say."""

import pytest
import torch
import torch.nn.functional as F

from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.records import normalized, signals_on_host
from qsync_opt.runtimes.torch.sensitivity.reductions import channel_variances


def _growth(tensors):
    every = {"input": torch.ones(1), "output": torch.ones(1), **tensors}
    return signals_on_host({"norm": [(1, every)]})["norm"][1][0][3]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_growth_in_a_batch_normalization(training, weighted):
    torch.manual_seed(0)
    x = torch.randn(8, 6, 5) * torch.logspace(-2, 2, 6).view(-1, 1) + 3
    x[:, 2] = 1.0  # varies in no way
    weight, bias = (torch.randn(6), torch.randn(6)) if weighted else (None, None)
    args = (x, torch.rand(6), torch.rand(6) + 0.5, weight, bias, training, 0.0, 1e-3)
    call = OperatorCall("norm", "batch_norm", "", F.batch_norm, args, {})
    output = call.run()
    expected = _growth({"before": channel_variances(x), "after": channel_variances(output)})
    tensors = normalized(call, x, output)
    assert ("after" in tensors) is not weighted
    assert _growth(tensors) == pytest.approx(expected, rel=1e-4)
