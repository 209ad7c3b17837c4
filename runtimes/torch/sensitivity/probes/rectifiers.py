"""The noise at the inputs of rectifiers and max-pools, and the shift of the mean gradient, measured by noisy passes.

How often an element changes its sign depends on the noise *there*: a batch normalization enlarges the channels of
small variance, and their noise with them; an image with large activations is noisier than others; a residual branch has
noisy channels of its own. With one noise level for a whole tensor, sign changes in ResNet-50 come out a third too few.
So the step runs once as it is and a few times with both operands of every product rounded to INT8, stochastically; the
result is the mean square of the difference at the input of each rectifier, per image and channel and in total. For a
max-pool it is the change of the gap between the two largest elements of a window.

The gradients of the noisy passes show by how much the *mean* gradient moves: the product of the deviations of two
independent draws is in expectation the squared norm of that shift. Noise of zero mean shifts it because the mean
gradient is that of the loss which the noise smooths.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.kernels import CONVOLUTIONS, KernelOptions
from qsync_opt.kernels.quantize import dequantize, quantize_int8
from qsync_opt.runtimes.torch.interception import Interception, OperatorCall
from qsync_opt.runtimes.torch.sensitivity.hooks import gradient_hooks
from qsync_opt.runtimes.torch.sensitivity.products import BILINEAR, is_adjustable, operand_slots, replace_operands
from qsync_opt.runtimes.torch.sensitivity.reductions import norms, square_sum, strided, totals

_POOLS: dict[str, Any] = {
    "max_pool1d": F.max_pool1d_with_indices,
    "max_pool2d": F.max_pool2d_with_indices,
    "max_pool3d": F.max_pool3d_with_indices,
}
MAX_POOLS: tuple[str, ...] = tuple(_POOLS)
_SIGNATURE = inspect.signature(
    lambda input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False: None
)


class Window(NamedTuple):
    """The arguments of a pool, one number per dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil: bool


class Contest(NamedTuple):
    """The two largest elements of every window of a max-pool, which compete for its gradient.

    Attributes:
        first: Index of the largest in the flattened spatial dimensions, (leading, windows), leading dimensions as one.
        second: Index of the second largest; the same as ``first`` in a window of one element.
        gap: Difference of the two; infinite in a window of one element.
        shape: Shape of the pool's result.
    """

    first: Tensor
    second: Tensor
    gap: Tensor
    shape: tuple[int, ...]

    def gap_in(self, x: Tensor) -> Tensor:
        """Difference of the same two elements in another tensor of the same shape; may be negative."""
        rows = x.detach().reshape(len(self.first), -1)
        return rows.gather(1, self.first) - rows.gather(1, self.second)


class LastRectified:
    """The input of the last rectifier, for a pool that reads its result."""

    def __init__(self) -> None:
        self._pair: tuple[Tensor, Tensor] | None = None

    def keep(self, result: Tensor, z: Tensor) -> None:
        """Store result and input of a rectifier; nothing may write into ``z`` any more."""
        self._pair = result, z.detach()

    def ranks(self, x: Tensor) -> Tensor:
        """The tensor by which a pool of ``x`` ranks its elements."""
        return self._pair[1] if self._pair is not None and self._pair[0] is x else x

    def clear(self) -> None:
        """Keep no tensor."""
        self._pair = None


def pool_call(op_type: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Window] | None:
    """Input and window of a call of one of ``MAX_POOLS``; None if it also asks for indices."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    if arguments["return_indices"]:
        return None
    dims = int(op_type[-2])
    stride = arguments["stride"]
    if stride is None or (isinstance(stride, Sequence) and not stride):
        stride = arguments["kernel_size"]
    extents = arguments["kernel_size"], stride, arguments["padding"], arguments["dilation"]
    kernel, steps, padding, dilation = (_each(extent, dims) for extent in extents)
    return arguments["input"], Window(kernel, steps, padding, dilation, bool(arguments["ceil_mode"]))


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, Sequence):
        return tuple(value) * dims if len(value) == 1 else tuple(value)
    return (value,) * dims


@torch.no_grad()
def contest(x: Tensor, window: Window) -> Contest:
    """The two largest elements of every window of ``x`` (leading, spatial); of equal ones torch's choice is first."""
    dims = len(window.kernel)
    spatial = x.shape[-dims:]
    lead, x = x.shape[:-dims], x.detach().reshape(-1, 1, *spatial)
    largest, first = _POOLS[f"max_pool{dims}d"](
        x, list(window.kernel), list(window.stride), list(window.padding), list(window.dilation), window.ceil, True
    )
    sizes = largest.shape[-dims:]
    edges, reach = [], []
    for size, out, kernel, stride, padding, dilation in zip(spatial, sizes, *window[:4], strict=True):
        needed = (out - 1) * stride + dilation * (kernel - 1) + 1
        edges.append((padding, max(0, needed - size - padding)))
        reach.append(stride * (out - 1) + 1)
    flat = [edge for pair in reversed(edges) for edge in pair]
    padded = F.pad(x, flat, value=-math.inf)
    places = F.pad(torch.arange(math.prod(spatial), device=x.device).view(1, 1, *spatial), flat, value=-1)
    rival, second = torch.full_like(largest, -math.inf), first.clone()
    for tap in itertools.product(*(range(kernel) for kernel in window.kernel)):
        slices = [
            slice(t * dilation, t * dilation + length, stride)
            for t, dilation, length, stride in zip(tap, window.dilation, reach, window.stride, strict=True)
        ]
        picked: tuple[Any, ...] = (..., *slices)
        value, place = padded[picked], places[picked]
        better = (value > rival) & (place != first)
        rival, second = torch.where(better, value, rival), torch.where(better, place, second)
    return Contest(first.flatten(1), second.flatten(1), (largest - rival).flatten(1), (*lead, *sizes))


class SwitchedPool(torch.autograd.Function):
    """A pool that passes a share of its gradient to the second largest element of each window.

    The share is 0, but the gradient depends on it. Share and result have the shape of ``Contest.gap``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The largest elements; ``x`` is (leading, elements)."""
        ctx.save_for_backward(share, first, second)
        ctx.elements = x.shape[1]
        return x.gather(1, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Divide the gradient by the share."""
        share, first, second = ctx.saved_tensors
        gradient = grad.new_zeros((len(grad), ctx.elements))
        moved = grad * share
        return gradient.scatter_add(1, first, grad - moved).scatter_add(1, second, moved), None, None, None


RECTIFIERS = ("relu", "relu_")
"""Operators whose derivative jumps at zero."""
KINKED = (*RECTIFIERS, *MAX_POOLS)
"""Operators whose derivative jumps."""
PASSES = 6
"""Passes with noise. With two, the root of a mean square of few elements comes out a tenth too small, and the shift is
known to a fifth of the variance; with six to a twentieth."""

_ELEMENTS = 1 << 14
"""Sample size, at most, of each parameter's gradient in the estimate of the shift."""


class InputNoise(NamedTuple):
    """Noise at the input of a rectifier or max-pool.

    Attributes:
        ratio: Its energy over that of the signal, all calls together.
        spread: Mean square, per call, broadcasting against the input: per sample and channel where there are
            positions, else per element, over the batch. Of a max-pool the mean square change of the gaps, per sample
            and channel, (..., 1).
    """

    ratio: float
    spread: tuple[Tensor, ...]

    def of_some(self, chosen: range, share: float) -> InputNoise:
        """The noise of some samples, a share of the measured ones; the mean over samples where it is per element."""
        samples = round(len(chosen) / share)

        def some(spread: Tensor) -> Tensor:
            if spread.shape[0] in (1, samples):
                return spread if spread.shape[0] == 1 else spread[chosen.start : chosen.stop : chosen.step]
            return spread.mean(0, keepdim=True)

        return InputNoise(self.ratio, tuple(some(spread) for spread in self.spread))


class NoiseMeasurement(NamedTuple):
    """The result of noisy passes.

    Attributes:
        input_noise: Noise at each rectifier and max-pool; empty if the step has none.
        shift: Squared norm by which the mean of the gradient moves; an estimate, so that it may be negative.
    """

    input_noise: Mapping[str, InputNoise]
    shift: float

    def of_some(self, chosen: range, share: float) -> NoiseMeasurement:
        """The noise of some samples; see `InputNoise.of_some`."""
        return NoiseMeasurement({name: noise.of_some(chosen, share) for name, noise in self.input_noise.items()}, 0.0)


NO_NOISE = NoiseMeasurement({}, 0.0)


class _NoisyPasses:
    """Handler of an interception: rounds operands in all passes but the first, and compares inputs of rectifiers."""

    def __init__(self, operators: frozenset[str] | None, passes: int) -> None:
        self._operators, self._passes = operators, passes
        self.draw = -1
        """Number of the pass; -1 is the one without noise."""
        self.reference: dict[str, list[Tensor]] = {}
        self._windows: dict[str, list[Contest]] = {}
        self._rectified = LastRectified()
        self.spread: dict[str, list[Tensor]] = {}
        self._gaps: dict[str, list[Tensor]] = {}
        self.calls: Counter[str] = Counter()
        self._seeds: dict[str, int] = {}
        self.recomputing: Callable[[], bool] = lambda: False

    def __call__(self, call: OperatorCall) -> Any:
        if call.op_type in KINKED:
            if self.recomputing():  # by activation checkpointing: the same numbers again
                return call.run()
            return self._pool(call) if call.op_type in MAX_POOLS else self._rectify(call)
        chosen = self._operators is None or call.name in self._operators
        if self.draw < 0 or call.op_type not in BILINEAR or not chosen or not is_adjustable(call):
            return call.run()
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        seed = self._seeds.setdefault(call.name, len(self._seeds))  # by name: a recomputation rounds alike
        options = KernelOptions(seed=seed, offset=self.draw)
        rounded = []
        for stream, slot in enumerate(slots):
            dims = _weight_slices(call.op_type, slot.tensor) if stream == 1 else None
            plain = slot.tensor.detach()
            values = dequantize(quantize_int8(plain, dims, options, stream), plain.dtype)
            if torch.is_grad_enabled():
                values = _StraightThrough.apply(slot.tensor, values)  # type: ignore[no-untyped-call]
            rounded.append(values)
        args, kwargs = replace_operands(call.args, call.kwargs, slots, rounded)
        return call.run(*args, **kwargs)

    def _rectify(self, call: OperatorCall) -> Any:
        z: Tensor = call.args[0] if call.args else call.kwargs["input"]
        read = z.detach().clone() if call.writes else z
        self._compare(call.traced_name, read, _per_channel)
        result = call.run()
        self._rectified.keep(result, read)
        return result

    def _pool(self, call: OperatorCall) -> Any:
        pool = pool_call(call.op_type, call.args, call.kwargs)
        if pool is not None:
            x, window = pool
            ranked, name = self._rectified.ranks(x), call.traced_name
            if self.draw < 0:
                self._windows.setdefault(name, []).append(contest(ranked, window))
            number, windows = self.calls[name], self._windows.get(name, [])
            if number < len(windows):
                leading = x.shape[: -len(window.kernel)]
                self._compare(name, x, lambda _: _gap_spread(windows[number], ranked).view(*leading, 1))
        return call.run()

    @torch.no_grad()
    def _compare(self, name: str, z: Tensor, spread_of: Callable[[Tensor], Tensor]) -> None:
        number = self.calls[name]
        self.calls[name] += 1
        if self.draw < 0:
            self.reference.setdefault(name, []).append(z.clone())
            return
        references = self.reference.get(name, [])
        if number >= len(references) or references[number].shape != z.shape:
            return  # the step took another path
        squares = (z - references[number]).square_()
        sums = [(self.spread, spread_of(squares))]
        if spread_of is not _per_channel:  # whose mean is that of all
            sums.append((self._gaps, squares.mean()))
        for place, value in sums:
            sums_of_calls = place.setdefault(name, [])
            if number == len(sums_of_calls):
                sums_of_calls.append(value)
            else:
                sums_of_calls[number] += value

    def clear(self) -> None:
        """Release all activations."""
        self.reference.clear()
        self._windows.clear()
        self._rectified.clear()

    def results(self) -> dict[str, InputNoise]:
        """Mean noise over all noisy passes, by rectifier and max-pool; one transfer to the host."""
        names = list(self.spread)
        if not names:
            return {}
        calls = [(name, number) for name in names for number in range(len(self.spread[name]))]
        reference = [self.reference[name][number] for name, number in calls]
        noisy = [(self._gaps.get(name) or self.spread[name])[number] for name, number in calls]
        signal, noise = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        host = torch.stack([x.double() for x in (*norms(reference), *totals(noisy))]).tolist()
        for (name, _), z, x, root, total in zip(
            calls, reference, noisy, host[: len(calls)], host[len(calls) :], strict=True
        ):
            signal[name] += root**2
            noise[name] += total / x.numel() * z.numel() / self._passes
        ratios = {name: noise[name] / signal[name] if signal[name] else 0.0 for name in names}
        spreads = [spread for name in names for spread in self.spread[name]]
        rest = iter(torch._foreach_div(spreads, float(self._passes)))
        return {
            name: InputNoise(ratios[name] if math.isfinite(ratios[name]) else 0.0, tuple(next(rest) for _ in spread))
            for name, spread in self.spread.items()
        }


def _per_channel(squares: Tensor) -> Tensor:
    return squares.mean(tuple(range(2, squares.dim())) if squares.dim() > 3 else 0, keepdim=True)


def _gap_spread(windows: Contest, ranked: Tensor) -> Tensor:
    counted = windows.gap.isfinite() & (windows.gap > 0)
    squares = torch.where(counted, (windows.gap_in(ranked) - windows.gap).square_(), 0.0)
    return squares.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)


def _weight_slices(op_type: str, tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions of a second operand that share a scale, one per output channel where it is a weight."""
    if op_type in CONVOLUTIONS or op_type == "linear":
        return tuple(range(1, tensor.dim()))
    return (0,) if tensor.dim() == 2 and op_type != "einsum" else None


class _MeanShift:
    """Squared norm of the mean deviation of a gradient, from independent draws and some elements of each parameter."""

    def __init__(self) -> None:
        self._parts: dict[int, Tensor] = {}
        self._exact: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: list[Tensor] = []

    def hook(self, index: int, g: Tensor) -> Tensor:
        """Sample a gradient, and keep nothing of its size."""
        some = strided(g, _ELEMENTS)
        self._parts[index] = some * math.sqrt(g.numel() / some.numel())
        return g.new_zeros(()).expand_as(g)

    def add(self) -> None:
        """Finish a pass: the first is the one without noise."""
        if not self._parts:
            return
        gradient = torch.cat([self._parts[i] for i in sorted(self._parts)])
        self._parts.clear()
        if self._exact is None:
            self._exact, self._sum = gradient, torch.zeros_like(gradient)
            return
        assert self._sum is not None
        deviation = gradient.sub_(self._exact)
        self._sum += deviation
        self._squares.append(square_sum(deviation))

    def estimate(self) -> float:
        """Mean product of the deviations over pairs of draws."""
        draws = len(self._squares)
        if self._sum is None or draws < 2:
            return 0.0
        return float((square_sum(self._sum) - torch.stack(self._squares).sum()) / (draws * (draws - 1)))


class _StraightThrough(torch.autograd.Function):
    """Replaces values in the forward pass and passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


def noisy_passes(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    operators: frozenset[str] | None = None,
    *,
    shift: bool = True,
    passes: int = PASSES,
) -> NoiseMeasurement:
    """The noise at a step's rectifiers and pools, and in the mean gradient, when all products round operands to INT8.

    Runs one training step and some with rounding, and keeps the inputs of rectifiers meanwhile. Every pass draws the
    same random numbers for the model's own use, and restores the generators.

    Args:
        model: The model.
        loss_of: Runs the model on the batch and returns the loss.
        operators: Names of the operators that round; None for all.
        shift: Whether to measure the shift; without it the passes are forward passes, a third of the work.
        passes: Number of passes with rounding.

    Source:
        Ours.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    watch, shifted = _NoisyPasses(operators, passes), _MeanShift()
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    interception = Interception(model, watch, kinds=KINKED)
    watch.recomputing = lambda: interception.recomputing
    try:
        for draw in range(-1, passes):
            watch.draw = draw
            watch.calls.clear()
            with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(shift):
                loss = loss_of()
            if not watch.reference:
                return NO_NOISE
            if not shift:
                continue
            with gradient_hooks(parameters, shifted.hook):
                torch.autograd.grad(loss, parameters, allow_unused=True)
            shifted.add()
        return NoiseMeasurement(watch.results(), shifted.estimate())
    finally:
        interception.remove()
        watch.clear()  # something may still refer to the handler
