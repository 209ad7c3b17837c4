"""From a model, devices with profiles, and a workload to a serving problem, and to a checked plan with predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from qsync_opt.costs import estimated_costs
from qsync_opt.errors import ProblemError
from qsync_opt.io import Json, Name, check_fields, format_memory, near_match
from qsync_opt.serving.evaluation import Evaluation, evaluate
from qsync_opt.serving.plan import Plan
from qsync_opt.serving.problem import Device, Ends, Group, Microbatch, Problem, Times
from qsync_opt.serving.profile import KINDS, PhaseCosts, ServeModel, ServingProfile
from qsync_opt.solving import Solution, TerminationStatus
from qsync_opt.systems import solve

_KIB = 1024
_MOST_PARTS = 16
"""Micro-batches that are tried at most: 1, 2, 4, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """A batch of prompts that is planned for: how many, of how many tokens at most, and how many new tokens each."""

    prompts: Annotated[int, Json(minimum=1)]
    prompt_tokens: Annotated[int, Json(minimum=1)]
    new_tokens: Annotated[int, Json(minimum=1)]

    def __post_init__(self) -> None:
        check_fields(self, "workload")

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that memory was not planned for.

        Raises:
            ProblemError: There are more, or one is longer.
        """
        if len(prompts) > self.prompts:
            raise ProblemError(f"there are {len(prompts)} prompts, but the plan is for {self.prompts}; plan for more")
        for k, prompt in enumerate(prompts):
            if len(prompt) > self.prompt_tokens:
                raise ProblemError(
                    f"prompt {k} has {len(prompt)} tokens, but the plan is for at most {self.prompt_tokens}; shorten "
                    "it, or plan for longer prompts"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDevice:
    """A device that may be used: its memory in all, and the profile of its kind."""

    name: Name
    memory_kib: int
    profile: ServingProfile

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What is expected of one stage: seconds of one micro-batch in both phases, and its process's peak memory."""

    device: str
    groups: tuple[str, ...]
    schemes: Mapping[str, int]
    prefill_s: float
    decode_s: float
    memory_kib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A problem with its checked solution, and what the plan should do; ``plan`` is None where nothing fits."""

    problem: Problem
    workload: ServeWorkload
    devices: tuple[ServingDevice, ...]
    solution: Solution[Any, Any]

    @property
    def plan(self) -> Plan | None:
        """The plan."""
        return self.solution.plan

    @property
    def reason(self) -> str | None:
        """Why there is no plan: the limit, the device that needs least more, and what is missing there."""
        reason = self.solution.reason
        if reason is None or not reason.startswith("memory"):
            return reason
        left = {device.name: device.memory_kib for device in self.problem.devices}
        taken = ", ".join(f"{format_memory(d.memory_kib - left[d.name])} on {d.name!r}" for d in self.devices)
        caches = sum(max(self.problem.state_kib[group.kind]) for group in self.problem.groups)
        return (
            f"{reason}. That is beside what the processes and their passes need ({taken}); of the groups' memory the "
            f"caches of both phases are {format_memory(caches)}: fewer prompts or tokens need less"
        )

    def predict(self, plan: Plan | None = None) -> Prediction:
        """What a plan should do; by default the solution's.

        Raises:
            ProblemError: There is none, or it is of another problem.
        """
        plan = self.plan if plan is None else plan
        if plan is None:
            raise ProblemError(f"there is no plan to predict: {self.reason}")
        return predict(self.problem, plan, self.workload, self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Expected seconds and tokens per second of both phases, and stages."""

    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    harm: float
    stages: tuple[StagePrediction, ...]
    evaluation: Evaluation

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "harm": self.harm,
            "stages": [
                {
                    "device": s.device,
                    "groups": len(s.groups),
                    "first": s.groups[0],
                    "last": s.groups[-1],
                    "schemes": dict(s.schemes),
                    "prefill_s": s.prefill_s,
                    "decode_s": s.decode_s,
                    "memory_kib": s.memory_kib,
                }
                for s in self.stages
            ],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMeasurement:
    """What a plan did: tokens per second of both phases, and the most memory of each device's process."""

    label: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    memory_kib: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "label": self.label,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "memory_kib": dict(self.memory_kib),
        }


def rounding_harm(model: ServeModel, schemes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Harm where nothing is known of a model: the squared step of each scheme, the same for every group of a kind.

    4 ** -bits, by weights of the group, so that all groups in 4 bits have the harm 1 together.

    Source: ours; the error of rounding to nearest is step ** 2 / 12.
    """
    size = {kind: model.parameters(kind) for kind in KINDS}
    total = model.layers * sum(size.values())
    return {
        group: {s: size[group.partition(".")[2]] / total * _square_step(s) for s in schemes} for group in model.groups
    }


def _square_step(scheme: str) -> float:
    digits = scheme[1:]
    if not scheme.startswith("W") or not digits.isdecimal():
        raise ProblemError(f"scheme is {scheme!r}, but without given harms it must be named by its bits, such as 'W4'")
    return 0.0 if int(digits) >= 16 else 4.0 ** (4 - int(digits))


def default_microbatches(prompts: int) -> tuple[Microbatch, ...]:
    """Powers of two for decoding, each with as many or the most micro-batches of prompts."""
    most = min(prompts, _MOST_PARTS)
    counts = [2**k for k in range(most.bit_length()) if 2**k <= most]
    pairs = [(p, d) for d in counts for p in dict.fromkeys((d, counts[-1]))]
    return tuple(Microbatch(prefill=p, decode=d) for p, d in pairs)


def build_serving_problem(
    model: ServeModel,
    devices: Sequence[ServingDevice],
    workload: ServeWorkload,
    *,
    schemes: Sequence[str] | None = None,
    harm: Mapping[str, Mapping[str, float]] | None = None,
    harm_limit: float | None = None,
    microbatches: Sequence[Microbatch] | None = None,
) -> Problem:
    """The serving problem of a model on devices.

    Args:
        model: Sizes; every profile must be of the same.
        devices: With memory and profiles.
        workload: What is to be served.
        schemes: Weight schemes to choose from; those that all profiles have by default.
        harm: By group and scheme; `rounding_harm` by default.
        harm_limit: Most harm in all; None: no limit.
        microbatches: Options; `default_microbatches` by default.

    Returns:
        The problem. A device's memory in it is what is left for weights and caches: without what the process and its
        passes need (the largest of all options).

    Raises:
        ProblemError: A profile is of another model or lacks a scheme, or a harm is missing or no number.
    """
    if not devices:
        raise ProblemError("devices is empty, but at least one is needed")
    for device in devices:
        if device.profile.model.sizes != model.sizes:
            raise ProblemError(
                f"the profile of device {device.name!r} is of the model {device.profile.model.name!r} with other sizes "
                f"than {model.name!r}; profile this model on it"
            )
    if schemes is None:
        schemes = [s for s in devices[0].profile.schemes if all(s in d.profile.schemes for d in devices)]
        if not schemes:
            raise ProblemError("the profiles of the devices have no scheme in common; profile one on all of them")
    for device in devices:
        for scheme in schemes:
            device.profile.check_scheme(scheme)
    harm = rounding_harm(model, schemes) if harm is None else harm
    _check_harm(harm, model, schemes)
    options = tuple(microbatches or default_microbatches(workload.prompts))
    shapes = [_Shape.of(workload, option) for option in options]
    # A device whose process alone is too large is left nothing, and is never used.
    processes = [_process_kib(d.profile, shapes, is_alone=len(devices) == 1) for d in devices]
    planned = [
        Device(name=d.name, memory_kib=max(d.memory_kib - own, 0)) for d, own in zip(devices, processes, strict=True)
    ]
    profiles = {device.name: device.profile for device in devices}
    tokens = workload.prompt_tokens + workload.new_tokens
    cache = max(p.cache_bytes_per_number for p in profiles.values())
    cache_kib = -(-(workload.prompts * model.cache_bytes(tokens, cache)) // _KIB)
    return Problem(
        name=f"{model.name}: {workload.prompts} prompts of {workload.prompt_tokens} and {workload.new_tokens} tokens",
        new_tokens=workload.new_tokens,
        schemes=tuple(schemes),
        harm_limit=harm_limit,
        microbatches=options,
        devices=tuple(planned),
        groups=tuple(Group(name=name, kind=name.partition(".")[2]) for name in model.groups),
        weights_kib={k: {s: max(p.weights_kib[k][s] for p in profiles.values()) for s in schemes} for k in KINDS},
        state_kib={"attn": (cache_kib,) * len(options), "mlp": (0,) * len(options)},
        costs={
            name: {k: {s: tuple(shape.times(p.costs[k][s]) for shape in shapes) for s in schemes} for k in KINDS}
            for name, p in profiles.items()
        },
        ends={
            name: Ends(
                first_kib=p.first_kib,
                last_kib=p.last_kib,
                first=tuple(shape.times(p.first) for shape in shapes),
                last=tuple(shape.times(p.last) for shape in shapes),
            )
            for name, p in profiles.items()
        },
        links={
            (a, b): tuple(shape.link(p, model) for shape in shapes)
            for a, p in profiles.items()
            for b in profiles
            if a != b
        },
        harm=harm,
        extras=estimated_costs({name: p.estimated_by for name, p in profiles.items()}),
    )


def plan_serving(
    model: ServeModel,
    devices: Sequence[ServingDevice],
    workload: ServeWorkload,
    *,
    method: str = "default",
    time_limit_s: float | None = None,
    **options: Any,
) -> ServingPlan:
    """Plan a model on devices for a workload: the problem, its checked solution, and predictions.

    Args:
        model: Sizes.
        devices: With memory and profiles.
        workload: What is to be served.
        method: Of the system ``serving``.
        time_limit_s: Of the method.
        options: What `build_serving_problem` takes.

    Returns:
        The plan; where nothing fits its ``plan`` is None and its ``reason`` names limit, device and missing memory.
        Where one device alone is fastest, which then has the memory that links to others would need, the problem is
        that of this device, and the bound one of all devices.

    Raises:
        ProblemError: As `build_serving_problem` does.

    Source: ours; the problem is LLM-PQ's (PPoPP 2024), corrected.
    """

    def planned(devices: Sequence[ServingDevice]) -> ServingPlan:
        problem = build_serving_problem(model, devices, workload, **options)
        solution = solve(problem, method, time_limit_s=time_limit_s)
        return ServingPlan(problem=problem, workload=workload, devices=tuple(devices), solution=solution)

    together = planned(devices)
    # A stage that is alone needs no memory for links, which no problem of several devices can say.
    alone = [planned([device]) for device in devices if len(devices) > 1 and device.profile.link_kib]
    best = min((each for each in alone if each.plan is not None), key=_objective, default=None)
    if best is None or _objective(best) >= _objective(together):
        return together
    possible = (each.solution for each in (together, *alone))
    bound = min(each.bound or 0.0 for each in possible if each.termination is not TerminationStatus.INFEASIBLE)
    is_proved = _objective(best) - bound <= 1e-6 * _objective(best)
    termination = TerminationStatus.OPTIMAL if is_proved else TerminationStatus.FEASIBLE
    return replace(best, solution=replace(best.solution, bound=bound, termination=termination))


def _objective(planned: ServingPlan) -> float:
    """Of the plan; infinite if there is none."""
    objective = planned.solution.objective
    return math.inf if objective is None else objective


def predict(problem: Problem, plan: Plan, workload: ServeWorkload, devices: Sequence[ServingDevice]) -> Prediction:
    """What a plan should do: seconds and tokens per second of both phases, and peak memory of each stage's process.

    Raises:
        ProblemError: The plan is of another problem.
    """
    evaluation = evaluate(problem, plan)
    profiles = {device.name: device.profile for device in devices}
    shape = _Shape.of(workload, problem.microbatches[plan.microbatch])
    kinds = {group.name: group.kind for group in problem.groups}
    stages = []
    for stage, times in zip(plan.stages, evaluation.stages, strict=True):
        counts: dict[str, int] = {}
        for name in stage.groups:
            counts[plan.schemes[name]] = counts.get(plan.schemes[name], 0) + 1
        profile, held_kib = profiles[stage.device], evaluation.memory_kib[stage.device]
        # While it loads, a stage has no caches yet.
        caches_kib = sum(problem.state_kib[kinds[name]][plan.microbatch] for name in stage.groups)
        more_kib = max(_passes_kib(profile, [shape]), profile.load_kib - caches_kib)
        stages.append(
            StagePrediction(
                device=stage.device,
                groups=stage.groups,
                schemes=counts,
                prefill_s=times.prefill_ns / 1e9,
                decode_s=times.decode_ns / 1e9,
                memory_kib=_idle_kib(profile, is_alone=len(plan.stages) == 1) + held_kib + more_kib,
            )
        )
    steps = workload.new_tokens - 1
    decode_s = evaluation.decode_ns / 1e9
    prefill_s = evaluation.prefill_ns / 1e9
    return Prediction(
        prefill_s=prefill_s,
        decode_s=decode_s,
        prefill_tokens_per_s=workload.prompts * workload.prompt_tokens / max(prefill_s, 1e-9),
        decode_tokens_per_s=workload.prompts * steps / decode_s if steps and decode_s > 0 else None,
        harm=evaluation.harm,
        stages=tuple(stages),
        evaluation=evaluation,
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Rows of a micro-batch in both phases, the length of prompts, and the mean number of tokens in the cache."""

    prefill_rows: int
    decode_rows: int
    prompt: int
    past: int

    @classmethod
    def of(cls, workload: ServeWorkload, option: Microbatch) -> _Shape:
        return cls(
            -(-workload.prompts // option.prefill),
            -(-workload.prompts // option.decode),
            workload.prompt_tokens,
            workload.prompt_tokens + workload.new_tokens // 2,
        )

    def times(self, costs: PhaseCosts) -> Times:
        return Times(
            round(costs.prefill.at(self.prefill_rows, self.prompt)), round(costs.decode.at(self.decode_rows, self.past))
        )

    def link(self, profile: ServingProfile, model: ServeModel) -> Times:
        row_kib = model.hidden * 4 / _KIB
        kib = (self.prefill_rows * self.prompt * row_kib, self.decode_rows * row_kib)
        return Times(*(round(profile.link_ns + profile.link_ns_per_kib * size) for size in kib))


def _process_kib(profile: ServingProfile, shapes: Sequence[_Shape], *, is_alone: bool) -> int:
    """KiB of a stage's process beside weights and caches: itself, and passes or loading, whichever needs more."""
    return _idle_kib(profile, is_alone=is_alone) + max(_passes_kib(profile, shapes), profile.load_kib)


def _idle_kib(profile: ServingProfile, *, is_alone: bool) -> int:
    return profile.base_kib + (0 if is_alone else profile.link_kib)


def _passes_kib(profile: ServingProfile, shapes: Sequence[_Shape]) -> int:
    return math.ceil(
        max(max(profile.workspace.at(s.prefill_rows, s.prompt), profile.workspace.at(s.decode_rows, 1)) for s in shapes)
    )


def _check_harm(harm: Mapping[str, Mapping[str, float]], model: ServeModel, schemes: Sequence[str]) -> None:
    for group in model.groups:
        if group not in harm:
            raise ProblemError(f"harm lacks the group {group!r}{near_match(group, harm)}; measure it, or give a number")
        for scheme in schemes:
            value = harm[group].get(scheme)
            if value is None:
                raise ProblemError(f"harm of group {group!r} lacks the scheme {scheme!r}; measure that scheme too")
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ProblemError(
                    f"harm of group {group!r} in scheme {scheme!r} is {value!r}, but it must be a finite number of at "
                    "least 0; the model's outputs may overflow, measure it again in FP32"
                )
