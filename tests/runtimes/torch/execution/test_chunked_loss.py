import warnings

import pytest
import torch
from torch import nn

from qsync_opt.kernels import layers
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, loss_heads, undo

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, CLASSES = 3, 12, 50


def _llama(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": CLASSES,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "use_cache": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes})).train()


def _gpt(**changes):
    torch.manual_seed(0)
    settings = {"vocab_size": CLASSES, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "use_cache": False}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, **dropout, **changes)).train()


def _batch():
    ids = torch.randint(CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def _plan(model, precision, head=None):
    names = {f"{path}/linear": precision for path, m in model.named_modules() if type(m) is nn.Linear}
    return {**names, "lm_head/linear": head or precision}


def _gradients(model, output):
    model.zero_grad()
    output.loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not in the plan")
        yield


@pytest.mark.parametrize("build", [_llama, _gpt])
@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_loss_and_gradients_are_those_of_the_plan_without_chunks(build, precision):
    model, batch = build(), _batch()
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    results = []
    for chunked in (False, True):
        apply(model, _plan(model, precision), options=ApplyOptions(chunked_loss=chunked))
        for _ in range(2):  # the second pass is a prepared one
            output = model(**batch)
            results.append((output.loss, _gradients(model, output)))
        assert (output.logits is None) is chunked
        undo(model)
    assert before == {path: dict(module.__dict__) for path, module in model.named_modules()}
    tolerance = 1e-5 if precision == "FP32" else 3e-2  # other places are rounded
    for loss, gradients in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=tolerance, atol=0)
        for name, gradient in gradients.items():
            true = results[0][1][name]
            assert (gradient - true).norm() <= tolerance * true.norm(), name


def test_passes_without_labels_or_gradients_have_logits():
    model, batch = _llama(), _batch()
    apply(model, _plan(model, "FP32"))
    assert model(input_ids=batch["input_ids"]).logits.shape == (BATCH, LENGTH, CLASSES)
    with torch.no_grad():
        assert model(**batch).logits.shape == (BATCH, LENGTH, CLASSES)
    model.eval()
    assert model(**batch).logits.shape == (BATCH, LENGTH, CLASSES)
    undo(model)
    assert model.train()(**batch).logits is not None


def test_arguments_of_the_loss_are_kept():
    model, batch = _llama(), _batch()
    expected = model(**batch, num_items_in_batch=torch.tensor(7)).loss
    as_tuple = model(**batch, return_dict=False)
    apply(model, _plan(model, "FP32"))
    torch.testing.assert_close(model(**batch, num_items_in_batch=torch.tensor(7)).loss, expected)
    mine = model(**batch, return_dict=False)
    torch.testing.assert_close(mine[0], as_tuple[0])
    assert mine[1] is None and len(mine) == len(as_tuple)
    undo(model)


def test_inside_a_wrapper_and_at_rest():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = _llama()

        def forward(self, **batch):
            return self.model(**batch).loss

    model, batch = WithLoss(), _batch()
    expected = model(**batch)
    for autocast in (None, "FP32"):
        plan = {f"{path}/linear": "FP32" for path, m in model.named_modules() if type(m) is nn.Linear}
        apply(model, plan, options=ApplyOptions(autocast=autocast))
        for _ in range(3):
            torch.testing.assert_close(model(**batch), expected)
        undo(model)


def test_autocast_decides_the_format_of_an_autocast_plan():
    model, batch = _llama(), _batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**batch).loss
    apply(model, _plan(model, "BF16"), options=ApplyOptions(autocast="BF16"))
    output = model(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=1e-2, atol=0)
    undo(model)


@pytest.mark.parametrize("precision", ["INT8", "INT8-BWD8"])
def test_heads_in_8_bits(precision):
    model, batch = _llama(hidden_size=64, intermediate_size=64), _batch()
    exact = model(**batch).loss
    apply(model, _plan(model, "FP32", precision))
    losses = [model(**batch).loss for _ in range(3)]
    assert len({loss.item() for loss in losses}) == 3  # noise of its own in every pass
    assert all(abs(loss.item() - exact.item()) < 0.02 * exact.item() for loss in losses)
    losses[-1].backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    undo(model)


def test_compiled_passes_give_the_same():
    model, batch = _llama(), _batch()
    expected = model(**batch).loss
    apply(model, _plan(model, "FP32"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = compiled(**batch)
    torch.testing.assert_close(output.loss, expected)
    assert output.logits is None
    output.loss.backward()
    undo(model)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(32, 64), layers.LinearCrossEntropy(64, CLASSES, label_smoothing=0.1)

    def forward(self, x, target):
        return self.head(self.body(x), target)


@pytest.mark.parametrize("precision", ["FP32", "BF16", "INT8", "INT8-BWD8"])
def test_a_loss_layer_follows_the_plan(precision):
    model = Classifier()
    x, target = torch.randn(40, 32), torch.randint(CLASSES, (40,))
    exact = nn.functional.cross_entropy(model.head.logits(model.body(x)), target, label_smoothing=0.1)
    torch.testing.assert_close(model(x, target), exact)
    plan, losses = {"body/linear": "FP32", "head/linear": precision}, []
    for chunked in (True, False):
        apply(model, plan, options=ApplyOptions(chunked_loss=chunked))
        losses = [model(x, target) for _ in range(2)]
        assert all(abs(loss.item() - exact.item()) < 0.02 * exact.item() for loss in losses)
        assert (losses[0] == losses[1]).item() is not precision.startswith("INT8")
        losses[-1].backward()
        undo(model)
    assert model.head.choice is None


def test_a_loss_layer_is_captured_as_a_linear_layer_and_a_loss():
    model = Classifier()
    graph = capture(model, (torch.randn(40, 32), torch.randint(CLASSES, (40,))))
    names = [operator.name for operator in graph]
    assert "head/linear" in names and "head/cross_entropy_loss" in names


def test_models_that_change_their_logits_are_left_alone():
    gemma = transformers.Gemma2Config(
        vocab_size=CLASSES,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    assert not loss_heads(transformers.Gemma2ForCausalLM(gemma))  # it caps them
    assert not loss_heads(nn.Sequential(nn.Linear(2, 2)))
    hooked = _llama()
    assert [head.layer_path for head in loss_heads(hooked)] == ["lm_head"]
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert not loss_heads(hooked)
    other = _llama()
    other.loss_function = lambda **_: torch.zeros(())
    assert not loss_heads(other)
