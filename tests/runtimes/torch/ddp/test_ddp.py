import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qsync_opt.errors import NotReadyError, ProblemError, UnsupportedError
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.ddp import fit_all_reduce, free_port, measure_all_reduce, process_group
from qsync_opt.training import BucketOptions, gradient_buckets

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def test_the_fit_recovers_latency_and_bandwidth():
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    model = fit_all_reduce(sizes, [1e-4 + size / 2e9 for size in sizes])
    assert model.latency_s == pytest.approx(1e-4, rel=1e-6)
    assert model.bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-6)
    assert model.relative_residual < 1e-9
    noisy = fit_all_reduce(
        sizes, [(1e-4 + size / 2e9) * f for size, f in zip(sizes, (1.1, 0.9, 1.1, 0.9), strict=True)]
    )
    assert 0.05 < noisy.relative_residual < 0.15
    convex = fit_all_reduce([1000, 2000, 4000], [1e-6, 3e-6, 9e-6])
    assert convex.latency_s == 0
    nan, inf = float("nan"), float("inf")
    bad = [([1], [1.0]), ([1, 2], [1.0]), ([1, 2], [1.0, 0.0]), ([1, 2], [2.0, 1.0])]
    for bad_sizes, bad_times in (*bad, ([1, 2], [1.0, nan]), ([1, 2], [1.0, inf]), ([-1, 2], [1.0, 2.0])):
        with pytest.raises(ProblemError):
            fit_all_reduce(bad_sizes, bad_times)


def test_groups_and_their_absence():
    with pytest.raises(NotReadyError, match="process_group"):
        measure_all_reduce()
    with pytest.raises(UnsupportedError, match="'mpi'"), process_group(0, 1, free_port(), backend="mpi"):
        pass
    port = free_port()
    with process_group(0, 1, port):
        with pytest.raises(NotReadyError, match="already"), process_group(0, 1, port):
            pass
        with pytest.raises(NotReadyError, match="two workers"):
            measure_all_reduce()
    assert not dist.is_initialized()


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the system does not name a process's threads in /proc"
)
def test_a_group_that_is_left_leaves_no_threads():
    script = f"""
import os
from torch import nn
from qsync_opt.runtimes.torch.ddp import process_group

def names():
    return {{open(f"/proc/self/task/{{thread}}/comm").read().strip() for thread in os.listdir("/proc/self/task")}}

with process_group(0, 1, {free_port()}):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    within = names()
    del model
print(sorted(within - names()))
print([name for name in names() if "gloo" in name])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    ended, left = done.stdout.splitlines()
    assert "pt_gloo_runloop" in ended  # one that frees tensors while Python closes aborts the process
    assert left == "[]"


def test_a_further_group_gives_up_as_soon_as_the_first(run_workers, tmp_path):
    heard, silent = run_workers("companion_worker.py", tmp_path)
    assert heard["seen"] == silent["seen"] == [0, 1]
    assert "the other ranks do not answer" in heard["text"]
    assert silent["waited_s"] < 60  # else rank 0 learned of it when rank 1 ended


def test_one_worker_in_fp32_and_one_under_a_plan(run_workers):
    fp32, planned = run_workers("hybrid_worker.py")
    for outcome in (fp32, planned):
        assert outcome["equal"]
        assert outcome["losses"][-1] < 0.8 * outcome["losses"][0]
        assert outcome["bandwidth"] > 0
    assert fp32["losses"] != planned["losses"]
    assert fp32["built"] == planned["built"]


class _Shuffled(nn.Module):
    """Registered in another order than used, one layer used twice, one weight shared, one frozen, one unused."""

    def __init__(self, unused):
        super().__init__()
        self.middle, self.first = nn.Linear(64, 64), nn.Linear(32, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 32)
        self.convolution, self.normalization = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.tied = nn.Linear(32, 64)
        self.tied.weight = self.first.weight
        self.last.weight.requires_grad_(False)
        if unused:
            self.unused = nn.Linear(40, 40)

    def forward(self, x):
        x = self.normalization(self.convolution(x[:, None])).mean(1)
        x = self.norm(self.middle(torch.relu(self.middle(self.first(x)))))
        return self.tied(self.last(x))


@pytest.mark.parametrize("unused", [False, True])
def test_predicted_buckets_are_those_that_are_reduced(unused):
    torch.manual_seed(0)
    model, x = _Shuffled(unused), torch.randn(8, 32)
    graph = capture(model, (x,))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with process_group(0, 1, free_port()):
        for cap in (100, 8_000, 17_000, 1 << 20):
            seen = []

            def note(_, bucket, seen=seen):
                seen.append(tuple(names[id(parameter)] for parameter in bucket.parameters()))
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            arguments = {"bucket_cap_mb": cap / 2**20, "find_unused_parameters": unused}
            wrapped = nn.parallel.DistributedDataParallel(model, **arguments)
            wrapped.register_comm_hook(None, note)
            for _ in range(3):
                seen.clear()
                wrapped(x).sum().backward()
            buckets = gradient_buckets(graph, BucketOptions.of_ddp(**arguments))
            assert [bucket.parameters for bucket in buckets] == seen
            del wrapped
