"""Memory of problems whose loss is computed in chunks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.kernels import layers
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.execution import loss_layers
from qsync_opt.runtimes.torch.job import JobModel, load_job, save_job
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.sensitivity import SensitivityValues
from qsync_opt.training import evaluate, uniform_plan

ROWS, FEATURES, CLASSES = 64, 16, 512


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, FEATURES), layers.LinearCrossEntropy(FEATURES, CLASSES)

    def forward(self, x, target):
        return self.head(torch.relu(self.body(x)), target)


@pytest.fixture(scope="module")
def job():
    torch.manual_seed(0)
    model = Classifier()
    assert loss_layers(model) == ("head/linear",)
    captured = capture_model(model, (torch.randn(ROWS, FEATURES), torch.randint(CLASSES, (ROWS,))))
    costs = profile(captured, "cpu", precisions=("BF16",), progress=False, repeats=2, name="here")
    rows = {o.name: {"BF16": 1.0, "FP32": 0.0} for o in captured.graph if o.role == "adjustable"}
    table = SensitivityValues(values_of=rows, unit="squared gradient")
    device = DeviceType(name="here", count=1, memory_limit_bytes=2**30, precisions=("BF16", "FP32"))
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e9, source="none")
    cluster = Cluster(name="one", devices=(device,), network=network)
    return JobModel(graph=captured.graph, profiles={"here": costs}, sensitivities={"here": table}, cluster=cluster)


@pytest.mark.parametrize("precision", ["BF16", "FP32"])
def test_logits_are_neither_kept_nor_cast(job, precision):
    whole, chunked = job.problem(), replace(job, loss_layers=("head/linear",)).problem()
    before, after = (evaluate(problem, uniform_plan(problem, precision)) for problem in (whole, chunked))
    logits = ROWS * CLASSES * 4
    assert before.memory_bytes["here"] - after.memory_bytes["here"] > 0.5 * logits
    own = chunked.devices[0].operators["head/linear"][precision]
    kept = 4 * CLASSES * FEATURES + ROWS * FEATURES * {"BF16": 2, "FP32": 4}[precision]
    assert own.memory_kib * 1024 >= kept
    assert own.forward_ns == whole.devices[0].operators["head/linear"][precision].forward_ns


def test_other_layers_are_left_as_they_are(job):
    assert replace(job, loss_layers=("body/linear", "not/there")).problem() == job.problem()


def test_the_file_of_a_job_has_them(job, tmp_path):
    known = replace(job, loss_layers=("head/linear",))
    save_job(known, tmp_path / "job.json", {"memory_bytes": {"here": 2**30}})
    assert load_job(tmp_path / "job.json")[0].loss_layers == ("head/linear",)
