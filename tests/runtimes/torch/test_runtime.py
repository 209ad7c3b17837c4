import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.errors import NotReadyError
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtime import Runtime
from qsync_opt.runtimes.torch import TorchRuntime
from qsync_opt.testing import check_runtime


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 11)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        scores = torch.softmax(x @ x.mT, -1)
        return self.down(torch.relu(self.up(scores @ x)))


def test_names_of_the_graph_are_those_that_apply_understands():
    runtime: Runtime = TorchRuntime()
    assert isinstance(runtime, Runtime)
    model, tokens = Mlp(), torch.randint(11, (2, 5))
    graph = runtime.capture(model, (tokens,))
    lowest = {o.name: runtime.operator_precisions(o.op_type, "cpu")[0] for o in graph.by_role(Role.ADJUSTABLE)}
    assert lowest == {
        "embed/embedding": "BF16",
        "matmul": "INT8",
        "matmul_1": "INT8",
        "up/linear": "INT8",
        "down/linear": "INT8",
    }
    plain = model(tokens)
    runtime.apply(model, lowest, graph=graph)
    output = model(tokens)
    assert torch.equal(output, output.to(torch.bfloat16).float())
    runtime.undo(model)
    assert torch.equal(model(tokens), plain)
    assert set(runtime.device_formats("cpu")) == {"INT8", "BF16", "FP32"}


def step(model, args):
    result = model(*args)
    result.float().sum().backward()
    return result.detach()


def conforms(runtime):
    torch.manual_seed(0)
    tokens = torch.randint(11, (2, 5))
    check_runtime(runtime, model=Mlp(), args=(tokens,), device="cpu", outputs_equal=torch.equal, step=step)


def test_the_torch_runtime_conforms():
    conforms("torch")


@functools.cache
def captured():
    return TorchRuntime().capture(Mlp(), (torch.randint(11, (2, 5)),))


class Captured(TorchRuntime):
    """Captures the one model of these tests once, as none of the faults is in how."""

    def capture(self, model, args, kwargs=None):
        return captured()


class Forgetful(Captured):
    """Leaves the plan on."""

    def undo(self, model):
        return model


class Careless(Captured):
    """Undoes, but not quite."""

    def undo(self, model):
        super().undo(model)
        with torch.no_grad():
            model.down.bias.add_(1.0)
        return model


class Lax(Captured):
    """Takes a second plan over the first."""

    def apply(self, model, plan, device_type=None, *, graph=None, options=None):
        try:
            return super().apply(model, plan, device_type, graph=graph, options=options)
        except NotReadyError:
            return model


class Renaming(Captured):
    """Another set of names with every capture."""

    captures = 0

    def capture(self, model, args, kwargs=None):
        graph = super().capture(model, args, kwargs)
        self.captures += 1
        first = replace(graph.operators[0], name=f"renamed{self.captures}")
        return OpGraph(
            name=graph.name,
            operators=tuple(
                replace(o, inputs=tuple(first.name if i == graph.operators[0].name else i for i in o.inputs))
                for o in (first, *graph.operators[1:])
            ),
            parameters=graph.parameters,
        )


class Unordered(TorchRuntime):
    def device_formats(self, device):
        return dict(reversed(super().device_formats(device).items()))


@pytest.mark.parametrize(
    ("runtime", "needle"),
    [
        (Forgetful, "undo does not give the model back"),
        (Careless, "undo does not give the model back"),
        (Lax, "a second plan is applied over the first"),
        (Renaming, "two captures of one model differ"),
        (Unordered, "coarsest first, but are FP32, BF16, INT8"),
    ],
)
def test_faulty_runtimes_are_found(runtime, needle):
    with pytest.raises(AssertionError, match=needle):
        conforms(runtime())
