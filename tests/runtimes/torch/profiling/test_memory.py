"""Predicted memory of whole plans beside the allocator's account of a training step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.kernels import KernelOptions
from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.runtimes.torch.support import TrainingExample, allocation_of, model_unchanged, resident_bytes
from qsync_opt.testing import make_cluster, make_sensitivities
from qsync_opt.training import build_problem, evaluate, uniform_plan


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers.append(nn.Conv2d(channels, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if norm == "batch" else [nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first, self.second, self.last = _block(3, 8, norm), _block(8, 16, norm), _block(16, 8, norm)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.second(F.max_pool2d(fine, 2))
        result: Tensor = self.out(self.last(torch.cat([self.up(coarse), fine], 1)))
        return result


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_plan_of_a_u_net_needs_what_is_predicted(norm: str) -> None:
    """Normalization keeps an FP32 copy of a 16-bit result, and the result itself is not kept beside it."""
    torch.manual_seed(0)
    model, images = UNet(norm), torch.randn(2, 3, 32, 32)
    labels = torch.zeros(2, 32, 32, dtype=torch.long)
    example = TrainingExample(model=model, args=(images,), loss=lambda y: F.cross_entropy(y.float(), labels))
    captured = capture_model(model, (images,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Times do not matter here, memory is exact in any number of runs.
    measured = profile(captured, "cpu", precisions=("BF16",), optimizer=optimizer, progress=False, repeats=1)
    cluster = make_cluster(count=1, precisions=("BF16", "FP32"))
    problem = build_problem(captured.graph, {"slow": measured}, make_sensitivities(captured.graph), cluster)
    needs, predictions = {}, {}
    for precision in ("BF16", "FP32"):
        plan = uniform_plan(problem, precision)
        predictions[precision] = evaluate(problem, plan).memory_bytes["slow"]
        options = KernelOptions(half_format="BF16")
        with model_unchanged(model), under_plan(model, plan.devices["slow"], captured.graph, options):
            example.run()
            model.zero_grad()
            _, allocation = allocation_of(example.run, torch.device("cpu"))
        needs[precision] = resident_bytes(model) + allocation.peak_bytes
        model.zero_grad()
        # Nearer where the processor has BF16 products: elsewhere they need buffers that are predicted at their largest.
        assert needs[precision] <= predictions[precision] <= 1.5 * needs[precision]
    # What a plan saves depends on the normalization: with batch normalization, next to nothing.
    if norm == "group":
        # Processors without BF16 products need FP32 copies of operands meanwhile, which take what is saved here.
        plain = torch.backends.cpu.get_cpu_capability() == "AVX2"
        assert needs["BF16"] < (1.02 if plain else 1.0) * needs["FP32"]
        assert plain or predictions["BF16"] < predictions["FP32"]
