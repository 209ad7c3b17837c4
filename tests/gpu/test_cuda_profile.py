import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.capture import capture_model
from qsync_opt.runtimes.torch.profiling import profile
from qsync_opt.runtimes.torch.support import TrainingExample, allocations_of, make_stopwatch, measure_iteration

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_host_and_device_time_are_told_apart() -> None:
    watch = make_stopwatch(CUDA)
    x = torch.randn(8192, 8192, device=CUDA)
    for _ in range(3):
        watch.settle()
        _, large = watch.time(lambda: x @ x)
    small_x = x[:8, :8].clone()
    for _ in range(3):
        watch.settle()
        _, small = watch.time(lambda: small_x + small_x)
    assert large.device_ns > 1e6 > large.host_ns > 0
    # The launch of a tiny kernel takes longer than the kernel, and must not be counted as device time.
    assert small.device_ns < 20_000
    assert small.host_ns > 0


def test_allocations_of_phases() -> None:
    def fill(_: None) -> list[torch.Tensor]:
        return [torch.ones(2**22, dtype=torch.uint8, device=CUDA)]

    _, (first, second) = allocations_of([fill, lambda held: held.clear()], CUDA)
    assert first.peak_bytes == first.kept_bytes == 2**22
    assert (second.peak_bytes, second.kept_bytes) == (0, -(2**22))


def test_a_model_is_profiled_on_the_card() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024)).to(CUDA)
    batch = (torch.randn(4096, 1024, device=CUDA),)
    captured = capture_model(model, batch)
    example = TrainingExample(model=model, args=batch)
    result = profile(captured, CUDA, example=example, progress=False, repeats=5)
    assert result.device.kind == "cuda"
    costs = result.cost("0/linear")
    assert set(costs) == set(result.formats)
    for cost in costs.values():
        # An 8-bit forward is what is left of the whole after the fitted cast, which may be nothing.
        assert cost.forward_ns + cost.backward_ns > 0
        assert cost.host_backward_ns > 0
    assert costs["BF16"].forward_ns < costs["FP32"].forward_ns
    checks = {check.precision: check for check in result.overhead.iterations}
    assert set(checks) == set(result.formats)
    summed = {name: check.summed_forward_ns + check.summed_backward_ns for name, check in checks.items()}
    predicted = {name: check.predicted_forward_ns + check.predicted_backward_ns for name, check in checks.items()}
    assert all(0 < summed[name] <= predicted[name] for name in checks)
    # Iterations that the fit has not seen, of the plain model, which products of milliseconds pace and not the host.
    measured = measure_iteration(example)
    assert predicted["FP32"] == pytest.approx(measured.forward_ns + measured.backward_ns, rel=0.3)
    measured = measure_iteration(example, torch.optim.AdamW(model.parameters()))
    assert "max_memory_allocated" in measured.memory_source
