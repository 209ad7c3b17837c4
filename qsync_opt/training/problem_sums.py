"""Do the numbers of a problem stay within what 64-bit integers and floats hold, whatever the plan?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from qsync_opt.errors import ProblemError
from qsync_opt.io.codec import LARGEST_INTEGER

if TYPE_CHECKING:  # problem.py asks for the check
    from qsync_opt.training.problem import Problem, ProblemDevice


def check_sums(problem: Problem, device: ProblemDevice) -> None:
    """Refuse a device type on which some plan's sums, or the products that they are made of, would overflow.

    Raises:
        ProblemError: One would; it is named.

    Source: ours.
    """
    elements = {operator.name: operator.output_elements for operator in problem.operators}
    widest = max(problem.formats.values())
    time_ns, memory_kib, sensitivity = 0, 0, 0.0
    for operator in problem.operators:
        table = device.operators[operator.name].values()
        time_ns += max(cost.forward_ns for cost in table) + max(cost.backward_ns for cost in table)
        memory_kib += max(cost.memory_kib for cost in table)
        sensitivity += max(cost.sensitivity for cost in table)
        for source in operator.inputs:
            time_ns += 2 * max((cast.time_ns(elements[source]) for cast in device.casts.values()), default=0)
            memory_kib += elements[source] * widest // 2**10 + 1
    time_ns += sum(problem.communication.allreduce_ns) + max(problem.communication.peer_ready_ns, default=0)
    time_ns += problem.optimizer_ns
    for what, total in (("times in ns", time_ns), ("memory in KiB with cast buffers", memory_kib)):
        if total > LARGEST_INTEGER:
            raise ProblemError(
                f"device {device.name!r}: {what} add up to {total:.1e}, but sums must be below 2**63; check units"
            )
    if not math.isfinite(sensitivity * len(problem.devices)):
        raise ProblemError(
            f"device {device.name!r}: the sensitivities add up to infinity; scale all of them by one factor"
        )
    # Solvers multiply before they divide, for all edges at once.
    most = LARGEST_INTEGER // max([widest, *(cast.ns_per_mi_elements for cast in device.casts.values())])
    for operator in problem.operators:
        if operator.output_elements > most:
            raise ProblemError(
                f"operator {operator.name!r}: output_elements is {operator.output_elements}, but on device "
                f"{device.name!r} bytes and cast times fit into 64 bits for at most {most}; check units"
            )
