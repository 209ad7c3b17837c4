"""From when until when is memory of a compiled step in use, and by whom?

A step has moments (`forward_moment`, `backward_moment`): one per operator and pass, in the order in which a model that
is not compiled would run them. A compiler fuses operators, and computes gradients of weights when it likes; but calls
of libraries (products, convolutions, attention) wait for what is before them in the model, so that the furthest of them
that has been called says which moment it is. The moments that pass between two of them are as one.

What counts at a moment is what is in use when most is during it: so a block that comes and goes between two such
instants belongs to none. Blocks that are alive then are summed up for another plan, operator by operator
(`qsync_opt.steps.memory.compiled_step_memory`).

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

ROUNDED_BYTES = 512
"""Multiples of which torch's caching allocator gives."""


class Block(NamedTuple):
    """Memory in use from one moment to before another.

    Attributes:
        operator: Whose result, gradient or workspace it is; "" for what belongs to none.
        begin: First moment at which it is in use.
        end: The first at which it is no more; `moments` of the model if it still is at the end of the passes.
        num_bytes: Its size; below zero for what was in use before the step and is given back at ``begin``.
    """

    operator: str
    begin: int
    end: int
    num_bytes: int


class Placed(NamedTuple):
    """A change of memory inside a step.

    Attributes:
        num_bytes: Allocated, or given back if below zero.
        address: Of the block; 0 if it is not known.
        operator: To whom an allocation is charged.
        moment: At which it comes about.
    """

    num_bytes: int
    address: int
    operator: str
    moment: int


def moments(count: int) -> int:
    """Moments of a model of ``count`` operators: they are numbered from 0."""
    return 2 * count + 2


def forward_moment(position: int) -> int:
    """When an operator runs in the forward pass; 0 is before all of them."""
    return position + 1


def backward_moment(position: int, count: int) -> int:
    """When an operator runs in the backward pass; ``count`` + 1 is before all of them."""
    return 2 * count + 1 - position


def blocks(changes: Sequence[Placed], count: int) -> tuple[Block, ...]:
    """Blocks that are in use when most memory is at some moment.

    Args:
        changes: Of the passes of one step, by time; their moments never fall.
        count: Operators of the model.
    """
    instants = _instants(changes)

    def at(place: int) -> int:
        return next((moment for moment, instant in instants if instant >= place), moments(count))

    found = []
    alive: dict[int, list[int]] = {}
    for place, change in enumerate(changes):
        if change.num_bytes > 0:
            alive.setdefault(change.address or -change.num_bytes, []).append(place)
            continue
        begun = alive.get(change.address or change.num_bytes)
        if begun:
            first = begun.pop()
            found.append(Block(changes[first].operator, at(first), at(place), changes[first].num_bytes))
        else:
            found.append(Block("", at(place), moments(count), change.num_bytes))
    for places in alive.values():
        found += [Block(changes[i].operator, at(i), moments(count), changes[i].num_bytes) for i in places]
    return tuple(sorted(block for block in found if block.begin < block.end))


def _instants(changes: Sequence[Placed]) -> list[tuple[int, int]]:
    """Moments, and after which change most memory is in use at each; a moment begins with what the last one left."""
    found: list[tuple[int, int]] = []
    now = most = 0
    for place, change in enumerate(changes):
        if not found or found[-1][0] != change.moment:
            found.append((change.moment, place - 1))
            most = now
        now += change.num_bytes
        if now > most:
            most = now
            found[-1] = (change.moment, place)
    return found


def written_for(num_bytes: int, calls: Sequence[list[tuple[str, int]]], otherwise: str) -> str:
    """For which operator a block of this size was allocated, by what calls write for whom; what is found is taken off.

    Args:
        num_bytes: Of the block.
        calls: The one before whose end it was allocated, and those after it: operators and bytes.
        otherwise: If none writes so much.
    """
    for writes in calls:
        for i, (operator, size) in enumerate(writes):
            if size <= num_bytes < size + ROUNDED_BYTES:
                del writes[i]
                return operator
    return otherwise


def changes_of(some: Iterable[Block], count: int) -> Iterator[tuple[int, int]]:
    """When blocks come and go, and by how many bytes memory grows then; what stays to the end never goes."""
    for block in some:
        for moment, num_bytes in ((block.begin, block.num_bytes), (block.end, -block.num_bytes)):
            if moment < moments(count):
                yield moment, num_bytes


def owner_of(block: Block, order: Sequence[str]) -> str:
    """To which operator a block belongs; one that no operator is known for to the one that runs when it comes.

    Its size may depend on formats there (a loss, and what is computed from it). What is given back stays with nobody.

    Args:
        block: The block.
        order: Operators of the model in the order of the forward pass.
    """
    if block.operator or block.num_bytes < 0 or not order:
        return block.operator
    count = len(order)
    position = block.begin - 1 if block.begin <= count else 2 * count + 1 - block.begin
    return order[min(max(position, 0), count - 1)]


Course = tuple[tuple[int, int, int], ...]
"""How an operator's memory changes: pass (0 forward, 1 backward), moments after its own one there, bytes."""


def course_of(own: Iterable[Block], position: int, count: int) -> dict[tuple[int, int], int]:
    """Changes by pass and distance from the operator's own moment, so that operators alike can be taken together."""
    found: dict[tuple[int, int], int] = {}
    for moment, num_bytes in changes_of(own, count):
        later = moment > count
        key = (int(later), moment - (backward_moment(position, count) if later else forward_moment(position)))
        found[key] = found.get(key, 0) + num_bytes
    return found


def mean_course(courses: Sequence[Mapping[tuple[int, int], int]]) -> Course:
    """The mean of some courses, in order."""
    keys = sorted({key for course in courses for key in course})
    means = [(*key, round(sum(course.get(key, 0) for course in courses) / len(courses))) for key in keys]
    return tuple(entry for entry in means if entry[2])


def scaled_course(course: Course, share: float) -> Course:
    """The course of something so many times as large."""
    return tuple((later, distance, round(num_bytes * share)) for later, distance, num_bytes in course)


def moment_of(entry: tuple[int, int, int], position: int, count: int) -> int:
    """When a change of a course comes about for an operator; a pass is not left."""
    later, distance, _ = entry
    if later:
        return min(max(backward_moment(position, count) + distance, count + 1), 2 * count + 1)
    return min(max(forward_moment(position) + distance, 0), count)
