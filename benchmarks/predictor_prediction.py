"""What is predicted for a case of the predictor's benchmark, as a record beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from predictor_cases import CAPTURED, FIXED, Combination

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceRole, DeviceType, Network
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.torch.ddp import CollectiveCost, clamped_share
from qsync_opt.sensitivity import weight_sensitivities
from qsync_opt.steps import (
    PlannedStep,
    StepCosts,
    StepPredictor,
    bucket_borders,
    bucket_segments,
    network_tails,
    profile_from_steps,
    slowed_segments,
    worker_step,
)
from qsync_opt.training import gradient_buckets

MS = 1e6


def slowest(by_rank: list[list[float]]) -> list[float]:
    """Times of the steps of the rank that took the longest for them, in milliseconds."""
    return [round(t / MS, 3) for t in max(by_rank, key=statistics.median)]


def said(combination: Combination, case: dict[str, Any]) -> str:
    """A case in one line."""
    memory = " ".join(f"{100 * w['memory_error']:+.2f}%" for w in case["workers"] if w["memory_error"] is not None)
    return (
        f"{combination.name:14s} {case['plan']:27s} {case['predicted_ms']:7.2f} / {case['measured_ms']:7.2f} ms "
        f"({100 * case['time_error']:+5.1f}%, spread {100 * case['spread']:.1f}%, {case['bound_by']}) "
        f"memory {memory} naive {case['naive_ms']:.1f} rows {case['problem_ms'] or 0:.1f}"
    )


def phases_of(predictor: StepPredictor, planned: PlannedStep) -> dict[str, list[float]]:
    """Predicted milliseconds by phase: on the host, and on the device."""
    phases = predictor.costs.phases
    rows = {
        "forward": [phases["forward"], *[cost.forward for cost in planned.costs], phases["forward|end"]],
        "backward": [phases["backward"], *[cost.backward for cost in planned.costs], phases["backward|end"]],
        "optimizer": [phases["optimizer"]],
        "zero_grad": [phases["zero_grad"]],
    }
    return {
        name: [round(sum(work.host for work in row) / MS, 2), round(sum(work.device for work in row) / MS, 2)]
        for name, row in rows.items()
    }


class Predictor:
    """Predicts the cases of one combination on rank 0."""

    def __init__(
        self,
        graph: OpGraph,
        costs: list[StepCosts],
        collective: CollectiveCost | None,
        combination: Combination,
        known: Mapping[str, PrecisionFormats],
        refused: Collection[str] = (),
        slowdowns: Sequence[float] = (),
    ) -> None:
        self.known, self.refused = known, refused
        self.graph, self.costs, self.combination = graph, costs, combination
        buckets = gradient_buckets(graph)
        self.buckets = buckets
        borders = bucket_borders(graph, buckets)
        self.segments = bucket_segments(graph, buckets)
        self.allreduce_ns = [0 if collective is None else collective.ns(bucket.num_bytes) for bucket in buckets]
        self.predictors = [
            StepPredictor(graph, c, borders, slowed_segments(self.allreduce_ns, self.segments, len(borders) + 1, share))
            for c, share in zip(costs, map(clamped_share, slowdowns or [0.0] * len(costs)), strict=True)
        ]
        self.collective = collective
        self.cluster = combination.cluster if len(costs) > 1 else combination.planned
        self.problem: qsync_opt.Problem | None = None

    def solve(self) -> dict[str, str] | None:
        """The plan that the default method finds for rank 1, with time to spare of half a percent."""
        self.make_problem()
        assert self.problem is not None
        solution = qsync_opt.solve(self.problem)
        return None if solution.plan is None else self.in_order(solution.plan.devices["planned"])

    def in_order(self, plan: Mapping[str, str]) -> dict[str, str]:
        """A plan in the order of the graph's adjustable operators."""
        return {operator.name: plan[operator.name] for operator in self.graph.by_role(Role.ADJUSTABLE)}

    def make_problem(self) -> None:
        """The problem file of this cluster, its rows from observed steps."""
        known = self.known
        usual = self.combination.allowed(known)
        allowed = {"fixed": usual, "planned": [p for p in usual if p not in self.refused]}
        profiles = {}
        names = ("fixed", "planned")[-len(self.costs) :]
        for name, costs in zip(names, self.costs, strict=True):
            state = 2 * sum(p.spec.num_bytes for p in self.graph.parameters)
            formats = {precision: known[precision] for precision in allowed[name]}
            profiles[name] = profile_from_steps(self.graph, costs, formats, state_bytes=state)
        fixed = FIXED if FIXED in usual else "FP32"
        limit, planned = 1 << 40, tuple(allowed["planned"])
        kinds = (
            DeviceType(name="fixed", count=1, memory_limit_bytes=limit, precisions=(fixed,), role=DeviceRole.FIXED),
            DeviceType(name="planned", count=1, memory_limit_bytes=limit, precisions=planned),
        )
        network = (
            Network(latency_s=0.0, bandwidth_bytes_per_s=1e12, source="one worker sends nothing")
            if self.collective is None
            else Network(
                latency_s=self.collective.latency_s / 2,
                bandwidth_bytes_per_s=self.collective.bandwidth_bytes_per_s,
                source="fitted to all-reduces of this group",
            )
        )
        sensitivities = weight_sensitivities(self.graph, {precision: known[precision] for precision in usual})
        self.problem = qsync_opt.build_problem(
            self.graph,
            profiles,
            sensitivities,
            Cluster(name="bench", devices=kinds[-len(names) :], network=network),
            slack=0.005,
        )

    def case(self, label: str, both: list[dict[str, str]], blocks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """One record; ``blocks`` has what `measure` returned, block by block and rank by rank."""
        rounds = [slowest([rank["steps"] for rank in told]) for told in blocks]
        peaks = [max(told[i]["peak"] for told in blocks) for i in range(len(both))]
        steps, workers, naive, steady = [], [], 0.0, 0
        captured = label.endswith(CAPTURED)
        tails = network_tails(self.allreduce_ns, self.segments)
        for rank, (predictor, plan, peak) in enumerate(zip(self.predictors, both, peaks, strict=True)):
            planned = predictor.plan(plan)
            steps.append(worker_step(f"rank {len(steps)}", predictor, planned))
            own = predictor.captured_ns(planned, tails) if captured else predictor.steady_ns(planned, tails)
            steady = max(steady, own)
            # Memory that graphs keep to themselves is not predicted.
            memory = None if captured else predictor.memory(planned).peak_bytes
            workers.append(
                {
                    "predicted_peak_bytes": memory,
                    "measured_peak_bytes": peak,
                    "memory_error": memory / peak - 1 if memory and peak else None,
                    "composed_cases": sum(cost.samples == 0 for cost in planned.costs),
                    "steady_ms": own / MS,
                    "predicted_phases_ms": phases_of(predictor, planned),
                    "measured_host_ms": [
                        {name: round(time / MS, 2) for name, time in told[rank]["host"].items()} for told in blocks
                    ],
                    "measured_steps_ms": [[round(t / MS, 3) for t in told[rank]["steps"]] for told in blocks],
                    "host_unit_us": [round(told[rank]["unit"] / 1e3, 2) for told in blocks],
                    "stolen_s": [told[rank]["stolen_s"] for told in blocks],
                }
            )
            naive = max(naive, sum(cost.kernel_ns for cost in planned.costs))
        medians = [statistics.median(steps) for steps in rounds]
        measured = statistics.median([time for steps in rounds for time in steps])
        hosts = max(
            (0 if captured else sum(s.host for s in step.segments)) + step.finish.host + step.optimizer.host
            for step in steps
        )
        devices = max(
            sum(s.device for s in step.segments) + step.finish.device + step.optimizer.device for step in steps
        )
        return {
            "key": f"{self.combination.name} {label}",
            "model": self.combination.subject.name,
            "plan": label,
            "cluster": self.cluster,
            "precisions": " ".join(both[-1].values()),
            "way": "captured" if captured else "compiled" if self.combination.compiled else "eager",
            "plan_recorded_alone": label.startswith("uniform"),
            "predicted_ms": steady / MS,
            "measured_ms": measured,
            "time_error": steady / MS / measured - 1,
            "spread": (max(medians) - min(medians)) / measured,
            "rounds_ms": rounds,
            "bound_by": "host" if hosts > devices else "device",
            "host_ms": hosts / MS,
            "device_ms": devices / MS,
            "naive_ms": naive / MS,
            "problem_ms": self.problem_ms(both[-1]),
            "sensitivity": self.sensitivity(both[-1]),
            "predicted_peak_bytes": workers[-1]["predicted_peak_bytes"],
            "measured_peak_bytes": workers[-1]["measured_peak_bytes"],
            "workers": workers,
        }

    def _evaluated(self, plan: Mapping[str, str]) -> Any:
        if self.problem is None:
            return None
        return qsync_opt.evaluate(
            self.problem, qsync_opt.Plan(problem=self.problem.name, devices={"planned": dict(plan)})
        )

    def problem_ms(self, plan: Mapping[str, str]) -> float | None:
        """Step time by the problem's linear rows."""
        evaluation = self._evaluated(plan)
        return None if evaluation is None else evaluation.iteration_ns / MS

    def sensitivity(self, plan: Mapping[str, str]) -> float | None:
        """Objective of the problem."""
        evaluation = self._evaluated(plan)
        return None if evaluation is None else evaluation.objective
