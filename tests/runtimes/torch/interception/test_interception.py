import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.interception import Interception, intercept, interception_of, operator_name
from qsync_opt.runtimes.torch.interception.functions import FIXED_KINDS, function_names, functions_named


def _names(model, *args):
    names = []

    def note(call):
        names.append((call.name, call.module, call.op_type))
        return call.run()

    with intercept(model, note):
        result = model(*args)
    return names, result


def test_names_are_paths_kinds_and_occurrences():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

        def forward(self, x):
            x = self.b(self.a(x) @ torch.eye(4))
            return self.a(torch.matmul(x, x.mT)).softmax(-1).mm(torch.eye(4))

    names, _ = _names(Model(), torch.randn(4, 4))
    assert [name for name, _, _ in names] == [
        "a/linear",
        "matmul",
        "b.0/linear",
        "b.1/layer_norm",
        "matmul_1",
        "a/linear_1",
        "softmax",
        "mm",
    ]
    assert names[2][1:] == ("b.0", "linear")
    assert operator_name("", "mm", 2) == "mm_2"


def test_multi_head_attention_is_entered():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    expected = model(x, x, x)
    names, result = _names(model, x, x, x)
    assert torch.equal(result[0], expected[0])
    kinds = [kind for _, _, kind in names]
    assert kinds.count("linear") == 2
    assert "softmax" in kinds
    assert sum(kind in ("bmm", "baddbmm", "matmul") for kind in kinds) == 2
    names, _ = _names(_Wrapped(model), x)
    assert "scaled_dot_product_attention" in [kind for _, _, kind in names]


class _Wrapped(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_encoder_layers_in_evaluation_are_seen():
    # In evaluation torch takes a fused path through the whole layer, which would hide its operators.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        names, _ = _names(layer, torch.randn(2, 3, 8))
    assert sum(kind == "linear" for _, _, kind in names) == 4


def test_the_handler_decides_the_result():
    model = nn.Linear(3, 3)
    with intercept(model, lambda call: call.run(call.args[0] * 0, *call.args[1:])):
        assert torch.equal(model(torch.ones(2, 3)), model.bias.expand(2, 3))


def test_one_interception_at_a_time():
    model = nn.Sequential(nn.Linear(3, 3))
    with intercept(model, lambda call: call.run()) as first:
        assert interception_of(model) is first
        with pytest.raises(NotReadyError, match="already"):
            Interception(model, lambda call: call.run())
    assert interception_of(model) is None


def test_removal_in_the_middle_of_a_pass_is_refused():
    class Model(nn.Module):
        def forward(self, x):
            interception_of(self).remove()
            return x

    model = Model()
    interception = Interception(model, lambda call: call.run())
    with pytest.raises(NotReadyError, match="middle"):
        model(torch.ones(1))
    interception.remove()
    assert "forward" not in model.__dict__


def test_every_fixed_kind_has_a_function():
    # These exist in exported programs alone.
    without = {kind for kind in FIXED_KINDS if not functions_named(kind)}
    assert without <= {"_native_batch_norm_legit_functional", "nll_loss2d", "frobenius_norm", "embedding_renorm"}
    names = function_names(("gelu",))
    assert names[F.gelu] == "gelu"
    assert names[F.nll_loss] == "nll_loss_nd"
    assert names[torch.Tensor.__matmul__] == "matmul"
    assert torch.add not in names
