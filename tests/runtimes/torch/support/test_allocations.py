import os

import pytest
import torch
from torch import Tensor

from qsync_opt.runtimes.torch.support import allocation_of, allocations_of

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
