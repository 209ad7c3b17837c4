"""Compiled plans of models whose blocks repeat: each kind of block is compiled once."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.execution import ApplyOptions, applied_plan, apply, undo
from qsync_opt.runtimes.torch.interception import CompiledByBlocks, repeated_blocks

pytestmark = [
    # torch's own, about a cache of constants.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    # torch's own, which advises TF32 on a card.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # torch's own, where a layer's input is another layer's result.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
BLOCKS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block=Block, run=lambda block, x: block(x)):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.run = nn.Linear(8, 8), nn.Linear(8, 4), run
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def precisions(*of_blocks, head="FP32"):
    """A plan with these precisions of the layers of all blocks, or of one block each."""
    each = [*of_blocks, *[of_blocks[-1]] * (BLOCKS - len(of_blocks))]
    layers = {f"blocks.{i}.{name}/linear": precision for i, precision in enumerate(each) for name in ("up", "down")}
    return {**layers, "stem/linear": head, "head/linear": head}


@pytest.fixture
def uses(monkeypatch):
    """Number of blocks that share each compiled graph, of every compilation; nothing is generated."""
    torch.compiler.reset()
    compilations = []

    def nodes(graph):
        yield from graph.graph.nodes
        for _, own in graph.named_children():  # what is checkpointed
            yield from nodes(own) if isinstance(own, torch.fx.GraphModule) else ()

    def backend(graph, example, **_):
        calls = [node.args[1] for node in nodes(graph) if "invoke_subgraph" in str(node.target)]
        compilations.append(sorted(calls.count(name) for name in set(calls)))
        return lookup_backend("aot_eager")(graph, example)

    monkeypatch.setattr("qsync_opt.runtimes.torch.interception.regions.lookup_backend", lambda name: backend)
    yield compilations
    torch.compiler.reset()


def passes(model, x, count=1):
    """Results and gradients of some training passes, whose gradients add up."""
    model.zero_grad()
    results = [model(x) for _ in range(count)]
    sum(result.float().square().sum() for result in results).backward()
    return results, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (precisions("BF16"), {}),
        (precisions("BF16", head="BF16"), {"autocast": "BF16"}),
        (precisions("FP32"), {"autocast": "FP32"}),
    ],
    ids=["BF16", "autocast", "FP32"],
)
def test_equal_blocks_are_compiled_once_with_the_same_results(uses, plan, options):
    model, x = Model(), torch.randn(4, 8)
    expected = passes(apply(model, plan, options=ApplyOptions(**options)), x)
    apply(undo(model), plan, options=ApplyOptions(compiled=True, regional=True, **options))
    results = passes(model, x)
    assert uses == [[BLOCKS]]
    torch.testing.assert_close(results, expected)
    assert undo(model)._compiled_call_impl is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_are_in_the_type_of_the_plans_autocast_and_not_of_the_process(uses, device):
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, torch.float16)  # as on a card by default
    try:
        model, x = Model().to(device), torch.randn(4, 8, device=device)
        with torch.no_grad():
            model.blocks[0].up.weight *= 1e6  # what follows is finite in BF16, but not in FP16
        plan = precisions("BF16", head="BF16")
        expected = passes(apply(model, plan, options=ApplyOptions(autocast="BF16")), x)
        apply(undo(model), plan, options=ApplyOptions(autocast="BF16", compiled=True, regional=True))
        results = passes(model, x)
        assert uses == [[BLOCKS]]
        assert torch.get_autocast_dtype(device) is torch.float16
    finally:
        torch.set_autocast_dtype(device, before)
    assert all(gradient.isfinite().all() for gradient in results[1])
    torch.testing.assert_close(results, expected)


def test_sizes_of_another_model_do_not_make_sizes_variable(monkeypatch):
    sizes = []

    def backend(graph, example):
        sizes.extend(type(size) for node in graph.graph.nodes for size in getattr(node.meta.get("val"), "shape", ()))
        sizes.extend(type(size) for value in example for size in getattr(value, "shape", (value,)))
        return graph

    torch.compiler.reset()
    monkeypatch.setattr("qsync_opt.runtimes.torch.interception.regions.lookup_backend", lambda name: backend)
    for rows in (4, 6):
        model = apply(Model(), precisions("BF16"), options=ApplyOptions(compiled=True))
        model(torch.randn(rows, 8))
    assert sizes and set(sizes) == {int}


class Gated(nn.Module):
    """Keeps both its inputs, one of which all blocks share, for the backward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, gate):
        return x * x + self.linear(x).sin() * gate


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generated_blocks_leave_intact_what_they_keep(device):
    torch.compiler.reset()

    class Shared(Model):
        def forward(self, x):
            x = self.stem(x).sin()
            gate = x.detach().cos()
            for block in self.blocks:
                x = block(x, gate)
            return self.head(x.cos())

    model, x = Shared(Gated).to(device), torch.randn(4, 8, device=device)
    plan = {f"{name}/linear": "FP32" for name in ("stem", "head", *(f"blocks.{i}.linear" for i in range(BLOCKS)))}
    expected = passes(apply(model, plan), x)
    apply(undo(model), plan, options=ApplyOptions(compiled=True, regional=True))
    results = passes(model, x)
    torch.testing.assert_close(results, expected)


def test_a_model_compiled_by_blocks_may_stand_in_autocast_of_the_plans_type_alone(uses):
    options = ApplyOptions(autocast="BF16", compiled=True, regional=True)
    model, other = (apply(Model(), precisions("BF16", head="BF16"), options=options) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 8)).sum().backward()
    assert uses == [[BLOCKS]]
    with torch.autocast("cpu", torch.float16), pytest.raises(NotReadyError, match=r"in torch\.float16, but its plan"):
        other(torch.randn(4, 8))


class Side(Model):
    """Equal blocks beside each other."""

    def forward(self, x):
        x = self.stem(x)
        # Doubled, so that their gradients have one layout, and one backward graph does.
        return self.head(torch.stack([2 * block(x) for block in self.blocks]))


@pytest.mark.parametrize("precision", ["INT8", "INT8-BWD8"])
def test_blocks_in_8_bits_share_code_but_not_noise(uses, precision):
    model, x = Side(), torch.randn(4, 8)
    for block in model.blocks:
        block.load_state_dict(model.blocks[0].state_dict())
    exact = model(x).detach()
    apply(model, precisions(precision), options=ApplyOptions(compiled=True, regional=True))
    results, gradients = passes(model, x, 2)
    assert uses == [[BLOCKS]]
    drawn = torch.cat(results).flatten(1).unique(dim=0)
    assert len(drawn) == 2 * BLOCKS
    for result in results:
        assert ((result.double() - exact).norm() / exact.norm()).item() < 0.05
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert applied_plan(model).options.kernels.offset == 2
    model.eval()
    assert torch.equal(model(x), model(x))
    assert uses == [[BLOCKS], [BLOCKS]]


class Dropping(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


def plainly(block, x):
    return block(x)


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def from_one_seed(model, x):
    torch.manual_seed(1)
    return passes(model, x)


@pytest.mark.parametrize("regional", [True, False], ids=["by blocks", "whole"])
def test_checkpointed_blocks_are_compiled_once_with_the_same_gradients(uses, regional):
    model, x = Model(run=checkpointed), torch.randn(4, 8)
    expected = from_one_seed(apply(model, precisions("BF16")), x)
    apply(undo(model), precisions("BF16"), options=ApplyOptions(compiled=True, regional=regional))
    torch.testing.assert_close(from_one_seed(model, x), expected)
    assert uses == [[BLOCKS] if regional else []]


def test_checkpointed_blocks_that_draw_random_numbers_are_compiled_as_a_whole(uses, caplog):
    model, x = Model(Dropping, run=checkpointed), torch.randn(4, 8)
    expected = from_one_seed(apply(model, precisions("BF16")), x)
    apply(undo(model), precisions("BF16"), options=ApplyOptions(compiled=True, regional=True))
    torch.testing.assert_close(from_one_seed(model, x), expected)
    assert uses == [[]]
    assert "they draw random numbers, as dropout does, and their activations are checkpointed" in caplog.text


def test_checkpointed_blocks_round_the_same_way_again(uses):
    x, plan = torch.randn(4, 8), precisions("INT8-BWD8")
    options = ApplyOptions(compiled=True, regional=True)
    expected, found = (
        from_one_seed(apply(Model(run=run), plan, options=options), x) for run in (plainly, checkpointed)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert uses == [[BLOCKS], [BLOCKS]]


def test_layers_of_transformers_that_checkpoint_themselves_are_compiled_once(uses):
    layers = pytest.importorskip("transformers.modeling_layers")

    class Layer(layers.GradientCheckpointingLayer, Block):
        def __init__(self):
            super().__init__()
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = checkpoints

    checkpoints = functools.partial(checkpoint, use_reentrant=False)
    model, x, plan = Model(Layer), torch.randn(4, 8), precisions("BF16", head="BF16")
    expected = from_one_seed(apply(model, plan, options=ApplyOptions(autocast="BF16")), x)
    apply(undo(model), plan, options=ApplyOptions(compiled=True, regional=True, autocast="BF16"))
    torch.testing.assert_close(from_one_seed(model, x), expected)
    assert uses == [[BLOCKS]]
    assert model.blocks[0].__dict__["_gradient_checkpointing_func"] is checkpoints


def test_as_many_kinds_of_blocks_are_compiled_as_the_plan_makes(uses):
    model = apply(Model(), precisions("BF16", "FP32"), options=ApplyOptions(compiled=True, regional=True))
    model(torch.randn(4, 8))
    assert uses == [[2]]  # what is used once becomes a part of the whole


def test_blocks_that_write_to_their_buffers_are_compiled_as_a_whole(uses, caplog):
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

    model, x = Model(Counting), torch.randn(4, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = []
    for compiled in (False, True):
        model.load_state_dict(before)
        apply(model, precisions("BF16"), options=ApplyOptions(compiled=compiled, regional=compiled))
        states.append((passes(model, x), {name: buffer.clone() for name, buffer in model.named_buffers()}))
        undo(model)
    torch.testing.assert_close(*states)
    assert uses == [[BLOCKS], []]  # torch differentiates no region that writes
    assert "the model is compiled as a whole" in caplog.text
    assert not torch.equal(states[0][1]["blocks.2.norm.running_mean"], before["blocks.2.norm.running_mean"])


def test_a_model_that_is_no_single_graph_is_compiled_as_a_whole(uses, caplog):
    class Breaking(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    model, x = Model(Breaking), torch.randn(4, 8)
    expected = passes(apply(model, precisions("BF16")), x)
    apply(undo(model), precisions("BF16"), options=ApplyOptions(compiled=True, regional=True))
    torch.testing.assert_close(passes(model, x), expected)
    assert "the model is compiled as a whole" in caplog.text
    assert uses
    assert not any(uses)


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole(uses):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    apply(model, {"0/linear": "INT8", "2/linear": "INT8"}, options=ApplyOptions(compiled=True, regional=True))
    passes(model, torch.randn(4, 8))
    assert uses == [[]]


@pytest.mark.parametrize("options", [{}, {"autocast": "BF16"}], ids=["planned", "autocast"])
def test_heads_are_split_off_within_one_graph(uses, options):
    class Heads(Block):
        def forward(self, x):
            return super().forward(x).unflatten(-1, (2, 4)).unflatten(dim=0, sizes=(-1, 1)).flatten(0, 1).flatten(1)

    model, x = Model(Heads), torch.randn(4, 8)
    plan = precisions("BF16", head="BF16")
    expected = passes(apply(model, plan, options=ApplyOptions(**options)), x)
    apply(undo(model), plan, options=ApplyOptions(compiled=True, regional=True, **options))
    torch.testing.assert_close(passes(model, x), expected)
    assert uses == [[BLOCKS]]


def tower():
    return nn.Sequential(*(Block() for _ in range(4)))


def experts():
    return nn.ModuleDict({"gate": nn.Linear(8, 2), "experts": nn.ModuleList(Block() for _ in range(2))})


def test_the_blocks_are_those_that_leave_least_to_compile():
    assert repeated_blocks(Model()) == ("blocks.0", "blocks.1", "blocks.2")
    assert repeated_blocks(nn.Sequential(tower(), tower())) == tuple(f"{i}.{j}" for i in range(2) for j in range(4))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(2))) for _ in range(6)))
    assert repeated_blocks(layers) == tuple(str(i) for i in range(6))
    assert repeated_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) == ()
    assert repeated_blocks(nn.ModuleList([Block()])) == ()


def test_blocks_differ_by_what_is_compiled_into_them():
    class Scaled(Block):
        def extra_repr(self):
            return f"scale={self.scale}"

    first, second = Scaled(), Scaled()
    first.scale = second.scale = 1.0
    assert repeated_blocks(nn.Sequential(first, second)) == ("0", "1")
    second.scale = 2.0
    assert repeated_blocks(nn.Sequential(first, second)) == ()
    frozen = nn.Sequential(Block(), Block())
    frozen[0].requires_grad_(False)
    assert repeated_blocks(frozen) == ()


def test_the_error_of_the_model_is_the_callers(uses):
    model = apply(Model(), precisions("BF16"), options=ApplyOptions(compiled=True, regional=True))
    assert isinstance(model._compiled_call_impl, CompiledByBlocks)
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(4, 7))
