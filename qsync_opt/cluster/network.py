"""Links between workers and the time of a ring all-reduce over them, in the alpha-beta (latency, bandwidth) model.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qsync_opt.errors import ProblemError
from qsync_opt.io import Name, check_fields, check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two workers: start-up time per message in seconds and bandwidth in bytes per second.

    ``source`` says where the figures are from (a measurement, a data sheet).
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    source: Name

    def __post_init__(self) -> None:
        what = type(self).__name__.lower()
        check_fields(self, what)
        if self.bandwidth_bytes_per_s == 0:
            raise ProblemError(f"{what}: bandwidth is 0 bytes per second, but it must be above zero")

    def message_s(self, num_bytes: float) -> float:
        """Time of one message in seconds: latency plus bytes over bandwidth."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Network(Link):
    """The link between any two workers that have none of their own: the slowest that an all-reduce crosses."""

    def allreduce_ns(self, num_bytes: int, num_workers: int) -> int:
        """Time of one all-reduce over a ring of this link alone, in nanoseconds; 0 for a single worker."""
        return ring_allreduce_ns([self], num_bytes, num_workers)


def ring_allreduce_ns(links: Iterable[Link], num_bytes: int, num_workers: int) -> int:
    """Time of one all-reduce over a ring, in nanoseconds; 0 for a single worker.

    Each worker sends ``2 (N - 1)`` messages of ``num_bytes / N``, a reduce-scatter and an all-gather. All workers send
    at the same time, so that every message takes as long as the slowest one.

    Args:
        links: Those between neighbors of the ring, at least one if there are several workers.
        num_bytes: Of the tensor that is reduced.
        num_workers: In the ring.
    """
    check_integer(num_bytes, "all-reduce: bytes")
    check_integer(num_workers, "all-reduce: workers", minimum=1)
    messages = 2 * (num_workers - 1)
    return round(messages * max((link.message_s(num_bytes / num_workers) for link in links), default=0.0) * 1e9)
