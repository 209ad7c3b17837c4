"""Which cycle decides how long a worker's step takes: the host's, the device's, or the one through the network?

A step copies its batch from the host's memory (if it was recorded so), goes forward and backward, waits for the last
all-reduce, clips gradients (if it was recorded so), takes the optimizer's step and clears the gradients. With several
micro-batches the passes before the last one add up gradients and reduce nothing (``no_sync`` of
DistributedDataParallel), so buckets are ready in the last pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from qsync_opt.errors import ProblemError
from qsync_opt.steps.queues import NOTHING, Work, compose

Tails = Sequence[tuple[int, int]]
"""For each bucket its segment, and the time of its all-reduce and all later ones."""


class Around:
    """What a step does besides the forward and backward pass of its last micro-batch.

    Args:
        phases: Work outside of operators, by label; those of copies and clipping may be missing.
        micro_batches: Forward and backward passes per step.
    """

    def __init__(self, phases: Mapping[str, Work], micro_batches: int) -> None:
        self.copies = phases.get("copies", NOTHING)
        self.finish = phases["backward|end"]
        self.after = compose([phases.get("clip", NOTHING), phases["optimizer"], phases["zero_grad"]])
        self.earlier = micro_batches - 1

    def steady_ns(self, host_ns: int, device_ns: Sequence[int], slowed_ns: int, tails: Tails) -> tuple[int, int]:
        """Time of a step by the host's cycle, and by the longer of the device's and the network's.

        Args:
            host_ns: Of one forward and backward pass.
            device_ns: Of its segments.
            slowed_ns: Of that, what is due to all-reduces; earlier micro-batches have none.
            tails: See `Tails`.

        Source: maximum cycle mean of a max-plus linear system (Baccelli et al., 1992).
        """
        copies, finish, after = self.copies, self.finish, self.after
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
        return begin_host + host_ns + finish.host + after.host, longest + finish.device + after.device

    def lead(self, passes: Callable[[], Sequence[Work]]) -> Work:
        """What comes before the last micro-batch: earlier ones, and copies.

        Args:
            passes: Segments of one forward and backward pass beside which nothing is reduced.
        """
        if not self.earlier:
            return self.copies
        return compose([*[self.copies, *passes(), self.finish] * self.earlier, self.copies])

    def standing_ns(self, lead: Work, segments: Sequence[Work], tails: Tails) -> int:
        """Time of a step that begins on an idle device, because the host waits for it in every step."""
        host, device = lead.run(0, 0)
        network = 0
        last = dict(tails[::-1])  # of buckets ready at once the first has all collectives behind it
        for k, segment in enumerate(segments):
            host, device = segment.run(host, device)
            network = max(network, device + last.get(k, 0))
        device = max(device, network)
        for work in (self.finish, self.after):
            host, device = work.run(host, device)
        return max(host, device)

    def captured_ns(self, device_ns: int, tails: Tails) -> int:
        """Time of a step whose passes are replayed as CUDA graphs; ``device_ns`` is that of one pass."""
        network = max((tail for _, tail in tails), default=0)
        passes = self.earlier + 1
        host = passes * (self.copies.host + self.finish.host) + self.after.host
        return max(host, passes * (self.copies.device + device_ns + self.finish.device) + network + self.after.device)
