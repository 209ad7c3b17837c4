import contextlib
import os

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.kernels.weight_only import pack, unpack
from qsync_opt.runtimes.torch.support import TrainingExample, allocation_of, allocations_of, out_of_memory_by_type

CPU = torch.device("cpu")
MEBI = 2**20


def test_peak_and_what_is_kept_are_told_apart() -> None:
    def work() -> Tensor:
        passing = torch.ones(3 * MEBI, dtype=torch.uint8)
        kept = torch.ones(2 * MEBI, dtype=torch.uint8)
        del passing
        return kept

    kept, allocation = allocation_of(work, CPU)
    assert kept.numel() == 2 * MEBI
    assert allocation.peak_bytes == pytest.approx(5 * MEBI, abs=4096)
    assert allocation.kept_bytes == pytest.approx(2 * MEBI, abs=4096)


def test_what_one_phase_allocates_another_may_release() -> None:
    def fill(_: None) -> list[Tensor]:
        return [torch.ones(2 * MEBI, dtype=torch.uint8)]

    def release(held: list[Tensor]) -> str:
        held.clear()
        torch.ones(MEBI, dtype=torch.uint8)
        return "done"

    result, (first, second) = allocations_of([fill, release], CPU)
    assert result == "done"
    assert first.peak_bytes == first.kept_bytes == pytest.approx(2 * MEBI, abs=4096)
    assert second.peak_bytes == 0
    assert second.kept_bytes == pytest.approx(-2 * MEBI, abs=4096)


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    allocation_of(lambda: torch.ones(3), CPU)
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    allocation_of(lambda: torch.ones(3), CPU)
    assert os.environ["KINETO_LOG_LEVEL"] == "99"
    captured = capfd.readouterr()
    assert captured.out == ""


def test_a_failure_inside_comes_through() -> None:
    def work() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        allocation_of(work, CPU)


def test_out_of_memory_has_the_type_of_torch_whoever_finds_it() -> None:
    text = "CUDA out of memory: no room for a result of 7 elements in a kernel of qsync_opt"
    own = RuntimeError(f"empty_on, kernels/csrc/stable.cuh:56, {text}")
    with pytest.raises(torch.OutOfMemoryError, match="7 elements"), out_of_memory_by_type():
        raise own
    of_torch = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(torch.OutOfMemoryError) as caught, out_of_memory_by_type():
        raise of_torch
    assert caught.value is of_torch
    with pytest.raises(RuntimeError, match="another failure") as other, out_of_memory_by_type():
        raise RuntimeError("another failure than CUDA out of memory")
    assert not isinstance(other.value, torch.OutOfMemoryError)


@pytest.mark.gpu
def test_a_kernel_without_room_says_so_and_a_pass_raises_what_torch_raises() -> None:
    class Unpacking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones((), device="cuda"))
            self.packed = pack(torch.randn(4096, 4096, device="cuda"), 4)

        def forward(self) -> Tensor:
            return self.factor * unpack(self.packed).sum()

    model = Unpacking()
    unpack(model.packed)
    torch.cuda.empty_cache()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    filling: list[Tensor] = []  # of what earlier tests left free between their tensors
    try:
        torch.cuda.set_per_process_memory_fraction(reserved / total)
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(32 * MEBI, dtype=torch.uint8, device="cuda"))
        torch.cuda.set_per_process_memory_fraction((reserved + 32 * MEBI) / total)  # unpacked it has 64 MiB
        with pytest.raises(RuntimeError, match="CUDA out of memory: no room for a result of 16777216 elements"):
            unpack(model.packed)
        with pytest.raises(torch.OutOfMemoryError, match="16777216 elements"):
            TrainingExample(model=model).run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
