"""Profile a job by its own training steps; the model is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.costs import ESTIMATE_OPTION, FP32_SHARE_OPTION, MEASURED_OPTION, DeviceProfile
from qsync_opt.errors import first_line
from qsync_opt.io import MeasurementCache, encode
from qsync_opt.kernels import KernelOptions, backend, ops
from qsync_opt.model import OpGraph, Role
from qsync_opt.numerics import PrecisionFormats
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.job.options import PlanningOptions, cache_folder
from qsync_opt.runtimes.torch.profiling import option_values, selected_formats
from qsync_opt.runtimes.torch.steps import RecordingOptions, Stepper, record_steps
from qsync_opt.runtimes.torch.support import (
    TrainingExample,
    device_identity,
    model_unchanged,
    optimizer_key,
    rebuild_optimizer,
    state_bytes,
    synchronize,
)
from qsync_opt.steps import StepCosts, StepFlow, StepPredictor, profile_from_steps, scaled_operators

METHOD = 2
"""Version of the recording; steps that were recorded by another version are not taken from the cache."""
_LOGGER = logging.getLogger(__name__)
_BLOCK_NS = 0.4e9
"""About how long the steps of one plan may take that are timed in a row."""


def profile_job_steps(
    example: TrainingExample,
    graph: OpGraph,
    optimizer: torch.optim.Optimizer | None,
    options: PlanningOptions,
    *,
    group: Any = None,
    precisions: tuple[str, ...] | None = None,
) -> DeviceProfile:
    """A profile from recorded training steps; parameters, buffers, gradients and random state are put back.

    Args:
        example: The bare model with a batch. While steps are recorded a copy of its parameters is in the host's memory.
        graph: Of the model.
        optimizer: One of its kind and settings, without state, steps the model; it is left alone itself. None: AdamW.
        options: Precisions, kernels, cache, name of the device, and for how long steps are recorded.
        group: Process group of this worker alone for ``DistributedDataParallel`` around the model; None: without.
        precisions: Instead of those in ``options``.

    Returns:
        The profile. Its options say how it was measured, and what was scaled for lack of memory.

    Raises:
        QSyncError: As in `profile_steps` and `profile_from_steps`.
    """
    device = example.device
    kernels = dataclasses.replace(options.kernels, half_format=backend.half_format(device))
    formats = selected_formats(device, precisions or options.precisions)
    environment = {
        "device": encode(device_identity(device, options.device_type)),
        "options": option_values(kernels),
        "method": f"steps {METHOD}",
        "distributed": group is not None,
    }
    cache = MeasurementCache(cache_folder(options.cache_dir), environment)
    prefix = "compiled " * options.compiled
    settings = "AdamW" if optimizer is None else optimizer_key(optimizer)
    menu = "" if options.precisions is None else " by name"
    key = f"{prefix}steps {graph.fingerprint()} in {','.join(formats)}{menu} with {settings}"
    known = cache.get(key)
    if known is None:
        try:
            with _memory_freed(device):
                costs, state = _recorded(example, graph, optimizer, tuple(formats), kernels, options, group)
        except RuntimeError as failure:
            running = precisions_that_run(example, graph, tuple(formats), kernels)
            # 8 bits ask for a 16-bit format at their borders, whether or not it was asked for.
            if "FP32" not in running or len(selected_formats(device, running)) == len(formats):
                raise
            lost = ", ".join(precision for precision in formats if precision not in running)
            _LOGGER.warning("%s does not run on this device and is left out: %s", lost, first_line(failure))
            return profile_job_steps(example, graph, optimizer, options, group=group, precisions=running)
        known = {"costs": costs.to_json(), "state_bytes": state, "signatures": _signatures(graph, costs)}
        cache.put(key, known)
    costs = _of_this_batch(graph, StepCosts.from_json(known["costs"], "recorded steps"), known["signatures"])
    return _described(graph, costs, formats, int(known["state_bytes"]))


def precisions_that_run(
    example: TrainingExample, graph: OpGraph, precisions: tuple[str, ...], kernels: KernelOptions
) -> tuple[str, ...]:
    """The precisions in which a pass of the model runs, each tried in every operator that has it.

    A library may choose a kernel that the device refuses: a partition of a card cannot hold every kernel that the whole
    card can. A precision for which memory does not suffice is kept.
    """
    running = []
    with model_unchanged(example.model):
        for precision in precisions:
            plan = {
                operator.name: precision if ops.supports(operator.op_type, precision, example.device) else "FP32"
                for operator in graph.by_role(Role.ADJUSTABLE)
            }
            with under_plan(example.model, plan, graph, kernels):
                try:
                    example.run()
                    synchronize(example.device)
                    running.append(precision)
                except torch.cuda.OutOfMemoryError:
                    running.append(precision)
                except RuntimeError as failure:
                    _LOGGER.warning("%s does not run: %s", precision, first_line(failure))
            example.model.zero_grad()
    return tuple(running)


def _signatures(graph: OpGraph, costs: StepCosts) -> list[str]:
    flow = StepFlow(graph, costs.half_format)
    return [flow.signature(i) for i in range(len(graph))]


def _of_this_batch(graph: OpGraph, costs: StepCosts, recorded: list[str]) -> StepCosts:
    """The costs for this batch: signatures of inputs differ with their values, even if shapes are the same."""
    now: dict[str, set[str]] = {}
    for before, after in zip(recorded, _signatures(graph, costs), strict=True):
        now.setdefault(before, set()).add(after)
    cases = {
        case._replace(signature=signature): cost
        for case, cost in costs.cases.items()
        for signature in sorted(now.get(case.signature, {case.signature}))
    }
    return dataclasses.replace(costs, cases=cases)


def _recorded(
    example: TrainingExample,
    graph: OpGraph,
    optimizer: torch.optim.Optimizer | None,
    formats: tuple[str, ...],
    kernels: KernelOptions,
    options: PlanningOptions,
    group: Any,
) -> tuple[StepCosts, int]:
    """Costs, and the bytes of the optimizer's state."""
    own = own_optimizer(optimizer, example.model)
    with parameters_put_back(example.model, own), model_unchanged(example.model):
        wrapped = example.model if group is None else DistributedDataParallel(example.model, process_group=group)
        stepped = dataclasses.replace(example, model=wrapped)
        # What was scaled is in the profile, which the plan quotes.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            records = record_steps(
                stepped,
                graph,
                own,
                precisions=formats,
                by_name=options.precisions is not None,
                options=_options(Stepper(stepped, own)),
                kernels=kernels,
                progress=options.progress,
                name=options.device_type,
                budget_s=options.profile_seconds,
                compiled=options.compiled,
            )
        return records.fit(graph), state_bytes(own)


@contextlib.contextmanager
def _memory_freed(device: torch.device) -> Iterator[None]:
    """Free the buckets of DistributedDataParallel after the block: it is part of reference cycles."""
    try:
        yield
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _options(stepper: Stepper) -> RecordingOptions:
    try:
        stepper.step()
        step_ns = stepper.steady_ns(1)
    except torch.cuda.OutOfMemoryError:
        return RecordingOptions(warm_up=1, repeats=2, traced=1)
    repeats = max(2, min(6, round(_BLOCK_NS / step_ns)))
    return RecordingOptions(warm_up=2 if repeats > 2 else 1, repeats=repeats, traced=1)


def own_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the same kind without state, over the model's parameters; None: AdamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        return torch.optim.AdamW(parameters)
    mine = {id(p) for p in parameters}
    if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        return rebuild_optimizer(optimizer, [dict(group) for group in optimizer.param_groups])
    return rebuild_optimizer(optimizer, [{"params": parameters}])


@contextlib.contextmanager
def parameters_put_back(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Restore the values of parameters after the block, bit for bit, from a copy in the host's memory.

    Args:
        model: Whose parameters.
        optimizer: Its parameters too: it may have others, such as those of a loss.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    parameters = list({id(p): p for p in (*model.parameters(), *stepped)}.values())
    values = [p.detach().to("cpu", copy=True) for p in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


def _described(graph: OpGraph, costs: StepCosts, formats: dict[str, PrecisionFormats], state: int) -> DeviceProfile:
    profile = profile_from_steps(graph, costs, formats, state_bytes=state)
    errors = [abs(check.time_error) for check in costs.checks]
    options: dict[str, str | int | float | bool] = {
        MEASURED_OPTION: f"{'compiled ' * (costs.graphs > 0)}training steps recorded under {len(costs.checks)} plans, "
        "whose times are predicted within "
        f"{statistics.fmean(errors):.1%} on average and {max(errors):.1%} at most"
    }
    options[FP32_SHARE_OPTION] = _fp32_share(graph, costs)
    scaled = scaled_operators(graph, costs)
    if scaled:
        options[ESTIMATE_OPTION] = "; ".join(
            f"{precision} of {_some(names)} was scaled from {source}, because it did not fit into memory"
            for (precision, source), names in scaled.items()
        )
    return dataclasses.replace(profile, options={**profile.options, **options})


def _fp32_share(graph: OpGraph, costs: StepCosts) -> float:
    """Time of a step in FP32 without interception, as a share of one under a plan of FP32 alone."""
    fine = dict.fromkeys((operator.name for operator in graph.by_role(Role.ADJUSTABLE)), "FP32")
    aside, carried_out = (
        predictor.steady_ns(predictor.plan(fine))
        for predictor in (
            StepPredictor(graph, costs),
            StepPredictor(graph, dataclasses.replace(costs, resting_share=1.0)),
        )
    )
    return aside / max(1, carried_out)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more operators"
