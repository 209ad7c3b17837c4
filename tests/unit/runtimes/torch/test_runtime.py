import torch
from torch import nn

from qsync_opt.graph import Role
from qsync_opt.runtimes.base import Runtime
from qsync_opt.runtimes.torch.runtime import TorchRuntime


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
    assert model(tokens).dtype is torch.bfloat16
    runtime.undo(model)
    assert torch.equal(model(tokens), plain)
    assert set(runtime.device_formats("cpu")) == {"INT8", "BF16", "FP32"}
