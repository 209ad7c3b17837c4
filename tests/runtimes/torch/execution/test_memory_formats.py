"""Weights channels last under a plan: the same values, and the layout as before when the plan is removed."""

import pytest
import torch
from torch import nn

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, undo
from qsync_opt.runtimes.torch.execution import plans as execution_plans

LAST = torch.channels_last


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 2))


PLANS = {
    "BF16": {"0/conv2d": "BF16", "2/conv2d": "INT8", "4/linear": "BF16"},
    "FP32": dict.fromkeys(("0/conv2d", "2/conv2d", "4/linear"), "FP32"),
}


def step(net, x):
    net.zero_grad()
    result = net(x)
    result.square().sum().backward()
    return result, [parameter.grad.clone() for parameter in net.parameters()]


@pytest.mark.parametrize(("plan", "autocast"), [("BF16", None), ("FP32", "FP32")])
def test_results_are_channels_last_with_the_same_values(plan, autocast):
    x, results, layouts = torch.randn(2, 3, 8, 8), [], []
    for channels_last in (False, True):
        net = model()
        apply(net, PLANS[plan], options=ApplyOptions(autocast=autocast, channels_last=channels_last))
        seen = net[1].register_forward_hook(
            lambda _, args, result: layouts.append(result.is_contiguous(memory_format=LAST))
        )
        results.append(step(net, x))
        seen.remove()
    assert layouts == [False, True]
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_parameters_stay_the_same_objects_and_get_their_layout_back():
    net = model()
    net[2].weight.data = net[2].weight.data.contiguous(memory_format=LAST)  # the user's own choice
    before = {name: (parameter, parameter.stride(), parameter.clone()) for name, parameter in net.named_parameters()}
    step(net, torch.randn(2, 3, 8, 8))
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    apply(net, PLANS["FP32"], options=ApplyOptions(channels_last=True))
    assert net[0].weight.is_contiguous(memory_format=LAST)
    assert net[0].weight.grad.is_contiguous(memory_format=LAST)
    undo(net)
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert parameter is before[name][0]
        assert parameter.stride() == before[name][1]
        assert torch.equal(parameter, before[name][2])
        assert torch.equal(parameter.grad, gradient)


def test_a_sharded_model_is_refused(monkeypatch):
    monkeypatch.setattr(execution_plans, "is_sharded", lambda _: True)
    with pytest.raises(UnsupportedError, match="channels_last=True lays out whole weights"):
        apply(model(), PLANS["FP32"], options=ApplyOptions(channels_last=True))
