"""Forward and backward time of each operator of a graph on one device type, in the integers of a problem file.

To the measured time of an operator this adds what the graph decides: gradients that are summed where a result has
several users, and the host's share of an iteration.

Host and device of a GPU run side by side: the host launches work ahead, and the device waits only where the host is
behind. The problem format has one time per operator, so each uniform plan is replayed with both queues, and an operator
is charged by how much it moves the end of the device's queue: its device time where the host is ahead, its launch where
the device is idle. Over a uniform plan the charges add up to the exact time of the two queues. On a cpu both queues are
one, and the overhead of an iteration is added.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_opt.cluster import DeviceRole, DeviceType
from qsync_opt.costs import DeviceProfile, IterationOverhead, MeasuredCost
from qsync_opt.errors import ProblemError
from qsync_opt.model import Operator, OpGraph, Role
from qsync_opt.numerics import closest_precision, number_format

GETITEM = "getitem"
"""Kind of the operators that take one result of an operator with several."""
Times = dict[str, dict[str, tuple[int, int]]]
"""Operator to precision to (forward, backward) nanoseconds."""


def problem_role(operator: Operator) -> Role:
    """Role of an operator in a problem: a dependent one without floating-point inputs or result is fixed."""
    if operator.role is Role.DEPENDENT and not (operator.inputs and operator.is_floating):
        return Role.FIXED
    return operator.role


def problem_inputs(operator: Operator) -> tuple[str, ...]:
    """Inputs that carry a format: an operator without floating-point result reads its inputs in any format."""
    return operator.inputs if operator.is_floating else ()


def device_tables(graph: OpGraph, profile: DeviceProfile, device: DeviceType) -> dict[str, dict[str, MeasuredCost]]:
    """The precisions that each operator may run in on a device type, with their measured costs.

    Adjustable operators get the precisions that the cluster file allows and the profile has; dependent ones the formats
    that those deliver, and FP32; fixed ones FP32 (or the finest of their table). On a type of fixed precision an
    adjustable operator that cannot run in it takes the next finer one, as the runtime does.

    Raises:
        ProblemError: The profile lacks an operator or a precision, or nothing is left for an adjustable operator.
    """
    for precision in device.precisions:
        if precision not in profile.formats:
            raise ProblemError(
                f"device type {device.name!r}: precision {precision!r} is asked for, but the profile of "
                f"{profile.device.name!r} has {', '.join(profile.formats)}; remove it or profile it"
            )
    delivered = {profile.formats[precision].output for precision in device.precisions} | {"FP32"}
    tables = {}
    for operator in graph:
        costs = profile.cost(operator.name)
        role = problem_role(operator)
        if role is Role.DEPENDENT:
            allowed = [precision for precision in costs if precision in delivered]
        elif role is Role.FIXED:
            allowed = [closest_precision(costs, "FP32")]
        elif device.role is DeviceRole.FIXED:
            allowed = [closest_precision(costs, device.precisions[0])]
        else:
            allowed = [precision for precision in costs if precision in device.precisions]
        if not allowed:
            raise ProblemError(
                f"device type {device.name!r}: operator {operator.name!r} was profiled in {', '.join(costs)}, but the "
                f"cluster allows {', '.join(device.precisions)}; allow one of them"
            )
        tables[operator.name] = {precision: costs[precision] for precision in sorted(allowed, key=_rank)}
    return tables


def uniform_precisions(
    graph: OpGraph, profile: DeviceProfile, tables: Mapping[str, Mapping[str, MeasuredCost]], precision: str
) -> dict[str, str]:
    """Precision of every operator when each adjustable one runs in ``precision``, or the next finer that it has.

    ``tables`` are the precisions that each operator may run in (`device_tables`).

    Source: ours; dependent operators follow the rule of the problem format.
    """
    result: dict[str, str] = {}
    for operator in graph:
        table = tables[operator.name]
        role = problem_role(operator)
        if role is Role.ADJUSTABLE:
            result[operator.name] = closest_precision(table, precision)
        elif role is Role.FIXED:
            result[operator.name] = next(iter(table))
        else:
            outputs = [profile.formats[result[source]].output for source in problem_inputs(operator)]
            result[operator.name] = closest_precision(table, max(outputs, key=_rank))
    return result


def price_operators(graph: OpGraph, profile: DeviceProfile, tables: Mapping[str, Mapping[str, MeasuredCost]]) -> Times:
    """Forward and backward time of every operator in every precision of its table.

    Raises:
        ProblemError: A sum of gradients is needed in a format that the profile has no cost for.

    Source: the two queues follow dPRO's replayer (MLSys 2022); charging them to operators is ours.
    """
    is_cpu = profile.device.kind == "cpu"
    added = profile.overhead if is_cpu else IterationOverhead()
    times: Times = {operator.name: {} for operator in graph}
    for operator in graph:
        for precision, cost in tables[operator.name].items():
            forward_ns = cost.forward_ns + added.forward_ns_per_operator
            sums_ns = _gradient_sums_ns(graph, profile, operator, precision)
            times[operator.name][precision] = forward_ns, cost.backward_ns + sums_ns + added.backward_ns_per_operator
    return times if is_cpu else _with_launches(graph, profile, tables, times)


def _gradient_sums_ns(graph: OpGraph, profile: DeviceProfile, operator: Operator, precision: str) -> int:
    """Time to sum the gradients that several users of a result deliver; the first one needs no addition."""
    # A getitem reads one of several results, whose gradients are put side by side and not added.
    users = [user for user in map(graph.__getitem__, graph.consumers(operator.name)) if user.op_type != GETITEM]
    additions = sum(user.is_floating for user in users) - 1
    if additions < 1 or not operator.is_floating:
        return 0
    format_name = profile.formats[precision].gradient_input
    fit = profile.gradient_sums.get(format_name)
    if fit is None:
        raise ProblemError(
            f"profile of {profile.device.name!r} has no gradient_sums for {format_name}, but the gradients of "
            f"{operator.name!r} are summed in it; profile the model again"
        )
    return additions * fit.ns(operator.output_elements)


def _with_launches(
    graph: OpGraph,
    profile: DeviceProfile,
    tables: Mapping[str, Mapping[str, MeasuredCost]],
    times: Times,
) -> Times:
    """Charge launches where the device waits for them (see the module's text)."""
    overhead = profile.overhead
    charges: dict[tuple[str, str, bool], int] = {}
    for precision in {precision for table in tables.values() for precision in table}:
        uniform = uniform_precisions(graph, profile, tables, precision)
        host_ns = device_ns = 0
        for backward, operators in ((False, graph.operators), (True, graph.operators[::-1])):
            overhead_ns = overhead.backward_ns_per_operator if backward else overhead.forward_ns_per_operator
            for operator in operators:
                chosen = uniform[operator.name]
                cost = tables[operator.name][chosen]
                host_ns += (cost.host_backward_ns if backward else cost.host_forward_ns) + overhead_ns
                end_ns = max(host_ns, device_ns) + times[operator.name][chosen][backward]
                key = (operator.name, chosen, backward)
                # An operator that occurs in several uniform plans is charged the most that it ever moves the end.
                charges[key] = max(charges.get(key, 0), end_ns - device_ns)
                device_ns = end_ns
    return {
        name: {
            precision: (
                charges.get((name, precision, False), forward_ns),
                charges.get((name, precision, True), backward_ns),
            )
            for precision, (forward_ns, backward_ns) in table.items()
        }
        for name, table in times.items()
    }


def _rank(precision: str) -> int:
    return number_format(precision).rank
