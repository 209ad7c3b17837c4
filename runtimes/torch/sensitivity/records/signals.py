"""Norms of the signals between operators, each computed once, and their transfer to the host."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsync_opt.runtimes.torch.interception import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.hooks import gradient_hooks
from qsync_opt.runtimes.torch.sensitivity.products import batch_norm_arguments
from qsync_opt.runtimes.torch.sensitivity.reductions import as_real, channel_variances, norm, on_host, square_sum
from qsync_opt.runtimes.torch.sensitivity.signs import RandomSigns
from qsync_opt.sensitivity import GradientNoise


def _square_sum(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return square_sum(values.detach())


class GradientScatter:
    """Sums up the squared gradient norms of batches, whose gradients accumulate in ``.grad``, at first None."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._squares: dict[torch.device, Tensor] = {}
        self._batches = 0
        self._last: dict[int, Tensor] = {}

    def _count(self, square: Tensor) -> None:
        previous = self._squares.get(square.device)
        self._squares[square.device] = square if previous is None else previous + square

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Count the backward pass within the block as one batch."""
        if self._batches == 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._count(_square_sum(parameter.grad))
        watched = self._parameters if self._batches else []
        self._last.clear()

        def hook(index: int, gradient: Tensor) -> None:
            self._last[index] = square = _square_sum(gradient)
            self._count(square)

        with gradient_hooks(watched, hook):
            yield
        self._batches += 1

    def roots(self) -> dict[int, Tensor]:
        """Root mean squares of the last batch's gradients, by the number of the trained parameter."""
        squares = self._last
        if self._batches == 1:
            squares = {i: _square_sum(p.grad) for i, p in enumerate(self._parameters) if p.grad is not None}
        return {i: (square.double() / as_real(self._parameters[i]).numel()).sqrt() for i, square in squares.items()}

    def clear(self) -> None:
        """Release the gradients: no batch follows."""
        for parameter in self._parameters:
            parameter.grad = None

    def noise(self) -> GradientNoise | None:
        """The noise of the gradient; None after fewer than two batches."""
        if self._batches < 2:
            return None
        squares = sum(value.item() for value in self._squares.values())
        whole = [_square_sum(p.grad) for p in self._parameters if p.grad is not None]
        of_sum = sum(value.item() for value in whole)
        # Cancellation may leave a negative number where all batches are alike.
        variance = max(0.0, (squares - of_sum / self._batches) / (self._batches - 1))
        return GradientNoise(mean_square_norm=squares / self._batches, variance=variance)


_CHUNK = 1 << 21
"""Elements of a loss's input, at most, that are differentiated twice at a time if its rows are independent."""
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def loss_curvature(call: OperatorCall, x: Tensor) -> Tensor:
    """Relative energy of the change: |H|^2 mean(x^2) / |g|^2, per unit of noise-to-signal ratio.

    The squared norm of the second derivative H is estimated with one vector of random signs from its own generator.

    Args:
        call: The call of the loss.
        x: Its first floating input, FP32, cut off from autograd.

    Returns:
        One number, FP64, on the device of ``x``; 0 for a linear loss.
    """
    random = RandomSigns(0)
    totals = torch.zeros(2, dtype=torch.float64, device=x.device)
    for function, part in _parts(call, x):
        squares = _norms(function, part, random)
        if squares is not None:
            totals += squares
    mean_square = square_sum(without_masked(x)) / x.numel()
    return totals[0] * mean_square / totals[1].clamp(min=torch.finfo(torch.float64).tiny)


def _norms(function: Callable[[Tensor], Tensor], x: Tensor, random: RandomSigns) -> Tensor | None:
    """Squared norms of H times signs, and of the gradient; None if the function is linear."""
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    if not gradient.requires_grad:
        return None
    # Where the gradient depends on parameters alone, the function is linear in its input.
    changes: tuple[Tensor | None, ...] = torch.autograd.grad(gradient, x, random.like(x.detach()), allow_unused=True)
    if changes[0] is None:
        return None
    return torch.stack([square_sum(t.detach()) for t in (changes[0], gradient)])


def _parts(call: OperatorCall, x: Tensor) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """The loss as a function of parts of its input.

    A large cross-entropy is divided into rows and summed instead of averaged: the factor between the two cancels in the
    ratio of H to the gradient.
    """
    arguments = dict(zip(_CROSS_ENTROPY, call.args, strict=False)) | dict(call.kwargs)
    target = arguments.get("target")
    plain = (
        call.function is F.cross_entropy and arguments.get("size_average") is None and arguments.get("reduce") is None
    )
    if not plain or not isinstance(target, Tensor) or x.dim() != 2 or x.numel() <= _CHUNK or len(target) != len(x):
        read = next(value for value in (*call.args, *call.kwargs.values()) if _same(value, x))
        yield functools.partial(_whole, call, read), x
        return
    rows = max(1, _CHUNK // x.shape[1])
    options = {key: arguments[key] for key in ("weight", "ignore_index", "label_smoothing") if key in arguments}
    for some, labels in zip(torch.split(x, rows), torch.split(target, rows), strict=True):
        yield functools.partial(F.cross_entropy, target=labels, reduction="sum", **options), some


def _same(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == x.shape


def _whole(call: OperatorCall, original: Tensor, x: Tensor) -> Tensor:
    args = tuple(x if value is original else value for value in call.args)
    kwargs = {key: x if value is original else value for key, value in call.kwargs.items()}
    loss: Tensor = call.function(*args, **kwargs)
    return loss


SignalTensors = tuple[int, dict[str, Tensor]]
"""Of one call: elements of its result, and tensors by name: norms ``input`` and ``output``, perhaps ``curvature``;
of a normalization channel variances ``before`` and either ``after``, or its weight (``scale``), the variances that it
divides by unless they are those before (``used``), and the number that it adds to these (``eps``)."""
SignalNumbers = tuple[float, float, float, float]
"""Sums of squares of input and output, curvature, and mean growth of the variance over channels."""


def signals_on_host(signals: Mapping[str, list[SignalTensors]]) -> dict[str, tuple[int, list[SignalNumbers]]]:
    """Numbers of all calls of every signal, with the elements of a result; one transfer per device and type."""
    every = [values for calls in signals.values() for _, tensors in calls for values in tensors.values()]
    host = iter(on_host(every))
    results: dict[str, tuple[int, list[SignalNumbers]]] = {}
    for name, calls in signals.items():
        rows = []
        for _, tensors in calls:
            numbers = {key: next(host) for key in tensors}
            spread = _growths(numbers)
            (curvature,) = numbers.get("curvature", [0.0])
            squares = numbers["input"][0] ** 2, numbers["output"][0] ** 2
            rows.append((*squares, curvature, sum(spread) / len(spread)))
        results[name] = calls[0][0], rows
    return results


def _growths(numbers: Mapping[str, list[float]]) -> list[float]:
    """Growth of the variance of each channel; 1 for other operators than normalizations."""
    before = numbers.get("before", [1.0])
    if "eps" in numbers:
        (eps,), used = numbers["eps"], numbers.get("used", before)
        grown = [x**2 / (u + eps) if u + eps else 0.0 for x, u in zip(numbers["scale"], used, strict=True)]
        return [growth if variance > 0.0 else 0.0 for growth, variance in zip(grown, before, strict=True)]
    pairs = zip(before, numbers.get("after", [1.0]), strict=True)
    return [after / variance if variance > 0.0 else 0.0 for variance, after in pairs]


def normalized(call: OperatorCall, x: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The tensors that give the growth of channel variances in a batch normalization, in few kernels."""
    before = {"before": channel_variances(x)}
    arguments = batch_norm_arguments(call)
    if arguments is None or arguments["weight"] is None:
        return before | {"after": channel_variances(output)}
    tensors = before | {
        "scale": arguments["weight"].detach(),
        "eps": torch.tensor([arguments["eps"]], dtype=torch.float64),
    }
    if not arguments["training"]:
        tensors["used"] = arguments["running_var"].clone()
    return tensors


MASKED = -65504.0
"""Elements down here are no values but a mask (``-inf``, the least number of a format, -1e9): FP16 holds none below."""


def without_masked(x: Tensor) -> Tensor:
    """A copy with zeros in place of masked elements."""
    return F.threshold(x, MASKED, 0.0)


class Norms:
    """Norms of tensors, each computed once, although a result of one operator is an input of the next."""

    def __init__(self, *, masked: bool = True) -> None:
        """Count masked elements, or leave them out."""
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._masked = masked

    def of(self, x: Tensor) -> Tensor:
        """The norm of a tensor's present values."""
        if x.is_inference():
            return self._norm(x)
        entry = self._known.get(id(x))
        if entry is not None and entry[0]() is x and entry[1] == x._version:
            return entry[2]
        value = self._norm(x)
        self._known[id(x)] = weakref.ref(x), x._version, value
        return value

    def _norm(self, x: Tensor) -> Tensor:
        values = x.detach().to(torch.float32)
        return norm(values if self._masked else without_masked(values))
