"""Activation checkpointing where other passes run between a forward pass and its backward pass."""

import itertools

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from qsync_opt.runtimes.torch.execution import apply
from qsync_opt.runtimes.torch.interception.recomputation import CallMemory


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
        reentrant = self.how.startswith("reentrant")
        if "function" in self.how:
            return checkpoint(
                lambda x: x + block.b(self.place(self.drop(torch.tanh(block.a(x))))), x, use_reentrant=reentrant
            )
        return checkpoint(block, x, use_reentrant=reentrant)

    def place(self, x):
        return x

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


class InMemory(torch.autograd.Function):
    """A copy that lies in a given piece of memory, as if an allocator had chosen it."""

    @staticmethod
    def forward(ctx, x, memory):
        return torch.frombuffer(memory, dtype=x.dtype, count=x.numel()).view_as(x).copy_(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ReusingNet(Net):
    """Recomputed inputs of the first block's second call lie where those of its first call lay, and the reverse."""

    def __init__(self, how):
        super().__init__(how)
        pieces = [bytearray(4 * 16 * 4) for _ in range(3)]
        self.pieces = itertools.cycle([pieces[index] for index in (0, 1, 2, 2, 0, 1)])

    def place(self, x):
        return InMemory.apply(x, next(self.pieces))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, about the evaluation
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "reentrant function", "function"])
@pytest.mark.parametrize(
    "passes", [one_pass, the_same_graph_twice, two_views, one_input_twice, losses_in_order, an_evaluation_between]
)
def test_what_is_recomputed_rounds_as_it_did_the_first_time(passes, how):
    compare(passes, how)


@pytest.mark.parametrize("how", ["reentrant function", "function"])
def test_new_tensors_that_lie_where_those_of_other_calls_lay(how):
    compare(one_pass, how, ReusingNet)


def test_inputs_are_not_kept():
    memory, x = CallMemory(shared_modules=False), torch.randn(4)
    storage = StorageWeakRef(x.untyped_storage())
    memory.remember("a", 0, {}, x)
    del x
    assert storage.expired()


@pytest.mark.parametrize("x", [None, torch.eye(2).to_sparse()])
def test_calls_without_a_storage_go_on_with_the_pass_of_the_last_repetition(x):
    memory, told = CallMemory(shared_modules=False), torch.randn(4)
    for index in range(2):
        memory.remember("a", index, {}, told if index == 0 else None)
        memory.remember("b", index, {}, x)
    assert [memory.recall("a", told), memory.recall("b", x)] == [(0, {}, False), (0, {}, False)]


def compare(passes, how, kind=Net):
    """Gradients of many passes with and without recomputation: old ones are forgotten, memory is used again."""
    gradients = []
    for checkpointed in (None, how):
        torch.manual_seed(0)
        model = apply(kind(checkpointed), PLAN)
        for _ in range(10):
            passes(model)
        gradients.append([p.grad for p in model.parameters()])
    # Sums of several passes' gradients are added up in another order.
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(plain, recomputed, rtol=1e-5, atol=1e-6)
