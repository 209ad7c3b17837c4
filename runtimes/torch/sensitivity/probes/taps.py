"""Nodes of a twice differentiated step at which noise can arise, and what is kept of the derivative at each: sums.

A derivative is reduced the moment it is known and not held, so that the pass needs no memory for all of them at once.
Values that noise is shaped by are those that autograd keeps anyway.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import (
    Delayed,
    attention_twice,
    batch_norm_twice,
    product_twice,
)
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import (
    MAX_POOLS,
    RECTIFIERS,
    Arriving,
    LastRectified,
    SwitchedPool,
    contest,
    pool_call,
)
from qsync_opt.runtimes.torch.sensitivity.products import ADJUSTABLE, Slot, operand_slots, replace_operands
from qsync_opt.runtimes.torch.sensitivity.reductions import by_place, largest, norms, strided, summed, totals
from qsync_opt.sensitivity import GRADIENTS, OPERANDS, SIGN_CHANGE_RATIOS

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


MASK = "mask"
_CHANCES = 1 << 20
"""Elements of a large rectifier that are looked at, evenly spaced; each has several chances to flip."""


@dataclass(slots=True)
class _Held:
    """Values at a node, and their version: what has been written since is known."""

    values: Tensor | None
    version: int
    key: Key


class _Rectifier(NamedTuple):
    """Where a rectifier lets gradients pass, and how far from zero each element is, in half precision."""

    tapper: GainTapper
    name: str
    mask: Tensor
    distance: Tensor


class MaskedRectifier(torch.autograd.Function):
    """A rectifier whose gradient is multiplied by a mask, by which it is differentiated, too."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, where: _Rectifier) -> Tensor:
        """Rectify."""
        ctx.where = where
        return z.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """By the mask alone."""
        return _MaskedGradient.apply(grad, ctx.where), None  # type: ignore[no-untyped-call]


class _MaskedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, where: _Rectifier) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.where = where
        return grad * where.mask

    @staticmethod
    def backward(ctx: Any, derivative: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        where = ctx.where
        where.tapper.flipped(where.name, where.distance, (derivative * grad).square_())
        return derivative * where.mask, None


class GainTapper:
    """Handler of an interception: watches every tensor that can be noisy in a step that is differentiated twice.

    Attributes:
        first: Whether the first differentiation is not over yet.
        last: Whether nothing is differentiated again after the present pass.
        rectified: Elements of the last call of each rectifier.
        weights: By what the projection multiplies the gradient of a parameter, by the parameter's id; 1 otherwise.
        written: Operators whose result was written into before it was looked at; they are to be given as ``copied``.
    """

    def __init__(
        self,
        wanted: frozenset[str] | None,
        arriving: Mapping[str, Arriving],
        *,
        keep: Callable[[Key, int], bool] | None = None,
        copied: frozenset[str] = frozenset(),
    ) -> None:
        """Nothing was seen yet.

        Args:
            wanted: Limits the operators; None is all adjustable ones.
            arriving: How noise is spread over what rectifiers read; evenly, where it does not say.
            keep: From a tensor and its number of elements to whether some of its derivative's are kept.
            copied: Operators whose result is copied for later.
        """
        self._wanted, self._copied = wanted, copied
        self._sizes = _sizes(arriving)
        self._ratios = {name: found.ratio for name, found in arriving.items()}
        self._outputs: dict[int, _Held] = {}
        self._inverse: dict[str, Tensor] = {}
        self._rectified = LastRectified()
        self._sums = DerivativeSums(keep)
        self._gradients = ParameterGradients()
        self._delayed: list[tuple[Delayed, _Held]] = []
        self.weights: dict[int, Tensor] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._elements: dict[Key, int] = {}
        self.first, self.last = True, False
        self.written: set[str] = set()
        self.rectified: dict[str, int] = {}

    # -- the step ------------------------------------------------------------------------------------------------

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator, and watch its operands, its result and their gradients."""
        if call.op_type in RECTIFIERS:
            return self._rectify(call)
        if call.op_type in MAX_POOLS:
            return self._pool(call)
        if call.op_type == "batch_norm":
            normalized = batch_norm_twice(call)
            return call.run() if normalized is None else normalized
        if call.op_type not in ADJUSTABLE or (self._wanted is not None and call.name not in self._wanted):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        lead = int(call.op_type == "embedding")
        operands, watched = [], []
        for operand, gradient, slot in zip(OPERANDS[lead:], GRADIENTS[lead:], slots, strict=False):
            x = slot.tensor
            ends = x.is_leaf  # nothing before it is differentiated
            alias = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            trained = gradient if x.requires_grad else None
            watched.append(self._watch(call.name, operand, trained, alias, x.detach(), leaf=x if ends else None))
            operands.append(alias)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, operands)
        output = self._run(call, args, kwargs, slots, watched)
        values = output.detach()
        held = self._watch(
            call.name, "output", "output_gradient", output, values.clone() if call.name in self._copied else values
        )
        self._sums.note_result(output.numel())
        self._outputs[output.data_ptr()] = held
        return output

    def _run(
        self,
        call: OperatorCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        slots: Sequence[Slot],
        watched: Sequence[_Held],
    ) -> Tensor:
        if call.op_type == "scaled_dot_product_attention":
            attended = attention_twice(args, kwargs)
            if attended is not None:
                return attended
        trained = tuple(slot.tensor.requires_grad for slot in slots[:2])
        found = product_twice(call.op_type, args, kwargs, wait=slots[-1].tensor.is_leaf, trained=trained)
        if found is None:
            plain: Tensor = call.run(*args, **kwargs)
            return plain
        self._delayed.append((found[1], watched[1]))
        return found[0]

    def _watch(
        self, name: str, tensor: str, gradient: str | None, node: Tensor, values: Tensor, *, leaf: Tensor | None = None
    ) -> _Held:
        """Reduce the derivative at a node, and at its gradient, as they come; what ends there goes no further."""
        held = self._hold(name, tensor, values)

        def hook(g: Tensor | None) -> Tensor | None:  # None: nothing depends on what is here
            if self.first and g is not None and gradient is not None:
                if leaf is None or len(leaf._backward_hooks or ()) != 1:  # somebody else's hook may change it
                    return self._watch_gradient(name, gradient, g)
                key = self._hold(name, gradient, g.detach()).key
                self._gradients.add(key, leaf, g)
                return None
            if self.first:
                return None
            self._reduce(g, held)
            return None if leaf is None or g is None else nothing_like(g)

        node.register_hook(hook)  # type: ignore[no-untyped-call]
        return held

    def _hold(self, name: str, tensor: str, values: Tensor) -> _Held:
        call = self._calls[name, tensor]
        self._calls[name, tensor] += 1
        return _Held(values, values._version, (name, tensor, call))

    def _watch_gradient(self, name: str, tensor: str, g: Tensor) -> Tensor:
        known = g.requires_grad
        tap = g.view_as(g) if known else g.detach().requires_grad_()
        held = self._hold(name, tensor, g.detach())

        def hook(derivative: Tensor | None) -> Tensor | None:
            self._reduce(derivative, held)
            return None if known or derivative is None else nothing_like(derivative)

        tap.register_hook(hook)  # type: ignore[no-untyped-call]
        return tap

    def _rectify(self, call: OperatorCall) -> Tensor:
        z: Tensor = call.args[0] if call.args else call.kwargs["input"]
        if not z.requires_grad:
            return call.run()  # type: ignore[no-any-return]
        sizes = self._sizes.get(call.traced_name)
        with torch.no_grad():
            distance = _distance(z, sizes.pop(0) if sizes else None)
        where = _Rectifier(self, call.traced_name, z.detach() > 0, distance)
        read = z.detach().clone() if call.writes else z
        result: Tensor = MaskedRectifier.apply(z, where)  # type: ignore[no-untyped-call]
        if not call.writes:
            self._rectified.keep(result, read)
            return result
        held = self._outputs.get(z.data_ptr())
        if held is not None and held.values is not None and held.values._version == held.version:
            held.values = held.values.clone()
            held.version = held.values._version
        result = z.copy_(result)
        self._rectified.keep(result, read)
        return result

    def _pool(self, call: OperatorCall) -> Any:
        given = pool_call(call.op_type, call.args, call.kwargs)
        if given is None or not given[0].requires_grad:
            return call.run()
        (x, window), name = given, call.traced_name
        known = contest(self._rectified.ranks(x), window)
        sizes = self._sizes.get(name)
        with torch.no_grad():
            even = sizes is None or self._ratios[name] <= 0
            size = (2 * x.detach().square().mean()).sqrt() if even or not sizes else sizes.pop(0)
            if size.dim() > 0:
                size = size.expand(*known.shape[: size.dim() - 1], 1).reshape(-1, 1)
            distance = known.gap.div(size).nan_to_num_(math.inf, math.inf).half()
        share = torch.zeros_like(known.gap).requires_grad_()

        def hook(derivative: Tensor | None) -> Tensor | None:
            if derivative is None:
                return None
            self.flipped(name, distance, derivative.square())
            return nothing_like(derivative)

        share.register_hook(hook)  # type: ignore[no-untyped-call]
        rows = x.reshape(len(share), -1)
        pooled: Tensor = SwitchedPool.apply(rows, share, known.first, known.second)  # type: ignore[no-untyped-call]
        return pooled.view(known.shape)

    # -- the second differentiation ------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, derivative: Tensor | None, held: _Held) -> None:
        values, key = held.values, held.key
        assert values is not None
        if derivative is None:
            derivative = nothing_like(values)
        if values._version != held.version:
            self.written.add(key[0])
            return
        if self.last:
            held.values = None
        self._elements[key] = values.numel()
        self._sums.add(key, derivative, values)

    @torch.no_grad()
    def settle(self) -> None:
        """A second differentiation is over: reduce what came late, or waits for more."""
        for delayed, held in self._delayed:
            late = delayed.taken()
            if late is not None:
                self._reduce(late, held)
        self._sums.flush()

    @torch.no_grad()
    def flipped(self, name: str, distances: Tensor, squares: Tensor) -> None:
        """Squares of the derivatives by the mask of a rectifier, or by the shares of a max-pool."""
        key = (name, MASK, 0)
        self.rectified[name] = squares.numel()
        sizes = self._inverse_sizes(name, squares)
        some = squares.numel() > _CHANCES
        distance, part = (strided(x, _CHANCES) if some else x for x in (distances, squares))
        # Twice the chance that a normal number is beyond the distance.
        chance = (distance.reshape(1, -1) * sizes).erfc_()
        chance[-1].square_()
        found = summed(chance.mul_(part.reshape(1, -1)), 1)
        if some:
            found *= squares.numel() / part.numel()
        self._sums.numbers.append((key, tuple(str(i) for i in range(len(SIGN_CHANGE_RATIOS) + 1)), found))

    def _inverse_sizes(self, name: str, like: Tensor) -> Tensor:
        """Of noise at the ratios that flips are counted at, and the one that was seen, over root 2: (ratios, 1)."""
        if name not in self._inverse:
            names = dict.fromkeys((*self._ratios, name)) if not self._inverse else [name]
            rows = [[*SIGN_CHANGE_RATIOS, self._ratios.get(some, 0.0)] for some in names]
            every = torch.tensor([[(2 * max(ratio, 1e-30)) ** -0.5 for ratio in row] for row in rows], dtype=like.dtype)
            inverse = every.to(like.device, non_blocking=True).unsqueeze(2).unbind()
            self._inverse.update(zip(names, inverse, strict=True))
        return self._inverse[name]

    def found(self, probes: int) -> tuple[dict[Key, Sums], dict[str, list[float]]]:
        """Means over probes: by operator and tensor, and by rectifier; one transfer to the host per type."""
        sums: dict[Key, Sums] = {}
        flips: dict[str, list[float]] = {}
        numbers = self._sums.numbers
        if not numbers:
            return sums, flips
        together: dict[torch.dtype, list[Tensor]] = {}
        for *_, values in numbers:
            together.setdefault(values.dtype, []).append(values)
        host = {dtype: iter(torch.cat(some).tolist()) for dtype, some in together.items()}
        for key, labels, values in numbers:
            for label in labels:
                value = next(host[values.dtype]) / (1.0 if label.startswith("~") else probes)
                if key[1] == MASK:
                    row = flips.setdefault(key[0], [0.0] * len(labels))
                    row[int(label)] += value * (0.5 if int(label) < len(SIGN_CHANGE_RATIOS) else 0.25)
                    continue
                known = sums.setdefault(key, Sums())
                attribute = label.removeprefix("~")
                added = value**2 / probes if label.startswith("~") else value
                setattr(known, attribute, getattr(known, attribute) + added)
        for key, known in sums.items():
            known.elements, known.kept = self._elements[key], self._sums.kept.get(key, [])
        sums |= self._gradients.sums(self.weights)
        for name, row in flips.items():
            if not self._ratios.get(name, 0.0):
                row[-1] = 0.0
        return sums, flips

    def forget(self) -> None:
        """Keep nothing; hooks keep the tapper alive from inside the autograd graph."""
        self._outputs.clear()
        self._rectified.forget()
        self._sums = DerivativeSums(None)
        self._gradients.forget()
        self.weights.clear()
        self._delayed.clear()
        self._sizes.clear()


@functools.lru_cache(maxsize=16)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def nothing_like(x: Tensor) -> Tensor:
    """Zeros that take no memory."""
    return _zero(x.dtype, x.device).expand_as(x)


def _sizes(arriving: Mapping[str, Arriving]) -> dict[str, list[Tensor]]:
    """Of the noise at each rectifier and max-pool, for noise as strong as the signal; few kernels for all."""
    calls = [(name, spread, found.ratio) for name, found in arriving.items() for spread in found.spread]
    if not calls:
        return {}
    sizes = torch._foreach_div([spread for _, spread, _ in calls], [ratio or 1.0 for *_, ratio in calls])
    torch._foreach_sqrt_(sizes)
    together: dict[str, list[Tensor]] = {}
    for (name, *_), size in zip(calls, sizes, strict=True):
        together.setdefault(name, []).append(size)
    return together


def _distance(z: Tensor, size: Tensor | None) -> Tensor:
    """Distance of every element from zero over the size of the noise there, for noise as strong as the signal.

    Where no noise arrives, nothing flips however close it is. In half precision, whose numbers reach from a thousandth
    of the least ratio's root to far beyond where anything flips.
    """
    if size is None or any(few not in (1, many) for few, many in zip(size.shape, z.shape, strict=True)):
        size = z.square().mean().sqrt()
    return z.abs().div_(size).nan_to_num_(math.inf, math.inf).half()
