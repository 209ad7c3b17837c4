"""The fastest plan of every device type by itself, for jobs whose local batches are sized by speed.

The plan of a job lets a device type that would wait spend its time on precision. With batches sized by speed nobody
waits, and every device type wants what is fastest on it.
"""

from __future__ import annotations

from dataclasses import replace

from qsync_opt.errors import SolverError
from qsync_opt.model.graph import Role
from qsync_opt.runtimes.torch.job.candidates import OWN, OWN_UNSCALED, SIZED_NOISE
from qsync_opt.training.planner import fastest, solve
from qsync_opt.training.problem import Communication, Problem, ProblemDevice

_SCALED = "FP16"
_SEARCH_S = 2.0


def own_plans(problem: Problem, *, slack: float = 0.0) -> dict[str, dict[str, dict[str, str]]]:
    """The least sensitive plan of every device type among the fastest of its passes, whatever the others do.

    Args:
        problem: Of the job. All-reduces and the optimizer are left out: they take as long under every plan, and those
            that hide behind the passes of one would hide what another one gains.
        slack: As in `build_problem`.

    Returns:
        Device type to the name of the way to operator to precision: among all formats and, where that one has FP16,
        among those whose losses need no scaling. A device type without a plan that fits has none.

    Source:
        Ours.
    """
    return {device.name: _of_device(problem, device, slack) for device in problem.devices}


def _of_device(problem: Problem, device: ProblemDevice, slack: float) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, mine in ((OWN, device), (OWN_UNSCALED, _without(problem, device, _SCALED))):
        plan = _fastest_passes(problem, mine, slack)
        scaled = plan is not None and _SCALED in plan.values()
        if plan is None or plan in found.values() or (scaled and mine is not device):
            continue
        found[name] = plan
    return found


def _without(problem: Problem, device: ProblemDevice, precision: str) -> ProblemDevice:
    """The same, but with a precision only where an adjustable operator has no other."""
    tables = dict(device.operators)
    for operator in problem.operators:
        others = {name: cost for name, cost in tables[operator.name].items() if name != precision}
        if operator.role is Role.ADJUSTABLE and others:
            tables[operator.name] = others
    return replace(device, operators=tables)


def _fastest_passes(problem: Problem, device: ProblemDevice, slack: float) -> dict[str, str] | None:
    buckets = (0,) * len(problem.communication.allreduce_ns)
    alone = replace(
        problem,
        devices=(device,),
        communication=Communication(allreduce_ns=buckets, peer_ready_ns=buckets),
        optimizer_ns=0,
        optimum=None,
    )
    try:
        quickest = fastest(alone, time_limit_s=_SEARCH_S)
        if quickest is None:
            return None
        limit_ns = round((1 + slack) * (1 + SIZED_NOISE) * quickest.evaluation.iteration_ns)
        best = solve(replace(alone, latency_limit_ns=limit_ns), "greedy").plan or quickest.plan
    except SolverError:
        return None
    return {o.name: best.devices[device.name][o.name] for o in problem.operators if o.role is Role.ADJUSTABLE}
