"""What fills a device's memory while an iteration runs, as far as the problem says what its figures are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import check_integer
from qsync_opt.training.evaluation import BYTES_PER_KIB, CastTime, DeviceEvaluation, cast_buffer_kib
from qsync_opt.training.memory import MEMORY_KEY, OPERATORS_KEY, MemoryBreakdown, StaticMemory, memory_breakdown
from qsync_opt.training.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of one worker over one iteration, in bytes at times in ns.

    From ``times_ns[i]`` on, ``held_bytes[i]`` of activations and cast buffers exist: an operator's from its forward
    pass until its backward pass is done. Parameters, optimizer state and all-reduce buckets stay throughout.
    Gradients and passing buffers are one allowance in the problem, which covers their worst moment, found at
    ``peak_operator``; the curve adds it throughout, so that its highest point is the memory that `evaluate` gives.
    """

    breakdown: MemoryBreakdown
    times_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    peak_ns: int
    peak_operator: str


def memory_curve(problem: Problem, device: DeviceEvaluation) -> MemoryCurve | None:
    """The curve of one device under a plan, or None if the problem knows only totals per operator.

    Args:
        problem: The problem; `build_problem` notes what is needed under ``x-memory`` and ``x-memory-operators``.
        device: The device's part of the plan's evaluation.

    Raises:
        ProblemError: The notes contradict the problem.

    Source: ours; the life of an activation follows `qsync_opt.training.memory`.
    """
    static_bytes = _static_bytes(problem, device.name)
    if static_bytes is None:
        return None
    breakdown = memory_breakdown(problem, device)
    own = _own_bytes(problem, device, static_bytes)
    times_ns, held_bytes = [0], [0]
    now_ns = held = 0
    for time in device.operators:
        now_ns += time.forward_total_ns
        held += own[time.name]
        times_ns.append(now_ns)
        held_bytes.append(held)
    peak_ns = now_ns
    for time in reversed(device.operators):
        now_ns += time.backward_total_ns
        held -= own[time.name]
        times_ns.append(now_ns)
        held_bytes.append(held)
    return MemoryCurve(
        breakdown=breakdown,
        times_ns=tuple(times_ns),
        held_bytes=tuple(held_bytes),
        peak_ns=peak_ns,
        peak_operator=_static(problem, device.name).peak_operator,
    )


def _static(problem: Problem, device: str) -> StaticMemory:
    return StaticMemory.from_json(problem.extras["devices", device, MEMORY_KEY], f"devices {device!r}: {MEMORY_KEY}")


def _static_bytes(problem: Problem, device: str) -> dict[str, int] | None:
    """Bytes of each operator's memory that no plan changes, or None where the problem does not say."""
    noted = problem.extras.get(("devices", device, OPERATORS_KEY))
    if noted is None or ("devices", device, MEMORY_KEY) not in problem.extras:
        return None
    what = f"devices {device!r}: {OPERATORS_KEY}"
    if not isinstance(noted, Mapping):
        raise ProblemError(f"{what} is {noted!r}, but it must map operators to bytes")
    for name, num_bytes in noted.items():
        problem.index(name)
        check_integer(num_bytes, f"{what}: {name!r}")
    total = _static(problem, device).total_bytes
    if sum(noted.values()) != total:
        raise ProblemError(
            f"{what} adds up to {sum(noted.values())} bytes, but {MEMORY_KEY} to {total}; build the problem again"
        )
    return dict(noted)


def _own_bytes(problem: Problem, device: DeviceEvaluation, static_bytes: Mapping[str, int]) -> dict[str, int]:
    """What each operator holds from its forward to its backward pass: activations, and the casts of its inputs."""
    table = problem.device(device.name).operators
    own = {}
    for time in device.operators:
        kept_kib = table[time.name][time.precision].memory_kib
        casts_kib = sum(_buffer_kib(problem, cast) for cast in time.forward_casts)
        own[time.name] = (kept_kib + casts_kib) * BYTES_PER_KIB - static_bytes.get(time.name, 0)
    return own


def _buffer_kib(problem: Problem, cast: CastTime) -> int:
    return cast_buffer_kib(problem, problem.operators[problem.index(cast.producer)], cast.target)
