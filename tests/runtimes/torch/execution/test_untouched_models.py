"""Plans that change nothing per operator cost nothing per operator: no module but the root is touched."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.execution import ApplyOptions, ApplySettings, applied_plan, apply, undo

PLAN = {"0/linear": "FP32", "2.0/linear": "FP32"}


def _model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)))


def _state(model):
    """Class, attributes and hooks of every module."""
    return {
        path: (type(module), {name: id(value) for name, value in module.__dict__.items()})
        for path, module in model.named_modules()
    }


def test_a_plan_that_is_not_worthwhile_touches_nothing():
    model = _model()
    settings = ApplySettings(
        worthwhile=False,
        autocast=None,
        captured=False,
        compiled=False,
        regional=False,
        channels_last=False,
        lifted_kinds=(),
        opaque_modules=(),
        expected_ns=1,
        expected_bytes=None,
    )
    before = _state(model)
    assert apply(model, SimpleNamespace(apply_settings=lambda: settings)) is model
    assert _state(model) == before


@pytest.mark.parametrize("mode", ["FP32"])
def test_a_plan_that_torch_carries_out_by_its_settings_touches_the_root_alone(mode):
    model, x = _model(), torch.randn(3, 4)
    before, expected = _state(model), model(x)
    apply(model, PLAN, options=ApplyOptions(autocast=mode))
    assert torch.equal(model(x), expected)
    now = _state(model)
    assert {path for path in now if now[path] != before[path]} == {""}
    assert now[""][0] is before[""][0] and now[""][1].keys() - before[""][1].keys() == {"forward"}
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(NotReadyError, match="leave autocast"):
        model(x)
    undo(model)
    assert _state(model) == before


def test_operators_can_be_observed_all_the_same():
    model, x, names = _model(), torch.randn(3, 4), []
    apply(model, PLAN, options=ApplyOptions(autocast="FP32"))
    before = _state(model)
    with applied_plan(model).interception.observed(lambda call, _: (names.append(call.name), call.run())[1], ()):
        model(x)
    assert names == ["0/linear", "2.0/linear", "2.1/softmax"]
    assert _state(model) == before
    undo(model)
