"""The tensors of a twice differentiated step at which noise can arise, and sums over the derivative at each.

A derivative is reduced as soon as it is known, so that the pass needs no memory for all of them at once. The values
that its elements are weighted by are those that autograd keeps anyway.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import (
    DeferredDerivative,
    attention_twice,
    batch_norm_twice,
    product_twice,
)
from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import (
    MAX_POOLS,
    RECTIFIERS,
    InputNoise,
    LastRectified,
    SwitchedPool,
    contest,
    pool_call,
)
from qsync_opt.runtimes.torch.sensitivity.products import is_adjustable, operand_slots, replace_operands, separate
from qsync_opt.runtimes.torch.sensitivity.reductions import Queue, largest, norms, on_host, strided, summed, totals
from qsync_opt.sensitivity import GRADIENTS, OPERANDS, SIGN_CHANGE_RATIOS

_QUANTIZED = ("first", "second", "output_gradient")
_TOGETHER = 1 << 22
"""Elements that are reduced at a time."""
_SHARE = 1 / 8
"""Part of all results of a step that may be reduced at a time, if more: a step of larger tensors has more memory."""
SAMPLE = 1 << 14
"""Sample size of the derivative of a tensor that all samples of a batch share."""

_LEAST = 1e-30
"""Smallest largest magnitude in INT8; 127 over anything far below is infinite."""

Key = tuple[str, str, int]
"""Operator, tensor, and number of the call."""


@dataclass
class Sums:
    """Sums over the elements of a tensor of one call.

    Attributes:
        plain: Of squared derivatives.
        fixed: Of these times the weights of fixed-point noise; ``fixed_weight`` is the sum of the weights.
        floating: Of these times squared values; ``values`` is the sum of the squared values.
        elements: Number of elements.
        kept: For every probe evenly spaced elements of the derivative, the values there and, of a quantized tensor, the
            weights of fixed-point noise there; (2 or 3, n). Products of these count ``scale`` times.
    """

    plain: float = 0.0
    fixed: float = 0.0
    fixed_weight: float = 0.0
    floating: float = 0.0
    values: float = 0.0
    elements: int = 0
    kept: list[Tensor] = field(default_factory=list)
    scale: float = 1.0


class DerivativeSums(Queue[tuple[Key, Tensor]]):
    """Reduces derivatives, many at once, and keeps samples of some."""

    def __init__(self, keep: Callable[[Key, int], bool] | None) -> None:
        super().__init__(_TOGETHER)
        self._keep = keep
        self._results = 0
        self.numbers: list[tuple[Key, tuple[str, ...], Tensor]] = []
        """Names and numbers of a key; names with a ``~`` have the square root of the number."""
        self.kept: dict[Key, list[Tensor]] = {}

    def count_result(self, elements: int) -> None:
        """Count the elements of a result of the step."""
        self._results += elements
        self.limit = max(_TOGETHER, int(self._results * _SHARE))

    def add(self, key: Key, derivative: Tensor, values: Tensor) -> None:
        """Queue a derivative and the values at its tensor; nothing may write into either any more."""
        self.wait(values, (key, derivative))

    def reduce(self, some: list[tuple[Tensor, tuple[Key, Tensor]]]) -> None:
        """Reduce derivatives of one type and device."""
        if len(some) == 1 and some[0][0].numel() > self.limit:
            self._reduce_large(some.pop())
            return
        keys = [key for _, (key, _) in some]
        derivatives, values = [derivative for _, (_, derivative) in some], [x for x, _ in some]
        products = torch._foreach_mul(derivatives, values)
        self._add_numbers(keys, ("~plain", "~values", "~floating"), [*map(norms, (derivatives, values, products))])
        del products
        fixed: dict[Key, Tensor] = {}
        chosen = [i for i, key in enumerate(keys) if key[1] in _QUANTIZED]
        if chosen:
            changes, parts = [derivatives[i] for i in chosen], [values[i] for i in chosen]
            weights = _fixed_point(parts, _steps(largest(parts)))
            squares = torch._foreach_mul(weights, changes)
            torch._foreach_mul_(squares, changes)
            rounded = [keys[i] for i in chosen]
            self._add_numbers(rounded, ("fixed", "fixed_weight"), [totals(squares), totals(weights)])
            fixed = dict(zip(rounded, weights, strict=True))
        for key, derivative, x in zip(keys, derivatives, values, strict=True):
            self._keep_sample(key, x, derivative, fixed.get(key))

    def _reduce_large(self, one: tuple[Tensor, tuple[Key, Tensor]]) -> None:
        """Reduce one tensor a part at a time."""
        values, (key, derivative) = one
        step = _steps(largest([values])) if key[1] in _QUANTIZED else None
        for part, there in zip(*(torch.split(x.reshape(-1), self.limit) for x in (derivative, values)), strict=True):
            self._add_numbers(
                [key], ("~plain", "~values", "~floating"), [norms([x]) for x in (part, there, part * there)]
            )
            if step is not None:
                weights = _fixed_point([there], step)
                self._add_numbers(
                    [key], ("fixed", "fixed_weight"), [totals([part.square() * weights[0]]), totals(weights)]
                )
        some = strided(values, SAMPLE)
        self._keep_sample(key, values, derivative, None if step is None else _fixed_point([some], step)[0])

    def _keep_sample(self, key: Key, values: Tensor, derivative: Tensor, fixed: Tensor | None) -> None:
        if self._keep is not None and self._keep(key, values.numel()):
            rows = [derivative, values] if fixed is None else [derivative, values, fixed]
            self.kept.setdefault(key, []).append(torch.stack([strided(x, SAMPLE) for x in rows]))

    def _add_numbers(self, keys: Sequence[Key], names: tuple[str, ...], columns: Sequence[Sequence[Tensor]]) -> None:
        """Record numbers of several keys; one column per name."""
        table = torch.stack([x.reshape(()) for row in columns for x in row]).view(len(names), -1)
        self.numbers.extend((key, names, column) for key, column in zip(keys, table.unbind(1), strict=True))


class ParameterGradients(Queue[tuple[Key, int]]):
    """Sums over derivatives with respect to an operator's contribution to the gradient of a parameter.

    Such a derivative is random signs times one number, so only the gradient's norm is needed.
    """

    def __init__(self) -> None:
        super().__init__(_TOGETHER)
        self._norms: list[tuple[Key, int, int, Tensor]] = []

    def add(self, key: Key, parameter: Tensor, gradient: Tensor) -> None:
        """Queue a contribution to a parameter's gradient; nothing may write into it any more."""
        self.wait(gradient.detach(), (key, id(parameter)))

    def reduce(self, some: list[tuple[Tensor, tuple[Key, int]]]) -> None:
        """Keep the norms."""
        for (gradient, item), root in zip(some, norms([x for x, _ in some]), strict=True):
            self._norms.append((*item, gradient.numel(), root))

    def sums(self, weights: Mapping[int, Tensor]) -> dict[Key, Sums]:
        """Sums by key; ``weights`` are the factors of the signs by the parameter's id, by default 1."""
        self.flush()
        if not self._norms:
            return {}
        roots = [root for *_, root in self._norms]
        host = torch.stack([x.double() for x in (*roots, *weights.values())]).tolist()
        numbers = dict(zip(weights, host[len(roots) :], strict=True))
        sums = {}
        for (key, parameter, elements, _), root in zip(self._norms, host, strict=False):
            square, values = numbers.get(parameter, 1.0) ** 2, root**2
            sums[key] = Sums(plain=square * elements, floating=square * values, values=values, elements=elements)
        return sums


def _steps(amaxes: Iterable[Tensor]) -> list[Tensor]:
    """INT8 steps per unit, from largest magnitudes."""
    largest_values = torch.stack(list(amaxes))
    return list((127.0 / largest_values.clamp(min=_LEAST)).unbind())


def _fixed_point(values: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
    """Variances of stochastic rounding to INT8 with one scale, in squared steps: 0 for numbers on the grid."""
    parts = [x * step for x, step in zip(values, steps, strict=True)]
    torch._foreach_frac_(parts)
    torch._foreach_abs_(parts)
    torch._foreach_addcmul_(parts, parts, parts, value=-1)
    return parts


_SIGN_SAMPLE = 1 << 20
"""Sample size, at most, of a rectifier: each element costs several probabilities of a sign change."""


@dataclass(slots=True)
class _Snapshot:
    """Values of a tensor, and their version, which tells whether they have been written into since."""

    values: Tensor | None
    version: int
    key: Key


class _MaskedRectifier(torch.autograd.Function):
    """A rectifier that passes on the squared derivatives of a second differentiation with respect to its mask, too."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, mask: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.where = mask, receive
        return z.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _MaskedGradient.apply(grad, *ctx.where), None, None  # type: ignore[no-untyped-call]


class _MaskedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, mask: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.where = mask, receive
        return grad * mask

    @staticmethod
    def backward(ctx: Any, derivative: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        mask, receive = ctx.where
        receive((derivative * grad).square_())
        return derivative * mask, None, None


class GainTapper:
    """Handler of an interception: watches every tensor that can be noisy in a step that is differentiated twice.

    Attributes:
        first: Whether the first differentiation is still running.
        last: Whether the present pass is the last.
        rectified: Elements of the last call of each rectifier.
        weights: Factor of the projection for the gradient of a parameter, by the parameter's id; by default 1.
        written: Operators whose result was written into before its reduction; the next tapper needs them as ``copied``.
    """

    def __init__(
        self,
        operators: frozenset[str] | None,
        input_noise: Mapping[str, InputNoise],
        *,
        keep: Callable[[Key, int], bool] | None = None,
        copied: frozenset[str] = frozenset(),
    ) -> None:
        """Prepare for one step.

        Args:
            operators: Names of the operators to watch; None for all adjustable ones.
            input_noise: Noise at the inputs of rectifiers; by default it is in proportion to the mean square.
            keep: From a tensor and its number of elements to whether to keep a sample of its derivative.
            copied: Operators whose result is copied, as something writes into it.
        """
        self._operators, self._copied = operators, copied
        self._sizes = _sizes(input_noise)
        self._ratios = {name: noise.ratio for name, noise in input_noise.items()}
        self._outputs: dict[int, _Snapshot] = {}
        self._inverse: dict[str, Tensor] = {}
        self._rectified = LastRectified()
        self._sums = DerivativeSums(keep)
        self._gradients = ParameterGradients()
        self._pending: list[tuple[DeferredDerivative, _Snapshot]] = []
        self.weights: dict[int, Tensor] = {}
        self._calls: Counter[tuple[str, str]] = Counter()
        self._elements: dict[Key, int] = {}
        self._changes: list[tuple[str, Tensor]] = []
        self.first, self.last = True, False
        self.written: set[str] = set()
        self.rectified: dict[str, int] = {}

    # -- the step ------------------------------------------------------------------------------------------------

    def __call__(self, call: OperatorCall) -> Any:
        """Run an operator, and watch its operands, its result and their gradients unless autograd is off there."""
        if not torch.is_grad_enabled():
            return call.run()
        if call.op_type in RECTIFIERS:
            return self._rectify(call)
        if call.op_type in MAX_POOLS:
            return self._pool(call)
        if call.op_type == "batch_norm":
            normalized = batch_norm_twice(call)
            return call.run() if normalized is None else normalized
        if not is_adjustable(call) or (self._operators is not None and call.name not in self._operators):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        lead = int(call.op_type == "embedding")
        operands, watched = [], []
        for operand, gradient, slot in zip(OPERANDS[lead:], GRADIENTS[lead:], slots, strict=False):
            x = slot.tensor
            alias = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            trained = gradient if x.requires_grad else None
            watched.append(self._watch(call.name, operand, trained, alias, x.detach(), leaf=x if x.is_leaf else None))
            operands.append(alias)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, operands)
        output: Tensor | None = None
        if call.op_type == "scaled_dot_product_attention":
            output = attention_twice(args, kwargs)
        else:
            reached = [slot.tensor.requires_grad for slot in slots[:2]]
            twice = product_twice(call.op_type, args, kwargs, defer=slots[-1].tensor.is_leaf, trained=reached)
            if twice is not None:
                output = twice[0]
                self._pending.append((twice[1], watched[1]))
        if output is None:
            output = separate(call.run(*args, **kwargs))
        values = output.detach()
        if call.name in self._copied:
            values = values.clone()
        snapshot = self._watch(call.name, "output", "output_gradient", output, values)
        self._sums.count_result(output.numel())
        self._outputs[output.data_ptr()] = snapshot
        return output

    def _watch(
        self, name: str, tensor: str, gradient: str | None, node: Tensor, values: Tensor, *, leaf: Tensor | None = None
    ) -> _Snapshot:
        """Reduce the derivatives at a node and at its gradient as they come; a leaf receives zeros."""
        snapshot = self._snapshot(name, tensor, values)
        reduce = self._reducer(snapshot, ends=leaf is not None)

        def hook(g: Tensor | None) -> Tensor | None:  # None: nothing depends on what is here
            if not self.first:
                return reduce(g)
            if g is None or gradient is None:
                return None
            seen = self._snapshot(name, gradient, g.detach())
            if leaf is not None and len(leaf._backward_hooks or ()) == 1:  # another hook may change it
                self._gradients.add(seen.key, leaf, g)
                return None
            tap = g.view_as(g) if g.requires_grad else g.detach().requires_grad_()
            tap.register_hook(self._reducer(seen, ends=not g.requires_grad))  # type: ignore[no-untyped-call]
            return tap

        node.register_hook(hook)  # type: ignore[no-untyped-call]
        return snapshot

    def _reducer(self, snapshot: _Snapshot, *, ends: bool) -> Callable[[Tensor | None], Tensor | None]:
        """A hook that reduces a derivative; where autograd ends, it hands on zeros."""

        def hook(derivative: Tensor | None) -> Tensor | None:
            self._reduce(derivative, snapshot)
            return expanded_zeros(derivative) if ends and derivative is not None else None

        return hook

    def _snapshot(self, name: str, tensor: str, values: Tensor) -> _Snapshot:
        call = self._calls[name, tensor]
        self._calls[name, tensor] += 1
        return _Snapshot(values, values._version, (name, tensor, call))

    def _rectify(self, call: OperatorCall) -> Tensor:
        z: Tensor = call.args[0] if call.args else call.kwargs["input"]
        if not z.requires_grad:
            return call.run()  # type: ignore[no-any-return]
        sizes = self._sizes.get(call.traced_name)
        with torch.no_grad():
            distance = _distance(z, sizes.pop(0) if sizes else None)
        receive = functools.partial(self.add_sign_changes, call.traced_name, distance)
        read = z.detach().clone() if call.writes else z
        result: Tensor = _MaskedRectifier.apply(z, z.detach() > 0, receive)  # type: ignore[no-untyped-call]
        if not call.writes:
            self._rectified.keep(result, read)
            return result
        snapshot = self._outputs.get(z.data_ptr())
        if snapshot is not None and snapshot.values is not None and snapshot.values._version == snapshot.version:
            snapshot.values = snapshot.values.clone()
            snapshot.version = snapshot.values._version
        result = z.copy_(result)
        self._rectified.keep(result, read)
        return result

    def _pool(self, call: OperatorCall) -> Any:
        pool = pool_call(call.op_type, call.args, call.kwargs)
        if pool is None or not pool[0].requires_grad:
            return call.run()
        (x, window), name = pool, call.traced_name
        windows = contest(self._rectified.ranks(x), window)
        sizes = self._sizes.get(name)
        with torch.no_grad():
            even = sizes is None or self._ratios[name] <= 0
            size = (2 * x.detach().square().mean()).sqrt() if even or not sizes else sizes.pop(0)
            if size.dim() > 0:
                size = size.expand(*windows.shape[: size.dim() - 1], 1).reshape(-1, 1)
            distance = windows.gap.div(size).nan_to_num_(math.inf, math.inf).half()
        share = torch.zeros_like(windows.gap).requires_grad_()

        def hook(derivative: Tensor | None) -> Tensor | None:
            if derivative is None:
                return None
            self.add_sign_changes(name, distance, derivative.square())
            return expanded_zeros(derivative)

        share.register_hook(hook)  # type: ignore[no-untyped-call]
        rows = x.reshape(len(share), -1)
        pooled: Tensor = SwitchedPool.apply(rows, share, windows.first, windows.second)  # type: ignore[no-untyped-call]
        return pooled.view(windows.shape)

    # -- the second differentiation ------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, derivative: Tensor | None, snapshot: _Snapshot) -> None:
        values, key = snapshot.values, snapshot.key
        assert values is not None
        if derivative is None:
            derivative = expanded_zeros(values)
        if values._version != snapshot.version:
            self.written.add(key[0])
            return
        if self.last:
            snapshot.values = None
        self._elements[key] = values.numel()
        self._sums.add(key, derivative, values)

    @torch.no_grad()
    def settle(self) -> None:
        """Finish a second differentiation: reduce deferred and queued derivatives."""
        for pending, snapshot in self._pending:
            deferred = pending.pop()
            if deferred is not None:
                self._reduce(deferred, snapshot)
        self._sums.flush()

    @torch.no_grad()
    def add_sign_changes(self, name: str, distances: Tensor, squares: Tensor) -> None:
        """Add the variance of sign changes, from squared derivatives by a rectifier's mask or a max-pool's shares."""
        self.rectified[name] = squares.numel()
        sizes = self._inverse_sizes(name, squares)
        some = squares.numel() > _SIGN_SAMPLE
        distance, part = (strided(x, _SIGN_SAMPLE) if some else x for x in (distances, squares))
        # Twice the probability that a normal number exceeds the distance.
        probability = (distance.reshape(1, -1) * sizes).erfc_()
        probability[-1].square_()
        changes = summed(probability.mul_(part.reshape(1, -1)), 1)
        if some:
            changes *= squares.numel() / part.numel()
        self._changes.append((name, changes))

    def _inverse_sizes(self, name: str, like: Tensor) -> Tensor:
        """Inverse noise levels over root 2 at ``SIGN_CHANGE_RATIOS`` and at the measured ratio: (ratios, 1)."""
        if name not in self._inverse:
            ratios = [*SIGN_CHANGE_RATIOS, self._ratios.get(name, 0.0)]
            sizes = torch.tensor([[(2 * max(ratio, 1e-30)) ** -0.5] for ratio in ratios], dtype=like.dtype)
            self._inverse[name] = sizes.to(like.device, non_blocking=True)
        return self._inverse[name]

    def results(self, probes: int) -> tuple[dict[Key, Sums], dict[str, list[float]]]:
        """Means over probes: by operator and tensor, and by rectifier; one transfer to the host per type."""
        sums: dict[Key, Sums] = {}
        flips: dict[str, list[float]] = {}
        numbers = self._sums.numbers
        host = on_host([values for *_, values in numbers] + [values for _, values in self._changes])
        for (key, names, _), row in zip(numbers, host, strict=False):
            sums_of_key = sums.setdefault(key, Sums(elements=self._elements[key], kept=self._sums.kept.get(key, [])))
            for name, number in zip(names, row, strict=True):
                attribute = name.removeprefix("~")
                added = (number**2 if name.startswith("~") else number) / probes
                setattr(sums_of_key, attribute, getattr(sums_of_key, attribute) + added)
        factors = [0.5] * len(SIGN_CHANGE_RATIOS) + [0.25]
        for (name, _), row in zip(self._changes, host[len(numbers) :], strict=True):
            before = flips.get(name, [0.0] * len(row))
            flips[name] = [x + change / probes * factor for x, change, factor in zip(before, row, factors, strict=True)]
        for name, row in flips.items():
            if not self._ratios.get(name, 0.0):
                row[-1] = 0.0
        return sums | self._gradients.sums(self.weights), flips

    def clear(self) -> None:
        """Release all tensors: hooks in the autograd graph keep the tapper alive."""
        self._outputs.clear()
        self._rectified.clear()
        self._sums = DerivativeSums(None)
        self._gradients.clear()
        self.weights.clear()
        self._pending.clear()
        self._sizes.clear()


@functools.lru_cache(maxsize=16)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def expanded_zeros(x: Tensor) -> Tensor:
    """Zeros of a tensor's shape that take no memory."""
    return _zero(x.dtype, x.device).expand_as(x)


def _sizes(input_noise: Mapping[str, InputNoise]) -> dict[str, list[Tensor]]:
    """Noise levels at each rectifier and max-pool, per call, for noise as strong as the signal."""
    calls = [(name, spread, noise.ratio) for name, noise in input_noise.items() for spread in noise.spread]
    if not calls:
        return {}
    sizes = torch._foreach_div([spread for _, spread, _ in calls], [ratio or 1.0 for *_, ratio in calls])
    torch._foreach_sqrt_(sizes)
    together: dict[str, list[Tensor]] = {}
    for (name, *_), size in zip(calls, sizes, strict=True):
        together.setdefault(name, []).append(size)
    return together


def _distance(z: Tensor, size: Tensor | None) -> Tensor:
    """Distance of every element from zero in units of the noise there, for noise as strong as the signal.

    Infinite without noise. Half precision reaches from a thousandth of the smallest ratio's root to far beyond any
    distance with a noticeable probability.
    """
    if size is None or any(few not in (1, many) for few, many in zip(size.shape, z.shape, strict=True)):
        size = z.square().mean().sqrt()
    return z.abs().div_(size).nan_to_num_(math.inf, math.inf).half()
