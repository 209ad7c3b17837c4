"""Serving from end to end on two processes of this machine: measure, plan, serve, compare with what was predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.measuring import MemoryWatch, measure_batches
from qsync_opt.runtimes.torch.serving.pipeline import Pipeline
from qsync_opt.runtimes.torch.serving.profiling import profile_serving
from qsync_opt.runtimes.torch.serving.sample import sample_config, write_sample
from qsync_opt.serving import (
    KINDS,
    Plan,
    Prediction,
    ServeWorkload,
    ServingDevice,
    ServingMeasurement,
    ServingPlan,
    Stage,
    plan_serving,
    rounding_harm,
)

SIZES = {"layers": 8, "hidden": 384, "inner": 1024, "heads": 6, "kv_heads": 2, "vocabulary": 2048}
WORKLOAD = ServeWorkload(prompts=8, prompt_tokens=64, new_tokens=32)
SCHEMES = ("W4", "W8", "W32")
_SHARE = 0.45
"""Memory for weights of the larger device, as a share of the model in 32 bits; the smaller one has half."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDemo:
    """What was planned, and what was measured of the plan and of the plans beside it."""

    planned: ServingPlan
    measured: tuple[ServingMeasurement, ...]
    predicted: tuple[Prediction, ...]

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows: tokens per second of both phases and memory, predicted and measured."""
        header = ("plan", "prefill", "predicted", "decode", "predicted", "memory", "predicted")
        rows: list[tuple[str, ...]] = []
        for measured, predicted in zip(self.measured, self.predicted, strict=True):
            memory = "+".join(f"{kib / 1024:.0f}" for kib in measured.memory_kib.values())
            expected = "+".join(f"{stage.memory_kib / 1024:.0f}" for stage in predicted.stages)
            rows.append(
                (
                    measured.label,
                    f"{measured.prefill_tokens_per_s:.0f} tokens/s",
                    f"{predicted.prefill_tokens_per_s:.0f}",
                    f"{measured.decode_tokens_per_s:.0f} tokens/s",
                    f"{predicted.decode_tokens_per_s or 0:.0f}",
                    f"{memory} MiB",
                    expected,
                )
            )
        return header, rows

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "plan": None if self.planned.plan is None else self.planned.plan.to_json(),
            "solution": self.planned.solution.to_json(),
            "runs": [
                {**measured.to_json(), "predicted": predicted.to_json()}
                for measured, predicted in zip(self.measured, self.predicted, strict=True)
            ],
        }


def run_serving_demo(
    model: str | None = None,
    *,
    threads: Sequence[int] = (1, 1),
    head: str | None = None,
    seed: int = 0,
    say: Say | None = None,
) -> ServingDemo:
    """Measure a model on this machine, plan it for two processes of unequal memory, serve, and compare.

    Args:
        model: A model folder or a ``.gguf`` file; a small seeded Llama by default.
        threads: Of the two processes; together no more than there are processors, or predictions are too fast.
        head: Weight scheme of the head; None: 32 bits.
        seed: Of the model that is made.
        say: Called with a line before every step.

    Returns:
        The plan and what was measured of it, of the same stages' number split evenly, and of equal bits everywhere; of
        equal plans only the first is served.

    Raises:
        ProblemError: Nothing fits, or a model cannot be read.
        StageError: A process failed.
    """
    tell = say or (lambda text: None)
    with tempfile.TemporaryDirectory(prefix="qsync-serving-") as temporary:
        if model is None:
            model = str(write_sample(Path(temporary) / "small-llama", sample_config(**SIZES), seed=seed))
            tell(f"a Llama of {SIZES['layers']} layers with random weights was made")
        return _run(str(model), tuple(threads), head, tell)


def _run(model: str, threads: tuple[int, ...], head: str | None, tell: Say) -> ServingDemo:
    profiles: dict[int, Any] = {}
    for k, count in enumerate(threads):
        if count in profiles:
            continue
        others = threads[:k] + threads[k + 1 :]
        tell(
            f"measuring its layers in {', '.join(SCHEMES)} with {count} thread{'s' if count > 1 else ''}, "
            "while the other process computes the same"
        )
        profiles[count] = profile_serving(
            model, WORKLOAD, schemes=SCHEMES, threads=count, beside=others, head=head, name=f"{count} threads"
        )
    devices = _devices([profiles[count] for count in threads])
    sizes = devices[0].profile.model
    limit = sum(harms["W8"] for harms in rounding_harm(sizes, SCHEMES).values())
    memory = ", ".join(f"{d.name} {d.memory_kib / 1024:.0f} MiB" for d in devices)
    tell(f"planning for {memory}, with no more harm than 8 bits everywhere")
    planned = plan_serving(sizes, devices, WORKLOAD, harm_limit=limit, schemes=SCHEMES)
    if planned.plan is None:
        raise ProblemError(f"the demo has no plan: {planned.reason}")
    plans: dict[str, tuple[ServingPlan, Plan]] = {"planned": (planned, planned.plan)}
    even = _even(planned)
    if even is not None:
        plans["even split, 8 bits"] = (planned, even)
    uniform = plan_serving(sizes, devices, WORKLOAD, harm_limit=limit, schemes=("W8",))
    if uniform.plan is not None and uniform.plan not in [plan for _, plan in plans.values()]:
        plans["planned, 8 bits everywhere"] = (uniform, uniform.plan)
    measured, predicted = [], []
    by_name = dict(zip((d.name for d in devices), threads, strict=True))
    for label, (base, plan) in plans.items():
        expected = base.predict(plan)
        tell(
            f"serving: {label}; predicted are {expected.prefill_tokens_per_s:.0f} and "
            f"{expected.decode_tokens_per_s or 0:.0f} tokens/s"
        )
        measured.append(measure_plan(model, base, plan, by_name, head=head, label=label))
        predicted.append(expected)
    return ServingDemo(planned=planned, measured=tuple(measured), predicted=tuple(predicted))


def measure_plan(
    model: str,
    planned: ServingPlan,
    plan: Plan,
    threads: Mapping[str, int],
    *,
    head: str | None = None,
    label: str = "planned",
) -> ServingMeasurement:
    """Serve a plan's workload on this machine: the median of some rounds, and the most memory of each stage's process.

    Loading counts too.

    Args:
        model: A model folder or a ``.gguf`` file.
        planned: What the plan was made for.
        plan: The plan to serve.
        threads: By device.
        head: Weight scheme of the head, as profiled.
        label: Of the measurement.

    Raises:
        StageError: A process failed.
    """
    workload, option = planned.workload, planned.problem.microbatches[plan.microbatch]
    with MemoryWatch() as watch:
        counts = [threads[stage.device] for stage in plan.stages]
        with Pipeline(model, plan, threads=counts, head=head, started=watch.add) as pipeline:
            speeds = measure_batches(
                pipeline,
                prompts=workload.prompts,
                prompt_tokens=workload.prompt_tokens,
                new_tokens=workload.new_tokens,
                prefill=option.prefill,
                decode=option.decode,
            )
    memory = dict(zip((stage.device for stage in plan.stages), watch.peaks_kib.values(), strict=True))
    return ServingMeasurement(
        label=label,
        prefill_tokens_per_s=speeds["prefill_tokens_per_s"],
        decode_tokens_per_s=speeds["decode_tokens_per_s"],
        memory_kib=memory,
    )


def _devices(profiles: Sequence[Any]) -> list[ServingDevice]:
    """Two devices that hold the model only together and in few bits; the second has half the first one's room."""
    result = []
    for k, (name, profile) in enumerate(zip(("larger", "smaller"), profiles, strict=True)):
        whole = profile.model.layers * sum(profile.weights_kib[kind]["W32"] for kind in KINDS)
        work = profile.workspace.at(WORKLOAD.prompts, WORKLOAD.prompt_tokens)
        fixed_kib = profile.base_kib + max(round(work), profile.load_kib) + max(profile.first_kib, profile.last_kib)
        result.append(
            ServingDevice(name=name, memory_kib=fixed_kib + round(_SHARE * whole) // (k + 1), profile=profile)
        )
    return result


def _even(planned: ServingPlan) -> Plan | None:
    """Half of the layers on each device in 8 bits, with as many micro-batches as stages; None if that does not fit.

    None too where one device alone is planned: its problem knows no other.
    """
    if len(planned.devices) != 2:
        return None
    names = [group.name for group in planned.problem.groups]
    half = len(names) // 2
    options = planned.problem.microbatches
    number = next(k for k, option in enumerate(options) if option.decode == 2 and option.prefill == 2)
    parts = (tuple(names[:half]), tuple(names[half:]))
    plan = Plan(
        microbatch=number,
        stages=tuple(Stage(device=d.name, groups=part) for d, part in zip(planned.devices, parts, strict=True)),
        schemes=dict.fromkeys(names, "W8"),
    )
    return plan if planned.predict(plan).evaluation.feasible else None
