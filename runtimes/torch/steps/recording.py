"""Record training steps of a model under a plan: who spends time where, and who keeps which memory."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity

from qsync_opt.io import check_integer, check_number
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.execution import applied_plan
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall, interception_of
from qsync_opt.runtimes.torch.support import TrainingExample, bare_model, silent_profiler, storage_of
from qsync_opt.steps import (
    BACKWARD,
    CLIP,
    COPIES,
    FORWARD,
    LAUNCHES,
    NODE,
    OPTIMIZER,
    PHASES,
    PREFIX,
    WAITS,
    ZERO_GRAD,
    Change,
    KeptTensors,
    Kernel,
    Launch,
    Node,
    Range,
    StepEvents,
    StepSample,
    StepSpans,
    charge,
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


FORMAT_OF: dict[torch.dtype, str] = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_NS_PER_MS = 1e6
_UNITS, _CALLS_PER_UNIT = 9, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """How much is recorded: steps to warm up, steps that count, and steps that are traced.

    ``rounds`` says how often the host is timed under every plan: the first time when it is recorded, then again after
    all are, because a host's speed may change within seconds. Plans under which the device takes far longer than the
    host are not timed again. With ``clip_norm`` every step clips its gradients to that norm (``clip_grad_norm_``).
    """

    warm_up: int = 3
    repeats: int = 5
    traced: int = 2
    rounds: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_integer(self.warm_up, "warm_up", minimum=1)
        check_integer(self.repeats, "repeats", minimum=1)
        check_integer(self.traced, "traced", minimum=1)
        check_integer(self.rounds, "rounds", minimum=1)
        if self.clip_norm is not None:
            check_number(self.clip_norm, "clip_norm")


class Stepper:
    """Runs training steps of an example, phase by phase.

    A batch in the host's memory is copied to the device in every step, as a data loader's would be.

    Args:
        example: The model with a batch.
        optimizer: Steps it.
        clip_norm: Norm to which every step clips its gradients; None: it does not.
    """

    def __init__(
        self, example: TrainingExample, optimizer: torch.optim.Optimizer, clip_norm: float | None = None
    ) -> None:
        self.example = example
        self.optimizer = optimizer
        self.device = example.device
        self._copies = example.is_elsewhere
        self._clip_norm = clip_norm

    def step(self, marks: list[int] | None = None) -> None:
        """One training step; ``marks`` receives the host's clock at the borders of the phases."""
        note: Callable[[], None] = (lambda: None) if marks is None else lambda: marks.append(time.perf_counter_ns())
        note()
        example = self.example
        if self._copies:
            with phase(COPIES):
                example = example.moved()
        note()
        with phase(FORWARD):
            loss = example.forward()
        note()
        with phase(BACKWARD):
            loss.backward()  # type: ignore[no-untyped-call]
        note()
        if self._clip_norm is not None:
            with phase(CLIP):
                nn.utils.clip_grad_norm_(example.model.parameters(), self._clip_norm)
        note()
        with phase(OPTIMIZER):
            self.optimizer.step()
        note()
        with phase(ZERO_GRAD):
            self.optimizer.zero_grad()
        del loss
        note()

    def host_unit_ns(self) -> float:
        """Median time on the host of a small fixed piece of work: how fast is the host just now?"""
        x = torch.zeros(16, device=self.device)
        times = []
        for _ in range(_UNITS):
            self.synchronize()
            start = time.perf_counter_ns()
            for _ in range(_CALLS_PER_UNIT):
                x.add_(1.0)
            times.append(time.perf_counter_ns() - start)
        return statistics.median(times)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def steady_ns(self, steps: int) -> float:
        """Mean time of a step when the host never waits between steps."""
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter_ns() - start) / steps

    def paced_ns(self, steps: int) -> list[float]:
        """Time of each of some steps when the host never waits between them; the step before them is not counted.

        On a GPU from events at the ends of the steps, so that a step counts what the device took for it.
        """
        self.synchronize()
        ends: list[Any] = []
        for _ in range(steps + 1):
            self.step()
            if self.device.type == "cuda":
                ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
                ends[-1].record()
            else:
                ends.append(time.perf_counter_ns())
        self.synchronize()
        if self.device.type != "cuda":
            return [float(b - a) for a, b in itertools.pairwise(ends)]
        return [a.elapsed_time(b) * _NS_PER_MS for a, b in itertools.pairwise(ends)]

    def host_ns(self, steps: int) -> tuple[dict[str, float], list[float]]:
        """Median time on the host of each phase, starting on an idle device; and the times of whole steps."""
        rows, wholes = [], []
        for _ in range(steps):
            self.synchronize()
            marks: list[int] = []
            self.step(marks)
            self.synchronize()
            wholes.append(float(time.perf_counter_ns() - marks[0]))
            rows.append([b - a for a, b in itertools.pairwise(marks)])
        return {
            name: statistics.median(column) for name, column in zip(PHASES, zip(*rows, strict=True), strict=True)
        }, wholes

    def peak_bytes(self) -> tuple[int, int]:
        """Bytes in use between steps and at most within one; zeros where no allocator keeps count (cpu)."""
        if self.device.type != "cuda":
            return 0, 0
        torch.cuda.synchronize(self.device)
        resident = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.step()
        torch.cuda.synchronize(self.device)
        return resident, torch.cuda.max_memory_allocated(self.device)


def record_step(
    stepper: Stepper,
    graph: OpGraph,
    *,
    name: str,
    precisions: Mapping[str, str],
    options: RecordingOptions | None = None,
) -> StepSample:
    """Record steps of a model as it is (with a plan applied, DistributedDataParallel around).

    Args:
        stepper: The model with a batch and an optimizer; parameters change as in training.
        graph: Of the model.
        name: Of the plan.
        precisions: Of the adjustable operators under it.
        options: How much to record.
    """
    options = options or RecordingOptions()
    model = stepper.example.model
    for _ in range(options.warm_up):
        stepper.step()
    before_ns = stepper.host_unit_ns()
    host_ns, wholes = stepper.host_ns(options.repeats)
    iteration_ns = statistics.median(stepper.paced_ns(options.repeats))
    after_ns = stepper.host_unit_ns()
    resident, peak = stepper.peak_bytes()
    with step_labels(model, graph):
        spans = _traced(stepper, options.traced, memory=False)
        memory = _traced(stepper, 1, memory=True)
    outputs, kept = watch_tensors(stepper, graph)
    return StepSample(
        name=name,
        precisions=dict(precisions),
        outputs=outputs,
        spans=spans,
        memory=memory,
        kept=kept,
        host_ns=host_ns,
        iteration_ns=iteration_ns,
        resident_bytes=resident,
        peak_bytes=peak,
        latencies_ns=tuple(wholes),
        host_unit_ns=(before_ns + after_ns) / 2,
    )


def trace_steps(stepper: Stepper, steps: int, *, memory: bool) -> torch.profiler.profile:
    """The finished profiler around some steps: the first pays for what a profiler sets up, so the last is to be read.

    Args:
        stepper: Whose steps.
        steps: How many.
        memory: Trace the allocator's events instead of the device's kernels.
    """
    activities = [ProfilerActivity.CPU]
    if stepper.device.type == "cuda" and not memory:
        activities.append(ProfilerActivity.CUDA)
    with silent_profiler(), torch.profiler.profile(activities=activities, profile_memory=memory, acc_events=True) as p:
        for _ in range(steps):
            stepper.step()
            stepper.synchronize()
    finished: torch.profiler.profile = p
    return finished


def _traced(stepper: Stepper, steps: int, *, memory: bool) -> StepSpans:
    return charge(read_events(trace_steps(stepper, steps, memory=memory)))[-1]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


class _Watcher:
    """Sees one step's tensors: formats, storages, what is kept by whom, and when the program lets go."""

    def __init__(self, graph: OpGraph, resident: set[int]) -> None:
        self._graph = graph
        self._resident = resident
        self._current = ""
        self._in_forward = True
        self._roots: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        self._pending: list[int] = []
        self._saved: list[str] = []
        self.outputs: dict[str, str] = {}
        self.root_of: dict[str, str] = {}
        self.result_bytes: dict[str, int] = {}
        self.saved_roots: dict[str, list[str]] = {}
        self.saves_output: set[str] = set()
        self.held: dict[str, str] = {}
        self._order: dict[str, int] = {}

    def around(self, call: OperatorCall, run: Callable[[], Any]) -> Any:
        """Run one operator and note what it does."""
        if call.name not in self._graph:
            return run()
        self._current = call.name
        self._order.setdefault(call.name, len(self._order))
        arguments = [*_tensors(call.args), *_tensors(call.kwargs)]
        self._arguments = {storage_of(t): self._roots[storage_of(t)] for t in arguments if storage_of(t) in self._roots}
        self._pending, self._saved = [], []
        result = run()
        results = {storage_of(tensor) for tensor in _tensors(result)}
        if any(pointer in results for pointer in self._pending):
            self.saves_output.add(call.name)
        self.saved_roots[call.name] = self._saved
        for tensor in _tensors(result):
            self._note_result(call.name, tensor)
        return result

    def _note_result(self, name: str, tensor: Tensor) -> None:
        pointer = storage_of(tensor)
        if tensor.dtype in FORMAT_OF:
            self.outputs[name] = FORMAT_OF[tensor.dtype]
        if pointer in self._resident:
            return
        root = self._arguments.get(pointer, name)
        self._roots[pointer] = root
        self.root_of[name] = root
        if root == name:
            self.result_bytes[name] = self.result_bytes.get(name, 0) + tensor.untyped_storage().nbytes()
        weakref.finalize(tensor, self._let_go, root)

    def _let_go(self, root: str) -> None:
        now = self._current if self._in_forward else ""
        before = self.held.get(root)
        if before is None or now == "" or (before and self._order[now] > self._order[before]):
            self.held[root] = now

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook of autograd: the current operator keeps this tensor."""
        pointer = storage_of(tensor)
        if pointer in self._arguments:
            self._saved.append(self._arguments[pointer])
        elif pointer not in self._resident:
            self._pending.append(pointer)
        # Not the tensor itself: that it is kept must not look as if the program held it.
        return tensor.detach()

    def end_forward(self) -> None:
        """From now on whatever is let go of was held beyond the forward pass."""
        self._in_forward = False

    def kept(self) -> dict[str, KeptTensors]:
        """Per operator, when the step is over."""
        found = {}
        for name in self._order:
            inputs = self._graph[name].inputs
            saved = set(self.saved_roots.get(name, ()))
            positions = tuple(i for i, source in enumerate(inputs) if self._root(source) in saved)
            root = self.root_of.get(name, name)
            found[name] = KeptTensors(
                inputs=positions,
                output=name in self.saves_output,
                result_bytes=self.result_bytes.get(name, 0),
                root=root,
                held_until=self.held.get(root, ""),
            )
        return found

    def _root(self, name: str) -> str:
        """Root of an operator's result; one that was not met hands on its input."""
        while name not in self.root_of and self._graph[name].inputs and name not in self._order:
            name = self._graph[name].inputs[0]
        return self.root_of.get(name, name)


def watch_tensors(stepper: Stepper, graph: OpGraph) -> tuple[dict[str, str], dict[str, KeptTensors]]:
    """Formats delivered and tensors kept, by operator, in one step."""
    model = stepper.example.model
    bare = bare_model(model)
    example = stepper.example.moved()
    resident = {storage_of(tensor) for tensor in (*bare.parameters(), *bare.buffers())}
    resident |= {storage_of(t) for t in (*_tensors(example.args), *_tensors(dict(example.kwargs)))}
    watcher = _Watcher(graph, resident)
    with observed_operators(model, graph, watcher.around):
        with saved_tensors_hooks(watcher.pack, lambda tensor: tensor):
            loss = example.forward()
        watcher.end_forward()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        stepper.optimizer.step()
        stepper.optimizer.zero_grad()
    return watcher.outputs, watcher.kept()
