"""Work on two queues: how long do host and device take when the host launches what the device runs?

The host runs through the program and launches kernels; the device runs them in order and waits where the host is
behind. Let ``h`` and ``d`` be the times at which host and device are free. A piece of work maps them to
``h' = h + host`` and ``d' = max(d + device, h + lag)``: either the device was busy all along, or it waited for the host
once more, last ``lag`` before its end. Such maps are closed under composition, which is associative. So a whole pass is
one map, exact to the kernel, and a changed operator changes one leaf of a tree of maps.

Source: ours; max-plus linear systems as in F. Baccelli et al., "Synchronization and Linearity" (1992).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

from qsync_opt.errors import ProblemError
from qsync_opt.jsonio import Fields, check_integer

NEVER = -(2**62)
"""Lag of work that launches nothing: the device does not wait for it."""


class Work(NamedTuple):
    """One piece of work in integer nanoseconds.

    Attributes:
        host: Time on the host.
        device: Time on the device when all of it was launched before.
        lag: From the beginning on the host to the end on an idle device; `NEVER` if nothing is launched.
    """

    host: int
    device: int
    lag: int

    def then(self, after: Work) -> Work:
        """This work, and ``after`` behind it, as one piece."""
        return Work(
            self.host + after.host,
            self.device + after.device,
            max(self.lag + after.device, self.host + after.lag),
        )

    def run(self, host_free: int, device_free: int) -> tuple[int, int]:
        """When host and device are free again."""
        return host_free + self.host, max(device_free + self.device, host_free + self.lag)


NOTHING = Work(0, 0, NEVER)


def launched(host: int, kernels: Iterable[tuple[int, int]]) -> Work:
    """Work of one stretch on the host that launches kernels.

    Args:
        host: Its time on the host.
        kernels: For each kernel, in order: when it may start at the earliest, from the beginning of the stretch; and
            for how long it occupies the device. Nanoseconds.
    """
    device = 0
    lag = NEVER
    for offset, duration in kernels:
        device += duration
        lag = max(lag, offset) + duration
    return Work(host, device, lag)


def compose(pieces: Iterable[Work]) -> Work:
    """All pieces, one behind the other."""
    host, device, lag = NOTHING
    for h, d, l in pieces:  # noqa: E741
        lag = max(lag + d, host + l)
        host += h
        device += d
    return Work(host, device, lag)


class WorkTree:
    """Pieces of work in order, of which single ones can be changed quickly.

    Args:
        pieces: In order; at least one.
    """

    __slots__ = ("_nodes", "_size")

    def __init__(self, pieces: Sequence[Work]) -> None:
        self._size = 1 << max(0, (len(pieces) - 1).bit_length())
        nodes = [NOTHING] * self._size + list(pieces) + [NOTHING] * (self._size - len(pieces))
        for k in range(self._size - 1, 0, -1):
            a, b = nodes[2 * k], nodes[2 * k + 1]
            nodes[k] = Work(a[0] + b[0], a[1] + b[1], max(a[2] + b[1], a[0] + b[2]))
        self._nodes = nodes

    @property
    def total(self) -> Work:
        """All of it as one piece."""
        return self._nodes[1]

    def __getitem__(self, position: int) -> Work:
        return self._nodes[self._size + position]

    def set(self, position: int, piece: Work) -> None:
        """Change one piece; the total follows."""
        nodes, k = self._nodes, self._size + position
        nodes[k] = piece
        while k > 1:
            k >>= 1
            a, b = nodes[2 * k], nodes[2 * k + 1]
            nodes[k] = Work(a[0] + b[0], a[1] + b[1], max(a[2] + b[1], a[0] + b[2]))
