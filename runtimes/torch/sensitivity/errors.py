"""What rounding a given tensor to a format really costs: the expected squared error of each element, without drawing.

An element at position ``f`` between two grid points a step ``s`` apart errs by ``f * (1 - f) * s**2`` in expectation
under stochastic rounding and by ``min(f, 1 - f)**2 * s**2`` under rounding to nearest. No distribution is assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from qsync_opt.numerics.formats import number_format
from qsync_opt.numerics.rounding import (
    LARGEST,
    WIDE_FP8,
    WIDE_FP8_LARGEST,
    WIDE_FP8_MANTISSA_BITS,
    WIDE_FP8_SMALLEST_EXPONENT,
    Granularity,
    smallest_exponent,
)

# A slice whose largest magnitude is below this many times the largest code uses the smallest normal FP32 scale.
_SMALLEST_NORMAL = 2.0**-126
_SMALLEST_UNIT = _SMALLEST_NORMAL * 512
_LARGEST_EXPONENT = 127


_Name = TypeVar("_Name")
_Found = TypeVar("_Found")


class ElementErrors(NamedTuple):
    """Expected squared error of each element, of the tensor's shape and in its squared units."""

    stochastic: Tensor
    nearest: Tensor


_STACKED_AT_ONCE = 4
"""Dimensions from which a card stacks tensors one by one."""
_EXPONENT_BITS = 0x7F800000
"""Of an FP32 number; what they leave of it is the largest power of two that is not above its magnitude."""


class _Stack(NamedTuple):
    """A stack of kinds, as tensors that broadcast against a stack of tensors.

    ``slices`` says by which granularity each kind is scaled (None: by none), ``largest`` onto which number the largest
    magnitude goes, ``bits`` two to the minus mantissa bits, ``least`` and ``greatest`` the powers of two between which
    the step follows the number.
    """

    slices: tuple[Granularity | None, ...]
    one: Tensor
    largest: Tensor
    bits: Tensor
    least: Tensor
    greatest: Tensor


def _grid(format_name: str) -> tuple[float, float, float]:
    if format_name != WIDE_FP8 and number_format(format_name).is_integer:
        return 1.0, 1.0, 1.0
    wide = format_name == WIDE_FP8
    bits = WIDE_FP8_MANTISSA_BITS if wide else number_format(format_name).mantissa_bits
    least = WIDE_FP8_SMALLEST_EXPONENT if wide else smallest_exponent(format_name)
    # Steps that are subnormal themselves would be squared to zero anyway.
    return 2.0**-bits, 2.0 ** max(least, bits - 126), 2.0**_LARGEST_EXPONENT


@functools.lru_cache(maxsize=64)
def _stack(kinds: tuple[str, ...], dims: int, device: torch.device) -> _Stack:
    slices: list[Granularity | None] = []
    largest, grids = [], []
    for kind in kinds:
        name, _, granularity = kind.partition("/")
        slices.append(Granularity(granularity) if granularity else None)
        largest.append(WIDE_FP8_LARGEST if name == WIDE_FP8 else LARGEST[name] if granularity else 1.0)
        grids.append(_grid(name))
    columns = torch.tensor([largest, *zip(*grids, strict=True)], dtype=torch.float32)
    columns = columns.view(4, -1, *(1,) * dims).to(device)
    return _Stack(tuple(slices), torch.ones((1,) * dims, device=device), *columns)


@functools.lru_cache(maxsize=64)
def _places(slices: tuple[Granularity | None, ...], amaxes: tuple[Granularity, ...], device: torch.device) -> Tensor:
    """Where each kind's unit stands behind 1 and the largest magnitudes in their order."""
    return torch.tensor([0 if g is None else 1 + amaxes.index(g) for g in slices]).to(device)


def _broadcast(dims: int, *tensors: Tensor) -> Tensor:
    """Tensors of so many dimensions or fewer, stacked."""
    if any(x.dim() == dims for x in tensors):  # without the shapes in Python
        return torch.stack(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]
    shape = torch.broadcast_shapes((1,) * dims, *(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    return torch.stack([x.expand(shape) for x in tensors])


def paired_errors(x: Tensor, kinds: tuple[str, ...], amaxes: Mapping[Granularity, Tensor]) -> Tensor:
    """What ``stacked_errors`` has, as one tensor of shape (2, kinds, *shape of x): stochastic, then nearest."""
    stack = _stack(kinds, x.dim(), x.device)
    units: Tensor | None = None
    values = x
    if any(stack.slices):
        # What x is held in before the format's own largest number comes in: 1, or a largest magnitude.
        amax = [stack.one if g is None else amaxes[g] for g in stack.slices]
        if x.dim() < _STACKED_AT_ONCE:
            units = _broadcast(x.dim(), *amax)
        else:
            units = _broadcast(x.dim(), stack.one, *amaxes.values())[_places(stack.slices, tuple(amaxes), x.device)]
        units.clamp_(min=_SMALLEST_UNIT)
        values = (x / units).mul_(stack.largest)
    binade = torch.bitwise_and(values.view(torch.int32), _EXPONENT_BITS).view(torch.float32)
    step = torch.clamp(binade, stack.least, stack.greatest).mul_(stack.bits)
    del binade
    below = torch.remainder(values, step)  # from the grid point below, up to the step
    del values
    above = step.sub_(below)
    found = below.new_empty((2, *below.shape))
    torch.mul(below, above, out=found[0])
    torch.minimum(below, above, out=found[1]).square_()
    return found if units is None else found.mul_(units.div_(stack.largest).square_())


def joint_errors(every: Sequence[tuple[Tensor, Mapping[Granularity, Tensor]]], kinds: tuple[str, ...]) -> list[Tensor]:
    """What ``paired_errors`` has of several tensors on one device, together."""
    if len(every) == 1:
        x, known = every[0]
        return [paired_errors(x, kinds, known)]
    sizes = [x.numel() for x, _ in every]
    whole = torch.cat([x.reshape(-1) for x, _ in every])
    amaxes = {granularity: torch.empty_like(whole) for granularity in every[0][1]}
    for granularity, place in amaxes.items():
        for (x, known), part in zip(every, torch.split(place, sizes), strict=True):
            part.view(x.shape).copy_(known[granularity])
    errors = torch.split(paired_errors(whole, kinds, amaxes), sizes, 2)
    return [part.view(2, len(kinds), *x.shape) for part, (x, _) in zip(errors, every, strict=True)]


class Wanted(NamedTuple):
    """Elements whose errors somebody waits for; what ``paired_errors`` takes."""

    x: Tensor
    kinds: tuple[str, ...]
    amaxes: Mapping[Granularity, Tensor]


def answered(
    groups: Iterable[tuple[_Name, Generator[Wanted, Tensor, _Found]]], limit: int
) -> Iterator[tuple[_Name, _Found]]:
    """Run computations each of which asks for errors once, those of several at once.

    Args:
        groups: By some name; all ask for errors of the same kinds.
        limit: Errors at most that are held together, unless one asks for more.

    Yields:
        Name, and what the computation returned.
    """
    waiting: list[tuple[_Name, Generator[Wanted, Tensor, _Found], Wanted]] = []

    def answer() -> Iterator[tuple[_Name, _Found]]:
        every = waiting.copy()
        waiting.clear()
        found = joint_errors([(wanted.x, wanted.amaxes) for *_, wanted in every], every[0][2].kinds)
        for (name, steps, _), errors in zip(every, found, strict=True):
            try:
                steps.send(errors)
            except StopIteration as done:
                yield name, done.value

    errors = 0
    for name, steps in groups:
        wanted = next(steps)
        number = wanted.x.numel() * len(wanted.kinds)
        if waiting and (errors + number > limit or wanted.x.device != waiting[0][2].x.device):
            yield from answer()
            errors = 0
        waiting.append((name, steps, wanted))
        errors += number
    if waiting:
        yield from answer()


def stacked_errors(x: Tensor, kinds: tuple[str, ...], amaxes: Mapping[Granularity, Tensor]) -> ElementErrors:
    """Errors of several noise kinds at once, in few kernels.

    Args:
        x: FP32, any shape, finite.
        kinds: Noise kinds (``BF16``, ``INT8/row``, ...).
        amaxes: Largest magnitude per slice and granularity, for the kinds with scales; broadcasting against ``x``.

    Returns:
        Errors of shape (kinds, *shape of x), subnormal ranges included.

    Source:
        Ours.
    """
    return ElementErrors(*paired_errors(x, kinds, amaxes))


def fixed_point_errors(x: Tensor, amaxes: Sequence[Tensor]) -> Tensor:
    """Expected squared error of each element in INT8 under stochastic rounding, for several ways to scale.

    Args:
        x: FP32, any shape, finite.
        amaxes: Largest magnitude per slice, broadcasting against ``x``, one tensor for each way.

    Returns:
        Shape (ways, *shape of x): what ``stacked_errors`` has for INT8, in half of the kernels.

    Source:
        Ours.
    """
    step = _broadcast(x.dim(), *amaxes).clamp_(min=_SMALLEST_UNIT).div_(LARGEST["INT8"])
    fraction = (x / step).frac_().abs_()
    return torch.addcmul(fraction, fraction, fraction, value=-1).mul_(step.square_())
