"""Capture of a model that lives on a GPU."""

import pytest
import torch
from example_models import example
from torch import nn

from qsync_opt.runtimes.torch.capture import capture, capture_model

pytestmark = pytest.mark.gpu


def test_names_do_not_depend_on_the_device_and_random_states_are_put_back() -> None:
    chosen = example("llama", small=True)
    on_cpu = capture(chosen.model, (), chosen.kwargs)
    chosen.model.cuda()
    kwargs = {name: tensor.cuda() for name, tensor in chosen.kwargs.items()}
    state = torch.cuda.get_rng_state()
    captured = capture_model(chosen.model, (), kwargs)
    assert captured.graph.fingerprint() == on_cpu.fingerprint()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for name, call in captured.calls.items():
        args, options = call.build(lambda argument: argument.random("cuda"), "cuda")
        with torch.no_grad():
            result = call.target(*args, **options)
        first = result[0] if isinstance(result, (list, tuple)) else result
        assert first.device.type == "cuda", name


def test_dropout_on_the_gpu_leaves_its_random_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    x = torch.ones(2, 8, device="cuda")
    state = torch.cuda.get_rng_state()
    assert [o.name for o in capture(model, (x,))] == ["input/input", "0/linear", "1/dropout"]
    assert torch.equal(torch.cuda.get_rng_state(), state)
