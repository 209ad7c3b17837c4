"""Sums over derivatives and the values that they belong to, of many tensors in few kernels.

A training step of small tensors keeps the host busy, not the card: what counts is how many kernels are launched.
Derivatives wait for each other until there are enough elements of them, and are then reduced together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, largest, norms, strided, totals

# Noise in the forward pass flips rectifiers; noise in gradients does not.
_QUANTIZED = ("first", "second", "output_gradient")
_TOGETHER = 1 << 22
"""Elements that are looked at together."""
_SHARE = 1 / 8
"""Part of all results of a step that may be looked at together, too: a step of larger tensors has memory for more."""
SAMPLE = 1 << 14
"""Elements of a derivative that are kept, of tensors that all samples of a batch share."""

_LEAST = 1e-30
"""Largest magnitude at least of what is looked at in INT8; 127 over anything far below is infinite."""

Key = tuple[str, str, int]
"""Operator, tensor, and which call."""
Numbers = tuple[Key, tuple[str, ...], Tensor]
"""Names and numbers of a key; of a name with a ``~`` the root of what is meant."""


class Kept(NamedTuple):
    """Some evenly spaced elements: of a derivative, of the values there, and how fixed-point noise is there."""

    derivative: Tensor
    values: Tensor
    fixed: Tensor | None


@dataclass
class Sums:
    """Over the elements of a tensor of one call.

    Attributes:
        plain: Squared derivatives.
        fixed: These times the weight of fixed-point noise; ``fixed_weight`` are the weights alone.
        floating: These times squared values; ``values`` are the squared values alone.
        elements: How many.
        kept: Some of them, of every probe; products of these count ``scale`` times.
    """

    plain: float = 0.0
    fixed: float = 0.0
    fixed_weight: float = 0.0
    floating: float = 0.0
    values: float = 0.0
    elements: int = 0
    kept: list[Kept] = field(default_factory=list)
    scale: float = 1.0


class _Waiting(NamedTuple):
    key: Key
    derivative: Tensor
    values: Tensor


class DerivativeSums:
    """Reduces derivatives, and keeps some elements of those that it is told to."""

    def __init__(self, keep: Callable[[Key, int], bool] | None) -> None:
        self._keep = keep
        self._waiting: list[_Waiting] = []
        self._elements = 0
        self._results = 0
        self.numbers: list[Numbers] = []
        self.kept: dict[Key, list[Kept]] = {}

    def note_result(self, elements: int) -> None:
        """An operator of the step has a result of so many elements."""
        self._results += elements

    @property
    def _limit(self) -> int:
        return max(_TOGETHER, int(self._results * _SHARE))

    def add(self, key: Key, derivative: Tensor, values: Tensor) -> None:
        """A derivative, and the values of what it is by; neither may be written into any more."""
        if self._elements + values.numel() > self._limit:
            self.flush()
        self._waiting.append(_Waiting(key, derivative, values))
        self._elements += values.numel()

    def flush(self) -> None:
        """Reduce all that wait."""
        alike = by_place(self._waiting, lambda waiting: waiting.values)
        self.forget_waiting()
        while alike:
            _, some = alike.popitem()
            if len(some) == 1 and some[0].values.numel() > self._limit:
                self._reduce_large(some.pop())
            else:
                self._reduce(some)

    def forget_waiting(self) -> None:
        """Keep nothing that waits."""
        self._waiting.clear()
        self._elements = 0

    def _reduce(self, some: Sequence[_Waiting]) -> None:
        keys = [waiting.key for waiting in some]
        derivatives, values = [waiting.derivative for waiting in some], [waiting.values for waiting in some]
        products = torch._foreach_mul(derivatives, values)
        self._give(keys, ("~plain", "~values", "~floating"), [*map(norms, (derivatives, values, products))])
        del products
        fixed: dict[Key, Tensor] = {}
        chosen = [i for i, key in enumerate(keys) if key[1] in _QUANTIZED]
        if chosen:
            changes, parts = [derivatives[i] for i in chosen], [values[i] for i in chosen]
            weights = _fixed_point(parts, _steps(largest(parts)))
            squares = torch._foreach_mul(weights, changes)
            torch._foreach_mul_(squares, changes)
            rounded = [keys[i] for i in chosen]
            self._give(rounded, ("fixed", "fixed_weight"), [totals(squares), totals(weights)])
            fixed = dict(zip(rounded, weights, strict=True))
        for waiting in some:
            if self._keep is not None and self._keep(waiting.key, waiting.values.numel()):
                self._take(waiting, fixed.get(waiting.key))

    def _reduce_large(self, waiting: _Waiting) -> None:
        """A part at a time."""
        key, derivative, values = waiting
        step = _steps(largest([values])) if key[1] in _QUANTIZED else None
        for part, there in zip(*(torch.split(x.reshape(-1), self._limit) for x in (derivative, values)), strict=True):
            self._give([key], ("~plain", "~values", "~floating"), [norms([x]) for x in (part, there, part * there)])
            if step is not None:
                weights = _fixed_point([there], step)
                self._give([key], ("fixed", "fixed_weight"), [totals([part.square() * weights[0]]), totals(weights)])
        if self._keep is not None and self._keep(key, values.numel()):
            some = strided(values, SAMPLE)
            self._take(waiting, None if step is None else _fixed_point([some], step)[0])

    def _take(self, waiting: _Waiting, fixed: Tensor | None) -> None:
        derivative, values = (strided(x, SAMPLE).clone() for x in (waiting.derivative, waiting.values))
        if fixed is not None:
            fixed = strided(fixed, SAMPLE).clone()
        self.kept.setdefault(waiting.key, []).append(Kept(derivative, values, fixed))

    def _give(self, keys: Sequence[Key], names: tuple[str, ...], found: Sequence[Sequence[Tensor]]) -> None:
        """Numbers by name and key."""
        table = torch.stack([x.reshape(()) for row in found for x in row]).view(len(names), -1)
        self.numbers.extend((key, names, column) for key, column in zip(keys, table.unbind(1), strict=True))


class ParameterGradients:
    """Of derivatives by what an operator adds to the gradient of a parameter: they are random signs times one number.

    So only the gradient's norm matters, and nothing of its size has to be kept until the derivative comes.
    """

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._elements = 0
        self._seen: list[tuple[Key, int, int]] = []
        self._norms: list[Tensor] = []

    def add(self, key: Key, parameter: Tensor, gradient: Tensor) -> None:
        """Such a part of a parameter's gradient; nothing may write into it any more."""
        if self._elements + gradient.numel() > _TOGETHER:
            self._flush()
        self._waiting.append(gradient.detach())
        self._elements += gradient.numel()
        self._seen.append((key, id(parameter), gradient.numel()))

    def _flush(self) -> None:
        if self._waiting:
            self._norms += norms(self._waiting)
        self.forget()

    def forget(self) -> None:
        """Keep no gradient."""
        self._waiting.clear()
        self._elements = 0

    def sums(self, weights: Mapping[int, Tensor]) -> dict[Key, Sums]:
        """Sums by key; ``weights`` has the numbers by the parameter's id, 1 where there is none."""
        self._flush()
        if not self._norms:
            return {}
        host = torch.stack([x.double() for x in (*self._norms, *weights.values())]).tolist()
        numbers = dict(zip(weights, host[len(self._norms) :], strict=True))
        found = {}
        for (key, parameter, elements), root in zip(self._seen, host, strict=False):
            square, values = numbers.get(parameter, 1.0) ** 2, root**2
            found[key] = Sums(plain=square * elements, floating=square * values, values=values, elements=elements)
        return found


def _steps(amaxes: Iterable[Tensor]) -> list[Tensor]:
    """Steps of INT8 per unit, by largest magnitudes."""
    found = torch.stack(list(amaxes))
    return list((127.0 / found.clamp(min=_LEAST)).unbind())


def _fixed_point(values: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
    """How much elements err in INT8 with one scale for all, up to a factor.

    Zeros and numbers on the grid do not err, and numbers below a step err in proportion.
    """
    parts = [x * step for x, step in zip(values, steps, strict=True)]
    torch._foreach_frac_(parts)
    torch._foreach_abs_(parts)
    torch._foreach_addcmul_(parts, parts, parts, value=-1)
    return parts
