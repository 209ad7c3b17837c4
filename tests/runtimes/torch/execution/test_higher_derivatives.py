"""Losses that hold gradients, and transforms of torch.func: as without a plan, or refused."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply

X = torch.linspace(-1, 1, 24).view(4, 6)


def critic(last="FP32", first="FP32", backward="half"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    options = ApplyOptions(kernels=KernelOptions(backward=backward))
    return apply(model, {"0/linear": first, "2/linear": last}, options=options)


def penalty(model):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("backward", ["half", "eight"])
@pytest.mark.parametrize(("first", "last"), [("FP32", "INT8"), ("INT8", "FP32"), ("INT8", "INT8")])
def test_a_gradient_penalty_through_8_bits_is_refused(first, last, backward):
    loss = penalty(critic(last, first, backward))
    with pytest.raises(RuntimeError, match="in 8 bits cannot be differentiated again: keep INT8 and FP8 out"):
        loss.backward()


def test_a_gradient_penalty_through_bf16_is_that_of_fp32():
    gradients = []
    for precision in ("FP32", "BF16"):
        model = critic(precision, precision)
        penalty(model).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*gradients, atol=0.02)


def test_a_graph_of_the_gradient_that_nobody_differentiates_is_no_fault():
    model = critic("INT8", "INT8")
    with pytest.warns(UserWarning, match="create_graph"):
        model(X).sum().backward(create_graph=True)
    once = [parameter.grad.detach().clone() for parameter in model.parameters()]
    model = critic("INT8", "INT8")
    model(X).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, model.parameters(), strict=True))


def per_sample(model):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return vmap(grad(lambda w, x: functional_call(model, w, (x,)).sum()), (None, 0))(weights, X)


def test_transforms_go_through_16_bits_and_are_refused_in_8():
    plain, planned = per_sample(critic()), per_sample(critic("BF16", "BF16"))
    assert all(torch.allclose(plain[name], planned[name], atol=0.02) for name in plain)
    model = critic("INT8")
    with pytest.raises(UnsupportedError, match=r"'2/linear' in 8 bits.*keep INT8 and FP8 out"):
        per_sample(model)
    model(X).sum().backward()  # and goes on
