"""Memory timeline of a compiled step: when memory is in use, and by which operator.

A step has moments (`forward_moment`, `backward_moment`): one per operator and pass, in the order of an uncompiled
model. A compiler fuses operators and computes gradients of weights at a time of its choice; but library calls
(products, convolutions, attention) wait for everything before them in the model, so that the furthest one that has been
called defines the moment. The moments between two of them count as one.

What counts at a moment is the memory in use at its peak; a block that is allocated and freed between two such instants
counts at none. The blocks alive at each peak are summed for another plan, operator by operator
(`qsync_opt.steps.memory.compiled_step_memory`).

Source: ours.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ROUNDED_BYTES = 512
"""Sizes of torch's caching allocator are multiples of this."""


class Block(NamedTuple):
    """Memory in use from one moment to before another.

    Attributes:
        operator: Whose result, gradient or workspace it is; "" for none.
        begin: First moment at which it is in use.
        end: First moment at which it is free again; `moments` of the model if it is in use at the end of the passes.
        num_bytes: Its size; below zero for memory that was in use before the step and is freed at ``begin``.
    """

    operator: str
    begin: int
    end: int
    num_bytes: int


class ChargedChange(NamedTuple):
    """A change of memory inside a step.

    Attributes:
        num_bytes: Allocated, or freed if below zero.
        address: Of the block; 0 if it is unknown.
        operator: To which an allocation is charged.
        moment: At which it happens.
    """

    num_bytes: int
    address: int
    operator: str
    moment: int


def moments(count: int) -> int:
    """Number of moments of a model of ``count`` operators; they are counted from 0."""
    return 2 * count + 2


def forward_moment(position: int) -> int:
    """Moment of an operator's forward pass; 0 is before all of them."""
    return position + 1


def backward_moment(position: int, count: int) -> int:
    """Moment of an operator's backward pass; ``count`` + 1 is before all of them."""
    return 2 * count + 1 - position


def blocks(changes: Sequence[ChargedChange], count: int) -> tuple[Block, ...]:
    """Blocks that are in use at the peak of some moment, from the changes of one step by time.

    ``count`` is the number of operators of the model, here and below.
    """
    peaks = _peaks(changes)

    def at(place: int) -> int:
        return next((moment for moment, peak in peaks if peak >= place), moments(count))

    result = []
    alive: dict[int, list[int]] = {}
    for place, change in enumerate(changes):
        if change.num_bytes > 0:
            alive.setdefault(change.address or -change.num_bytes, []).append(place)
            continue
        allocations = alive.get(change.address or change.num_bytes)
        if allocations:
            first = allocations.pop()
            result.append(Block(changes[first].operator, at(first), at(place), changes[first].num_bytes))
        else:
            result.append(Block("", at(place), moments(count), change.num_bytes))
    for places in alive.values():
        result += [Block(changes[i].operator, at(i), moments(count), changes[i].num_bytes) for i in places]
    return tuple(sorted(block for block in result if block.begin < block.end))


def _peaks(changes: Sequence[ChargedChange]) -> list[tuple[int, int]]:
    """Moments, and the change after which each has most memory in use; it begins with the memory of the last one."""
    peaks: list[tuple[int, int]] = []
    now = most = 0
    for place, change in enumerate(changes):
        if not peaks or peaks[-1][0] != change.moment:
            peaks.append((change.moment, place - 1))
            most = now
        now += change.num_bytes
        if now > most:
            most = now
            peaks[-1] = (change.moment, place)
    return peaks


def take_reader(num_bytes: int, calls: Sequence[list[tuple[str, int]]], otherwise: str) -> str:
    """The operator for which a block was allocated, by the bytes that calls write for operators; the match is removed.

    ``calls`` begin with the one before whose end the block was allocated; ``otherwise`` is returned without a match.
    """
    for writes in calls:
        for i, (operator, size) in enumerate(writes):
            if size <= num_bytes < size + ROUNDED_BYTES:
                del writes[i]
                return operator
    return otherwise


def owner_of(block: Block, order: Sequence[str]) -> str:
    """The operator of a block; without a known one, the operator that runs when the block is allocated.

    The size of such a block may depend on formats there (a loss, and values computed from it). Freed memory has no
    owner. ``order`` is that of the forward pass.
    """
    if block.operator or block.num_bytes < 0 or not order:
        return block.operator
    count = len(order)
    position = block.begin - 1 if block.begin <= count else 2 * count + 1 - block.begin
    return order[min(max(position, 0), count - 1)]


def changes_of(some: Iterable[Block], count: int) -> Iterator[tuple[int, int]]:
    """Moments at which memory grows by blocks, and by how many bytes; blocks that stay to the end are never freed."""
    for block in some:
        for moment, num_bytes in ((block.begin, block.num_bytes), (block.end, -block.num_bytes)):
            if moment < moments(count):
                yield moment, num_bytes


MemoryTimeline = tuple[tuple[int, int, int], ...]
"""Changes of an operator's memory: pass (0 forward, 1 backward), moments after the operator's own one, bytes."""


def timeline_of(own: Iterable[Block], position: int, count: int) -> MemoryTimeline:
    """Changes by pass and distance from the operator's own moment, so that equal operators can be averaged."""
    changes: Counter[tuple[int, int]] = Counter()
    for moment, num_bytes in changes_of(own, count):
        own_moment = backward_moment(position, count) if moment > count else forward_moment(position)
        changes[int(moment > count), moment - own_moment] += num_bytes
    return tuple((*key, changes[key]) for key in sorted(changes) if changes[key])


def mean_timeline(timelines: Sequence[MemoryTimeline]) -> MemoryTimeline:
    """The mean of some timelines, in order."""
    totals: Counter[tuple[int, int]] = Counter()
    for backward, distance, num_bytes in itertools.chain(*timelines):
        totals[backward, distance] += num_bytes
    means = [(*key, round(totals[key] / len(timelines))) for key in sorted(totals)]
    return tuple(entry for entry in means if entry[2])


def scaled_timeline(timeline: MemoryTimeline, factor: float) -> MemoryTimeline:
    """The timeline of sizes multiplied by ``factor``."""
    return tuple((backward, distance, round(num_bytes * factor)) for backward, distance, num_bytes in timeline)


def moment_of(entry: tuple[int, int, int], position: int, count: int) -> int:
    """Moment of a change in an operator's timeline, within its pass."""
    backward, distance, _ = entry
    if backward:
        return min(max(backward_moment(position, count) + distance, count + 1), 2 * count + 1)
    return min(max(forward_moment(position) + distance, 0), count)
