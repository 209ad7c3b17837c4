import functools

import pytest
import torch

from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.example_models import example


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def known():
    """Small example models by name, each with its capture; built once, so whoever changes one puts it back."""

    @functools.cache
    def get(name):
        torch.manual_seed(0)
        chosen = example(name, small=True)
        return chosen, capture_model(chosen.model, (), chosen.kwargs, name=name)

    return get
