"""What `graphed` refuses; what it does is tested on a card."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import functional_call

import qsync_opt
from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.runtimes.torch.execution.graphs import _check_memory, _recurrent_weights
from qsync_opt.runtimes.torch.job import host_bound_words


def test_a_plan_comes_first():
    with pytest.raises(NotReadyError, match=r"no plan is applied.*make_graphed_callables"):
        qsync_opt.graphed(nn.Linear(4, 4), torch.zeros(2, 4))


def test_evaluation_is_refused():
    resting = qsync_opt.apply(nn.Sequential(nn.Linear(4, 4)), {"0/linear": "FP32"}).eval()
    with pytest.raises(NotReadyError, match=r"evaluation mode.*model.train\(\)"):
        qsync_opt.graphed(resting, torch.zeros(2, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_read_replaced_parameters_where_they_are(kind):
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4, 2))
    others = {id(own): own.detach().requires_grad_() for own in model.parameters()}
    replaced = {name: others[id(own)] for name, own in model.named_parameters()}
    before = model[1]._flat_weights
    with _recurrent_weights(model, others):
        weights = model[1]._flat_weights
        output = functional_call(model, replaced, torch.randn(3, 2, 4))[0]
        assert model[1]._flat_weights is weights  # they were not moved to memory of their own
    gradients = torch.autograd.grad(output.sum(), list(others.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert model[1]._flat_weights is before
    assert not model[1]._weights_have_changed()


def test_passes_that_move_parameters_are_refused():
    """As recurrent layers do on a card, whose weights are computed in every pass."""
    layer = nn.LSTM(4, 4)
    aliases = [own.detach().requires_grad_() for own in layer.parameters()]
    _check_memory([*layer.parameters()], aliases)
    aliases[1].data = aliases[1].data.clone()
    with pytest.raises(UnsupportedError, match=r"moves its parameters.*weight_norm.*operator by operator"):
        _check_memory([*layer.parameters()], aliases)


def test_a_model_on_the_host_cannot_be_captured():
    model = qsync_opt.apply(nn.Sequential(nn.Linear(4, 4)), {"0/linear": "BF16"})
    with pytest.raises(UnsupportedError, match="on cpu: CUDA graphs need a model on a card"):
        qsync_opt.graphed(model, torch.zeros(2, 4))
    output = model(torch.randn(2, 4))
    assert torch.equal(output, output.to(torch.bfloat16).float())


def test_a_plan_says_which_devices_wait_for_their_host_and_what_helps():
    lines = host_bound_words({"H200": 0.97, "T4": 0.41})
    assert len(lines) == 1
    assert "H200 waits for its host" in lines[0]
    assert "97%" in lines[0]
    assert "qsync_opt.graphed(model, batch)" in lines[0]
    plan = qsync_opt.auto_plan(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
        torch.zeros(4, 8),
        options=qsync_opt.PlanningOptions(precisions=("FP32",), progress=False),
    )
    assert plan.host_shares == {}  # on a CPU nobody waits
    assert lines[0] in dataclasses.replace(plan, host_shares={"H200": 0.97}).describe()
