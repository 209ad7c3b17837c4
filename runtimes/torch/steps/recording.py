"""Recordings of training steps under a plan: the time of each operator, and the tensors that it keeps."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
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
from qsync_opt.runtimes.torch.support import (
    TrainingExample,
    allocation_of,
    bare_model,
    intervals_ns,
    resident_bytes,
    silent_profiler,
    state_bytes,
    storage_of,
    synchronize,
    tensors_in,
    time_mark,
)
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
    StepSpans,
    charge_step,
    operator_label,
    phase_label,
)

_MEMORY = "[memory]"
FUSED = ("triton_", "cpp_fused_")
"""Prefixes of the names of a compiler's kernels, and of the ranges around their launches."""


@contextlib.contextmanager
def observed_operators(
    model: nn.Module, graph: OpGraph, around: Callable[[OperatorCall, Callable[[], Any]], Any]
) -> Iterator[None]:
    """Let ``around`` run every operator of the graph, with a plan applied or without.

    It is called with the call and a function that runs the call under the plan; it returns the result.
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
    """Label the operators of a model for a profiler; `phase` labels the phases.

    Under a plan the labels name its precisions, so that ``qsync-opt audit`` can check that it gets the same plan.

    Examples:
        >>> from qsync_opt.runtimes.torch.capture import capture
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
    """Addresses of blocks of memory by time and size; empty if this version of torch does not report them."""
    addresses: dict[tuple[int, int], int] = {}
    try:
        waiting = list(recorded.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            kind, extra = event.typed
            if kind == torch._C._profiler._EventType.Allocation:
                addresses[event.start_time_ns, extra.alloc_size] = int(extra.ptr or 0)
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return addresses


def read_events(profiler: torch.profiler.profile, *, memory: bool = False) -> StepEvents:
    """The events of a finished profiler; with ``memory``, blocks have addresses, else they are matched by size."""
    finished: Any = profiler.profiler
    recorded = finished.kineto_results.events()
    addresses = _addresses(finished.kineto_results) if memory else {}
    cpu = torch._C._autograd.DeviceType.CPU
    ranges, nodes, launches, kernels, changes, waits = [], [], [], [], [], []
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
    # Ranges of the host appear on the device too and are no kernels, but a compiler's kernels have names of ranges.
    for name, start, end, event in on_device:
        if name not in host_names or (name.startswith(FUSED) and not event.is_user_annotation()):
            kernels.append(Kernel(start, end, event.correlation_id(), event.device_resource_id(), name))
    return StepEvents(
        ranges=sorted(ranges),
        nodes=sorted(nodes),
        launches=sorted(launches),
        kernels=sorted(kernels),
        changes=sorted(changes),
        waits=sorted(waits),
    )


FORMAT_OF: dict[torch.dtype, str] = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_UNITS, _CALLS_PER_UNIT = 9, 64
_LONG_NS, _FAR_AHEAD = 0.2e9, 4.0
"""A step of which the host needs so small a part takes as long from an idle device as among others, if it is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Steps to warm up, to time (``repeats``) and to trace under each plan.

    The host is timed in ``rounds``: first while a plan is recorded, then again after all others, because its speed may
    change within seconds; not again if the device takes far longer than the host. With ``clip_norm`` every step clips
    its gradients to that norm (``clip_grad_norm_``).
    """

    warm_up: int = 3
    repeats: int = 5
    traced: int = 2
    rounds: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("warm_up", "repeats", "traced", "rounds"):
            check_integer(getattr(self, name), name, minimum=1)
        if self.clip_norm is not None:
            check_number(self.clip_norm, "clip_norm")


class Stepper:
    """Runs training steps of an example, phase by phase.

    A batch in the host's memory is copied to the device in every step, like a data loader's.
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
        """Run one training step; ``marks`` receives the host's clock at the borders of the phases."""
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
            example.backward(loss)
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
        """Median time of a small fixed piece of work on the host, a measure of its present speed."""
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
        synchronize(self.device)

    def steady_ns(self, steps: int) -> float:
        """Mean time of a step if the host does not wait between steps."""
        self.synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return (time.perf_counter_ns() - start) / steps

    def paced_ns(self, steps: int) -> list[float]:
        """Device time of each step if the host does not wait between steps; one step before does not count."""
        self.synchronize()
        ends = []
        for _ in range(steps + 1):
            self.step()
            ends.append(time_mark(self.device))
        self.synchronize()
        return intervals_ns(ends)

    def host_ns(self, steps: int) -> tuple[dict[str, float], list[float]]:
        """Median time on the host of each phase, starting on an idle device; and the time of each whole step."""
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

    def measure(self, repeats: int) -> dict[str, Any]:
        """Times and memory of steps without a profiler, as fields of `StepSample`."""
        is_cuda = self.device.type == "cuda"
        before_ns = self.host_unit_ns()
        if is_cuda:
            self.synchronize()
            resident = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        host_ns, wholes = self.host_ns(repeats)
        iteration_ns = statistics.median(wholes)
        if iteration_ns < max(_LONG_NS, _FAR_AHEAD * sum(host_ns.values())):
            iteration_ns = statistics.median(self.paced_ns(repeats))
        after_ns = self.host_unit_ns()
        if is_cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
        else:  # whose allocator does not count: what model and optimizer keep, and what the profiler reports
            resident = resident_bytes(self.example.model) + state_bytes(self.optimizer)
            peak = resident + allocation_of(self.step, self.device)[1].peak_bytes
        return {
            "host_ns": host_ns,
            "iteration_ns": iteration_ns,
            "latencies_ns": tuple(wholes),
            "host_unit_ns": (before_ns + after_ns) / 2,
            "resident_bytes": resident,
            "peak_bytes": peak,
        }


def trace_steps(stepper: Stepper, steps: int, *, memory: bool) -> torch.profiler.profile:
    """The finished profiler of some steps, to read the last of: the first pays for the profiler's setup.

    With ``memory`` the allocator's events are traced instead of the device's kernels.
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


def traced_spans(stepper: Stepper, steps: int, *, memory: bool) -> StepSpans:
    """The last of some traced steps, charged to operators."""
    return charge_step(read_events(trace_steps(stepper, steps, memory=memory)))[-1]


class _Watcher:
    """Observes one step's tensors: formats, storages, which operator keeps them, and when the program releases them.

    The root of a tensor is the operator whose result first had its storage.
    """

    def __init__(self, graph: OpGraph, resident: set[int]) -> None:
        self._graph = graph
        self._resident = resident
        self._current = ""
        self._in_forward = True
        self._roots: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        self._pending: set[int] = set()
        self._saved: set[str] = set()
        self.outputs: dict[str, str] = {}
        self.root_of: dict[str, str] = {}
        self.result_bytes: dict[str, int] = {}
        self.saved_roots: dict[str, set[str]] = {}
        self.saves_output: set[str] = set()
        self.held_until: dict[str, str] = {}
        self._order: dict[str, int] = {}

    def around(self, call: OperatorCall, run: Callable[[], Any]) -> Any:
        """Run one operator and observe its tensors."""
        if call.name not in self._graph:
            return run()
        self._current = call.name
        self._order.setdefault(call.name, len(self._order))
        arguments = {storage_of(tensor) for tensor in tensors_in((call.args, call.kwargs))}
        self._arguments = {storage: self._roots[storage] for storage in arguments & self._roots.keys()}
        self._pending, self._saved = set(), set()
        result = run()
        if not self._pending.isdisjoint(storage_of(tensor) for tensor in tensors_in(result)):
            self.saves_output.add(call.name)
        self.saved_roots[call.name] = self._saved
        for tensor in tensors_in(result):
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
        weakref.finalize(tensor, self._release, root)

    def _release(self, root: str) -> None:
        now = self._current if self._in_forward else ""
        before = self.held_until.get(root)
        if before is None or now == "" or (before and self._order[now] > self._order[before]):
            self.held_until[root] = now

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook of autograd: the current operator keeps this tensor."""
        pointer = storage_of(tensor)
        if pointer in self._arguments:
            self._saved.add(self._arguments[pointer])
        elif pointer not in self._resident:
            self._pending.add(pointer)
        # Not the tensor itself: autograd keeping it must not look as if the program did.
        return tensor.detach()

    def end_forward(self) -> None:
        """Count later releases as after the forward pass."""
        self._in_forward = False

    def kept(self) -> dict[str, KeptTensors]:
        """The tensors that each operator keeps, after the step."""
        kept = {}
        for name in self._order:
            inputs = self._graph[name].inputs
            saved = self.saved_roots.get(name, set())
            positions = tuple(i for i, source in enumerate(inputs) if self._root(source) in saved)
            root = self.root_of.get(name, name)
            kept[name] = KeptTensors(
                inputs=positions,
                output=name in self.saves_output,
                result_bytes=self.result_bytes.get(name, 0),
                root=root,
                held_until=self.held_until.get(root, ""),
            )
        return kept

    def _root(self, name: str) -> str:
        """Root of an operator's result; one that did not run has the root of its input."""
        while name not in self.root_of and self._graph[name].inputs and name not in self._order:
            name = self._graph[name].inputs[0]
        return self.root_of.get(name, name)


def watch_tensors(stepper: Stepper, graph: OpGraph) -> tuple[dict[str, str], dict[str, KeptTensors]]:
    """Output formats and kept tensors of the operators in one step."""
    model = stepper.example.model
    bare = bare_model(model)
    example = stepper.example.moved()
    resident = {storage_of(tensor) for tensor in (*bare.parameters(), *bare.buffers())}
    resident |= {storage_of(tensor) for tensor in tensors_in((example.args, example.kwargs))}
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
