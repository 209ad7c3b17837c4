"""How often to save: between what saving costs and what a failure loses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qsync_opt.io import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The best time between two saves, and what is then lost.

    Attributes:
        interval_s: Seconds of training between the beginnings of two saves.
        loss_per_failure_s: Expected seconds that a failure costs: half an interval of lost work, the part of a save
            that was not durable yet, and the load.
        stall_share: Share of the time for which training waits for saves.
        lost_share: Share of the time that is expected to be lost altogether: stalls and failures.
        limited_by_durable: Whether a shorter interval would be better, but the save before would not be durable yet.
    """

    interval_s: float
    loss_per_failure_s: float
    stall_share: float
    lost_share: float
    limited_by_durable: bool

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def best_interval(*, stall_s: float, durable_s: float, load_s: float, failures_per_day: float) -> Interval:
    """The time between saves that loses least, from measured times and a rate of failures.

    Args:
        stall_s: Seconds for which training waits in a save.
        durable_s: Seconds from the beginning of a save until it survives a failure.
        load_s: Seconds from a failure until training goes on.
        failures_per_day: Of the whole job: failures of one worker per day times the number of workers.

    Returns:
        The interval max(sqrt(2 * stall / rate), durable), as one save at a time is written; it is infinite without
        failures.

    Raises:
        ProblemError: A time is negative or not finite.

    Source: Young, "A first order approximation to the optimum checkpoint interval" (CACM 1974), whose cost of a
    checkpoint is here the stall alone; the expected loss interval / 2 + durable + load is ByteCheckpoint's.

    Examples:
        >>> round(best_interval(stall_s=0.1, durable_s=2.0, load_s=5.0, failures_per_day=4).interval_s, 2)
        65.73
    """
    stall_s = check_number(stall_s, "stall in seconds")
    durable_s = check_number(durable_s, "durable time in seconds")
    load_s = check_number(load_s, "load time in seconds")
    per_s = check_number(failures_per_day, "failures per day") / 86400.0
    wanted_s = math.sqrt(2.0 * stall_s / per_s) if per_s else math.inf
    interval_s = max(wanted_s, durable_s, stall_s)
    loss_s = interval_s / 2.0 + durable_s + load_s
    if math.isinf(interval_s):
        return Interval(
            interval_s=interval_s, loss_per_failure_s=loss_s, stall_share=0.0, lost_share=0.0, limited_by_durable=False
        )
    stall_share = stall_s / interval_s if interval_s else 0.0
    return Interval(
        interval_s=interval_s,
        loss_per_failure_s=loss_s,
        stall_share=stall_share,
        lost_share=min(1.0, stall_share + loss_s * per_s),
        limited_by_durable=wanted_s < durable_s,
    )
