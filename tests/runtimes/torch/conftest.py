import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

# The example models belong to the benchmarks; tests of this folder import them by the bare name.
sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from example_models import example

from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.ddp import free_port


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


@pytest.fixture
def two_cards():
    """For tests that run one worker on each of two cards."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


class Rank:
    """Starts the scripts of one rank: forked from a process that has loaded torch, or by themselves where CUDA is.

    A process that has looked for CUDA devices cannot be forked.
    """

    def __init__(self, modules):
        self.modules = modules
        self.server = None
        self.process = None

    def start(self, folder, script, arguments, flags, deadline):
        self.output, self.errors = folder / "output", folder / "errors"
        if torch.cuda.is_available():
            with self.output.open("w") as output, self.errors.open("w") as errors:
                command = [sys.executable, "-P", *flags, script, *arguments]
                self.process = subprocess.Popen(command, stdout=output, stderr=errors)
            return
        if self.server is None:
            command = [
                sys.executable,
                "-P",
                str(Path(__file__).with_name("workers") / "worker_server.py"),
                *self.modules,
            ]
            self.server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        request = {
            "script": script,
            "arguments": arguments,
            "environment": dict(os.environ),
            "flags": flags,
            "output": str(self.output),
            "errors": str(self.errors),
            "deadline": deadline,
        }
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()

    def wait(self, deadline):
        """Exit status, or None if the script did not end in time, or took the server along."""
        left = max(0.0, deadline - time.monotonic())
        if self.process is not None:
            try:
                return self.process.wait(left)
            except subprocess.TimeoutExpired:
                return None
        ready, _, _ = select.select([self.server.stdout], [], [], left)
        line = self.server.stdout.readline() if ready else ""
        return int(line) if line else None

    def result(self):
        """What the script printed in its last line, as JSON."""
        return json.loads(self.output.read_text().splitlines()[-1])

    def stop(self):
        """End whatever is running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self.server is not None:
            os.killpg(self.server.pid, signal.SIGKILL)
            self.server.stdin.close()
            self.server.stdout.close()
            self.server.wait()
            self.server = None


class Workers:
    """Runs a script of ``workers`` as several workers, which find ``modules`` loaded beside torch.

    The script is given rank, number of workers, a port and the further arguments; ``flags`` may hold Python's ``-W``.
    """

    def __init__(self, folders, *modules):
        self.folders, self.modules, self.ranks = folders, modules, []

    def __call__(self, script, *arguments, world_size=2, flags=()):
        """What each printed in its last line, as JSON; all of them must end well."""
        chosen, statuses = self.ended(script, *arguments, world_size=world_size, flags=flags)
        said = "\n".join(f"rank {k}: {rank.errors.read_text()}" for k, rank in enumerate(chosen))
        assert not any(statuses), f"statuses {statuses}\n{said}"
        return [rank.result() for rank in chosen]

    def ended(self, script, *arguments, world_size=2, flags=()):
        """The ranks and their exit statuses, after all have ended."""
        self.ranks.extend(Rank(self.modules) for _ in range(world_size - len(self.ranks)))
        path = str(Path(__file__).with_name("workers") / script)
        shared = [str(world_size), str(free_port()), *map(str, arguments)]
        deadline, statuses = time.monotonic() + 240, []
        chosen = self.ranks[:world_size]
        try:
            for number, rank in enumerate(chosen):
                rank.start(self.folders.mktemp("worker"), path, [str(number), *shared], flags, deadline)
            statuses = [rank.wait(deadline) for rank in chosen]
        finally:
            if None in statuses or len(statuses) < world_size:
                self.stop()
        return chosen, statuses

    def stop(self):
        for rank in self.ranks:
            rank.stop()


@pytest.fixture(scope="session")
def run_workers(tmp_path_factory):
    """Runs a script of ``workers`` as several workers; returns what each printed in its last line, as JSON."""
    workers = Workers(tmp_path_factory)
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def graph_workers(tmp_path_factory):
    """As `run_workers`, with what trains on graphs loaded."""
    workers = Workers(tmp_path_factory, "torch_geometric.nn", "qsync_opt.runtimes.torch.messages")
    yield workers
    workers.stop()
