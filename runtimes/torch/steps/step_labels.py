"""Label a model's operators for the profiler, and read what it recorded.

Under a plan or without one: the labels go around the calls that the interception names, dependent operators included,
which run as they would without labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from qsync_opt.model.graph import OpGraph
from qsync_opt.runtimes.torch.execution.plans import applied_plan
from qsync_opt.runtimes.torch.interception.interception import Interception, OperatorCall, interception_of
from qsync_opt.runtimes.torch.support.models import bare_model
from qsync_opt.steps.trace import (
    LAUNCHES,
    NODE,
    PREFIX,
    WAITS,
    Change,
    Kernel,
    Launch,
    Node,
    Range,
    StepEvents,
    operator_label,
    phase_label,
)

_MEMORY = "[memory]"
FUSED = ("triton_", "cpp_fused_")
"""Beginnings of the names of a compiler's kernels, and of the ranges around their launches."""


@contextlib.contextmanager
def observed_operators(
    model: nn.Module, graph: OpGraph, around: Callable[[OperatorCall, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Let ``around`` run every operator of the graph that the interception can name.

    Args:
        model: With a plan applied or without, also inside ``DistributedDataParallel``.
        graph: Of the model.
        around: Called with the call and what carries it out under the plan; returns the result.
    """
    bare = bare_model(model)
    kinds = tuple(sorted({operator.op_type for operator in graph}))
    active = interception_of(bare)
    if active is None:
        own = Interception(bare, lambda call: around(call, call.run), kinds=kinds)
        try:
            yield
        finally:
            own.remove()
        return
    decide = active.handler

    def handle(call: OperatorCall, planned: bool) -> Any:
        return around(call, (lambda: decide(call)) if planned else call.run)

    with active.observed(handle, kinds):
        yield


@contextlib.contextmanager
def step_labels(model: nn.Module, graph: OpGraph) -> Iterator[None]:
    """Label the operators of a model while a profiler records; the phases are labelled by `phase`.

    Under a plan the labels name its precisions, so that ``qsync-opt audit`` sees whether it is given that plan.

    Example:
        >>> from qsync_opt.runtimes.torch.capture.model import capture
        >>> model, x = nn.Linear(4, 2), torch.zeros(3, 4)
        >>> graph = capture(model, (x,))
        >>> with step_labels(model, graph), torch.profiler.profile() as profiler:
        ...     with phase("forward"):
        ...         loss = model(x).sum()
        ...     with phase("backward"):
        ...         loss.backward()
    """
    next_number = torch._C._autograd._get_sequence_nr
    applied = applied_plan(model)
    precisions = {} if applied is None else applied.precisions

    def around(call: OperatorCall, run: Callable[[], Any]) -> Any:
        with _RecordFunctionFast(operator_label(call.name, next_number(), precisions.get(call.name, ""))):
            return run()

    with observed_operators(model, graph, around):
        yield


def phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Range around a phase of the step: ``forward``, ``backward``, ``optimizer`` or ``zero_grad``."""
    labelled: contextlib.AbstractContextManager[Any] = _RecordFunctionFast(phase_label(name))
    return labelled


def _addresses(recorded: Any) -> dict[tuple[int, int], int]:
    """Addresses of blocks of memory by time and size; nothing where this version of torch does not tell."""
    found: dict[tuple[int, int], int] = {}
    try:
        waiting = list(recorded.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            kind, extra = event.typed
            if kind == torch._C._profiler._EventType.Allocation:
                found[event.start_time_ns, extra.alloc_size] = int(extra.ptr or 0)
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return found


def read_events(profiler: torch.profiler.profile, *, memory: bool = False) -> StepEvents:
    """The events of a finished profiler, without a detour through a file.

    Args:
        profiler: That recorded.
        memory: Read the addresses of blocks too; blocks are told apart by size otherwise.
    """
    finished: Any = profiler.profiler
    recorded = finished.kineto_results.events()
    addresses = _addresses(finished.kineto_results) if memory else {}
    cpu = torch._C._autograd.DeviceType.CPU
    ranges, nodes, launches, kernels, calls, changes, waits = [], [], [], [], [], [], []
    host_names: set[str] = set()
    on_device = []
    for event in recorded:
        name, start = event.name(), event.start_ns()
        if name == _MEMORY:
            if event.device_type() != cpu or not torch.cuda.is_available():
                changes.append(Change(start, event.nbytes(), addresses.get((start, event.nbytes()), 0)))
        elif event.device_type() != cpu:
            on_device.append((name, start, start + event.duration_ns(), event))
        else:
            end = start + event.duration_ns()
            if name.startswith(LAUNCHES):
                launches.append(Launch(start, end, event.correlation_id()))
                continue
            host_names.add(name)
            if name.startswith(WAITS):
                waits.append(start)
            if name.startswith(PREFIX):
                ranges.append(Range(start, end, name))
            elif name.startswith(NODE):
                nodes.append(Node(start, end, event.sequence_nr()))
            else:
                calls.append(start)
    # Ranges of the host are shown on the device too; they are no kernels. A compiler's kernels are named as ranges are.
    for name, start, end, event in on_device:
        if name not in host_names or (name.startswith(FUSED) and not event.is_user_annotation()):
            kernels.append(Kernel(start, end, event.correlation_id(), event.device_resource_id(), name))
    return StepEvents(
        ranges=sorted(ranges),
        nodes=sorted(nodes),
        launches=sorted(launches),
        kernels=sorted(kernels),
        calls=sorted(calls),
        changes=sorted(changes),
        waits=sorted(waits),
    )
