"""What a model under a plan returns to the script."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.errors import UnsupportedError
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply
from qsync_opt.runtimes.torch.support import full_precision

PLAN = {"0/linear": "INT8", "1/linear": "BF16"}


@dataclass
class Pair:
    logits: torch.Tensor
    other: int = 0


class Named(NamedTuple):
    logits: torch.Tensor
    other: str = ""


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def dtypes(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    parts = value if isinstance(value, tuple | list) else vars(value).values() if isinstance(value, Pair) else value
    return [dtypes(part) for part in (parts.values() if isinstance(parts, dict) else parts)]


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(3, 1).bfloat16(),
        torch.ones(1).half(),
        (torch.ones(3).bfloat16(), torch.ones(3).half()),
        [{"a": torch.ones(3).bfloat16()}],
        Pair(torch.ones(3).bfloat16()).logits,
    ],
)
def test_what_is_in_16_bits_is_cast_up(output):
    flat = str(dtypes(full_precision(output)))
    assert "float32" in flat
    assert "float16" not in flat.replace("bfloat16", "float16")


def test_kinds_of_outputs_stay_what_they_are():
    pair, named = full_precision(Pair(torch.ones(2).half(), 3)), full_precision(Named(torch.ones(2).half(), "x"))
    assert (type(pair), pair.logits.dtype, pair.other) == (Pair, torch.float32, 3)
    assert (type(named), named.logits.dtype, named.other) == (Named, torch.float32, "x")
    numbers = (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64), None, 3)
    assert full_precision(numbers) is numbers
    assert full_precision("text") == "text"


def test_beside_a_loss_nothing_is_cast():
    logits, loss = torch.ones(3).half(), torch.tensor(2.0)
    for output in ({"loss": loss, "logits": logits}, (loss, logits), loss.bfloat16()):
        assert full_precision(output) is output


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: F.huber_loss(output, torch.zeros(5, 4)),
        lambda output: F.binary_cross_entropy(output.sigmoid(), torch.zeros(5, 4)),
        lambda output: torch.cdist(output, torch.zeros(3, 4)).mean(),
        lambda output: F.cross_entropy(output, torch.zeros(5, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize("autocast", [None, "BF16"])
def test_losses_of_the_script_compute_as_before(loss, autocast):
    plan = PLAN if autocast is None else dict.fromkeys(PLAN, "BF16")
    model = apply(net(), plan, options=ApplyOptions(autocast=autocast))
    found = loss(model(torch.randn(5, 8)))
    found.backward()
    assert found.dtype is torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model(torch.randn(5, 8)).numpy()  # numpy has no BF16


def test_compiled_and_checkpointed_models_return_the_same():
    model, x = apply(net(), dict.fromkeys(PLAN, "BF16")), torch.randn(5, 8, requires_grad=True)
    output = model(x)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), output)
    again = checkpoint(model, x, use_reentrant=False)  # the whole model, as a part of a larger one may be
    again.square().sum().backward()
    assert torch.equal(again, output)


def test_as_the_plan_has_it():
    assert apply(net(), PLAN, options=ApplyOptions(outputs="plan"))(torch.randn(5, 8)).dtype is torch.bfloat16
    with pytest.raises(UnsupportedError, match="outputs='BF16'"):
        ApplyOptions(outputs="BF16")


class Logged(UserDict):
    step = 0


@pytest.mark.parametrize("kind", [OrderedDict, partial(defaultdict, list), UserDict, Logged])
def test_mappings_of_every_class_are_cast_up(kind):
    integers = torch.arange(3)
    output = kind({"out": torch.ones(2).bfloat16(), "ids": integers})
    lifted = full_precision(output)
    assert type(lifted) is type(output)
    assert list(lifted) == ["out", "ids"]
    assert lifted["out"].dtype is torch.float32
    assert lifted["ids"] is integers
    assert output["out"].dtype is torch.bfloat16  # the model may have kept it


def test_a_plan_in_full_precision_leaves_what_the_model_itself_casts():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).half()

    model = apply(Half(), {"layer/linear": "FP32"})
    assert [model(torch.ones(2, 4)).dtype for _ in range(3)] == [torch.float16] * 3


class Coder(nn.Module):
    """Called by methods of its own, with an operator outside of every module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.turn = nn.Parameter(torch.randn(4, 4))

    def encode(self, x):
        return self.up(x)

    def decode(self, z):
        return self.down(z @ self.turn)

    def forward(self, x):
        return self.decode(self.encode(x))


def test_parts_that_the_script_calls_return_full_precision():
    model, x = Coder(), torch.randn(4, 8)
    plain = model.decode(model.encode(x))
    plan = {"up/linear": "BF16", "matmul": "FP32", "down.0/linear": "BF16", "down.2/linear": "BF16"}
    apply(model, plan)
    for _ in range(2):  # before and after the first whole pass
        code = model.encode(x)
        assert code.dtype is torch.float32
        assert torch.equal(code, code.bfloat16())  # computed in BF16
        result = model.decode(code)
        assert result.dtype is torch.float32
        assert torch.allclose(result, plain, atol=0.05)
        result.sum().backward()
        model(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_parts_return_the_same_when_they_are_computed_again(reentrant, inside):
    gradients = []
    for again in (True, False):
        model, x = Coder(), torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        apply(model, dict.fromkeys(["up/linear", "down.0/linear", "down.2/linear", "matmul"], "BF16"))
        model(x)
        seen = []
        model.down[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))

        def run(function, *args, again=again):
            return checkpoint(function, *args, use_reentrant=reentrant) if again else function(*args)

        if inside:
            model.decode = lambda z, model=model, run=run: run(model.down, z @ model.turn)
            model(x).square().sum().backward()
        else:
            run(lambda z, model=model: model.down(model.up(z) @ model.turn), x).square().sum().backward()
        assert len(set(seen)) == 1
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
