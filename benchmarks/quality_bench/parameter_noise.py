"""How large is rounding noise beside the gradient of the same parameter? Uniform INT8, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from noisy import exact_gradient, gradient, planned
from plans import LOW
from subjects import subject_of, train_briefly
from work import Clock, significant

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import ApplyOptions
from qsync_opt.runtimes.torch.sensitivity import full_precision

_STEPS, _BATCHES, _DRAWS = 150, 6, 3


def section(
    device: torch.device, scale: str, clock: Clock, name: str, factor: float, backward: str
) -> Iterator[dict[str, Any]]:
    """One record: per parameter, added variance over the mean square of its gradient, in all and of the median element.

    Args:
        device: Where.
        scale: Of the subject.
        clock: Not looked at; the section is one measurement.
        name: Of the subject.
        factor: By which errors are magnified.
        backward: ``half`` or ``eight``.
    """
    del clock
    subject = subject_of(name, device, scale=scale)
    model = subject.model(0, device)
    steps = 3 if scale == "tiny" else _STEPS
    train_briefly(subject, model, steps)
    batches = [subject.batch(10**6 + i) for i in range(_BATCHES)]
    exact = [exact_gradient(model, batch) for batch in batches]
    squares = [torch.stack(parts).square().mean(0) for parts in zip(*exact, strict=True)]
    graph = capture(model, batches[0], name=name)
    plan = {o.name: LOW for o in graph.by_role(Role.ADJUSTABLE) if ops.supports(o.op_type, LOW, device)}
    options = ApplyOptions(kernels=KernelOptions(weight_granularity="tensor", backward=backward))
    added = [torch.zeros_like(square) for square in squares]
    with full_precision(), planned(model, plan, graph, options, factor=factor):
        for _ in range(_DRAWS):
            for total, low, true in zip(added, gradient(model, batches[0]), exact[0], strict=True):
                total += (low - true).square() / _DRAWS
    tiny = torch.finfo(torch.float32).tiny
    yield significant(
        {
            "model": name,
            "what": subject.what,
            "factor": factor,
            "backward": backward,
            "steps": steps,
            "whole": float(sum(map(torch.sum, added)) / sum(map(torch.sum, squares))),
            "parameters": {
                key: {
                    "all": float(noise.sum() / square.sum().clamp(min=tiny)),
                    "median": float((noise / square.clamp(min=tiny)).median()),
                }
                for (key, _), noise, square in zip(model.named_parameters(), added, squares, strict=True)
            },
        }
    )
