"""What do the parts of a step cost that are no operators: casts on edges, sums of gradients, the optimizer?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.costs.profile import OptimizerCost
from qsync_opt.kernels import ops
from qsync_opt.kernels.options import KernelOptions
from qsync_opt.model.graph import TensorSpec
from qsync_opt.runtimes.timing import steady_medians
from qsync_opt.runtimes.torch.profiling.operators import DTYPES, ROUND_BYTES
from qsync_opt.runtimes.torch.support.memory import allocation_of
from qsync_opt.runtimes.torch.support.optimizers import check_steps, kind_of, rebuilt, state_bytes
from qsync_opt.runtimes.torch.support.timing import Stopwatch

_ROTATED = 4


def time_cast(
    source: str,
    target: str,
    spec: TensorSpec,
    device: torch.device,
    options: KernelOptions,
    stopwatch: Stopwatch,
    repeats: int,
) -> float:
    """Nanoseconds of one cast as the runtime does it on an edge."""
    inputs = [torch.randn(spec.shape, device=device).to(DTYPES[source]) for _ in range(_ROTATED)]
    return _time(lambda x: ops.cast(x, target, options), inputs, spec, stopwatch, repeats)


def time_gradient_sum(name: str, spec: TensorSpec, device: torch.device, stopwatch: Stopwatch, repeats: int) -> float:
    """Nanoseconds to add up two gradients of a result that two operators read."""
    inputs = [torch.randn(spec.shape, device=device).to(DTYPES[name]) for _ in range(_ROTATED)]
    other = torch.randn(spec.shape, device=device).to(DTYPES[name])
    return _time(lambda x: x + other, inputs, spec, stopwatch, repeats)


def _time(
    work: Callable[[Tensor], Any], inputs: Sequence[Tensor], spec: TensorSpec, stopwatch: Stopwatch, repeats: int
) -> float:
    """One time from rounds that keep their results alive; the first, which touches fresh memory, does not count."""
    count = max(2, min(repeats, ROUND_BYTES // max(1, 4 * spec.elements)))

    def run_round() -> list[tuple[float]]:
        kept, rows = [], []
        for i in range(count):
            x = inputs[i % len(inputs)]
            stopwatch.settle()
            with torch.no_grad():
                result, elapsed = stopwatch.time(functools.partial(work, x))
            kept.append(result)
            rows.append((max(elapsed.device_ns, elapsed.host_ns),))
        return rows

    run_round()
    return max(1.0, steady_medians(run_round)[0])


def like(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and settings over parameters of the same shapes, with gradients."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": parameters})
    return rebuilt(optimizer, groups)


def measure_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, stopwatch: Stopwatch, repeats: int
) -> OptimizerCost:
    """Time of a step and of clearing the gradients, state kept, and memory used in passing.

    Args:
        optimizer: Any torch optimizer; a copy of it is measured, so that neither parameters nor state change.
        device: Where.
        stopwatch: For the device.
        repeats: Steps per round.

    Raises:
        UnsupportedError: It cannot be copied, or its step needs an argument.
    """
    check_steps(optimizer)
    copy = like(optimizer, device)
    parameters = [p for group in copy.param_groups for p in group["params"]]

    def run_round() -> list[tuple[float, float]]:
        rows = []
        for _ in range(repeats):
            _give_gradients(parameters)
            stopwatch.settle()
            _, step = stopwatch.time(copy.step)
            _, clear = stopwatch.time(copy.zero_grad)
            rows.append((max(step.device_ns, step.host_ns), max(clear.device_ns, clear.host_ns)))
        return rows

    run_round()  # makes the state
    step_ns, zero_grad_ns = steady_medians(run_round)
    _give_gradients(parameters)
    _, allocation = allocation_of(copy.step, device)
    return OptimizerCost(
        name=kind_of(optimizer),
        step_ns=round(step_ns),
        zero_grad_ns=round(zero_grad_ns),
        state_bytes=state_bytes(copy),
        workspace_bytes=allocation.peak_bytes,
    )


def _give_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
