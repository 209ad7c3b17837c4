"""Time of work on two queues: the host launches kernels, and the device runs them.

The device runs kernels in order and waits where the host is behind. Let ``h`` and ``d`` be the times at which host and
device are free. A piece of work maps them to ``h' = h + host`` and ``d' = max(d + device, h + lag)``: either the device
was busy throughout, or it waited for the host, for the last time ``lag`` before its end. Such maps are closed under
composition, which is associative. A whole pass is therefore one map, exact to the kernel.

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
        device: Time on the device if everything was launched before.
        lag: From the beginning on the host to the end on an idle device; `NEVER` if nothing is launched.
    """

    host: int
    device: int
    lag: int

    def run(self, host_free: int, device_free: int) -> tuple[int, int]:
        """When host and device are free again."""
        return host_free + self.host, max(device_free + self.device, host_free + self.lag)

    def lanes(self, host_free: int, device_free: int) -> list[tuple[str, int, int]]:
        """Stream, start and end on host and device; without the device if that is not used."""
        host_end, device_end = self.run(host_free, device_free)
        lanes = [("host", host_free, host_end)]
        return [*lanes, ("compute", device_end - self.device, device_end)] if self.device else lanes


NOTHING = Work(0, 0, NEVER)


def launched(host: int, kernels: Iterable[tuple[int, int]]) -> Work:
    """Work of one stretch of time ``host`` on the host that launches kernels.

    ``kernels`` are earliest start, from the beginning of the stretch, and duration of each, in order.
    """
    device = 0
    lag = NEVER
    for offset, duration in kernels:
        device += duration
        lag = max(lag, offset) + duration
    return Work(host, device, lag)


def compose(pieces: Iterable[Work]) -> Work:
    """All pieces, one after another."""
    host, device, lag = NOTHING
    for h, d, l in pieces:  # noqa: E741
        lag = max(lag + d, host + l)
        host += h
        device += d
    return Work(host, device, lag)
