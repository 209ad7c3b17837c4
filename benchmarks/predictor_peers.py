"""What PyTorch's own estimators say of the cases that they apply to: `torch.distributed._tools`.

They run a model on fake tensors, so its step is the real one, with the plan's casts in it. 8-bit operators look at
their values and cannot be run so.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from predictor_models import Subject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator

from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.execution import ApplyOptions, apply
from qsync_opt.runtimes.torch.steps import Stepper
from qsync_opt.runtimes.torch.support import TrainingExample

MODES = {"torch_benchmark_ms": "operator-level-benchmark", "torch_roofline_ms": "operator-level-cost-model"}


def torch_estimates(
    subject: Subject, graph: OpGraph, plan: Mapping[str, str], device: torch.device, *, whole: bool
) -> dict[str, Any]:
    """Step time in milliseconds and peak memory in bytes by torch's estimators, or why there are none.

    Args:
        subject: Model and batch.
        graph: Of the model.
        plan: To apply.
        device: Where operators are benchmarked, on the current stream.
        whole: Whether the whole device is used: the roofline knows no parts of one.
    """
    found: dict[str, Any] = {}
    with FakeTensorMode(), _noting(found, "torch_refuses"):
        model, kwargs = subject.build(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        stepper = Stepper(TrainingExample(model=model, kwargs=kwargs), optimizer)
        apply(model, dict(plan), graph=graph, options=ApplyOptions())
        stepper.step()  # the optimizer makes its state
        for name, mode in MODES.items():
            if mode == "operator-level-benchmark" or whole:
                estimator = RuntimeEstimator()
                with _noting(found, f"{name}_refused"), contextlib.redirect_stdout(io.StringIO()), estimator(mode):
                    stepper.step()
                    found[name] = estimator.total_runtime
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            stepper.step()
        snapshots = tracker.get_tracker_snapshot("peak")
        found["torch_peak_bytes"] = max(snapshot["Total"] for snapshot in snapshots.values())
    return found


@contextlib.contextmanager
def _noting(found: dict[str, Any], key: str) -> Iterator[None]:
    """What they cannot do is a part of the comparison, whatever it is."""
    try:
        yield
    except Exception as error:
        found[key] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]
