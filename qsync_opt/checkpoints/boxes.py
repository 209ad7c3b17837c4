"""Boxes of tensors: axis-aligned blocks of global indices, their intersections, and exact covers.

A sharded tensor is a set of boxes. Flat intervals, which optimizers that flatten their parameters keep, become boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qsync_opt.errors import ProblemError, first_few
from qsync_opt.io import check_fields


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Indices ``offsets`` to ``offsets + lengths`` of a tensor, one number per dimension; a scalar has none."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, "box")
        if len(self.offsets) != len(self.lengths):
            raise ProblemError(
                f"box: {len(self.offsets)} offsets and {len(self.lengths)} lengths, but one of each per dimension is "
                "needed"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """First indices behind the box."""
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """The indices in both, None if there are none.

        Raises:
            ProblemError: They have different numbers of dimensions.
        """
        if len(self.offsets) != len(other.offsets):
            raise ProblemError(f"boxes of {len(self.offsets)} and {len(other.offsets)} dimensions do not intersect")
        offsets = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(min(a, b) - o for a, b, o in zip(self.ends, other.ends, offsets, strict=True))
        if any(length <= 0 for length in lengths):
            return None
        return Box(offsets, lengths)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape has all indices of the box."""
        return len(shape) == len(self.offsets) and all(e <= n for e, n in zip(self.ends, shape, strict=True))

    def relative_to(self, other: Box) -> tuple[slice, ...]:
        """Slices of this box in an array that holds ``other``."""
        return tuple(
            slice(o - base, o - base + n) for o, base, n in zip(self.offsets, other.offsets, self.lengths, strict=True)
        )


def boxes_of_interval(shape: Sequence[int], begin: int, end: int) -> tuple[Box, ...]:
    """Boxes that cover the elements ``begin`` to ``end`` of a flattened tensor exactly, in their order.

    Args:
        shape: Of the tensor, in row-major order.
        begin: First element.
        end: First element behind the interval.

    Returns:
        At most 2 ndim - 1 boxes, each contiguous in the interval: the rest of a row, whole rows, the beginning of a
        row, and so on in deeper dimensions.

    Raises:
        ProblemError: The interval is not one of the tensor.

    Source: irregular tensor sharding of ByteCheckpoint (NSDI 2025), section 3.2.
    """
    size = math.prod(shape)
    if not 0 <= begin <= end <= size:
        raise ProblemError(f"elements {begin} to {end} of a tensor that has {size}: give an interval in it")
    if begin == end:
        return ()
    if not shape:
        return (Box((), ()),)
    row = size // shape[0]
    first, skipped = divmod(begin, row)
    last, rest = divmod(end, row)

    def within(index: int, low: int, high: int) -> list[Box]:
        inner = boxes_of_interval(shape[1:], low, high)
        return [Box((index, *box.offsets), (1, *box.lengths)) for box in inner]

    if first == last:
        return tuple(within(first, skipped, rest))
    boxes = within(first, skipped, row) if skipped else []
    first += bool(skipped)
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return (*boxes, *(within(last, 0, rest) if rest else []))


def check_cover(shape: Sequence[int], boxes: Iterable[Box], what: str = "tensor") -> None:
    """Refuse boxes that do not cover each element of a tensor exactly once.

    Args:
        shape: Of the tensor.
        boxes: Empty ones are allowed.
        what: Names the tensor in errors.

    Raises:
        ProblemError: A box leaves the tensor, two overlap, or elements are missing.

    Source: ours.
    """
    boxes = list(boxes)
    if outside := [box for box in boxes if len(box.offsets) != len(shape)]:
        raise _outside(shape, outside, what)
    begin_BN = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    length_BN = np.array([box.lengths for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    size_B = length_BN.prod(axis=1)
    if (leaves_B := (begin_BN + length_BN > np.asarray(shape, dtype=np.int64)).any(axis=1)).any():
        raise _outside(shape, [boxes[number] for number in np.flatnonzero(leaves_B)], what)
    filled = np.flatnonzero(size_B)
    filled = filled[np.lexsort(begin_BN[filled].T[::-1])] if shape else filled
    if (pair := _overlap(begin_BN[filled], length_BN[filled])) is not None:
        first, second = (boxes[filled[number]] for number in pair)
        raise ProblemError(f"{what} of shape {tuple(shape)}: {first} and {second} overlap; save each element once")
    missing = math.prod(shape) - int(size_B.sum())
    if missing:
        raise ProblemError(f"{what} of shape {tuple(shape)} lacks {missing} of its elements; give all its shards")


def _outside(shape: Sequence[int], boxes: Sequence[Box], what: str) -> ProblemError:
    return ProblemError(f"{what} of shape {tuple(shape)} does not have all of {first_few(list(map(str, boxes)))}")


def _overlap(begin_BN: NDArray[np.int64], length_BN: NDArray[np.int64]) -> tuple[int, int] | None:
    """Numbers of two boxes, which are sorted and not empty, that share an index; None if there are none.

    Each box is compared with the later ones that begin, in the first dimension, before it ends.
    """
    count, dimensions = begin_BN.shape
    if not dimensions:
        return (0, 1) if count > 1 else None
    end_BN = begin_BN + length_BN
    until_B = np.searchsorted(begin_BN[:, 0], end_BN[:, 0], side="left")
    for number in np.flatnonzero(until_B > np.arange(1, count + 1)).tolist():
        later = slice(number + 1, int(until_B[number]))
        shared = (begin_BN[later] < end_BN[number]) & (begin_BN[number] < end_BN[later])
        hits = np.flatnonzero(shared.all(axis=1))
        if hits.size:
            return number, number + 1 + int(hits[0])
    return None
