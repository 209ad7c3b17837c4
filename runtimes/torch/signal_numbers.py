"""Norms of the signals between operators, each taken once, and their way to the host."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from qsync_opt.runtimes.torch.reductions import norm

SignalTensors = tuple[int, dict[str, Tensor]]
"""Of one call: elements of its result; norms ``entering`` and ``leaving``, perhaps ``curvature``, and of a
normalization variances of channels ``before`` and ``after``."""
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
            pairs = zip(numbers.get("before", [1.0]), numbers.get("after", [1.0]), strict=True)
            spread = [after / before if before > 0.0 else 0.0 for before, after in pairs]
            squares = numbers["entering"][0] ** 2, numbers["leaving"][0] ** 2
            rows.append((*squares, *numbers.get("curvature", [0.0]), sum(spread) / len(spread)))
        found[name] = calls[0][0], rows
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
