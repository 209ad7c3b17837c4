import copy
import pickle
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.errors import ModelError, NotReadyError, UnsupportedError
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import Operator, OpGraph, ParameterSpec, Role, TensorSpec
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, operator_kind, undo
from qsync_opt.runtimes.torch.interception import intercept


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.before, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 2, 8).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / 8**0.5
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    def __init__(self, fused, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.blocks = nn.Embedding(20, 16), nn.ModuleList([Block(fused), Block(fused)])
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Shared(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.first = nn.Linear(12, 12)
        self.second = self.first

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(
                self.second, torch.relu(checkpoint(self.first, x, use_reentrant=False)), use_reentrant=False
            )
        return self.second(torch.relu(self.first(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=True)[0]


def _bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=20,
        max_position_embeddings=16,
        attn_implementation="eager",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config, add_pooling_layer=False)
    model.config.return_dict = False
    return model


TOKENS = (3, 7)
MODELS = {
    "mlp": (Mlp, lambda: torch.randn(5, 12)),
    "cnn": (Cnn, lambda: torch.randn(4, 3, 8, 8)),
    "gpt": (lambda: Gpt(False), lambda: torch.randint(20, TOKENS)),
    "gpt-fused": (lambda: Gpt(True), lambda: torch.randint(20, TOKENS)),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
    "shared": (Shared, lambda: torch.randn(4, 12)),
    "bert": (_bert, lambda: torch.randint(20, TOKENS)),
}


def _main(output):
    return output[0] if isinstance(output, tuple) else output


def _calls(model, *args):
    names = []

    def note(call):
        names.append(call.name)
        return call.run()

    with intercept(model, note):
        model(*args)
    return names


def _plan(model, *args, low="INT8"):
    """Every adjustable operator as low as it goes."""
    plan = {}
    for name in _calls(model, *args):
        kind = operator_kind(name)
        if kind is not None:
            plan[name] = low if kind not in ("embedding", "scaled_dot_product_attention") else "BF16"
    return plan


def _train_step(model, x):
    model.zero_grad(set_to_none=True)
    output = _main(model(x))
    output.float().square().mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_apply_and_undo(name):
    build, data = MODELS[name]
    model, x = build(), data()
    keys = list(model.state_dict())
    plain = copy.deepcopy(model)
    expected, plain_grads = _train_step(plain, x)
    own_attributes = {path: set(module.__dict__) for path, module in model.named_modules()}
    plan = _plan(model, x)
    assert plan

    assert apply(model, plan) is model
    assert list(model.state_dict()) == keys
    assert type(model) is type(plain)
    result, grads = _train_step(model, x)
    assert 0 < ((result - expected).norm() / expected.norm()).item() < 0.1
    for key, grad in grads.items():
        if plain_grads[key] is None:
            assert grad is None
            continue
        assert grad.dtype is torch.float32
        # Gradients that are exactly zero in theory (a key bias under softmax) hold rounding noise alone.
        if plain_grads[key].norm() > 1e-6:
            assert ((grad - plain_grads[key]).norm() / plain_grads[key].norm()).item() < 0.3, key

    assert undo(model) is model
    assert {path: set(module.__dict__) for path, module in model.named_modules()} == own_attributes
    model.load_state_dict(plain.state_dict())
    fresh = build()
    fresh.load_state_dict(plain.state_dict())
    again, grads = _train_step(model, x)
    reference, reference_grads = _train_step(fresh, x)
    assert torch.equal(again, reference)
    assert all(grads[k] is None or torch.equal(grads[k], reference_grads[k]) for k in grads)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_fp32_changes_no_bit(name):
    build, data = MODELS[name]
    model, x = build(), data()
    twin = copy.deepcopy(model)
    apply(model, _plan(model, x, low="FP32") | {n: "FP32" for n in _plan(model, x)})
    result, grads = _train_step(model, x)
    expected, expected_grads = _train_step(twin, x)
    assert torch.equal(result, expected)
    assert all(grads[k] is None or torch.equal(grads[k], expected_grads[k]) for k in grads)


def test_each_operator_runs_at_its_precision():
    model, x = Gpt(False), torch.randint(20, TOKENS)
    outputs = {}
    apply(model, _plan(model, x, low="BF16") | {"blocks.0/matmul_1": "FP32"})
    interception = model.forward.interception
    handler = interception.handler

    def note(call):
        result = handler(call)
        outputs[call.name] = (result.dtype, {a.dtype for a in call.args if isinstance(a, torch.Tensor)})
        return result

    interception.handler = note
    model(x)
    assert outputs["blocks.0/matmul"][0] is torch.bfloat16
    assert outputs["blocks.0/matmul_1"][0] is torch.float32
    assert outputs["blocks.0/softmax"] == (torch.float32, {torch.bfloat16})
    assert outputs["blocks.1.before/layer_norm"][0] is torch.float32
    assert outputs["embed/embedding"][0] is torch.bfloat16
    interception.handler = handler
    undo(model)


def test_two_passes_differ_in_noise_and_two_runs_do_not():
    x = torch.randn(5, 12)
    model = Mlp()
    runs = []
    for _ in range(2):
        apply(model, {"up/linear": "INT8", "down/linear": "INT8"})
        runs.append([model(x), model(x)])
        undo(model)
    assert not torch.equal(runs[0][0], runs[0][1])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    apply(model, {"up/linear": "INT8", "down/linear": "INT8"}, options=ApplyOptions(rank=1))
    assert not torch.equal(model(x), runs[0][0])
    undo(model)
    apply(model, {"up/linear": "INT8", "down/linear": "INT8"}, options=ApplyOptions(kernels=KernelOptions(seed=1)))
    assert not torch.equal(model(x), runs[0][0])


def in_bf16(output):
    """Whether a model's result, which is cast up to FP32, was computed in BF16."""
    return output.dtype is torch.float32 and torch.equal(output, output.to(torch.bfloat16).float())


def test_evaluation():
    model, x = Mlp(), torch.randn(5, 12)
    plan = {"up/linear": "INT8", "down/linear": "INT8"}
    model.eval()
    plain = model(x)
    apply(model, plan)
    assert in_bf16(model(x))
    assert torch.equal(model(x), model(x))
    undo(model)
    apply(model, plan, options=ApplyOptions(evaluate_in="FP32"))
    assert torch.equal(model(x), plain)
    model.train()
    assert in_bf16(model(x))
    undo(model)
    with pytest.raises(UnsupportedError, match="evaluate_in='BF16'"):
        ApplyOptions(evaluate_in="BF16")


@pytest.mark.parametrize("use_inference_mode", [False, True])
def test_without_gradients(use_inference_mode):
    model, x = Gpt(True), torch.randint(20, TOKENS)
    apply(model, _plan(model, x))
    context = torch.inference_mode() if use_inference_mode else torch.no_grad()
    with context:
        assert not model(x).requires_grad


def test_checkpointing_rounds_the_same_way_twice():
    torch.manual_seed(1)
    plain, checkpointed = Gpt(False), Gpt(False, checkpointed=True)
    checkpointed.load_state_dict(plain.state_dict())
    x = torch.randint(20, TOKENS)
    plan = _plan(plain, x)
    for model in (plain, checkpointed):
        apply(model, plan)
        model(x)  # an earlier pass, whose noise must not come back
    (a, grads_a), (b, grads_b) = _train_step(plain, x), _train_step(checkpointed, x)
    assert torch.equal(a, b)
    assert all(torch.equal(grads_a[key], grads_b[key]) for key in grads_a)


def test_checkpointing_of_a_module_that_runs_twice():
    plain, checkpointed = Shared(), Shared(checkpointed=True)
    checkpointed.load_state_dict(plain.state_dict())
    x = torch.randn(4, 12, requires_grad=True)
    for precisions in (("INT8", "FP32"), ("FP32", "BF16")):
        plan = dict(zip(("first/linear", "first/linear_1"), precisions, strict=True))
        for model in (plain, checkpointed):
            apply(model, plan)
        (a, grads_a), (b, grads_b) = _train_step(plain, x), _train_step(checkpointed, x)
        assert torch.equal(a, b)
        assert all(torch.equal(grads_a[key], grads_b[key]) for key in grads_a)
        undo(plain)
        undo(checkpointed)


def test_a_forward_pass_that_raises_leaves_nothing_behind():
    class Fragile(Mlp):
        error = None

        def forward(self, x):
            hidden = self.up(x)
            if self.error is not None:
                raise self.error
            return self.down(hidden)

    model, x = Fragile(), torch.randn(5, 12)
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    for error in (ValueError("broken"), KeyboardInterrupt()):
        model.error = error
        with pytest.raises(type(error)):
            model(x)
        assert (x @ x.T).dtype is torch.float32
        assert model.forward.interception.path is None
    model.error = None
    assert in_bf16(model(x))
    assert model.forward.interception.seen == ["up/linear", "down/linear"]


def test_submodules_may_run_alone():
    model, x = Gpt(False), torch.randn(2, 3, 16)
    apply(model, _plan(model, torch.randint(20, TOKENS), low="BF16"))
    result = model.blocks[1].qkv(x)
    assert result.dtype is torch.float32
    assert torch.equal(result, result.bfloat16())  # computed in BF16, and cast up for the script
    assert model.forward.interception.seen == ["blocks.1.qkv/linear"]
    model.blocks[0](x).float().sum().backward()
    assert model.blocks[0].qkv.weight.grad.dtype is torch.float32


def test_outside_the_model_nothing_changes():
    model, x = Mlp(), torch.randn(5, 12)
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    model(x)
    assert F.linear(x, model.up.weight).dtype is torch.float32
    assert copy.copy(x).dtype is torch.float32


def test_copies_of_an_applied_model_are_refused():
    model = Mlp()
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(NotReadyError, match="undo"):
            attempt(model)
    undo(model)
    assert isinstance(copy.deepcopy(model), Mlp)


def test_a_module_with_a_forward_of_its_own_gets_it_back():
    model, x = Mlp(), torch.randn(5, 12)

    def special(x):
        return F.linear(x, model.up.weight) * 2

    model.up.forward = special
    expected = model(x)
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    assert in_bf16(model(x))
    undo(model)
    assert model.up.forward is special
    assert torch.equal(model(x), expected)


def test_order_of_calls():
    model = Mlp()
    with pytest.raises(NotReadyError, match="no plan is applied"):
        undo(model)
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    with pytest.raises(NotReadyError, match="already"):
        apply(model, {"up/linear": "FP32"})
    with pytest.raises(NotReadyError, match="already"):
        apply(model.up, {"linear": "FP32"})
    model.down.forward = lambda x: x
    with pytest.raises(NotReadyError, match="'down'"):
        undo(model)
    assert model.up.forward.path == "up"


def test_layers_that_are_skipped_at_times_must_all_run_first():
    class Skipping(nn.Sequential):
        skips = True

        def forward(self, x):
            return self[1](x if self.training and self.skips else self[0](x))

    model, x = Skipping(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(5, 8)
    plan = {"0/linear": "BF16", "1/linear": "BF16"}
    apply(model, plan)
    with pytest.raises(ModelError, match=r"did not meet '0/linear' .* skips layers at times, run all of them in one"):
        model(x)
    undo(model)
    apply(model, plan).eval()(x)  # what the message says to do
    assert model.train()(x).shape == (5, 4)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    model.skips = False
    model(x).sum().backward()
    assert model[0].weight.grad is not None


class Encoding(nn.Module):
    """An encoder whose result may be passed in, as generation does."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x, encoded=None):
        return self.decoder(self.encoder(x) if encoded is None else encoded)


def test_parts_of_a_model_may_run_before_it_is_trained():
    model, x = Encoding(), torch.randn(5, 8)
    apply(model, {"encoder/linear": "BF16", "decoder/linear": "BF16"})
    with torch.no_grad():
        assert model.eval()(x, model.encoder(x)).shape == (5, 4)
        assert model.train()(x, model.encoder(x)).shape == (5, 4)
    model(x).sum().backward()
    undo(model)
    apply(model, {"encoder/linear": "BF16", "encoder/matmul": "BF16", "decoder/linear": "BF16"})
    model.eval()(x)
    with pytest.raises(ModelError, match="the first training pass did not meet 'encoder/matmul'"):
        model.train()(x)


def test_plans_for_another_model():
    model, x = Mlp(), torch.randn(5, 12)
    with pytest.raises(ModelError, match="'left/linear'"):
        apply(model, {"up/linear": "BF16", "left/linear": "BF16"})
    apply(model, {"up/linear": "BF16", "up/matmul": "BF16", "down/linear_1": "INT8"})
    with pytest.raises(ModelError, match=r"did not meet 'up/matmul', 'down/linear_1' .* another model: undo it"):
        model(x)
    undo(model)
    with pytest.raises(ModelError, match=r"for another model: it names 'fc1', 'fc2', .* is named by module and kind"):
        apply(model, {"fc1": "BF16", "fc2": "FP32"})  # as nodes of an ONNX file are called
    with pytest.raises(NotReadyError, match="no plan is applied"):
        undo(model)


@pytest.mark.parametrize(
    ("name", "precision", "meant"),
    [
        ("up/linear_", "INT8", "'up/linear'"),
        ("up/Linear", "BF16", "'up/linear'"),
        ("up/matmull", "FP32", "'up/matmul'"),
        ("upp/linear", "BF16", "'up/linear'"),
        ("up/ConvTranspose", "BF16", "'up/conv_transpose[123]d'"),
    ],
)
def test_every_entry_of_a_plan_names_an_operator(name, precision, meant):
    model = Mlp()
    plan = {"up/linear": "BF16", "down/linear": "BF16", name: precision}
    with pytest.raises(ModelError, match=f"the plan does not fit: it names '{name}', which this model .* mean {meant}"):
        apply(model, plan)
    with pytest.raises(ModelError, match=f"it names '{name}', which this graph does not have"):
        apply(model, plan, graph=capture(model, (torch.randn(5, 12),)))
    assert "forward" not in model.__dict__


def test_a_plan_may_name_operators_that_are_not_adjustable():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.LayerNorm(8))
    x = torch.randn(2, 4)
    graph = capture(model, (x,))
    plan = {operator.name: "FP32" for operator in graph}
    assert {"0/linear", "1/relu_", "2/layer_norm"} < plan.keys()
    for options in ({}, {"graph": graph}):
        assert undo(apply(model, plan, **options))(x).shape == (2, 8)


def test_operators_that_the_plan_does_not_name():
    model, x = Mlp(), torch.randn(5, 12)
    apply(model, {"up/linear": "BF16"})
    with pytest.warns(UserWarning, match=r"1 adjustable operators are not in the plan.*'down/linear'"):
        assert model(x).dtype is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_precisions_that_cannot_be():
    model = Gpt(True)
    for plan, text in (
        ({"head/linear": "FP16"}, "'head/linear' cannot run in FP16 on cpu: allowed are INT8-BWD8, INT8, BF16, FP32"),
        ({"embed/embedding": "INT8"}, "'embed/embedding' cannot run in INT8 on cpu: allowed are BF16, FP32"),
        ({"blocks.0/scaled_dot_product_attention": "INT8"}, "allowed are BF16, FP32"),
        ({"head/linear": "int8"}, "unknown precision 'int8'"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            apply(model, plan)
    assert "forward" not in model.__dict__


def test_models_that_are_not_in_fp32():
    with pytest.raises(ModelError, match=r"'up.weight' is float64"):
        apply(Mlp().double(), {"up/linear": "BF16"})
    with pytest.raises(UnsupportedError, match="scripted"):
        apply(torch.jit.script(nn.Linear(2, 2)), {"linear": "BF16"})


def test_what_is_neither_model_nor_plan():
    with pytest.raises(ModelError, match=r"cannot apply a plan to a str: a torch\.nn\.Module is needed"):
        apply("model", {"up/linear": "BF16"})
    for plan in ("BF16", [("up/linear", "BF16")], {"up/linear": None}, {3: "BF16"}, None):
        with pytest.raises(ModelError, match=f"the plan is a {type(plan).__name__}: a Plan is needed"):
            apply(Mlp(), plan)


def test_autocast_is_refused():
    model, x = Mlp(), torch.randn(5, 12)
    apply(model, {"up/linear": "BF16", "down/linear": "BF16"})
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotReadyError, match="autocast"):
        model(x)


class _Plans:
    def __init__(self, **devices):
        self.devices = devices


def test_plans_with_device_types():
    model, x = Mlp(), torch.randn(5, 12)
    low, high = {"up/linear": "BF16", "down/linear": "BF16"}, {"up/linear": "FP32", "down/linear": "FP32"}
    for device_type in ("a", "b"):
        apply(model, _Plans(a=low, b=high), device_type)
        assert in_bf16(model(x)) == (device_type == "a")
        undo(model)
    apply(model, _Plans(a=low))
    undo(model)
    with pytest.raises(ModelError, match="several device types"):
        apply(model, _Plans(a=low, b=high))
    with pytest.raises(ModelError, match="no device type 'c': it has a, b"):
        apply(model, _Plans(a=low, b=high), "c")


def _graph(model, **changes):
    def operator(name, kind, role):
        spec = TensorSpec(shape=(5, 6), dtype="float32")
        values = {
            "name": name,
            "op_type": kind,
            "module": name.rpartition("/")[0],
            "role": role,
            "inputs": (),
            "input_specs": (),
            "output_specs": (spec,),
            "parameters": (),
            "onnx_nodes": (),
            "flops": 0,
            "num_bytes": 0,
            "signature": kind,
        }
        return Operator(**values)

    roles = {"up/linear": Role.ADJUSTABLE, "gelu": Role.DEPENDENT, "down/linear": Role.ADJUSTABLE} | changes
    parameters = tuple(
        ParameterSpec(name=n, spec=TensorSpec(shape=tuple(p.shape), dtype="float32"))
        for n, p in model.named_parameters()
    )
    operators = tuple(operator(n, n.rpartition("/")[2], r) for n, r in roles.items())
    return OpGraph(name="mlp", operators=operators, parameters=parameters)


def test_with_the_graph_names_and_roles_are_checked_at_once():
    model, x = Mlp(), torch.randn(5, 12)
    graph = _graph(model)
    with pytest.raises(ModelError, match=r"'down/linear_1'.*graph"):
        apply(model, {"up/linear": "BF16", "down/linear_1": "BF16"}, graph=graph)
    with pytest.raises(ModelError, match=r"parameters differ, first 'up.weight'"):
        apply(Cnn(), {"up/linear": "BF16"}, graph=graph)
    fixed = _graph(model, **{"gelu": Role.FIXED, "down/linear": Role.FIXED})
    with pytest.raises(UnsupportedError, match="'gelu' cannot run in BF16: its role is fixed"):
        apply(model, {"up/linear": "BF16", "gelu": "BF16"}, graph=fixed)
    # Roles that a user changed hold at run time too: the fixed linear runs in FP32 and is not warned about, and the
    # fixed gelu gets FP32.
    apply(model, {"up/linear": "BF16"}, graph=fixed)
    interception = model.forward.interception
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(x).dtype is torch.float32
    assert interception.seen == ["up/linear", "gelu", "down/linear"]
    undo(model)


def test_signature_of_forward_stays_visible():
    import inspect

    model = Gpt(True)
    before = inspect.signature(model.forward)
    apply(model, {"head/linear": "BF16"})
    assert inspect.signature(model.forward) == before


def test_recurrent_layers_get_fp32():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.cell = nn.Linear(6, 8), nn.LSTM(8, 4, batch_first=True)

        def forward(self, x):
            return self.cell(self.up(x))[0]

    model = Recurrent()
    apply(model, {"up/linear": "BF16"})
    assert model(torch.randn(2, 3, 6)).dtype is torch.float32


def test_frozen_parameters_are_no_other_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    graph = capture(model, (torch.zeros(3, 4),))
    plan = {"0/linear": "BF16", "2/linear": "BF16"}
    assert undo(apply(model, plan, graph=graph)) is model
    model[2].bias.requires_grad_(False)  # frozen since: the same model
    undo(apply(model, plan, graph=graph))
    model[0].requires_grad_(True)  # the graph knows no gradient of it
    with pytest.raises(ModelError, match=r"parameters differ, first '0\.weight'"):
        apply(model, plan, graph=graph)


@pytest.mark.parametrize("precision", ["FP32", "BF16", "INT8"])
@pytest.mark.parametrize("passes", [0, 2])
def test_a_model_that_is_cast_under_its_plan_is_refused(precision, passes):
    model = apply(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), {"0/linear": precision})
    for _ in range(passes):
        model(torch.zeros(3, 4))
    model.bfloat16()
    if precision == "FP32" and passes:  # such a plan stands aside
        assert model(torch.zeros(3, 4).bfloat16()).dtype is torch.bfloat16
    else:
        with pytest.raises(
            ModelError, match=r"parameter '0.weight' is bfloat16: .*call model.float\(\).*undo\(model\)"
        ):
            model(torch.zeros(3, 4))
    model.float()
    assert model(torch.zeros(3, 4)).dtype is torch.float32


def test_two_threads_at_once_are_refused():
    class Waiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.inside, self.go_on = nn.Linear(4, 4), threading.Event(), threading.Event()

        def forward(self, x):
            if len(x) == 1:
                self.inside.set()
                self.go_on.wait(60)
            return self.layer(x)

    model = apply(Waiting(), {"layer/linear": "BF16"})
    expected = model(torch.ones(2, 4))
    found = []
    other = threading.Thread(target=lambda: found.append(model(torch.ones(1, 4))))
    other.start()
    assert model.inside.wait(60)
    with pytest.raises(NotReadyError, match=r"two threads at once.*take turns"):
        model(torch.ones(2, 4))
    model.go_on.set()
    other.join()
    assert torch.equal(found[0], expected[:1])  # the other one went on, under the plan
    assert torch.equal(model(torch.ones(2, 4)), expected)
