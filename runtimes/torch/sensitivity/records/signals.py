"""Norms of the signals between operators, each taken once, and their way to the host."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_opt.runtimes.torch.interception.operator_calls import OperatorCall
from qsync_opt.runtimes.torch.sensitivity.reductions import channel_variances, norm

_BATCH_NORM = inspect.signature(F.batch_norm)

SignalTensors = tuple[int, dict[str, Tensor]]
"""Of one call: elements of its result; norms ``entering`` and ``leaving``, perhaps ``curvature``, and of a
normalization variances of channels ``before`` and either ``after`` or, instead, what it multiplies by (``scale``), the
variances that it divides by unless they are those before (``used``), and what it adds to these (``eps``)."""
SignalNumbers = tuple[float, float, float, float]
"""Sums of squares entering and leaving, curvature, and mean over channels by how much variance grows."""


def signals_on_host(signals: Mapping[str, list[SignalTensors]]) -> dict[str, tuple[int, list[SignalNumbers]]]:
    """What was seen of signals, by name; one transfer per device."""
    every = [values for calls in signals.values() for _, seen in calls for values in seen.values()]
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for values in every:
        places.setdefault((values.device, values.dtype), []).append(values)
    host = {place: iter(torch.cat([x.reshape(-1) for x in some]).tolist()) for place, some in places.items()}
    found: dict[str, tuple[int, list[SignalNumbers]]] = {}
    for name, calls in signals.items():
        rows = []
        for _, seen in calls:
            numbers = {
                key: list(itertools.islice(host[values.device, values.dtype], values.numel()))
                for key, values in seen.items()
            }
            spread = _growths(numbers)
            squares = numbers["entering"][0] ** 2, numbers["leaving"][0] ** 2
            rows.append((*squares, *numbers.get("curvature", [0.0]), sum(spread) / len(spread)))
        found[name] = calls[0][0], rows
    return found


def _growths(numbers: Mapping[str, list[float]]) -> list[float]:
    """By how much the variance of each channel grows; 1 of what is no normalization."""
    before = numbers.get("before", [1.0])
    if "eps" in numbers:
        (eps,), used = numbers["eps"], numbers.get("used", before)
        grown = [x**2 / (u + eps) if u + eps else 0.0 for x, u in zip(numbers["scale"], used, strict=True)]
        return [growth if variance > 0.0 else 0.0 for growth, variance in zip(grown, before, strict=True)]
    pairs = zip(before, numbers.get("after", [1.0]), strict=True)
    return [after / variance if variance > 0.0 else 0.0 for variance, after in pairs]


def normalized(call: OperatorCall, entering: Tensor, leaving: Tensor) -> dict[str, Tensor]:
    """What tells by how much a batch normalization makes the variance of each channel grow, in few kernels."""
    before = {"before": channel_variances(entering)}
    if call.function is not F.batch_norm:
        return before | {"after": channel_variances(leaving)}
    bound = _BATCH_NORM.bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["weight"] is None:
        return before | {"after": channel_variances(leaving)}
    found = before | {"scale": given["weight"].detach(), "eps": torch.tensor([given["eps"]], dtype=torch.float64)}
    if not given["training"]:
        found["used"] = given["running_var"].clone()
    return found


class Norms:
    """Norms of tensors, each taken once: what leaves one operator enters the next."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def of(self, x: Tensor) -> Tensor:
        """The norm of a tensor's present values."""
        if x.is_inference():
            return norm(x.detach().to(torch.float32))
        known = self._known.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        found = norm(x.detach().to(torch.float32))
        self._known[id(x)] = weakref.ref(x), x._version, found
        return found
