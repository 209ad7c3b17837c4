"""How long does a real training iteration take, and how much memory does it need at its peak?"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ModelError
from qsync_opt.io import check_integer
from qsync_opt.runtimes.timing import steady_medians
from qsync_opt.runtimes.torch.support.memory import allocation_of
from qsync_opt.runtimes.torch.support.models import bare_model
from qsync_opt.runtimes.torch.support.optimizers import state_bytes
from qsync_opt.runtimes.torch.support.timing import cpu_clock

_HALF = (torch.bfloat16, torch.float16)


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model returns: its output, or what is called ``loss`` in it, or the first of a tuple.

    Returns:
        One number of no dimension, None if there is none that gradients flow into.
    """
    for value in (_named_loss(output), _first(output)):
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad and value.is_floating_point():
            return value.reshape(())
    return None


def full_precision(output: Any) -> Any:
    """A model's output with its 16-bit tensors in FP32, for whatever the script computes from them.

    Where the model returns its own loss nothing is changed: nobody needs the rest, which may be large.

    Args:
        output: Tensors, also in tuples, lists, mappings and data classes.
    """
    loss, first = _named_loss(output), _first(output)
    if isinstance(loss, Tensor) or (isinstance(first, Tensor) and not first.dim()):
        return output
    return _lifted(output)


def _named_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    if isinstance(value, tuple | list):
        parts = [_lifted(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value) if entry.init}
        changed = {name: lifted for name, part in fields.items() if (lifted := _lifted(part)) is not part}
        return dataclasses.replace(value, **changed) if changed else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _lifted(part)) for key, part in value.items())
    if isinstance(value, MutableMapping):  # of another class: whatever else it holds stays
        changed = {key: lifted for key, part in value.items() if (lifted := _lifted(part)) is not part}
        result = copy.copy(value) if changed else value
        for key, part in changed.items():
            result[key] = part
        return result
    return value


Loss = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExample:
    """A model and one batch for it, enough to run an iteration.

    ``loss`` turns the model's output into the scalar to differentiate; None: the output itself if it is one, its
    ``loss`` if it has one (by attribute or key, or first in a tuple), else the sum of its floating-point tensors.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.args, tuple):
            raise ModelError(
                f"args is a {type(self.args).__name__}: a tuple of the forward pass's positional arguments is needed"
            )
        object.__setattr__(self, "kwargs", MappingProxyType(dict(self.kwargs)))

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def is_elsewhere(self) -> bool:
        """Whether a tensor of the batch is on another device than the parameters: in the host's memory."""
        batch = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return any(isinstance(leaf, Tensor) and leaf.device != self.device for leaf in batch)

    def moved(self) -> TrainingExample:
        """The same with its batch on the device; copies from pinned memory are not waited for."""

        def there(leaf: Tensor) -> Tensor:
            return leaf.to(self.device, non_blocking=True)

        args, kwargs = pytree.tree_map_only(Tensor, there, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss."""
        output = self.model(*self.args, **self.kwargs)
        return (self.loss or default_loss)(output)


def default_loss(output: Any) -> Tensor:
    """The scalar to differentiate (see `TrainingExample`).

    Raises:
        ModelError: The output holds no floating-point tensor with a gradient.
    """
    found = own_loss(output)
    if found is not None:
        return found
    tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
    if not tensors:
        raise ModelError(
            "the model's output has no floating-point tensor that gradients flow into; give a loss function"
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMeasurement:
    """Medians over iterations, in nanoseconds, and the peak memory of one, in bytes.

    ``iteration_ns`` is the wall clock's time for a whole iteration. ``memory_source`` says where the peak is from.
    """

    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    iteration_ns: int
    peak_memory_bytes: int
    memory_source: str
    iterations: int


def measure_iteration(
    example: TrainingExample,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    repeats: int = 10,
    warm_up: int = 3,
) -> IterationMeasurement:
    """Run training iterations as they are (a plan applied, DistributedDataParallel around) and measure them.

    Parameters and optimizer state change as in training. On a cpu with one thread, the parts are timed by the thread's
    processor time, the iteration by the wall clock.

    Args:
        example: The model and a batch.
        optimizer: Stepped and cleared in each iteration; None: gradients are cleared only.
        repeats: Iterations that count.
        warm_up: Iterations before them.

    Returns:
        Times and peak memory. On cuda the peak is that of the caching allocator; on cpu what ``torch.profiler`` reports
        as allocated in one further iteration, plus parameters, buffers, optimizer state and all-reduce buckets.
    """
    check_integer(repeats, "repeats", minimum=1)
    check_integer(warm_up, "warm_up")
    run = _run_cuda if example.device.type == "cuda" else _run_cpu
    rows = [run(example, optimizer) for _ in range(warm_up + repeats)][warm_up:]
    forward, backward, step, whole = (round(statistics.median(column)) for column in zip(*rows, strict=True))
    peak_bytes, source = _peak_memory(example, optimizer)
    return IterationMeasurement(
        forward_ns=forward,
        backward_ns=backward,
        optimizer_ns=step,
        iteration_ns=whole,
        peak_memory_bytes=peak_bytes,
        memory_source=source,
        iterations=repeats,
    )


def time_passes(example: TrainingExample, repeats: int) -> dict[str, int]:
    """Forward and backward time of iterations without an optimizer, as ``forward_ns`` and ``backward_ns``."""
    run = _run_cuda if example.device.type == "cuda" else _run_cpu

    def run_round() -> list[tuple[float, ...]]:
        return [run(example, None)[:2] for _ in range(repeats)]

    run_round()
    forward_ns, backward_ns = steady_medians(run_round)
    return {"forward_ns": round(forward_ns), "backward_ns": round(backward_ns)}


def _finish(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        example.model.zero_grad()


def _run_cpu(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    clock = cpu_clock()
    wall_ns, start_ns = time.perf_counter_ns(), clock()
    loss = example.forward()
    forward_ns = clock()
    loss.backward()  # type: ignore[no-untyped-call]
    backward_ns = clock()
    _finish(example, optimizer)
    end_ns = clock()
    whole_ns = time.perf_counter_ns() - wall_ns
    return forward_ns - start_ns, backward_ns - forward_ns, end_ns - backward_ns, whole_ns


def _run_cuda(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(example.device)
    wall_ns = time.perf_counter_ns()
    marks[0].record()
    loss = example.forward()
    marks[1].record()
    loss.backward()  # type: ignore[no-untyped-call]
    marks[2].record()
    _finish(example, optimizer)
    marks[3].record()
    torch.cuda.synchronize(example.device)
    whole_ns = time.perf_counter_ns() - wall_ns
    return (*(float(a.elapsed_time(b)) * 1e6 for a, b in itertools.pairwise(marks)), whole_ns)


def _peak_memory(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> tuple[int, str]:
    def iterate() -> None:
        example.forward().backward()  # type: ignore[no-untyped-call]
        _finish(example, optimizer)

    device = example.device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        _, allocation = allocation_of(iterate, device)
        return before + allocation.peak_bytes, "torch.cuda.max_memory_allocated"
    _, allocation = allocation_of(iterate, device)
    resident = resident_bytes(example.model) + (0 if optimizer is None else state_bytes(optimizer))
    return resident + allocation.peak_bytes, "allocations reported by torch.profiler, and what a model keeps between"


def resident_bytes(model: nn.Module) -> int:
    """Bytes that a model keeps between iterations: parameters, buffers, and buckets of DistributedDataParallel."""
    bare = bare_model(model)
    parameters = sum(p.numel() * p.element_size() for p in bare.parameters())
    buffers = sum(b.numel() * b.element_size() for b in bare.buffers())
    return parameters + buffers + (parameters if isinstance(model, DistributedDataParallel) else 0)
