"""Work on two queues: how long do host and device take when the host launches what the device runs?

The host runs through the program and launches kernels; the device runs them in order and waits where the host is
behind. Let ``h`` and ``d`` be the times at which host and device are free. A piece of work maps them to
``h' = h + host`` and ``d' = max(d + device, h + lag)``: either the device was busy all along, or it waited for the host
once more, last ``lag`` before its end. Such maps are closed under composition, which is associative. So a whole pass is
one map, exact to the kernel.

Source: ours; max-plus linear systems as in F. Baccelli et al., "Synchronization and Linearity" (1992).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
