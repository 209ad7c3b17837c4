"""Recordings of training steps of compiled models under a plan."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from qsync_opt.errors import ProblemError, UnsupportedError, first_line
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.steps.compiled.schedule import annotated_operators, collected_schedules, read_schedules
from qsync_opt.runtimes.torch.steps.recording import (
    FORMAT_OF,
    FUSED,
    RecordingOptions,
    Stepper,
    observed_operators,
    read_events,
    trace_steps,
)
from qsync_opt.runtimes.torch.support import bare_model, compiled_in_place
from qsync_opt.steps import LAUNCHES, PREFIX, Range, StepSample
from qsync_opt.steps.compiled import ChargedStep, CompiledEvents, HostCall, Scheduled, charge_compiled

_GRAPH = "## Call CompiledFxGraph"
_ATTEMPTS = 3
"""Maximum number of traces of a plan."""


@contextlib.contextmanager
def compiled_inside(model: nn.Module, backend: str = "inductor") -> Iterator[None]:
    """Compile a model in place within the block, as one graph per pass, inside ``DistributedDataParallel`` if any.

    Earlier compilations of this process are dropped (`torch.compiler.reset`), before and after.
    """
    bare = bare_model(model)
    torch.compiler.reset()
    try:
        with compiled_in_place(bare, fullgraph=True, dynamic=False, backend=backend):
            yield
    finally:
        torch.compiler.reset()
        gc.collect()  # graphs are cycles and hold memory


def record_compiled_plan(
    stepper: Stepper,
    graph: OpGraph,
    label: str,
    plan: Mapping[str, str],
    options: RecordingOptions | None = None,
    kernels: KernelOptions | None = None,
) -> StepSample:
    """Record compiled steps under one plan, which is removed afterwards.

    Raises:
        UnsupportedError: The model cannot be compiled as one graph per pass.
        ProblemError: The graphs did not run what the compiler scheduled.
    """
    model, options = stepper.example.model, options or RecordingOptions()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(under_plan(model, dict(plan), graph, kernels, chunked_loss=False))
            outputs = _delivered_formats(stepper, graph)
            stack.enter_context(compiled_inside(model))
            stack.enter_context(annotated_operators(model, graph))
            schedulers = stack.enter_context(collected_schedules())
            for _ in range(options.warm_up):
                stepper.step()
            schedules = read_schedules(schedulers)
            schedulers.clear()
            measured = stepper.measure(options.repeats)
            # From an idle device the host takes longer than in consecutive steps, where it takes a step at most.
            share = min(1.0, measured["iteration_ns"] / sum(measured["host_ns"].values()))
            measured["host_ns"] = {phase: share * time for phase, time in measured["host_ns"].items()}
            order = tuple(operator.name for operator in graph)
            spans = _traced(stepper, options.traced, schedules, order, memory=False).spans
            memory = _traced(stepper, 1, schedules, order, memory=True)
    except TorchDynamoException as failure:
        raise UnsupportedError(
            f"the model cannot be compiled as one graph: {first_line(failure)}; "
            "torch.compile(model, fullgraph=True) says where it breaks, and steps of the model as it is can be recorded"
        ) from failure
    return StepSample(
        name=label,
        precisions=dict(plan),
        outputs=outputs,
        spans=spans,
        memory=memory.spans,
        kept={},
        graphs=len(schedules[0]),
        blocks=memory.blocks,
        **measured,
    )


def _traced(
    stepper: Stepper,
    steps: int,
    schedules: tuple[Sequence[Sequence[Scheduled]], Sequence[Sequence[Scheduled]]],
    order: Sequence[str],
    *,
    memory: bool,
) -> ChargedStep:
    """The last of some traced steps; a trace that lacks kernels is repeated, because the profiler may lose some."""

    def trace() -> ChargedStep:
        events = read_compiled_events(trace_steps(stepper, steps, memory=memory), memory=memory)
        return charge_compiled(events, *schedules, order)[-1]

    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(ProblemError):
            return trace()
    return trace()


def read_compiled_events(profiler: torch.profiler.profile, *, memory: bool = False) -> CompiledEvents:
    """The events of a finished profiler around compiled steps."""
    finished: Any = profiler.profiler
    cpu = torch._C._autograd.DeviceType.CPU
    graphs, calls = [], []
    for event in finished.kineto_results.events():
        name = event.name()
        if event.device_type() != cpu or name.startswith((PREFIX, "[", *LAUNCHES)):
            continue
        start = event.start_ns()
        end = start + event.duration_ns()
        if name.startswith(_GRAPH):
            graphs.append(Range(start, end, name))
        elif (call := call_of(start, end, name)) is not None:
            calls.append(call)
    graphs.sort()
    return CompiledEvents(read_events(profiler, memory=memory), graphs, outermost(calls, graphs))


def call_of(start: int, end: int, name: str) -> HostCall | None:
    """A range on the host as a call, None if it is neither an operation nor a compiler's kernel.

    A profiler shows its own overhead there too ("Activity Buffer Request"), around calls that continue.
    """
    fused = any(mark in name for mark in FUSED)
    return HostCall(start, end, name, fused) if fused or "::" in name else None


def outermost(calls: Sequence[HostCall], graphs: Sequence[Range]) -> list[HostCall]:
    """Calls of graphs, without those inside other calls."""
    result: list[HostCall] = []
    waiting = iter(sorted(calls, key=lambda call: (call.start, -call.end)))
    call = next(waiting, None)
    for graph in graphs:
        until = graph.start
        while call is not None and call.start < graph.end:
            if call.start >= until and call.end <= graph.end:
                result.append(call)
                until = call.end
            call = next(waiting, None)
    return result


def _delivered_formats(stepper: Stepper, graph: OpGraph) -> dict[str, str]:
    """Output formats of operators, observed in an eager pass, which computes the same as a compiled one."""
    formats: dict[str, str] = {}

    def around(call: OperatorCall, run: Callable[[], Any]) -> Any:
        result = run()
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.dtype in FORMAT_OF:
                formats[call.name] = FORMAT_OF[value.dtype]
        return result

    bare = bare_model(stepper.example.model)
    with torch.no_grad(), observed_operators(bare, graph, around):
        bare(*stepper.example.args, **stepper.example.kwargs)
    return {name: kind for name, kind in formats.items() if name in graph}
