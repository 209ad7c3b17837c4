"""Planned models whose training passes are replayed as CUDA graphs."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from qsync_opt.errors import NotReadyError
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, graphed, undo
from qsync_opt.runtimes.torch.job import host_share
from qsync_opt.runtimes.torch.support import TrainingExample, capture_stream, capturing

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Model(nn.Module):
    """Keyword arguments, a loss beside logits in a mapping, a parameter that is not used, running statistics."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Dropout(dropout)
        self.down, self.unused = nn.Linear(512, 64), nn.Linear(8, 8)

    def forward(self, x, labels=None, scale=1.0):
        logits = self.down(self.drop(self.norm(nn.functional.gelu(self.up(x))))) * scale
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "note": "as given"}


def _planned(precision, dropout=0.0, **options):
    if not ops.supports("linear", precision, CUDA):
        pytest.skip(f"this card has no {precision}")
    torch.manual_seed(0)
    model = Model(dropout).to(CUDA)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        plan = {"up/linear": precision, "down/linear": precision}
        apply(one, plan, options=ApplyOptions(kernels=KernelOptions(**options)))
    batches = [
        {"x": torch.randn(128, 256, device=CUDA), "labels": torch.randint(64, (128,), device=CUDA)} for _ in range(4)
    ]
    return model, twin, batches


def _train(model, batches, *, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(loss.detach())
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("precision", "backward"),
    [*((p, "half") for p in ("FP32", "TF32", "BF16", "FP16", "INT8", "FP8")), ("INT8", "eight"), ("FP8", "eight")],
)
def test_replayed_training_is_the_eager_one(precision, backward, accumulate):
    model, twin, batches = _planned(precision, rounding="nearest", backward=backward)
    before = copy.deepcopy(model.state_dict())
    graphed(model, batches[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    mine, theirs = (_train(one, batches * 3, accumulate=accumulate) for one in (model, twin))
    # An 8-bit gradient is rounded stochastically in any case.
    tolerance = 5e-2 if backward == "eight" else 2e-3
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance)
    assert applied_plan(model).interception.graphs.replayed
    assert model(**batches[0])["note"] == "as given"


def test_every_replay_has_its_own_noise_and_masks():
    model, _, batches = _planned("INT8", backward="eight", weights="step")
    graphed(model, batches[0])
    with_noise = [model(**batches[0])["logits"].clone() for _ in range(2)]
    assert not torch.equal(*with_noise)
    model, _, batches = _planned("BF16", dropout=0.5)
    graphed(model, batches[0])
    with_masks = [model(**batches[0])["logits"].clone() for _ in range(2)]
    assert not torch.equal(*with_masks)


def test_capturing_moves_neither_noise_nor_random_state():
    model, twin, batches = _planned("INT8")
    state = torch.cuda.get_rng_state()
    graphed(model, batches[0])
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert int(applied_plan(model).counter) == int(applied_plan(twin).counter)
    applied_plan(model).go_on_at(seed=1, offset=5)  # the seed is part of what was captured
    first = model(**batches[0])["logits"].clone()
    applied_plan(model).go_on_at(seed=1, offset=5)
    assert torch.equal(first, model(**batches[0])["logits"])


def test_passes_that_do_not_fit_run_eagerly():
    model, _, batches = _planned("BF16")
    graphed(model, batches[0])
    graphs = applied_plan(model).interception.graphs
    part = {name: value[:100] for name, value in batches[0].items()}
    for wrong in (part, {**batches[0], "scale": 2.0}):
        model(**wrong)["loss"].backward()
        assert not graphs.replayed
    with torch.no_grad():
        model(**batches[0])
    assert not graphs.replayed
    model.eval()
    model(**batches[0])
    assert not graphs.replayed
    model.train()
    model(**batches[0])
    assert graphs.replayed
    undo(model)
    assert model(**batches[0])["logits"].dtype is torch.float32


def test_a_backward_pass_without_its_activations_is_refused():
    model, _, batches = _planned("BF16")
    graphed(model, batches[0])
    first = model(**batches[0])["loss"]
    second = model(**batches[1])["loss"]
    with pytest.raises(NotReadyError, match="before the next forward pass"):
        first.backward()
    second.backward()


REFUSED = """
import torch
from torch import nn
import qsync_opt
from qsync_opt.errors import UnsupportedError

class Waiting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out, self.drop = nn.Linear(64, 64), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.out(x)) * (1.0 if x.sum().item() > 0 else 2.0)

x = torch.randn(16, 64, device="cuda")
model = qsync_opt.apply(Waiting().to("cuda"), {"out/linear": "BF16"})
try:
    qsync_opt.graphed(model, x)
except UnsupportedError as error:
    print(error)
for _ in range(2):
    model(x).float().sum().backward()  # with dropout, which a generator in the midst of a capture refuses
torch.cuda.synchronize()
allocated = torch.cuda.memory_allocated()
torch.empty(1 << 24, device="cuda")
assert torch.cuda.memory_allocated() == allocated
assert model.out.weight.grad is not None
"""


def test_what_cannot_be_captured_is_refused_and_runs_on():
    # In a process of its own: a capture that failed is not the state in which other tests should start.
    done = subprocess.run([sys.executable, "-P", "-c", REFUSED], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("graphed: the passes of this model cannot be captured (")


@pytest.mark.parametrize("autocast", [None, "BF16"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {"num_layers": 2, "batch_first": True}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {})],
)
def test_recurrent_layers_are_trained_by_captured_passes(kind, options, autocast):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = kind(64, 64, **options)
            self.out = nn.Linear(128 if "bidirectional" in options else 64, 64)

        def forward(self, x):
            return self.out(self.inner(x)[0])

    torch.manual_seed(0)
    model = Recurrent().to(CUDA)
    twin = copy.deepcopy(model)
    twin.inner.flatten_parameters()  # a copy's weights lie apart
    plan = {"out/linear": autocast or "FP32"}
    apply(model, plan, options=ApplyOptions(autocast=autocast, captured=True))
    apply(twin, plan, options=ApplyOptions(autocast=autocast))
    trained = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, twin)]
    for _ in range(4):
        x = torch.randn(8, 12, 64, device=CUDA)
        for each, optimizer in trained:
            optimizer.zero_grad()
            each(x).float().square().mean().backward()
            optimizer.step()
    assert applied_plan(model).interception.graphs.replayed
    for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, other, atol=1e-3 if autocast else 1e-5)
        assert ours.grad is not None
    undo(model)
    before = [weight.data_ptr() for weight in model.inner.parameters()]
    model(x).float().sum().backward()
    assert [weight.data_ptr() for weight in model.inner.parameters()] == before


@pytest.mark.parametrize("autocast", [None, "BF16", "FP16"])
def test_the_first_training_pass_is_captured(autocast):
    torch.manual_seed(0)
    model = Model().to(CUDA)
    twin = copy.deepcopy(model)
    precision = autocast or "BF16"
    plan = {"up/linear": precision, "down/linear": precision}
    apply(model, plan, options=ApplyOptions(autocast=autocast, captured=True))
    apply(twin, plan, options=ApplyOptions(autocast=autocast))
    batches = [{"x": torch.randn(128, 256, device=CUDA), "labels": torch.arange(128, device=CUDA) % 64}] * 4
    model.eval()
    model(**batches[0])
    assert not applied_plan(model).interception.graphs.generation
    model.train()
    mine, theirs = (_train(one, batches) for one in (model, twin))
    torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
    assert applied_plan(model).interception.graphs.replayed
    undo(model)
    assert model(**batches[0])["logits"].dtype is torch.float32


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_what_is_captured_is_compiled_once():
    torch.manual_seed(0)
    model = Model().to(CUDA)
    twin = copy.deepcopy(model)
    plan = {"up/linear": "BF16", "down/linear": "BF16"}
    apply(model, plan, options=ApplyOptions(autocast="BF16", compiled=True, captured=True))
    apply(twin, plan, options=ApplyOptions(autocast="BF16"))
    batches = [{"x": torch.randn(128, 256, device=CUDA), "labels": torch.arange(128, device=CUDA) % 64}] * 4
    torch._dynamo.reset()
    counters.clear()
    mine, theirs = (_train(one, batches) for one in (model, twin))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)
    assert applied_plan(model).interception.graphs.replayed


def test_capturing_again_and_again_takes_no_more_memory():
    held = []
    model, _, batches = _planned("BF16")
    for _ in range(6):
        graphed(model, batches[0])
        model(**batches[0])["loss"].backward()
        model.zero_grad(set_to_none=True)
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1]


def test_no_graph_is_freed_while_another_is_captured():
    """A graph in a reference cycle, as those of a dropped model are, would be freed in the middle of a capture."""
    stream, x = capture_stream(), torch.ones(4, device=CUDA)

    def captured():
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with capturing(graph, stream):
            y = x + 1
            cycles = [[] for _ in range(50)]
            for cycle in cycles:
                cycle.append(cycle)
            y = y + 1
        return graph, y

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(20, 1, 1)
    try:
        cycle = [captured()]
        cycle.append(cycle)
        del cycle
        graph, y = captured()
    finally:
        gc.set_threshold(*thresholds)
    graph.replay()
    assert y.tolist() == [3.0] * 4
    assert gc.isenabled()


def test_a_loss_of_before_may_be_kept():
    model, _, batches = _planned("BF16")
    kept = model(**batches[0])["loss"]
    kept.backward(retain_graph=True)
    graphed(model, batches[0])
    model(**batches[0])["loss"].backward()
    assert torch.isfinite(kept)


def test_gradients_reach_the_input_and_come_from_any_output():
    model, twin, batches = _planned("BF16")
    x = batches[0]["x"].clone().requires_grad_()
    graphed(model, {"x": x})
    found = []
    for one in (model, twin):
        for _ in range(2):
            x.grad = None
            one.zero_grad()
            one(x=x)["logits"].square().mean().backward()
        found.append([x.grad, one.up.weight.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-6)


def test_the_share_of_the_host_is_measured_and_leaves_no_trace():
    model, _, batches = _planned("BF16")
    undo(model)
    before = copy.deepcopy(model.state_dict())
    example = TrainingExample(model=model, kwargs=batches[0])
    share = host_share(example, {"up/linear": "BF16", "down/linear": "BF16"}, None, KernelOptions())
    assert 0 < share <= 1
    assert applied_plan(model) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Asking(nn.Module):
    """Does more where it believes to be captured, as libraries do that would look at a value else."""

    def __init__(self, looks):
        super().__init__()
        self.looks, self.out = looks, nn.Linear(64, 8)
        self.told = []

    def forward(self, x, mask):
        self.told.append(torch.cuda.is_current_stream_capturing())
        if self.told[-1] or (self.looks and not bool(mask.all())):
            x = x * mask
        return self.out(x).float().square().mean()


@pytest.mark.parametrize("looks", [False, True])
def test_only_a_model_that_looks_at_values_is_told_that_it_is_captured(looks):
    torch.manual_seed(0)
    model = Asking(looks).to(CUDA)
    x, mask = torch.randn(16, 64, device=CUDA), torch.ones(16, 64, device=CUDA)
    apply(model, {"out/linear": "BF16"})
    eager = model(x, mask).detach()
    graphed(model, (x, mask))
    assert model.told[-1] is looks
    torch.testing.assert_close(model(x, mask).detach(), eager)
    hidden = model.out.bias.detach().bfloat16().float().square().mean()
    torch.testing.assert_close(model(x, 0 * mask).detach(), hidden if looks else eager)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert applied_plan(model).interception.graphs.replayed
