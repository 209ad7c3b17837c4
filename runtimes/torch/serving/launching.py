"""A model and a plan to a running engine and server: what the commands ``serving run`` and ``serving bench`` do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.io import near_match
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.engine import Engine, EngineLimits
from qsync_opt.runtimes.torch.serving.packing import scheme_bits
from qsync_opt.runtimes.torch.serving.speculation import Speculation
from qsync_opt.runtimes.torch.serving.stage import Progress, check_plan, group_names
from qsync_opt.runtimes.torch.serving.weights import open_model
from qsync_opt.runtimes.torch.serving.workers import StageOptions, StageProcesses
from qsync_opt.serving import Plan, Stage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HERE = "here"


def uniform_plan(config: DecoderConfig, scheme: str) -> Plan:
    """One stage with all groups in one scheme."""
    names = group_names(config.layers)
    return Plan(microbatch=0, stages=(Stage(device=_HERE, groups=names),), schemes=dict.fromkeys(names, scheme))


def by_stage(plan: Plan, values: Mapping[str, str], what: str) -> list[str | None]:
    """Values by device name in the order of the stages; None where none is given.

    Raises:
        ProblemError: A name is no device of the plan.
    """
    devices = [stage.device for stage in plan.stages]
    for name in values:
        if name not in devices:
            raise ProblemError(
                f"{what} names {name!r}{near_match(name, devices)}; the plan's devices are {', '.join(devices)}"
            )
    return [values.get(device) for device in devices]


def start_stages(
    model: str | Path,
    plan: Plan | None = None,
    *,
    scheme: str | None = None,
    dtype: str | None = None,
    kv_bits: int | None = None,
    head: str | None = None,
    reproducible: bool = False,
    devices: Mapping[str, str] | None = None,
    threads: Mapping[str, int] | None = None,
    timeout_s: float = 120.0,
    progress: Progress | None = None,
) -> StageProcesses:
    """Start the stages of a plan, or of one stage for the whole model.

    Args:
        model: A model folder or a ``.gguf`` file.
        plan: A plan for it; None: one stage.
        scheme: Of the one stage; by default W16 on a card, else W32.
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default BF16 where all stages are on cards, else FP32.
        kv_bits: 8 for caches of 8 bits.
        head: Weight scheme of the head; as the dtype by default.
        reproducible: See `StageModel`.
        devices: torch's device by the plan's device names; by default card after card if there are as many as stages,
            else the CPU.
        threads: By the plan's device names; by default the processors are shared equally.
        timeout_s: Longest wait for a pass.
        progress: Told of every loaded group.

    Raises:
        ProblemError: The plan is for another model, or an option does not fit.
        StageError: A stage could not load.
    """
    config, _ = open_model(model)
    if plan is not None and scheme is not None:
        raise ProblemError(
            f"scheme {scheme!r} is given beside a plan, which has a scheme for every group; leave one out"
        )
    if head is not None:
        scheme_bits(head)  # refuses an unknown one
    if dtype is not None and dtype not in DTYPES:
        raise ProblemError(f"dtype is {dtype!r}, but allowed are {', '.join(DTYPES)}")
    count = 1 if plan is None else len(plan.stages)
    cards = torch.cuda.device_count()
    usual = [f"cuda:{k}" for k in range(count)] if count <= cards else ["cpu"] * count
    shape = plan or uniform_plan(config, "W32")
    check_plan(shape, config)
    places = [given or default for given, default in zip(by_stage(shape, devices or {}, "device"), usual, strict=True)]
    for place in places:
        _check_device(place, cards)
    on_cards = all(place.startswith("cuda") for place in places)
    if plan is None:
        plan = uniform_plan(config, scheme or ("W16" if on_cards else "W32"))
    share = max(1, _processors() // count)
    given_threads = by_stage(plan, {name: str(value) for name, value in (threads or {}).items()}, "threads")
    options = StageOptions(
        dtype=DTYPES[dtype or ("bfloat16" if on_cards else "float32")],
        kv_bits=kv_bits,
        head=head,
        reproducible=reproducible,
        threads=[share if value is None else int(value) for value in given_threads],
        devices=places,
        timeout_s=timeout_s,
    )
    return StageProcesses(str(model), plan, options, progress=progress)


def start_engine(stages: StageProcesses, limits: EngineLimits, speculation: Speculation | None = None) -> Engine:
    """An engine over stages; they are closed if it cannot start, such as for want of memory for caches."""
    try:
        return Engine(stages, limits, speculation=speculation)
    except BaseException:
        stages.close()
        raise


def describe(stages: StageProcesses) -> Sequence[str]:
    """A line per stage: where it runs, what it holds, and the memory of both."""
    lines = []
    options, mebi = stages.options, 2**20
    devices = options.devices or ["cpu"] * len(stages.plan.stages)
    for stage, place, weights, caches in zip(
        stages.plan.stages, devices, stages.weight_bytes, stages.cache_bytes, strict=True
    ):
        schemes = dict.fromkeys(stages.plan.schemes[name] for name in stage.groups)
        lines.append(
            f"stage {stage.device} on {place}: {stage.groups[0]} to {stage.groups[-1]} in {', '.join(schemes)}, "
            f"{weights / mebi:.1f} MiB of weights and {caches / mebi:.1f} MiB of caches"
        )
    return lines


def _check_device(place: str, cards: int) -> None:
    kind, _, number = place.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ProblemError(f"device {place!r} is unknown; allowed are cpu, cuda and cuda:N")
    if kind == "cuda" and int(number or 0) >= cards:
        raise ProblemError(f"device {place!r} is not there: torch sees {cards} cards on this machine")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
