"""A measured job as a file, and the same job on other workers, in less memory, or at another speed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch.utils._pytree import tree_leaves

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import CostFit, DeviceProfile, MeasuredCost
from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io import Fields, Json, check_number, decode, encode, read_json, write_json
from qsync_opt.model import OpGraph, Role, graph_to_json, parse_graph
from qsync_opt.runtimes.torch.ddp import together
from qsync_opt.runtimes.torch.job.candidates import ExecutionMode, Modes, StepTime
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job, job_indicator
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.sensitivity import SensitivityValues

JOB_FORMAT = "qsync-job/1"
_ANEW = "remove the file, and the next start of auto_plan measures the job and writes it anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceEntry:
    name: str
    count: Annotated[int, Json(minimum=1)]
    memory_bytes: Annotated[int, Json(minimum=1)]
    precisions: tuple[str, ...]


def _read_device(data: Any, where: str) -> DeviceType:
    entry = decode(_DeviceEntry, data, where)
    memory_bytes, precisions = entry.memory_bytes, entry.precisions
    return DeviceType(name=entry.name, count=entry.count, memory_limit_bytes=memory_bytes, precisions=precisions)


def _write_device(device: DeviceType) -> dict[str, Any]:
    memory_bytes, precisions = device.memory_limit_bytes, device.precisions
    return encode(_DeviceEntry(name=device.name, count=device.count, memory_bytes=memory_bytes, precisions=precisions))


def _read_graph(data: Any, where: str) -> OpGraph:
    return parse_graph(json.dumps(data), where=where)


_Profile = Annotated[DeviceProfile, Json(read=DeviceProfile.from_json, write=DeviceProfile.to_json)]
_Values = Annotated[SensitivityValues, Json(read=SensitivityValues.from_json, write=SensitivityValues.to_json)]
_Device = Annotated[DeviceType, Json(read=_read_device, write=_write_device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobFile:
    facts: Mapping[str, Any]
    graph: Annotated[OpGraph, Json(read=_read_graph, write=graph_to_json)]
    profiles: Mapping[str, _Profile]
    sensitivities: Mapping[str, _Values]
    ways: Annotated[Mapping[str, tuple[ExecutionMode, ...]], Json(optional=True)] = field(default_factory=dict)
    steps: Annotated[tuple[StepTime, ...], Json(optional=True)] = ()
    loss_layers: Annotated[tuple[str, ...], Json(omitted=True)] = ()
    network: Network
    devices: tuple[_Device, ...]
    memory_excess_bytes: Annotated[Mapping[str, int], Json(omitted=True)] = field(default_factory=dict)


def save_job(job: JobModel, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
    """Write a measured job, whole or not at all.

    Args:
        job: Rank 0's ``plan.model``.
        path: The file.
        facts: What a later start must have in common with this one to use it, as plain JSON data; and
            ``memory_bytes``, what the devices had before any trial.
    """
    content = _JobFile(
        facts=facts,
        graph=job.graph,
        profiles=job.profiles,
        sensitivities=job.sensitivities,
        ways=job.modes,
        steps=job.steps,
        loss_layers=job.loss_layers,
        network=job.cluster.network,
        devices=job.cluster.devices,
        memory_excess_bytes=job.memory_excess_bytes,
    )
    write_json(path, encode(content, version=JOB_FORMAT))


def load_job(path: str | os.PathLike[str]) -> tuple[JobModel, dict[str, Any]]:
    """Read a measured job and its facts.

    Raises:
        QSyncError: Missing or truncated file, another format version, an unknown, missing or unusable entry.
    """
    data = read_json(path, (JOB_FORMAT,), again=_ANEW)
    where = os.fspath(path)
    try:
        content = decode(_JobFile, data, where, version=JOB_FORMAT)
        job = _job_of(content, where)
        memory = Fields(content.facts.get("memory_bytes"), f"{where}: facts: memory_bytes")
        for name in job.workers:
            memory.integer(name, minimum=1)
    except QSyncError as failure:
        place = "" if where in str(failure) else f"{where}: "
        raise type(failure)(f"{place}{failure}; {_ANEW}") from failure
    return job, dict(content.facts)


def _job_of(content: _JobFile, where: str) -> JobModel:
    job = JobModel(
        graph=content.graph,
        profiles=content.profiles,
        sensitivities=content.sensitivities,
        cluster=Cluster(name="job", devices=content.devices, network=content.network),
        modes=content.ways,
        steps=content.steps,
        loss_layers=content.loss_layers,
        memory_excess_bytes=content.memory_excess_bytes,
    )
    names = job.workers.keys()
    if not names == job.profiles.keys() == job.sensitivities.keys():
        raise ProblemError(f"{where}: devices, profiles and sensitivities are of different types")
    if job.modes and job.modes.keys() != names:
        raise ProblemError(f"{where}: devices and ways are of different types")
    operators = {operator.name for operator in job.graph.by_role(Role.ADJUSTABLE)}
    for name, own in job.modes.items():
        if not own or any(mode.precisions.keys() != operators for mode in own):
            raise ProblemError(f"{where}: ways of {name!r} are none, or for other operators than the graph's")
    known = {name: {mode.label for mode in own} for name, own in job.modes.items()}
    for step in job.steps:
        if any(label not in known.get(name, ()) for name, label in step.taken.items()):
            raise ProblemError(f"{where}: a step was timed in a way that was not: {dict(step.taken)}")
    for profile in job.profiles.values():
        profile.check_graph(job.graph)
    return job


def with_workers(job: JobModel, counts: Mapping[str, int]) -> JobModel:
    """The same job on other numbers of workers; types that are not named have left.

    The network's figures are per message, so that they hold for any number of workers over the same links.

    Raises:
        ProblemError: A type that was not measured.
    """
    devices = tuple(replace(job.cluster.device(name), count=count) for name, count in counts.items())
    return replace(
        job,
        profiles={name: job.profiles[name] for name in counts},
        sensitivities={name: job.sensitivities[name] for name in counts},
        modes={name: job.modes[name] for name in counts} if job.modes else {},
        steps=job.steps if dict(counts) == job.workers else (),  # all-reduces of other workers take another time
        cluster=replace(job.cluster, devices=devices),
    )


def with_speed(job: JobModel, factors: Mapping[str, float]) -> JobModel:
    """The same job with all times of some device types multiplied: 2.0 is half as fast as it was measured.

    Raises:
        ProblemError: A type that was not measured, or a factor that is not above 0.
    """
    for name, factor in factors.items():
        job.cluster.device(name)
        check_number(factor, f"speed factor of {name!r}")
        if not factor:
            raise ProblemError(f"speed factor of {name!r} is 0: times are multiplied by it, so it must be above 0")
    changed = {name: _slowed(job.profiles[name], factor) for name, factor in factors.items() if factor != 1.0}
    modes = {name: tuple(mode.slowed(factors.get(name, 1.0)) for mode in own) for name, own in job.modes.items()}
    # Batches that were sized for other speeds say nothing.
    steps = tuple(_with_passes(step, job.modes, modes) for step in job.steps if not (changed and step.batches))
    return replace(job, profiles={**job.profiles, **changed}, modes=modes, steps=steps)


def _with_passes(step: StepTime, before: Modes, after: Modes) -> StepTime:
    """The step with the time of its passes as it is now; what it takes beside them stays."""
    then, now = (
        max(mode.pass_ns for name, own in modes.items() for mode in own if mode.label == step.taken.get(name))
        for modes in (before, after)
    )
    rounds_ns = tuple(time and max(1, time + now - then) for time in step.rounds_ns)
    return replace(step, step_ns=max(1, step.step_ns + now - then), rounds_ns=rounds_ns)


def _slowed(profile: DeviceProfile, factor: float) -> DeviceProfile:
    def times(entry: Any, names: Sequence[str]) -> Any:
        return replace(entry, **{name: round(factor * getattr(entry, name)) for name in names})

    operator = ("forward_ns", "backward_ns", "host_forward_ns", "host_backward_ns")
    fit = ("base_ns", "ns_per_mi_elements")
    measurements: dict[str, dict[str, MeasuredCost]] = {
        key: {precision: times(cost, operator) for precision, cost in costs.items()}
        for key, costs in profile.measurements.items()
    }
    casts: dict[str, CostFit] = {pair: times(cost, fit) for pair, cost in profile.casts.items()}
    return replace(
        profile,
        measurements=measurements,
        casts=casts,
        gradient_sums={name: times(cost, fit) for name, cost in profile.gradient_sums.items()},
        optimizer=times(profile.optimizer, ("step_ns", "zero_grad_ns")),
        overhead=times(profile.overhead, ("forward_ns_per_operator", "backward_ns_per_operator")),
    )


def steering(options: PlanningOptions) -> dict[str, Any]:
    """Options that decide for which stages ranks wait for each other: they must be equal on all."""
    names = ("compare", "compiled", "capture", "compile", "local_batches", "trial")
    return {**{name: getattr(options, name) for name in names}, "job_file": options.job_file is not None}


def job_facts(job: Job) -> dict[str, Any]:
    """What two starts must have in common for one to use the other's measurements."""
    leaves = tree_leaves((job.example.args, dict(job.example.kwargs)))
    return {
        "versions": {"qsync_opt": qsync_opt.__version__, "torch": torch.__version__},
        "parameters": [[name, list(p.shape), p.requires_grad] for name, p in job.model.named_parameters()],
        "compiled": job.options.compiled,
        "indicator": str(job_indicator(job)),
        "batch": [[str(x.dtype), list(x.shape)] for x in leaves if isinstance(x, torch.Tensor)],
        "kernels": {
            field.name: getattr(job.options.kernels, field.name)
            for field in dataclasses.fields(job.options.kernels)
            if field.name not in ("seed", "offset", "step")
        },
    }


def keep_job(job: Job, plan: JobPlan, types: DeviceTypes) -> None:
    """Write the job file, with what the trials left of the memory and what it was before them."""
    path, measured = job.options.job_file, plan.model
    if path is None:
        return
    facts = {**job_facts(job), "memory_bytes": dict(types.memory_bytes)}
    together(lambda: None if measured is None else save_job(measured, path, facts))
