"""Time of work on two queues: the host launches kernels, and the device runs them.

The device runs kernels in order and waits where the host is behind. Let ``h`` and ``d`` be the times at which host and
device are free. A piece of work maps them to ``h' = h + host`` and ``d' = max(d + device, h + lag)``: either the device
was busy throughout, or it waited for the host, for the last time ``lag`` before its end. Such maps are closed under
composition, which is associative. A whole pass is therefore one map, exact to the kernel.

Source: ours; max-plus linear systems as in F. Baccelli et al., "Synchronization and Linearity" (1992).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qsync_opt.errors import ProblemError

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
    """Work of one stretch on the host that launches kernels.

    Args:
        host: Its time on the host.
        kernels: Earliest start, from the beginning of the stretch, and duration of each kernel, in order.
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


Tails = Sequence[tuple[int, int]]
"""For each gradient bucket the segment that completes it, and the time of its all-reduce and all later ones."""


class StepCycle:
    """The recurring step of a worker: everything around the last micro-batch's forward and backward pass.

    Args:
        phases: Work outside of operators, by label; those of copies and clipping may be missing.
        micro_batches: Forward and backward passes per step.
    """

    def __init__(self, phases: Mapping[str, Work], micro_batches: int) -> None:
        self.copies = phases.get("copies", NOTHING)
        self.finish = phases["backward|end"]
        self.optimizer = compose([phases.get("clip", NOTHING), phases["optimizer"], phases["zero_grad"]])
        self.earlier = micro_batches - 1

    def steady_ns(self, host_ns: int, device_ns: Sequence[int], slowed_ns: int, tails: Tails) -> tuple[int, int]:
        """Time of a step by the host's cycle, and by the longer of the device's and the network's.

        Args:
            host_ns: Of one forward and backward pass.
            device_ns: Of its segments.
            slowed_ns: Part of ``device_ns`` caused by all-reduces; earlier micro-batches have none.
            tails: See `Tails`.

        Source: maximum cycle mean of a max-plus linear system (Baccelli et al., 1992).
        """
        copies, finish, optimizer = self.copies, self.finish, self.optimizer
        now, begin_host = copies.device, copies.host
        if self.earlier:
            now += self.earlier * (copies.device + sum(device_ns) - slowed_ns + finish.device)
            begin_host += self.earlier * (copies.host + host_ns + finish.host)
        ready = []
        for device in device_ns:
            now += device
            ready.append(now)
        longest = now
        try:
            for segment, tail in tails:
                if ready[segment] + tail > longest:
                    longest = ready[segment] + tail
        except IndexError:
            raise ProblemError(
                f"a bucket is ready after segment {segment}, but there are {len(ready)}: give the predictor the "
                "borders of these buckets"
            ) from None
        return begin_host + host_ns + finish.host + optimizer.host, longest + finish.device + optimizer.device

    def lead(self, passes: Callable[[], Sequence[Work]]) -> Work:
        """Work before the last micro-batch: earlier ones, and copies.

        Args:
            passes: Segments of one forward and backward pass without all-reduces beside it.
        """
        if not self.earlier:
            return self.copies
        return compose([*[self.copies, *passes(), self.finish] * self.earlier, self.copies])

    def standing_ns(self, lead: Work, segments: Sequence[Work], tails: Tails) -> int:
        """Time of a step that begins on an idle device, because the host waits for it in every step."""
        host, device = lead.run(0, 0)
        network = 0
        last = dict(tails[::-1])  # of buckets ready at once, the first is followed by all their collectives
        for k, segment in enumerate(segments):
            host, device = segment.run(host, device)
            network = max(network, device + last.get(k, 0))
        device = max(device, network)
        for work in (self.finish, self.optimizer):
            host, device = work.run(host, device)
        return max(host, device)

    def captured_ns(self, device_ns: int, tails: Tails) -> int:
        """Time of a step whose passes are replayed as CUDA graphs; ``device_ns`` is that of one pass."""
        network = max((tail for _, tail in tails), default=0)
        passes = self.earlier + 1
        host = passes * (self.copies.host + self.finish.host) + self.optimizer.host
        device = passes * (self.copies.device + device_ns + self.finish.device) + network + self.optimizer.device
        return max(host, device)
