"""Time the ways that a job could compute in, on every rank at once, before one of them is taken."""

from __future__ import annotations

import contextlib
import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph, Role
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json, together, world
from qsync_opt.runtimes.torch.execution import AUTOCAST_TYPES, ApplyOptions, DevicePlans, apply, undo
from qsync_opt.runtimes.torch.job.candidates import FULL, PLANNED, Way, own_plans
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.support import TrainingExample, allocation_of, cpu_clock, model_unchanged, resident_bytes
from qsync_opt.training import BYTES_PER_KIB, Problem, ProblemDevice, evaluate_device, propagate, uniform_plan

_PASSES = 3


def host_share(
    example: TrainingExample, plan: Mapping[str, str] | DevicePlans, graph: OpGraph | None, kernels: KernelOptions
) -> float | None:
    """Share of a forward and backward pass under a plan in which the host still launches; None without a card.

    Near 1 the device has done everything by the time that the host has launched it: it waits for the host. Parameters,
    gradients, buffers and random state are put back.
    """
    if example.device.type != "cuda":
        return None
    shares = []
    with model_unchanged(example.model):
        apply(example.model, plan, graph=graph, options=ApplyOptions(kernels=kernels))
        try:
            for _ in range(1 + _PASSES):
                torch.cuda.synchronize(example.device)
                begin = time.perf_counter()
                example.forward().backward()  # type: ignore[no-untyped-call]
                launched = time.perf_counter()
                torch.cuda.synchronize(example.device)
                shares.append((launched - begin) / (time.perf_counter() - begin))
                example.model.zero_grad()
        finally:
            undo(example.model)
    return statistics.median(shares[1:])


def with_host_shares(job: Job, plan: JobPlan, graph: OpGraph | None, types: DeviceTypes) -> JobPlan:
    """The plan with the largest share of each device type's workers; every rank must call it.

    A plan that is not worth applying, and one that was not tried, stays as it is.
    """
    if not (job.options.trial and plan.worthwhile):
        return plan
    found = gather_json(together(lambda: host_share(job.example, plan, graph, job.options.kernels)))
    shares: Mapping[str, float] = {
        name: max(known)
        for name, ranks in types.ranks.items()
        if (known := [found[rank] for rank in ranks if found[rank] is not None])
    }
    return replace(plan, host_shares=MappingProxyType(dict(shares)))


_LOGGER = logging.getLogger(__name__)
_ROUNDS, _CAPTURED_ROUNDS = 7, 3
_BLOCK_NS = 60e6
"""How long the passes take that are timed together, as far as `_MOST_PASSES` allows."""
_MOST_PASSES = 20
_FAR_SLOWER = 3.0
"""Ways that take so many times the fastest one's time are not captured."""
_WAY_NS = 1.2e9
"""When a way has taken so long, all counted, no further round follows."""


def ways_of(problem: Problem, plan: Mapping[str, Mapping[str, str]]) -> dict[str, list[Way]]:
    """The ways of every device type, not timed: one precision everywhere, from the finest, and any other plan.

    Args:
        problem: Gives sensitivities, and which precisions an operator has on a device.
        plan: Device type to operator to precision.
    """
    found: dict[str, list[Way]] = {}
    for device in problem.devices:
        present = {precision for table in device.operators.values() for precision in table}
        mine = []
        for precision in reversed([name for name in problem.formats if name in present]):
            whole = uniform_plan(problem, precision).devices[device.name]
            autocast = precision in AUTOCAST_TYPES and set(_adjustable(problem, whole).values()) <= {precision, FULL}
            name = f"{precision} autocast" if autocast else precision
            mine.append(_way(problem, device, name, whole, precision if autocast else None))
        planned = _way(problem, device, PLANNED, plan[device.name], None)
        found[device.name] = mine if planned.is_plain else [*mine, planned]
    return found


def own_ways(problem: Problem, known: Mapping[str, Sequence[Way]], *, slack: float) -> dict[str, list[Way]]:
    """The fastest plans of every device type by itself, not timed, as far as no known way is the same."""
    found: dict[str, list[Way]] = {}
    for name, plans in own_plans(problem, slack=slack).items():
        drafts = [_way(problem, problem.device(name), label, plan, None) for label, plan in plans.items()]
        others = [way.precisions for way in known[name]]
        found[name] = [way for way in drafts if way.precisions not in others]
    return found


def captured_too(ways: Sequence[Way]) -> list[Way]:
    """The same, and all once more with captured passes."""
    return [*ways, *(replace(way, captured=True) for way in ways)]


def has_captured(ways: Mapping[str, Sequence[Way]]) -> bool:
    """Whether passes were timed captured."""
    return any(way.captured for mine in ways.values() for way in mine)


def _adjustable(problem: Problem, precisions: Mapping[str, str]) -> dict[str, str]:
    return {o.name: precisions[o.name] for o in problem.operators if o.role is Role.ADJUSTABLE}


def _way(problem: Problem, device: ProblemDevice, name: str, entry: Mapping[str, str], autocast: str | None) -> Way:
    precisions = _adjustable(problem, entry)
    found = evaluate_device(problem, device, propagate(problem, device, precisions))
    return Way(
        name=name,
        precisions=precisions,
        autocast=autocast,
        sensitivity=found.sensitivity,
        needed_bytes=found.memory_kib * BYTES_PER_KIB,
    )


def measure_ways(job: Job, made: JobModel | None, found: JobPlan, types: DeviceTypes) -> JobModel | None:
    """The job with the times of every way that it could compute in; every rank must call it.

    With local batches by speed, the fastest plan of every device type by itself is among them; of a job whose ways were
    timed before, such plans alone are timed.

    Args:
        job: Whose model and batch are used; the model is left as it was.
        made: What was measured before, on rank 0.
        found: The solver's plan.
        types: Device types and their ranks.

    Returns:
        ``made`` with ``ways``, where it was given.
    """
    rank, size = world()

    def draft() -> dict[str, list[Way]]:
        if rank or made is None or found.problem is None:
            return {}
        ways = {} if made.ways else ways_of(found.problem, found.plan.devices)
        if job.options.sizes_batches and not job.options.compiled:  # compiling each would take longer than it is worth
            own = own_ways(found.problem, made.ways or ways, slack=job.options.slack)
            ways = {name: [*ways.get(name, ()), *mine] for name, mine in own.items()}
        return {name: captured_too(mine) for name, mine in ways.items()} if job.options.capture else ways

    drafts = together(draft)
    # What is timed runs neither the optimizer, whose state stays, nor DistributedDataParallel, whose buckets do.
    buckets = sum(p.numel() * p.element_size() for p in job.model.parameters() if p.requires_grad) if size > 1 else 0
    states = {} if made is None else {name: made.profiles[name].optimizer.state_bytes for name in drafts}
    told = broadcast_json({name: [states[name], [way.to_json() for way in mine]] for name, mine in drafts.items()})
    if not any(entries for _, entries in told.values()):
        return made
    state_bytes, entries = told[types.mine]
    mine = [Way.from_json(entry, "a way") for entry in entries]
    graph = None if made is None else made.graph
    kernels = job.options.kernels
    kept_bytes = state_bytes + buckets
    compiled = job.options.compiled
    timed = together(
        lambda: time_ways(job.model, job.example, mine, graph, kernels, kept_bytes=kept_bytes, compiled=compiled)
    )
    gathered = gather_json([[way.pass_ns, way.needed_bytes] for way in timed])
    if made is None or rank:
        return made
    ways = {}
    for name, ranks in types.ranks.items():
        rows = zip(drafts[name], *(gathered[number] for number in ranks), strict=True)
        ways[name] = (*made.ways.get(name, ()), *(_merged(way, results) for way, *results in rows))
    return replace(made, ways=ways)


def _merged(way: Way, results: Sequence[Sequence[int | None]]) -> Way:
    """A way as its slowest worker, and the one that needs most memory, found it."""
    needs = [needed for _, needed in results if needed is not None]
    needed = None if len(needs) < len(results) else max(needs)
    return replace(way, pass_ns=max(int(time_ns or 0) for time_ns, _ in results), needed_bytes=needed)


def time_ways(
    model: nn.Module,
    example: TrainingExample,
    ways: Sequence[Way],
    graph: OpGraph | None,
    kernels: KernelOptions,
    *,
    kept_bytes: int = 0,
    compiled: bool = False,
) -> list[Way]:
    """The same ways, with the median time of a forward and backward pass on this rank, and on a card its peak memory.

    Several passes are timed together, as they follow each other in training: on a card the host runs ahead. The ways
    take turns, so that a disturbance meets all of them. Parameters, gradients, buffers and random state are put back.

    Args:
        model: Without a plan.
        example: A batch for it.
        ways: To be timed.
        graph: The captured graph, if it is known here.
        kernels: Rounding and granularity.
        kept_bytes: What training keeps beside parameters, gradients and activations.
        compiled: Compile the model under every way, one after the other.

    Returns:
        In the same order. ``needed_bytes`` is None where memory ran out, an operation of the model refused the
        precisions, passes could not be captured or compiled, or were too slow to try; on a CPU, which keeps no account
        of it, it stays what it was.
    """
    times: list[list[float]] = [[] for _ in ways]
    spent = [0.0 for _ in ways]
    needs = [way.needed_bytes for way in ways]
    with model_unchanged(model):
        if compiled:
            return [_compiled_way(example, way, graph, kernels, kept_bytes) for way in ways]
        for turn in range(_ROUNDS):
            for index, way in enumerate(ways):
                if way.captured or needs[index] is None or spent[index] > _WAY_NS:
                    continue
                began = time.perf_counter()
                with carried_out(model, way, graph, kernels):
                    try:
                        if not turn and example.device.type == "cuda":
                            needs[index] = _peak_bytes(example) + kept_bytes
                        block, passes = _timed_block(example)
                    except torch.cuda.OutOfMemoryError:
                        needs[index] = None
                        model.zero_grad()
                        torch.cuda.empty_cache()
                        continue
                    except RuntimeError as failure:
                        if way.is_plain:
                            raise
                        _LOGGER.warning("%s does not run and is left out: %s", way.name, first_line(failure))
                        needs[index] = None
                        model.zero_grad()
                        continue
                times[index].append(block / passes)
                spent[index] += 1e9 * (time.perf_counter() - began)
        medians = {way.name: statistics.median(found) for way, found in zip(ways, times, strict=True) if found}
        slow = _FAR_SLOWER * min(medians.values(), default=0.0)
        for index, way in enumerate(ways):
            if way.captured and slow and medians.get(way.name, slow) >= slow:
                needs[index] = None  # the host is not what it waits for
            elif way.captured:
                times[index], needs[index] = _captured_times(example, way, graph, kernels, kept_bytes)
    return [
        replace(way, pass_ns=round(statistics.median(found)) if found else 0, needed_bytes=needed)
        for way, found, needed in zip(ways, times, needs, strict=True)
    ]


@contextlib.contextmanager
def carried_out(model: nn.Module, way: Way, graph: OpGraph | None, kernels: KernelOptions) -> Iterator[None]:
    """The model goes this way within the block."""
    if way.is_plain:
        yield
        return
    options = ApplyOptions(kernels=kernels, autocast=way.autocast, captured=way.captured)
    apply(model, way.precisions, graph=graph, options=options)
    try:
        yield
    finally:
        undo(model)


def _compiled_way(
    example: TrainingExample, way: Way, graph: OpGraph | None, kernels: KernelOptions, kept_bytes: int
) -> Way:
    """A way with the time and memory of compiled passes.

    Compiled once and timed in a row: compiling takes far longer than the passes.
    """
    device, needed = example.device, way.needed_bytes
    try:
        with carried_out(example.model, way, graph, kernels), compiled_inside(example.model):
            _pass(example)
            if device.type == "cuda":
                needed = _peak_bytes(example) + kept_bytes
            blocks = [_timed_block(example)]
            while len(blocks) < _ROUNDS and sum(block for block, _ in blocks) <= _WAY_NS:
                blocks.append(_timed_block(example))
    except torch.cuda.OutOfMemoryError:
        failed = "memory ran out"
    except (TorchDynamoException, UnsupportedError) as failure:
        failed = first_line(failure)
    else:
        times = [block / passes for block, passes in blocks]
        return replace(way, pass_ns=round(statistics.median(times)), needed_bytes=needed)
    _LOGGER.warning("%s is not timed compiled: %s", way.name, failed)
    example.model.zero_grad()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(way, pass_ns=0, needed_bytes=None)


def _captured_times(
    example: TrainingExample, way: Way, graph: OpGraph | None, kernels: KernelOptions, kept_bytes: int
) -> tuple[list[float], int | None]:
    """Nanoseconds of a replayed pass, some times, and the peak memory; none where passes cannot be captured.

    Captured once and timed in a row: capturing takes as long as several passes.
    """
    device = example.device
    if device.type != "cuda":
        return [], None
    before = _reserved_bytes(device)
    try:
        with carried_out(example.model, way, graph, kernels):
            _pass(example)  # captures, then replays for the first time
            blocks = [_timed_block(example)]
            while len(blocks) < _CAPTURED_ROUNDS and sum(block for block, _ in blocks) <= _WAY_NS:
                blocks.append(_timed_block(example))
            needed = resident_bytes(example.model) + torch.cuda.max_memory_reserved(device) - before
    except (torch.cuda.OutOfMemoryError, UnsupportedError) as failure:
        _LOGGER.warning("%s is not timed captured: %s", way.name, first_line(failure))
        example.model.zero_grad()
        return [], None
    finally:
        _reserved_bytes(device)
    return [block / passes for block, passes in blocks], needed + kept_bytes


def _reserved_bytes(device: torch.device) -> int:
    """What torch holds of a card when it has given back all it can; the peak is counted from here on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def _pass(example: TrainingExample) -> None:
    example.forward().backward()  # type: ignore[no-untyped-call]
    example.model.zero_grad()


def _peak_bytes(example: TrainingExample) -> int:
    _, allocation = allocation_of(lambda: _pass(example), example.device)
    return resident_bytes(example.model) + allocation.peak_bytes


def _timed_block(example: TrainingExample) -> tuple[float, int]:
    """Nanoseconds of some passes that follow each other, and how many they are."""
    device = example.device
    clock: Callable[[], int] = time.perf_counter_ns if device.type == "cuda" else cpu_clock()

    def block(passes: int) -> float:
        began = clock()
        for _ in range(passes):
            _pass(example)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return float(clock() - began)

    first = block(1)
    if first <= _BLOCK_NS:  # else one pass more is as good as any
        first = block(1)
    passes = max(1, min(_MOST_PASSES, int(_BLOCK_NS / max(1.0, first))))
    return block(passes), passes
