"""Training iterations of a model on one batch: their times and their peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ModelError
from qsync_opt.io import check_integer
from qsync_opt.runtimes.timing import Rounds
from qsync_opt.runtimes.torch.support.memory import allocation_of, out_of_memory_by_type
from qsync_opt.runtimes.torch.support.models import bare_model
from qsync_opt.runtimes.torch.support.optimizers import state_bytes
from qsync_opt.runtimes.torch.support.outputs import default_loss
from qsync_opt.runtimes.torch.support.timing import cpu_clock, intervals_ns, synchronize, time_mark

Loss = Callable[[Any], Tensor]


def call_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward pass from a batch: ``model(**batch)``, ``model(*batch)`` or ``model(batch)``.

    Args:
        batch: Keyword arguments as a mapping, positional ones as a tuple or list, or the single argument.

    Returns:
        Positional and keyword arguments.

    Raises:
        ModelError: The batch has no sample.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    check_samples(args, kwargs)
    return args, kwargs


def check_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a batch without samples; a tensor without elements beside others is none (an empty memory, no edges).

    Raises:
        ModelError: No tensor of the batch has an element.
    """
    empty = ""
    for name, value in (
        *((f"argument {i}", x) for i, x in enumerate(args)),
        *((repr(k), x) for k, x in kwargs.items()),
    ):
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            if leaf.numel():
                return
            empty = empty or f"{name} of the batch has the shape {tuple(leaf.shape)}"
    if empty:
        raise ModelError(
            f"{empty}, without any element: pass a batch with at least one sample, of the size that is trained with "
            "(a last batch of nothing comes from the loader: drop_last=True)"
        )


def check_batches(batches: Any) -> None:
    """Refuse a single batch where several are asked for.

    Raises:
        ModelError: ``batches`` is a tensor, whose rows would be taken for batches, or a mapping or text.
    """
    if isinstance(batches, Tensor | Mapping | str | bytes) or not hasattr(batches, "__iter__"):
        shape = f" of shape {tuple(batches.shape)}" if isinstance(batches, Tensor) else ""
        raise ModelError(
            f"batches is a {type(batches).__name__}{shape}: a list of batches is needed; for a single one pass [batch]"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExample:
    """A model and one batch for it, enough to run an iteration.

    ``args`` are the positional arguments, or a batch as `call_arguments` takes it.
    ``loss`` turns the model's output into the scalar to differentiate; None: the output itself if it is one, its
    ``loss`` if it has one (by attribute or key, or first in a tuple), else the sum of its floating-point tensors.
    """

    model: nn.Module
    args: Any = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Loss | None = None

    def __post_init__(self) -> None:
        args, kwargs = call_arguments(self.args)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", MappingProxyType({**kwargs, **self.kwargs}))
        check_samples(args, self.kwargs)

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

        def move(leaf: Tensor) -> Tensor:
            return leaf.to(self.device, non_blocking=True)

        args, kwargs = pytree.tree_map_only(Tensor, move, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss."""
        with out_of_memory_by_type():
            output = self.model(*self.args, **self.kwargs)
            return (self.loss or default_loss)(output)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss of `forward`; gradients are added to those that are there."""
        with out_of_memory_by_type():
            loss.backward()  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Run a forward and a backward pass; gradients are added to those that are there."""
        self.backward(self.forward())


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMeasurement:
    """Median times of iterations in nanoseconds, and the peak memory of one in bytes.

    ``iteration_ns`` is the wall time of a whole iteration. ``memory_source`` says how the peak was measured.
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
        Times and peak memory. On cuda the peak is that of the caching allocator; on cpu the allocations that
        ``torch.profiler`` reports in one further iteration, plus parameters, buffers, optimizer state and all-reduce
        buckets.
    """
    check_integer(repeats, "repeats", minimum=1)
    check_integer(warm_up, "warm_up")
    rows = [_run(example, optimizer) for _ in range(warm_up + repeats)][warm_up:]
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


def time_passes(example: TrainingExample, repeats: int, rounds: Rounds | None = None) -> dict[str, int]:
    """Forward and backward time of iterations without an optimizer, as ``forward_ns`` and ``backward_ns``."""
    rounds = rounds or Rounds()
    began = time.monotonic()
    _run(example, None)
    count = rounds.runs(repeats, time.monotonic() - began)

    def run_round() -> list[tuple[float, ...]]:
        return [_run(example, None)[:2] for _ in range(count)]

    for _ in range(count - 1):  # with the run above, a round that does not count
        _run(example, None)
    forward_ns, backward_ns = rounds.medians(run_round)
    return {"forward_ns": round(forward_ns), "backward_ns": round(backward_ns)}


def _run(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Times of one iteration: forward, backward, optimizer, and the whole by the wall clock."""
    device = example.device
    clock: Callable[[], Any] = (lambda: time_mark(device)) if device.type == "cuda" else cpu_clock()
    synchronize(device)
    wall_ns, marks = time.perf_counter_ns(), [clock()]
    loss = example.forward()
    marks.append(clock())
    example.backward(loss)
    marks.append(clock())
    _finish(example, optimizer)
    marks.append(clock())
    synchronize(device)
    whole_ns = time.perf_counter_ns() - wall_ns
    return (*intervals_ns(marks), whole_ns)


def _finish(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    else:
        example.model.zero_grad()


def _peak_memory(example: TrainingExample, optimizer: torch.optim.Optimizer | None) -> tuple[int, str]:
    def iterate() -> None:
        example.run()
        _finish(example, optimizer)

    device = example.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    _, allocation = allocation_of(iterate, device)
    if device.type == "cuda":
        return before + allocation.peak_bytes, "torch.cuda.max_memory_allocated"
    resident = resident_bytes(example.model) + (0 if optimizer is None else state_bytes(optimizer))
    return resident + allocation.peak_bytes, "allocations reported by torch.profiler, and what a model keeps between"


def resident_bytes(model: nn.Module) -> int:
    """Bytes that a model keeps between iterations: parameters, buffers, and buckets of DistributedDataParallel."""
    bare = bare_model(model)
    parameters = sum(p.numel() * p.element_size() for p in bare.parameters())
    buffers = sum(b.numel() * b.element_size() for b in bare.buffers())
    return parameters + buffers + (parameters if isinstance(model, DistributedDataParallel) else 0)
