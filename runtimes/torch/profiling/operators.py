"""Costs of single operators, casts and optimizer steps, measured on random tensors.

Adjustable operators run through ``kernels.ops.execute``, as under a plan; the others run their recorded call, in each
format that they may have. Activations arrive in the format that the runtime would deliver, so that their casts are not
in the time; an 8-bit operator quantizes inside, which the caller subtracts because it is a cost of the edge.

All results of a round are kept until their backward passes have run, in reverse order: memory is then fresh in forward
and reused in backward, as in a training step, and page faults occur where a step has them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from qsync_opt.costs import MeasuredCost, OptimizerCost
from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.model import Operator, Role, TensorSpec
from qsync_opt.runtimes.timing import Rounds, steady_medians
from qsync_opt.runtimes.torch.capture import OpaqueModule, RecordedCall, TensorArgument
from qsync_opt.runtimes.torch.interception import numbers_in_range
from qsync_opt.runtimes.torch.support import (
    Elapsed,
    Stopwatch,
    allocation_of,
    allocations_of,
    check_steps,
    optimizer_name,
    rebuild_optimizer,
    state_bytes,
    storage_of,
    tensors_in,
)

DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
    "TF32": torch.float32,
    "FP32": torch.float32,
}
ROUND_BYTES = 32 * 2**20
"""Results that one round may keep; larger operators run in shorter rounds."""
_FREE_KINDS = frozenset({"input", "getitem"})
"""Kinds that only name a tensor."""
_ROTATED = 4
"""Sets of arguments that runs use in turn."""
_IDLE_RUNS = 20
_NOTHING = Elapsed(device_ns=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run: its work, its floating-point activations, parameters and buffers, and the tensors with gradients."""

    work: Callable[[], Any]
    activations: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]


class OperatorBench:
    """Runs one recorded call in one precision on a device, with the ``options`` of the 8-bit kernels."""

    def __init__(
        self,
        operator: Operator,
        call: RecordedCall,
        precision: str,
        device: torch.device,
        options: KernelOptions,
    ) -> None:
        self._operator = operator
        self._inside: tuple[Tensor, ...] = ()
        if isinstance(call.target, OpaqueModule):  # its passes may write into buffers
            opaque = call.target.copied(device)
            call, self._inside = replace(call, target=opaque), opaque.parameters()
        self._call = call
        self._precision = precision
        self._device = device
        self._options = options
        half = DTYPES[options.half_format]
        self._arrival = torch.float32 if operator.role is Role.FIXED else DTYPES.get(precision, half)
        schema = call.target._schema if isinstance(call.target, torch._ops.OpOverload) else None
        self._in_place = schema is not None and schema.is_mutable
        self._generator = torch.Generator(device).manual_seed(0)

    def measure(self, stopwatch: Stopwatch, repeats: int, rounds: Rounds | None = None) -> MeasuredCost:
        """Time and memory, from ``rounds`` of ``repeats`` runs after one that does not count."""
        rounds = rounds or Rounds()
        if self._operator.op_type in _FREE_KINDS:
            return MeasuredCost(forward_ns=0, backward_ns=0, alias_input=0 if self._operator.inputs else None)
        memory = self._memory()
        per_run = max(1, sum(spec.num_bytes for spec in self._operator.output_specs) + memory.saved_bytes)
        count = max(2, min(repeats, ROUND_BYTES // per_run))
        rotated = [self._tensors() for _ in range(min(count, _ROTATED))]
        began = time.monotonic()
        self._round(stopwatch, rotated, 1)
        count = rounds.runs(count, time.monotonic() - began)
        # The first round touches its memory for the first time; those page faults are no part of a step.
        if count > 1:
            self._round(stopwatch, rotated, count)
        idle = _idle_backward(stopwatch, self._device)
        times = rounds.medians(lambda: self._round(stopwatch, rotated, count))
        forward, host_forward, backward, host_backward = times
        return replace(
            memory,
            forward_ns=max(0, round(forward)),
            host_forward_ns=max(0, round(host_forward)),
            backward_ns=max(0, round(backward - idle[0])),
            host_backward_ns=max(0, round(host_backward - idle[1])),
        )

    def _tensors(self) -> list[Tensor]:

        def make(argument: TensorArgument) -> Tensor:
            tensor = argument.random(self._device, self._generator)
            is_activation = argument.state is None and argument.dtype is torch.float32
            # 0-dim operands follow the others by type promotion, whatever their own type.
            if is_activation and (tensor.dim() > 0 or self._operator.role is Role.ADJUSTABLE):
                return tensor.detach().to(self._arrival).requires_grad_(argument.requires_gradient)
            return tensor

        return [make(argument) for argument in self._call.tensors()]

    def _run(self, tensors: Sequence[Tensor]) -> _Run:
        """Build the call; an operator that writes into an argument gets copies, for each run must see the original."""
        passed = [t.clone() if self._in_place else t for t in tensors]
        remaining = iter(passed)
        args, kwargs = self._call.build(lambda _: next(remaining), self._device)
        args, kwargs = numbers_in_range(self._operator.op_type, args, kwargs)
        work = functools.partial(self._call.target, *args, **kwargs)
        if self._operator.role is Role.ADJUSTABLE:
            arguments = (self._operator.op_type, self._precision, self._call.target, args, kwargs, self._options)
            work = functools.partial(ops.execute, *arguments)
        pairs = list(zip(self._call.tensors(), passed, strict=True))
        return _Run(
            work=work,
            activations=tuple(t for argument, t in pairs if argument.state is None and argument.spec.is_floating),
            state=(*(t for argument, t in pairs if argument.state is not None), *self._inside),
            leaves=(*(t for t in tensors if t.requires_grad), *self._inside),
        )

    def _round(self, stopwatch: Stopwatch, rotated: Sequence[list[Tensor]], count: int) -> list[tuple[float, ...]]:
        """``count`` forward passes, then their backward passes in reverse: device and host time of each, per run."""
        forward: list[Elapsed] = []
        backward: list[Elapsed] = []
        kept: list[tuple[_Run, Any]] = []
        for i in range(count):
            run = self._run(rotated[i % len(rotated)])
            # A view moves no data: its cost is the interpreter's, whose caches a step does not flush.
            stopwatch.settle(flush=not self._call.is_view)
            result, elapsed = stopwatch.time(run.work)
            forward.append(elapsed)
            kept.append((run, result))
            del result
        while kept:
            run, result = kept.pop()
            work = _backward(run, result)
            del result
            stopwatch.settle()
            backward.append(stopwatch.time(work)[1] if work is not None else _NOTHING)
        pairs = zip(forward, reversed(backward), strict=True)
        return [(f.device_ns, f.host_ns, b.device_ns, b.host_ns) for f, b in pairs]

    def _memory(self) -> MeasuredCost:
        """Memory saved for backward, and workspace: the peak less what is kept (forward) or delivered (backward)."""
        run = self._run(self._tensors())
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = run.work()
        cost = self._kept(run, tensors_in(result), saved)
        del result
        run = self._run(self._tensors())
        delivered_bytes = 0

        def backward(result: Any) -> None:
            nonlocal delivered_bytes
            if (work := _backward(run, result)) is not None:
                parts = [part for gradient in work() if gradient is not None for part in _stored(gradient)]
                delivered = {storage_of(t): t.untyped_storage().nbytes() for t in parts}
                delivered_bytes = sum(delivered.values())

        _, (first, second) = allocations_of([lambda _: run.work(), backward], self._device)
        return replace(
            cost,
            forward_workspace_bytes=max(0, first.peak_bytes - first.kept_bytes),
            backward_workspace_bytes=max(0, second.peak_bytes - delivered_bytes),
        )

    def _kept(self, run: _Run, results: Sequence[Tensor], saved: Sequence[Tensor]) -> MeasuredCost:
        """Assign saved tensors by storage to parameters, inputs, the result, or the operator itself."""
        edges = run.activations
        if len(edges) > len(self._operator.inputs):
            edges = tuple(tensor for tensor in edges if tensor.dim() > 0)
        # Storage of each activation with an edge, and its position among the operator's inputs.
        positions = {storage_of(tensor): position for position, tensor in reversed(list(enumerate(edges)))}
        state = {storage_of(tensor) for tensor in run.state}
        outputs = {storage_of(tensor) for tensor in results}
        keys = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
        own = [size for key, size in keys.items() if key not in positions and key not in outputs and key not in state]
        return MeasuredCost(
            forward_ns=0,
            backward_ns=0,
            saved_bytes=sum(own),
            saves_inputs=tuple(sorted({positions[key] for key in keys if key in positions})),
            saves_output=any(key in outputs and key not in positions for key in keys),
            alias_input=next((positions[key] for key in outputs if key in positions), None),
        )


def _idle_backward(stopwatch: Stopwatch, device: torch.device) -> tuple[float, ...]:
    """Time of an autograd call without work, which a step makes once and not per operator."""
    x = torch.zeros(1, device=device, requires_grad=True)
    y = x.view(1)
    g = torch.zeros(1, device=device)

    def run_round() -> list[tuple[float, ...]]:
        rows: list[tuple[float, ...]] = []
        for _ in range(_IDLE_RUNS):
            # Without a head start of the host, the device's time would be the host's.
            stopwatch.settle(flush=False)
            elapsed = stopwatch.time(lambda: torch.autograd.grad([y], [x], [g]))[1]
            rows.append((elapsed.device_ns, elapsed.host_ns))
        return rows

    return steady_medians(run_round)


def _stored(gradient: Tensor) -> tuple[Tensor, ...]:
    """The tensors that store a gradient: of an embedding's sparse one, indices and values."""
    return (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)


def _backward(run: _Run, result: Any) -> Callable[[], tuple[Tensor | None, ...]] | None:
    """Backward pass of one run with constant gradients; None if no gradient flows."""
    outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not outputs or not run.leaves:
        return None
    gradients = [torch.full_like(tensor, 1e-3) for tensor in outputs]
    return lambda: torch.autograd.grad(outputs, run.leaves, gradients, allow_unused=True)


def time_cast(
    source: str,
    target: str,
    spec: TensorSpec,
    device: torch.device,
    options: KernelOptions,
    stopwatch: Stopwatch,
    repeats: int,
    rounds: Rounds,
) -> float:
    """Nanoseconds of one cast of the runtime on an edge."""
    return _time(lambda x: ops.cast(x, target, options), source, spec, device, stopwatch, repeats, rounds)


def time_gradient_sum(
    name: str, spec: TensorSpec, device: torch.device, stopwatch: Stopwatch, repeats: int, rounds: Rounds
) -> float:
    """Nanoseconds to add two gradients of a result that two operators read."""
    other = torch.randn(spec.shape, device=device).to(DTYPES[name])
    return _time(lambda x: x + other, name, spec, device, stopwatch, repeats, rounds)


def _time(
    work: Callable[[Tensor], Any],
    name: str,
    spec: TensorSpec,
    device: torch.device,
    stopwatch: Stopwatch,
    repeats: int,
    rounds: Rounds,
) -> float:
    """Time of one run on a tensor in the format ``name``, from rounds that keep their results.

    The first round, which touches fresh memory, does not count.
    """
    count = max(2, min(repeats, ROUND_BYTES // max(1, 4 * spec.elements)))
    inputs = [torch.randn(spec.shape, device=device).to(DTYPES[name]) for _ in range(min(count, _ROTATED))]

    def run_round(count: int) -> list[tuple[float]]:
        kept, rows = [], []
        for i in range(count):
            x = inputs[i % len(inputs)]
            stopwatch.settle()
            with torch.no_grad():
                result, elapsed = stopwatch.time(functools.partial(work, x))
            kept.append(result)
            rows.append((max(elapsed.device_ns, elapsed.host_ns),))
        return rows

    began = time.monotonic()
    run_round(1)
    count = rounds.runs(count, time.monotonic() - began)
    if count > 1:
        run_round(count)
    return max(1.0, rounds.medians(lambda: run_round(count))[0])


def like(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings over zero parameters of the same shapes."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters = [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for p in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": parameters})
    return rebuild_optimizer(optimizer, groups)


def measure_optimizer(
    optimizer: torch.optim.Optimizer, device: torch.device, stopwatch: Stopwatch, repeats: int, rounds: Rounds
) -> OptimizerCost:
    """Time of a step and of clearing the gradients, state, and workspace of a copy of an optimizer.

    Raises:
        UnsupportedError: It cannot be copied, or its step needs an argument.
    """
    check_steps(optimizer)
    copy = like(optimizer, device)
    parameters = [p for group in copy.param_groups for p in group["params"]]

    def give_gradients() -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)

    def run_round(count: int) -> list[tuple[float, float]]:
        rows = []
        for _ in range(count):
            give_gradients()
            stopwatch.settle()
            _, step = stopwatch.time(copy.step)
            _, clear = stopwatch.time(copy.zero_grad)
            rows.append((max(step.device_ns, step.host_ns), max(clear.device_ns, clear.host_ns)))
        return rows

    run_round(1)  # creates the state
    began = time.monotonic()
    run_round(1)
    count = rounds.runs(repeats, time.monotonic() - began)
    step_ns, zero_grad_ns = rounds.medians(lambda: run_round(count))
    give_gradients()
    _, allocation = allocation_of(copy.step, device)
    return OptimizerCost(
        name=optimizer_name(optimizer),
        step_ns=round(step_ns),
        zero_grad_ns=round(zero_grad_ns),
        state_bytes=state_bytes(copy),
        workspace_bytes=allocation.peak_bytes,
    )
