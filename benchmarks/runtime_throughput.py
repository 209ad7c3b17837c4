"""Throughput on a hybrid cluster: plain ways, the plan, local batches sized by speed, and both together.

What is compared most closely is timed in turn, round by round, so that what slows a round slows all of it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from example_models import example
from runtime_training import Batch, Run, Worker, everywhere, fused_adamw, kinds
from torch import nn

import qsync_opt
from qsync_opt.io import encode
from qsync_opt.runtimes.torch.ddp import broadcast_json, gather_json
from qsync_opt.runtimes.torch.demo import Gpt, GptConfig
from qsync_opt.runtimes.torch.job import ExecutionMode, JobPlan, paired_times

BATCHES = {"bert-base": 32, "gpt2": 32, "resnet50": 64, "vit-base": 32, "gpt-small": 64}
BLOCK_S, BLOCKS = 0.4, 3
"""Seconds of steps that are timed together, and how often; the median counts."""
FAR = 2.5
"""What takes so many times the fastest way's step is timed once."""
ROUNDS, CAPTURED_ROUNDS, NEAR = 4, 3, 0.06
"""How often ways take turns, the same where one must be captured anew in every turn, and how much slower than the
fastest a plain way may be to be among them."""
FAR_OFF = 0.15
"""What is so much slower than the fastest is not timed again."""
SMALL_BATCH = 4  # of the small models that stand for these on a CPU
CAPTURED = ", captured"


def rows(kwargs: Mapping[str, Any], count: int, device: torch.device) -> Batch:
    """A batch of so many samples, from an example's."""
    return {name: x[torch.arange(count) % len(x)].to(device) for name, x in kwargs.items()}


def shares(speeds: list[float], total: int) -> list[int]:
    """Whole samples per worker, as their speeds are, none without any; together ``total``."""
    wanted = [total * speed / sum(speeds) for speed in speeds]
    found = [max(1, int(count)) for count in wanted]
    while sum(found) != total:  # to whom most is missing, or from whom has most too much and more than one
        step = 1 if sum(found) < total else -1
        places = [i for i, count in enumerate(found) if count + step >= 1]
        found[max(places, key=lambda i: step * (wanted[i] - found[i]))] += step
    return found


def timed(run: Run, *, fastest_s: float = 0.0) -> float:
    """Seconds of a step: median of some blocks; a single one where a step takes far longer than the fastest so far."""
    first = run.timed(1)
    if fastest_s and first > FAR * fastest_s:
        return run.timed(1)
    steps = broadcast_json(max(2 if first < BLOCK_S else 1, min(20, int(BLOCK_S / first))))
    return statistics.median(run.timed(steps) for _ in range(BLOCKS))


def maker(name: str, *, small: bool) -> tuple[Callable[[], nn.Module], Mapping[str, Any]]:
    """What builds the model again and again, with the same weights, and a batch of few samples."""
    torch.manual_seed(0)
    if name == "gpt-small":  # 13 million parameters: all-reduces by the host do not drown what is computed
        config = (
            GptConfig(width=128, layers=2, context=32)
            if small
            else GptConfig(width=512, heads=8, layers=4, context=512)
        )
        tokens = torch.randint(0, config.vocabulary, (4, config.context))
        model = Gpt(config)
        return lambda: copy.deepcopy(model), {"tokens_BS": tokens, "targets_BS": tokens}
    chosen = example(name, small=small)
    if hasattr(chosen.model, "config"):  # keys and values are kept for generation alone
        chosen.model.config.use_cache = False
    return lambda: copy.deepcopy(chosen.model), chosen.kwargs


@dataclass(frozen=True)
class Subject:
    """One way to train as it is measured: name, samples per worker (None: equal batches), and what `Run.go` takes."""

    label: str
    how: Mapping[str, Any]
    counts: list[int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def captured(self) -> bool:
        """Whether any worker replays CUDA graphs."""
        plan = self.how.get("plan")
        return bool(plan.captured) if isinstance(plan, (ExecutionMode, JobPlan)) else False


class Measuring:
    """One model on one cluster: measures ways of training, each of which becomes a record as soon as it is known."""

    def __init__(self, worker: Worker, name: str) -> None:
        small = worker.device.type == "cpu"
        self.worker, self.name = worker, name
        self.label = name + (" (small)" if small else "")
        self.make, self.kwargs = maker(name, small=small)
        self.per_worker = SMALL_BATCH if small else BATCHES[name]
        self.total = self.per_worker * worker.world
        self.batch = rows(self.kwargs, self.per_worker, worker.device)
        self.speeds: dict[str, float] = {
            label: record.get("samples_per_s") or 0.0 for label, record in worker.known.items()
        }
        self.records: dict[str, dict[str, Any]] = {}
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The one model that is trained with in all ways, one after the other."""
        if self._run is None:
            self._run = Run(self.worker, self.make, self.batch, optimizer=fused_adamw)
        return self._run

    def failed_before(self, what: str) -> bool:
        """Whether workers before these ended in it."""
        return what in self.worker.known and bool(self.worker.known[what].get("failure"))

    def _go(self, subject: Subject) -> None:
        counts, rank = subject.counts, self.worker.rank
        local = self.batch if counts is None else rows(self.kwargs, counts[rank], self.worker.device)
        weight = 1.0 if counts is None else self.worker.world * counts[rank] / self.total
        self.run.go(local, weight=weight, **subject.how)

    def measure(self, subject: Subject) -> bool:
        """Samples per second; where it does not run, a record that says why. False then."""
        worker, total, label = self.worker, self.total, subject.label
        if label in worker.known:
            return bool(self.speeds[label])
        worker.begin(label)
        said, seconds, alone = "", 0.0, 0.0
        run = self.run
        try:
            self._go(subject)
            alone = run.alone_s(3)
        except (RuntimeError, qsync_opt.QSyncError) as failure:  # memory; what a part of a card refuses
            said = f"rank {worker.rank}: {str(failure).splitlines()[0][:120]}"
        failed = [text for text in gather_json(said) if text]
        peaks: list[int] = []
        if failed:
            run.leave()
            if worker.device.type == "cuda":
                torch.cuda.empty_cache()
        else:
            run.begin()
            fastest = max(self.speeds.values(), default=0.0)
            seconds, peaks = timed(run, fastest_s=total / fastest if fastest else 0.0), run.peaks()
        self.speeds[label] = total / seconds if seconds else 0.0
        alone_s = gather_json(alone)
        self.records[label] = {
            "model": self.label,
            "configuration": label,
            "samples_per_s": self.speeds[label] or None,
            "step_ms": 1e3 * seconds or None,
            "local_batches": subject.counts or [self.per_worker] * worker.world,
            "alone_ms": [1e3 * t for t in alone_s],
            "peak_bytes": peaks or None,
            "failure": "; ".join(failed) or None,
            **subject.facts,
        }
        worker.write(**self.records[label])
        return not failed

    def in_turn(self, what: str, subjects: Iterable[Subject]) -> None:
        """Measure again ways that run, in turn; their records are replaced by what is found then."""
        subjects = [subject for subject in subjects if subject.label in self.records and self.speeds[subject.label]]
        fastest = max((self.speeds[subject.label] for subject in subjects), default=0.0)
        keep = broadcast_json([self.speeds[subject.label] > (1 - FAR_OFF) * fastest for subject in subjects])
        subjects = [subject for subject, stays in zip(subjects, keep, strict=True) if stays]
        if len(subjects) < 2 or what in self.worker.known:
            return
        self.worker.begin(what)
        rounds: list[dict[int, float]] = []
        for turn in range(CAPTURED_ROUNDS if any(subject.captured for subject in subjects) else ROUNDS):
            times: dict[int, float] = {}
            # Each is first as often as the others.
            for index in sorted(range(len(subjects)), key=lambda i: (i + turn) % len(subjects)):
                self._go(subjects[index])
                self.run.begin()
                self.run.timed(1)
                first = self.run.timed(1)
                steps = broadcast_json(max(3, min(20, int(BLOCK_S / first))))
                times[index] = self.run.timed(steps)
            rounds.append(times)
        found = paired_times(rounds)
        for index, subject in enumerate(subjects):
            self.speeds[subject.label] = self.total / found[index]
            self.worker.write(
                **{
                    **self.records[subject.label],
                    "samples_per_s": self.speeds[subject.label],
                    "step_ms": 1e3 * found[index],
                    "in_turn_with": [other.label for other in subjects if other is not subject],
                    "rounds_ms": [1e3 * times[index] for times in rounds if index in times],
                }
            )

    def sized(self, subject: Subject, plan: JobPlan | None) -> Subject:
        """The same with local batches for which all workers take as long, optimizer included.

        Where ``plan`` was made from steps with such batches in this very way, they are those; else they are found in
        two rounds.
        """
        label = f"{BY_SPEED}{subject.label}"
        if label in self.worker.known:
            return replace(subject, label=label)
        self.worker.begin(label)
        counts = [self.per_worker] * self.worker.world
        way = subject.label.removeprefix("uniform ")
        steps = () if plan is None or plan.model is None else plan.model.steps
        tried = broadcast_json(next((dict(s.batches) for s in steps if s.batches and {*s.taken.values()} == {way}), {}))
        if tried:
            counts = shares(gather_json(tried[self.worker.kind]), self.total)
        for _ in range(0 if tried else 2):
            spent, said = 0.0, ""
            try:
                self._go(replace(subject, counts=counts))
                spent = self.run.cycle_s(4)
            except (RuntimeError, qsync_opt.QSyncError) as failure:  # `measure` says it
                said = str(failure)
            if any(gather_json(said)):
                break
            counts = shares([n / t for n, t in zip(counts, gather_json(spent), strict=True)], self.total)
        return replace(subject, label=label, counts=broadcast_json(counts))

    def plan(self, **changes: Any) -> JobPlan:
        """From `auto_plan`; it measures the first time, and solves from what was measured then."""
        # Where workers ended in planning, the next ones leave out what no plan needs.
        failed = self.failed_before(PLANNING)
        options = self.worker.options(
            self.name, capture=self.worker.device.type == "cuda", compare="passes" if failed else True, **changes
        )
        model = self.make().to(self.worker.device)
        return qsync_opt.auto_plan(model, self.batch, optimizer=fused_adamw(model), options=options)

    def first_plan(self) -> JobPlan:
        """The plan, with a record of sensitivities and of how long it took until a step ran under it."""
        worker = self.worker
        worker.begin(PLANNING_BY_PASSES if self.failed_before(PLANNING) else PLANNING)
        began = time.perf_counter()
        plan = self.plan()
        planning_s = time.perf_counter() - began
        self._go(Subject("plan", {"plan": plan}))
        self.run.begin()
        self.run.step()
        worker.wait()
        # Clocks of one host: from the start of the processes to the end of the slowest worker's first step.
        first_step_s = max(gather_json(time.time())) - worker.task.started
        worker.write(
            model=self.label,
            sensitivities={**{other.name: other.sensitivity for other in plan.alternatives}, "plan": plan.sensitivity},
            planning_s=planning_s,
            first_planned_step_s=first_step_s,
            predicted_ms=(plan.expected_ns or plan.iteration_ns) / 1e6,
            taken=dict(plan.taken),
            measured=dict(plan.measured),
            reason=plan.reason,
            stages_s={stage: round(spent, 2) for stage, spent in plan.stages_s.items()},
            steps=[] if plan.model is None else [encode(step) for step in plan.model.steps],
            ways=[] if plan.model is None else measured_modes(plan),
        )
        return plan


PLANNING, PLANNING_BY_PASSES = "planning", "planning without whole steps"
BY_SPEED = "local batches by speed, "


def measured_modes(plan: JobPlan) -> list[dict[str, Any]]:
    """What `auto_plan` measured of every way, without the operators' precisions."""
    assert plan.model is not None
    return [
        {"worker": kind, "name": mode.label, "pass_ms": mode.pass_ns / 1e6, "sensitivity": mode.sensitivity}
        for kind, modes in plan.model.modes.items()
        for mode in modes
    ]


def throughput(worker: Worker, name: str) -> None:
    """What decides comes first: the plan and the plain ways, both with local batches by speed, then all else."""
    measuring = Measuring(worker, name)
    small, device = worker.device.type == "cpu", worker.device
    planned = not measuring.failed_before(PLANNING_BY_PASSES)
    operators: list[tuple[str, str]] | None = None
    equal: Subject | None = None
    if planned and "plan" not in worker.known:
        plan = measuring.first_plan()
        equal = Subject("plan", {"plan": plan})
        measuring.measure(equal)
        operators = broadcast_json(None if plan.model is None else kinds(plan.model.graph))
    if operators is None:
        worker.begin("capture for uniform precisions")
        operators = kinds(qsync_opt.capture(measuring.make().to(device), (), measuring.batch))
    ways = plain_ways(operators, device)
    for way in ways.values():
        measuring.measure(way)
    in_order = broadcast_json(sorted(ways, key=lambda label: -measuring.speeds[label]))
    speeds = broadcast_json(measuring.speeds)
    best, second = ways[in_order[0]], ways[in_order[1]]
    if equal is not None:
        near = [label for label in in_order if speeds[label] > (1 - NEAR) * speeds[best.label]]
        measuring.in_turn("the plan and plain ways in turn", [equal, *(ways[label] for label in near[:3])])
        best = ways[broadcast_json(max(near, key=lambda label: measuring.speeds[label]))]
        second = ways[next(label for label in in_order if label != best.label)]
    sized_ways: list[Subject] = []
    sized: JobPlan | None = None
    if planned and f"{BY_SPEED}plan" not in worker.known:
        # Nobody waits now, so that another plan is best; of what was measured, whole steps alone are taken again.
        worker.begin(f"{BY_SPEED}plan")
        sized = measuring.plan(local_batches="by speed")
        facts = {
            "sensitivity": sized.sensitivity,
            "taken": dict(sized.taken),
            "reason": sized.reason,
            "predicted_ms": (sized.expected_ns or sized.iteration_ns) / 1e6,
            "stages_s": {stage: round(spent, 2) for stage, spent in sized.stages_s.items()},
            "steps": [] if sized.model is None else [encode(s) for s in sized.model.steps if s.batches],
        }
        counts = shares(gather_json(sized.shares[sized.device_type]), measuring.total)
        sized_ways.append(Subject(f"{BY_SPEED}plan", {"plan": sized}, counts, facts))
        measuring.measure(sized_ways[-1])
    replayed = {label: captured(way, operators, device) for label, way in ways.items()}
    launched_best = best_sized(sized, ways) or best.label
    for way in [ways[launched_best], *(() if small else (replayed[best_sized(sized, replayed) or best.label],))]:
        found = measuring.sized(way, sized)
        measuring.measure(found)
        sized_ways.append(found)
    measuring.in_turn("local batches by speed in turn", sized_ways)
    if not small:
        measuring.measure(Subject("TF32", {"tf32": True}))
    measuring.measure(Subject("FP32", {}))
    if not small:
        measuring.measure(replayed[best.label])
    measuring.measure(measuring.sized(best if best.label != launched_best else second, sized))
    measuring.run.close()


def best_sized(plan: JobPlan | None, ways: Mapping[str, Subject]) -> str | None:
    """Which of some plain ways was the fastest with sized batches when `auto_plan` tried them; None: it tried none."""
    steps = () if plan is None or plan.model is None else plan.model.steps
    named = {way.label.removeprefix("uniform "): label for label, way in ways.items()}
    tried = {
        named[way]: step.step_ns
        for step in steps
        if step.batches and len(names := {*step.taken.values()}) == 1 and (way := next(iter(names))) in named
    }
    return broadcast_json(min(tried, key=tried.__getitem__, default=None))


def plain_ways(operators: list[tuple[str, str]], device: torch.device) -> dict[str, Subject]:
    """The same way on all workers, that a user could choose without a plan; those that are fast, that is not FP32."""
    ways: dict[str, Mapping[str, Any]] = {"BF16 autocast": {"autocast": torch.bfloat16}}
    eight_bits = ("INT8",)
    if device.type == "cuda":
        ways["FP16 autocast"] = {"autocast": torch.float16}
        eight_bits = ("INT8", "FP8")
    for precision in eight_bits:
        ways[f"uniform {precision}"] = {"plan": everywhere(operators, precision, device)}
    return {label: Subject(label, how) for label, how in ways.items()}


def captured(subject: Subject, operators: list[tuple[str, str]], device: torch.device) -> Subject:
    """A plain way with captured passes."""
    name = subject.label.removeprefix("uniform ").removesuffix(" autocast")
    autocast = name if subject.label.endswith(" autocast") else None
    precisions = everywhere(operators, name, device)
    mode = ExecutionMode(name=subject.label, precisions=precisions, autocast=autocast, captured=True)
    return Subject(subject.label + CAPTURED, {"plan": mode})
