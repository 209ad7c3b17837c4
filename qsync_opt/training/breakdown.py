"""What the memory of a worker under a plan is made of, and how it grows and shrinks over an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from qsync_opt.errors import ProblemError
from qsync_opt.io import check_integer, decode
from qsync_opt.training.evaluation import BYTES_PER_KIB, DeviceEvaluation, cast_buffers_kib
from qsync_opt.training.memory import MEMORY_KEY, OPERATORS_KEY, StaticMemory
from qsync_opt.training.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Predicted memory of one worker under a plan by purpose, in bytes; ``activations_bytes`` includes rounding."""

    device: str
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buckets_bytes: int
    activations_bytes: int
    casts_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it; equal to the memory that `evaluate` gives."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Memory of one worker over one iteration, in bytes at times in ns.

    From ``times_ns[i]`` on, ``live_bytes[i]`` of activations and cast buffers exist: an operator's from its forward
    pass until its backward pass is done. Parameters, optimizer state and all-reduce buckets stay throughout.
    Gradients and transient buffers are one allowance in the problem, which covers their worst moment, at
    ``peak_operator``; added throughout, it makes the highest point the memory that `evaluate` gives.
    """

    breakdown: MemoryBreakdown
    times_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]
    peak_ns: int
    peak_operator: str


def memory_breakdown(problem: Problem, device: DeviceEvaluation) -> MemoryBreakdown:
    """Split the predicted memory of one device under a plan by purpose.

    Args:
        problem: A problem made by `build_problem`, which notes the static part under ``x-memory``.
        device: The device's part of an evaluation of a plan for it.

    Raises:
        ProblemError: The problem has no such note (it was written by hand or by another tool).
    """
    static = _static_memory(problem, device.name)
    casts_kib = sum(cast_buffers_kib(problem, time.forward_casts) for time in device.operators)
    return MemoryBreakdown(
        device=device.name,
        **static.parts,
        casts_bytes=casts_kib * BYTES_PER_KIB,
        activations_bytes=(device.memory_kib - casts_kib) * BYTES_PER_KIB - static.total_bytes,
    )


def memory_timeline(problem: Problem, device: DeviceEvaluation) -> MemoryTimeline | None:
    """The memory timeline of one device under a plan, or None if the problem knows only totals per operator.

    Args:
        problem: The problem; `build_problem` notes what is needed under ``x-memory`` and ``x-memory-operators``.
        device: The device's part of the plan's evaluation.

    Raises:
        ProblemError: The notes contradict the problem.

    Source: ours; the life of an activation follows `qsync_opt.training.memory`.
    """
    charges = _static_charges(problem, device.name)
    if charges is None:
        return None
    costs = problem.device(device.name).operators
    own_bytes = {}
    for time in device.operators:
        kib = costs[time.name][time.precision].memory_kib + cast_buffers_kib(problem, time.forward_casts)
        own_bytes[time.name] = kib * BYTES_PER_KIB - charges.get(time.name, 0)
    steps = [(time.forward_total_ns, own_bytes[time.name]) for time in device.operators]
    steps += [(time.backward_total_ns, -own_bytes[time.name]) for time in reversed(device.operators)]
    times_ns, live_bytes = [0], [0]
    for duration_ns, change_bytes in steps:
        times_ns.append(times_ns[-1] + duration_ns)
        live_bytes.append(live_bytes[-1] + change_bytes)
    return MemoryTimeline(
        breakdown=memory_breakdown(problem, device),
        times_ns=tuple(times_ns),
        live_bytes=tuple(live_bytes),
        peak_ns=times_ns[len(device.operators)],
        peak_operator=_static_memory(problem, device.name).peak_operator,
    )


def _static_memory(problem: Problem, device: str) -> StaticMemory:
    note = problem.extras.get(("devices", device, MEMORY_KEY))
    if note is None:
        raise ProblemError(
            f"problem {problem.name!r} does not say what the memory of {device!r} is made of (key "
            f"{MEMORY_KEY!r}); build it with build_problem"
        )
    return decode(StaticMemory, note, f"devices {device!r}: {MEMORY_KEY}")


def _static_charges(problem: Problem, device: str) -> Mapping[str, int] | None:
    """Bytes of each operator's memory that no plan changes, or None where the problem does not say."""
    charges = problem.extras.get(("devices", device, OPERATORS_KEY))
    if charges is None or ("devices", device, MEMORY_KEY) not in problem.extras:
        return None
    what = f"devices {device!r}: {OPERATORS_KEY}"
    if not isinstance(charges, Mapping):
        raise ProblemError(f"{what} is {charges!r}, but it must map operators to bytes")
    for name, num_bytes in charges.items():
        problem.index(name)
        check_integer(num_bytes, f"{what}: {name!r}")
    charged, total = sum(charges.values()), _static_memory(problem, device).total_bytes
    if charged != total:
        raise ProblemError(f"{what} adds up to {charged} bytes, but {MEMORY_KEY} to {total}; build the problem again")
    return charges
