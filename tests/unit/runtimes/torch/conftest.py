import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.ddp import free_port
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


@pytest.fixture(scope="session")
def run_workers():
    """Run a script of this folder as several workers; returns what each printed in its last line, as JSON.

    The script is given rank, number of workers, a port and the further arguments.
    """

    def run(script, *arguments, world_size=2, flags=()):
        command = [sys.executable, "-P", *flags, str(Path(__file__).with_name(script))]
        shared = [str(world_size), str(free_port()), *map(str, arguments)]
        workers = [
            subprocess.Popen([*command, str(rank), *shared], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(world_size)
        ]
        try:
            texts = [worker.communicate(timeout=240) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for worker, (_, errors) in zip(workers, texts, strict=True):
            assert worker.returncode == 0, errors
        return [json.loads(output.splitlines()[-1]) for output, _ in texts]

    return run
