"""What `graphed` refuses; what it does is tested on a card."""

import pytest
import torch
from torch import nn

import qsync_opt
from qsync_opt.errors import NotReadyError, UnsupportedError


def test_a_plan_comes_first():
    with pytest.raises(NotReadyError, match=r"no plan is applied.*make_graphed_callables"):
        qsync_opt.graphed(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_model_on_the_host_cannot_be_captured():
    model = qsync_opt.apply(nn.Sequential(nn.Linear(4, 4)), {"0/linear": "BF16"})
    with pytest.raises(UnsupportedError, match="on cpu: CUDA graphs need a model on a card"):
        qsync_opt.graphed(model, torch.zeros(2, 4))
    assert model(torch.zeros(2, 4)).dtype is torch.bfloat16
