"""Activation checkpointing where other passes run between a forward pass and its backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.runtimes.torch.apply import apply


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.b(self.drop(torch.tanh(self.a(x))))


class Net(nn.Module):
    """Two blocks, of which the first runs twice."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = Block(), Block(), how
        self.drop = nn.Dropout(0.1)

    def run(self, block, x):
        x = self.drop(x)
        if self.how is None:
            return block(x)
        if self.how == "function":
            return checkpoint(lambda x: x + block.b(self.drop(torch.tanh(block.a(x)))), x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=self.how == "reentrant")

    def forward(self, x):
        return self.run(self.second, self.run(self.first, self.run(self.first, x)))


PLAN = dict.fromkeys(["first.a/linear", "first.b/linear", "first.a/linear_1", "second.a/linear"], "INT8") | {
    "first.b/linear_1": "BF16",
    "second.b/linear": "BF16",
}


def one_pass(model):
    model(torch.randn(4, 16, requires_grad=True)).square().mean().backward()


def the_same_graph_twice(model):
    loss = model(torch.randn(4, 16, requires_grad=True)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def two_views(model):
    """As in contrastive training: one loss of two passes."""
    first, second = model(torch.randn(4, 16, requires_grad=True)), model(torch.randn(4, 16, requires_grad=True))
    (first.square().mean() + second.square().mean()).backward()


def one_input_twice(model):
    x = torch.randn(4, 16, requires_grad=True)
    (model(x) - 2 * model(x)).square().mean().backward()


def losses_in_order(model):
    losses = [model(torch.randn(4, 16, requires_grad=True)).square().mean() for _ in range(3)]
    for loss in losses:
        loss.backward()


def an_evaluation_between(model):
    loss = model(torch.randn(4, 16, requires_grad=True)).square().mean()
    with torch.no_grad():
        model.eval()(torch.randn(4, 16))
    model.train()
    loss.backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, about the evaluation
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize(
    "passes", [one_pass, the_same_graph_twice, two_views, one_input_twice, losses_in_order, an_evaluation_between]
)
def test_what_is_recomputed_rounds_as_it_did_the_first_time(passes, how):
    compare(passes, how)


@pytest.mark.parametrize("passes", [one_pass, an_evaluation_between])
def test_functions_that_call_modules(passes):
    compare(passes, "function")


def compare(passes, how):
    """Gradients of many passes with and without recomputation: old ones are forgotten, memory is used again."""
    gradients = []
    for checkpointed in (None, how):
        torch.manual_seed(0)
        model = apply(Net(checkpointed), PLAN)
        for _ in range(10):
            passes(model)
        gradients.append([p.grad for p in model.parameters()])
    # Sums of several passes' gradients are added up in another order.
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=1e-5, atol=1e-6)
