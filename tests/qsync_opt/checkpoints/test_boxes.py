import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.checkpoints import (
    Box,
    SavedPiece,
    Shard,
    assign_boxes,
    boxes_of_interval,
    check_cover,
    copies_into,
    replica_problem,
)
from qsync_opt.errors import ProblemError
from qsync_opt.systems import evaluate, solve

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(SHAPES, st.data())
def test_a_flat_interval_is_covered_in_order_by_few_boxes(shape, data):
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    numbers = np.arange(size).reshape(shape)
    boxes = boxes_of_interval(shape, begin, end)
    parts = [numbers[box.relative_to(Box.whole(shape))].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([np.array([], dtype=int), *parts]), np.arange(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_an_interval_outside_the_tensor_is_refused():
    with pytest.raises(ProblemError, match="elements 3 to 9 of a tensor that has 6"):
        boxes_of_interval((2, 3), 3, 9)


@st.composite
def partitions(draw, shape):
    """Boxes that cover a tensor, by repeated cuts."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not shape:
            return [box]
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.lengths[axis]))
        first = tuple(cut if k == axis else n for k, n in enumerate(box.lengths))
        rest = tuple(n - cut if k == axis else n for k, n in enumerate(box.lengths))
        moved = tuple(o + cut if k == axis else o for k, o in enumerate(box.offsets))
        boxes += [Box(box.offsets, first), Box(moved, rest)]
    return draw(st.permutations(boxes))


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(tuple(shape)), partitions(tuple(shape)))), st.data())
def test_a_cover_is_accepted_and_one_that_lacks_or_repeats_a_box_is_not(case, data):
    shape, boxes = case
    check_cover(shape, boxes)
    filled = [box for box in boxes if box.size]
    chosen = data.draw(st.sampled_from(filled))
    with pytest.raises(ProblemError, match="overlap"):
        check_cover(shape, [*boxes, chosen])
    with pytest.raises(ProblemError, match=f"lacks {chosen.size} of its elements"):
        check_cover(shape, [box for box in boxes if box is not chosen and box != chosen])


def test_a_box_outside_the_tensor_is_refused():
    with pytest.raises(ProblemError, match=r"of shape \(2, 3\) does not have all of Box"):
        check_cover((2, 3), [Box((0, 0), (2, 4))])
    with pytest.raises(ProblemError, match="2 offsets and 1 lengths"):
        Box((0, 0), (1,))


@given(SHAPES.flatmap(lambda s: st.tuples(st.just(tuple(s)), partitions(tuple(s)), partitions(tuple(s)))))
def test_what_is_read_of_the_saved_boxes_is_each_wanted_box(case):
    shape, saved, wanted = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    pieces = [SavedPiece(file=str(k), begin=0, offsets=b.offsets, lengths=b.lengths) for k, b in enumerate(saved)]
    for box in wanted:
        result = np.full(box.lengths, -1)
        for copy in copies_into(box, pieces):
            stored = numbers[copy.piece.box.relative_to(Box.whole(shape))]
            result[copy.box.relative_to(box)] = stored[copy.box.relative_to(copy.piece.box)]
        assert np.array_equal(result, numbers[box.relative_to(Box.whole(shape))])
    if math.prod(shape) and len(pieces) > 1:
        lacking = [piece for piece in pieces if piece is not max(pieces, key=lambda piece: piece.box.size)]
        with pytest.raises(ProblemError, match="do not hold all of"):
            copies_into(Box.whole(shape), lacking)


@given(
    st.lists(SHAPES.flatmap(lambda s: st.tuples(st.just(tuple(s)), partitions(tuple(s)))), min_size=1, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_replicas_are_written_once_and_balanced(tensors, ranks, data):
    shards = []
    for number, (shape, boxes) in enumerate(tensors):
        for box in dict.fromkeys(boxes):
            holders = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            shards.append(Shard(tensor=f"t{number}", shape=shape, itemsize=4, box=box, ranks=tuple(sorted(holders))))
    problem = replica_problem(shards, ["host"] * ranks)
    solution = solve(problem)
    assert evaluate(problem, solution.plan).feasible
    written = assign_boxes(shards, problem, solution.plan)
    for number, (shape, _) in enumerate(tensors):
        check_cover(shape, [box for own in written for tensor, box in own if tensor == f"t{number}"])
    for rank, own in enumerate(written):
        held = {shard.tensor: [] for shard in shards}
        for shard in shards:
            if rank in shard.ranks:
                held[shard.tensor].append(shard.box)
        assert all(any(box.intersection(mine) == box for mine in held[tensor]) for tensor, box in own)


@pytest.mark.parametrize("ranks", [1, 3, 8, 100, 1024])
def test_replicated_weights_are_balanced_to_one_percent(ranks):
    shapes = [(50257, 1024), *[(1024, 4096), (4096,), (4096, 1024), (1024,), (1024, 3072), ()] * 24]
    everyone = tuple(range(ranks))
    shards = [
        Shard(tensor=str(k), shape=shape, itemsize=4, box=Box.whole(shape), ranks=everyone)
        for k, shape in enumerate(shapes)
    ]
    problem = replica_problem(shards, [f"h{rank // 8}" for rank in everyone])
    loads = solve(problem).evaluation.writer_bytes.values()
    assert max(loads) <= 1.01 * sum(loads) / ranks
