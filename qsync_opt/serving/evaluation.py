"""What a serving plan costs: stage times, time to serve, memory and harm, in integers, by no solver.

With stage times P_j (prefill) and D_j (decode) of one micro-batch, n = new_tokens - 1, and m_p, m_d micro-batches::

    prefill = sum P + (m_p - 1) max P
    decode  = (n - 1) max(sum D, m_d max D) + sum D + (m_d - 1) max D      (0 if n = 0)

A micro-batch's next token must wait until it has passed all stages (sum D) and until the slowest stage has served all
micro-batches (m_d max D), whichever is later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from qsync_opt.serving.plan import Plan
from qsync_opt.serving.problem import Problem

HARM_SLACK = 1e-9
"""Relative rounding that a sum of harms may exceed its limit by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage: its device and nanoseconds of one micro-batch in each phase, link to the next stage included."""

    device: str
    prefill_ns: int
    decode_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a plan costs; ``memory_kib`` is by device in use."""

    stages: tuple[StageTimes, ...]
    prefill_ns: int
    decode_ns: int
    memory_kib: Mapping[str, int]
    harm: float
    violations: tuple[str, ...]

    @property
    def total_ns(self) -> int:
        """Nanoseconds from the first prompt token to the last new one."""
        return self.prefill_ns + self.decode_ns

    @property
    def objective(self) -> float:
        """`total_ns`."""
        return float(self.total_ns)

    @property
    def feasible(self) -> bool:
        """Whether every device's memory and the harm limit are kept."""
        return not self.violations

    def to_json(self) -> dict[str, Any]:
        """The keys that the command line prints with ``--json``."""
        return {
            "objective": self.total_ns,
            "total_ns": self.total_ns,
            "prefill_ns": self.prefill_ns,
            "decode_ns": self.decode_ns,
            "stages": [{"device": s.device, "prefill_ns": s.prefill_ns, "decode_ns": s.decode_ns} for s in self.stages],
            "memory_kib": dict(self.memory_kib),
            "harm": self.harm,
            "feasible": self.feasible,
            "violations": list(self.violations),
        }


def prefill_ns(stages: Sequence[int], microbatches: int) -> int:
    """Time for ``microbatches`` to pass stages that take ``stages`` each: sum + (m - 1) max.

    Source: the make-span of a linear pipeline; LLM-PQ (PPoPP 2024) has the same.
    """
    return sum(stages) + (microbatches - 1) * max(stages)


def decode_ns(stages: Sequence[int], microbatches: int, steps: int) -> int:
    """Time for ``steps`` rounds of ``microbatches`` through the stages, each round after the one before; 0 for none.

    Source: ours; LLM-PQ counts only (m - 1)(n - 1) max D, which is up to n times too low for few micro-batches.
    """
    if steps == 0:
        return 0
    total, slowest = sum(stages), max(stages)
    return (steps - 1) * max(total, microbatches * slowest) + total + (microbatches - 1) * slowest


def evaluate(problem: Problem, plan: Plan) -> Evaluation:
    """Compute what ``plan`` costs and which limits it breaks.

    Raises:
        ProblemError: The plan is none of this problem; see `Plan.check_fits`.

    Source: ours; see the module's formulas.
    """
    plan.check_fits(problem)
    k = plan.microbatch
    kinds = {group.name: group.kind for group in problem.groups}
    stages: list[StageTimes] = []
    memory: dict[str, int] = {}
    last = len(plan.stages) - 1
    for j, stage in enumerate(plan.stages):
        costs, ends = problem.costs[stage.device], problem.ends[stage.device]
        times = [costs[kinds[name]][plan.schemes[name]][k] for name in stage.groups]
        memory[stage.device] = sum(
            problem.weights_kib[kinds[name]][plan.schemes[name]] + problem.state_kib[kinds[name]][k]
            for name in stage.groups
        )
        if j == 0:
            times.append(ends.first[k])
            memory[stage.device] += ends.first_kib
        if j == last:
            times.append(ends.last[k])
            memory[stage.device] += ends.last_kib
        if last > 0:
            following = plan.stages[(j + 1) % len(plan.stages)]
            times.append(problem.links[stage.device, following.device][k])
        stages.append(
            StageTimes(
                device=stage.device, prefill_ns=sum(t.prefill for t in times), decode_ns=sum(t.decode for t in times)
            )
        )
    harm = math.fsum(problem.harm[name][scheme] for name, scheme in plan.schemes.items())
    option = problem.microbatches[k]
    return Evaluation(
        stages=tuple(stages),
        prefill_ns=prefill_ns([stage.prefill_ns for stage in stages], option.prefill),
        decode_ns=decode_ns([stage.decode_ns for stage in stages], option.decode, problem.new_tokens - 1),
        memory_kib=MappingProxyType(memory),
        harm=harm,
        violations=_violations(problem, memory, harm),
    )


def _violations(problem: Problem, memory: Mapping[str, int], harm: float) -> tuple[str, ...]:
    result = []
    for device in problem.devices:
        used = memory.get(device.name, 0)
        if used > device.memory_kib:
            result.append(
                f"device {device.name!r} needs {used} KiB, which is {used - device.memory_kib} KiB more than its "
                f"{device.memory_kib} KiB"
            )
    limit = problem.harm_limit
    if limit is not None and harm > limit * (1 + HARM_SLACK):
        result.append(f"the harm is {harm:.6g}, but the limit is {limit:.6g}")
    return tuple(result)
