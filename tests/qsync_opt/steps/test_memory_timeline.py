"""Blocks of memory of compiled steps: who has them, from when until when, and the peak of their sum."""

import random

import pytest

from qsync_opt.steps.memory_timeline import (
    Block,
    ChargedChange,
    backward_moment,
    blocks,
    forward_moment,
    mean_timeline,
    moment_of,
    moments,
    owner_of,
    take_reader,
    timeline_of,
)

COUNT = 5


def _step(seed, *, addresses):
    """A step that allocates and gives back at random, with what is in use after every change."""
    generator = random.Random(seed)
    changes, alive, used = [], {}, [0]
    for moment in sorted(generator.choices(range(moments(COUNT)), k=60)):
        if alive and generator.random() < 0.45:
            address = generator.choice(list(alive))
            changes.append(ChargedChange(-alive.pop(address), address if addresses else 0, "", moment))
        else:
            address, size = 1000 + len(changes), generator.randint(1, 9)
            alive[address] = size
            changes.append(ChargedChange(size, address if addresses else 0, f"o{generator.randrange(COUNT)}", moment))
        used.append(used[-1] + changes[-1].num_bytes)
    return changes, used


@pytest.mark.parametrize("addresses", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_blocks_has_the_peak_of_every_moment(seed, addresses):
    changes, used = _step(seed, addresses=addresses)
    found = blocks(changes, COUNT)
    for moment in {change.moment for change in changes}:
        inside = [i for i, change in enumerate(changes) if change.moment == moment]
        most = max(used[inside[0] : inside[-1] + 2])
        assert sum(b.num_bytes for b in found if b.begin <= moment < b.end) == most


@pytest.mark.parametrize("seed", range(10))
def test_timelines_add_up_to_the_blocks_they_are_made_of(seed):
    changes, _ = _step(seed, addresses=True)
    found = blocks(changes, COUNT)
    for position in range(COUNT):
        own = [block for block in found if block.operator == f"o{position}"]
        timeline = mean_timeline([timeline_of(own, position, COUNT)] * 2)
        for moment in range(moments(COUNT)):
            total = sum(entry[2] for entry in timeline if moment_of(entry, position, COUNT) <= moment)
            assert total == sum(block.num_bytes for block in own if block.begin <= moment < block.end)


def test_what_was_in_use_before_goes_for_good():
    changes = [ChargedChange(-7, 3, "", 4), ChargedChange(2, 4, "o1", 6)]
    assert blocks(changes, COUNT) == (Block("", 6, moments(COUNT), -7), Block("o1", 6, moments(COUNT), 2))


def test_moments_follow_the_passes():
    forward = [forward_moment(position) for position in range(COUNT)]
    backward = [backward_moment(position, COUNT) for position in reversed(range(COUNT))]
    assert [0, *forward, COUNT + 1, *backward] == list(range(moments(COUNT)))


def test_operators_alike_are_taken_together():
    first = timeline_of([Block("a", 2, backward_moment(1, COUNT), 100)], 1, COUNT)
    second = timeline_of([Block("b", 4, backward_moment(3, COUNT), 300)], 3, COUNT)
    assert mean_timeline([first, second]) == ((0, 0, 200), (1, 0, -200))
    assert mean_timeline([first, ()]) == ((0, 0, 50), (1, 0, -50))


def test_a_block_belongs_to_the_operator_that_its_kernel_writes_it_for():
    calls = [[("reader", 1000), ("writer", 4000)], [("next", 1000)]]
    assert take_reader(4096, calls, "other") == "writer"
    assert [take_reader(1024, calls, "other") for _ in range(3)] == ["reader", "next", "other"]
    assert calls == [[], []]


def test_a_block_of_nobody_belongs_to_the_operator_that_runs_when_it_comes():
    order = [f"o{i}" for i in range(COUNT)]
    for position, name in enumerate(order):
        for begin in (forward_moment(position), backward_moment(position, COUNT)):
            assert owner_of(Block("", begin, moments(COUNT), 8), order) == name
    assert owner_of(Block("", 0, 3, 8), order) == "o0"
    assert owner_of(Block("", COUNT + 1, moments(COUNT), 8), order) == f"o{COUNT - 1}"
    assert owner_of(Block("o2", 0, 3, 8), order) == "o2"
    assert owner_of(Block("", 3, moments(COUNT), -8), order) == ""
    assert owner_of(Block("", 3, 4, 8), []) == ""
