"""Passes after the first ask the plan no more: they must give what the plan says all the same, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.errors import NotReadyError
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import Role, RoleTable
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import AppliedPlan, ApplyOptions, applied_plan, apply, undo


class Everything(nn.Module):
    """Modules that are one operator, the same operators as functions, a module that is called twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.shared = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.act = nn.GELU()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(1)
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, index):
        x = self.table(index)
        x = self.shared(self.act(self.shared(x)))
        x = self.conv(self.norm(x))
        x = self.batch_norm(x.unsqueeze(1)).squeeze(1)
        x = F.linear(x, self.weight) @ self.weight
        x = torch.matmul(x, x.transpose(-1, -2))
        x = F.scaled_dot_product_attention(x, x, x) / 8
        return (x.softmax(-1) * x).square().sum()


PLAN = {
    "table/embedding": "BF16",
    "shared/linear": "INT8",
    "shared/linear_1": "BF16",
    "conv/conv1d": "INT8",
    "linear": "INT8",
    "matmul": "INT8",
    "matmul_1": "BF16",
    "scaled_dot_product_attention": "BF16",
}


def _model(seed=0):
    torch.manual_seed(seed)
    return Everything(), torch.randint(11, (3, 4))


def _slow(model):
    """Ask the plan about every operator in every pass, as in the first."""
    applied_plan(model).interception.prepare = None


def _pass(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("backward", ["half", "eight"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_later_passes_are_those_of_an_asked_plan(backward, rounding):
    results = []
    for slow in (False, True):
        model, x = _model()
        options = ApplyOptions(kernels=KernelOptions(backward=backward, rounding=rounding))
        apply(model, PLAN, options=options)
        found = []
        for _ in range(3):
            found.append(_pass(model, x))
            if slow:
                _slow(model)
        model.eval()
        with torch.no_grad():
            found.append([model(x), model(x)])
        results.append(found)
    for fast, asked in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(fast, asked, strict=True))
    assert rounding == "nearest" or not torch.equal(results[0][1][1], results[0][2][1])
    assert torch.equal(*results[0][3])


def test_the_plan_is_asked_about_the_first_pass_only(monkeypatch):
    model, x = _model()
    apply(model, PLAN)
    model(x)
    asked = []
    monkeypatch.setattr(AppliedPlan, "__call__", lambda self, call: asked.append(call))
    model(x)
    assert asked == []


def test_a_plan_that_answers_otherwise_is_asked_always():
    class Counting(AppliedPlan):
        calls = 0

        def __call__(self, call):
            self.calls += 1
            return super().__call__(call)

    model, x = _model()
    applied = Counting(model, PLAN, None, ApplyOptions())
    model(x)
    before = applied.calls
    model(x)
    assert applied.calls == 2 * before
    applied.interception.remove()


def test_hooks_subclasses_and_parametrizations_keep_their_operators():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(model[2])
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    apply(model, {"0/linear": "BF16", "1/linear": "BF16", "2/linear": "BF16"})
    x = torch.randn(4, 8)
    first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert seen == [torch.bfloat16] * 2
    second.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_may_be_replaced_between_passes():
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    apply(model, {"0/linear": "BF16"})
    model(x)
    model[0].weight = nn.Parameter(torch.zeros(8, 8))
    model[0].bias = None
    assert torch.equal(model(x), torch.zeros(4, 8, dtype=torch.bfloat16))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)


def test_a_layer_that_is_recomputed_by_itself_rounds_as_it_did():
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(16, 8, requires_grad=True)
    plan = {"first/linear": "INT8", "first/linear_1": "INT8", "second/linear": "INT8"}
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.second(plain.first(plain.first(x)))
    for candidate in (model, plain):
        apply(candidate, plan)
    for _ in range(3):
        found = []
        for candidate in (model, plain):
            candidate.zero_grad()
            candidate(x).square().sum().backward()
            found.append([p.grad.clone() for p in candidate.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_is_refused_in_later_passes():
    model, x = _model()
    apply(model, PLAN)
    model(x)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(NotReadyError, match=r"'table/embedding'.*autocast"),
    ):
        model(x)
    assert model(x).dtype is torch.float32


def test_the_stream_can_be_moved():
    model, x = _model()
    apply(model, PLAN)
    first = _pass(model, x)
    _pass(model, x)
    applied_plan(model).go_on_at(0, 0)
    again = _pass(model, x)
    assert torch.equal(first[0], again[0])
    undo(model)
    assert model(x).dtype is torch.float32


def test_what_a_role_makes_fixed_is_lifted_in_later_passes():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    graph = capture(model, (x,), {}, roles=RoleTable(by_type={"gelu": Role.FIXED}))
    for given, dtype in ((None, torch.bfloat16), (graph, torch.float32)):
        found = []
        hook = model[1].register_forward_hook(lambda module, args, output, found=found: found.append(output.dtype))
        apply(model, {"0/linear": "BF16", "2/linear": "BF16"}, graph=given)
        for _ in range(2):
            model(x)
        assert found == [dtype] * 2
        hook.remove()
        undo(model)
