import os

import pytest
import torch

from qsync_opt.runtimes.torch import tracing
from qsync_opt.runtimes.torch.tracing import traced


def test_the_host_is_traced_without_a_card(monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    with traced(torch.device("cpu"), memory=True) as profiler:
        torch.ones(1 << 16).sum()
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    assert "aten::ones" in names
    assert "[memory]" in names
    assert "TEARDOWN_CUPTI" not in os.environ


@pytest.mark.parametrize(
    ("version", "before", "after"), [("13.0", None, "1"), ("13.0", "0", "0"), ("12.4", None, None)]
)
def test_a_tracer_of_kernels_is_taken_off_where_that_is_safe(monkeypatch, version, before, after):
    """Without a card: what the environment says while the profiler runs, and whether CUDA is called afterwards."""

    class Profile:
        def __enter__(self):
            said.append(os.environ.get("TEARDOWN_CUPTI"))

        def __exit__(self, *_):
            said.append("end")

    said = []
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: Profile())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("called"))
    monkeypatch.setattr(tracing, "_PAUSE_S", 0.0)
    monkeypatch.setenv("TEARDOWN_CUPTI", before or "")
    if before is None:
        monkeypatch.delenv("TEARDOWN_CUPTI")
    with traced(torch.device("cuda")):
        pass
    assert said[:2] == [after, "end"]
    assert said[2:] == ["called"] * (tracing._CALLS if after == "1" else 0)
