"""A measured job as a file, and the same job on other workers, in less memory, or at another speed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import qsync_opt
from qsync_opt.cluster import Cluster, DeviceType, Network
from qsync_opt.costs import CostFit, DeviceProfile, MeasuredCost
from qsync_opt.errors import ProblemError, QSyncError
from qsync_opt.io import Fields, check_number, read_json, write_json
from qsync_opt.model import Role, graph_to_json, parse_graph
from qsync_opt.runtimes.torch.ddp import together
from qsync_opt.runtimes.torch.job.candidates import StepTime, Way
from qsync_opt.runtimes.torch.job.measuring import DeviceTypes, Job, job_indicator
from qsync_opt.runtimes.torch.job.options import PlanningOptions
from qsync_opt.runtimes.torch.job.plan import JobModel, JobPlan
from qsync_opt.sensitivity import SensitivityValues

JOB_FORMAT = "qsync-job/1"
_ANEW = "remove the file, and the next start of auto_plan measures the job and writes it anew"


def save_job(made: JobModel, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
    """Write a measured job, whole or not at all.

    Args:
        made: Rank 0's ``plan.model``.
        path: The file.
        facts: What a later start must have in common with this one to use it, as plain JSON data; and
            ``memory_bytes``, what the devices had before any trial.
    """
    write_json(
        path,
        {
            "format": JOB_FORMAT,
            "facts": dict(facts),
            "graph": graph_to_json(made.graph),
            "profiles": {name: profile.to_json() for name, profile in made.profiles.items()},
            "sensitivities": {name: values.to_json() for name, values in made.sensitivities.items()},
            "ways": {name: [way.to_json() for way in ways] for name, ways in made.ways.items()},
            "steps": [step.to_json() for step in made.steps],
            "network": {
                "latency_s": made.cluster.network.latency_s,
                "bandwidth_bytes_per_s": made.cluster.network.bandwidth_bytes_per_s,
                "source": made.cluster.network.source,
            },
            "devices": [
                {"name": d.name, "count": d.count, "memory_bytes": d.memory_limit_bytes, "precisions": [*d.precisions]}
                for d in made.cluster.devices
            ],
        },
    )


def load_job(path: str | os.PathLike[str]) -> tuple[JobModel, dict[str, Any]]:
    """Read a measured job and its facts.

    Raises:
        QSyncError: Missing or truncated file, another format version, an unknown, missing or unusable entry.
    """
    data = read_json(path, (JOB_FORMAT,), again=_ANEW)
    try:
        return _job_of(data, os.fspath(path))
    except QSyncError as failure:
        raise type(failure)(f"{failure}; {_ANEW}") from failure


def _job_of(data: Any, where: str) -> tuple[JobModel, dict[str, Any]]:
    fields = Fields(data, where)
    fields.version(JOB_FORMAT)
    facts = fields.mapping("facts")
    memory = Fields(facts.get("memory_bytes"), f"{where}: facts: memory_bytes")
    told = Fields(fields.take("network"), f"{where}: network")
    network = Network(
        latency_s=told.number("latency_s"),
        bandwidth_bytes_per_s=told.number("bandwidth_bytes_per_s"),
        source=told.text("source"),
    )
    told.finish()
    devices = []
    for position, entry in enumerate(fields.sequence("devices")):
        device = Fields(entry, f"{where}: devices[{position}]")
        devices.append(
            DeviceType(
                name=device.text("name"),
                count=device.integer("count", minimum=1),
                memory_limit_bytes=device.integer("memory_bytes", minimum=1),
                precisions=device.texts("precisions"),
            )
        )
        device.finish()
    names = {device.name for device in devices}
    profiles = {
        name: DeviceProfile.from_json(entry, f"{where}: profile of {name!r}")
        for name, entry in fields.mapping("profiles").items()
    }
    sensitivities = {
        name: SensitivityValues.from_json(entry, f"{where}: sensitivities of {name!r}")
        for name, entry in fields.mapping("sensitivities").items()
    }
    ways = _ways(fields, where)
    steps = [
        StepTime.from_json(entry, f"{where}: steps[{position}]")
        for position, entry in enumerate(fields.sequence("steps") if "steps" in fields else ())
    ]
    graph = parse_graph(json.dumps(fields.take("graph")), where=where)
    fields.finish()
    for name in names:
        memory.integer(name, minimum=1)
    if not names == profiles.keys() == sensitivities.keys():
        raise ProblemError(f"{where}: devices, profiles and sensitivities are of different types")
    if ways and ways.keys() != names:
        raise ProblemError(f"{where}: devices and ways are of different types")
    operators = {operator.name for operator in graph.by_role(Role.ADJUSTABLE)}
    for name, mine in ways.items():
        if not mine or any(way.precisions.keys() != operators for way in mine):
            raise ProblemError(f"{where}: ways of {name!r} are none, or for other operators than the graph's")
    for step in steps:
        labels = {name: {way.label for way in mine} for name, mine in ways.items()}
        if any(label not in labels.get(name, ()) for name, label in step.taken.items()):
            raise ProblemError(f"{where}: a step was timed in a way that was not: {dict(step.taken)}")
    for profile in profiles.values():
        profile.check_graph(graph)
    cluster = Cluster(name="job", devices=tuple(devices), network=network)
    made = JobModel(
        graph=graph,
        profiles=profiles,
        sensitivities=sensitivities,
        cluster=cluster,
        ways=ways,
        steps=tuple(steps),
    )
    return made, facts


def _ways(fields: Fields, where: str) -> dict[str, tuple[Way, ...]]:
    """Times of the whole model, where they were taken."""
    if "ways" not in fields:
        return {}
    told = Fields(fields.take("ways"), f"{where}: ways")
    return {
        name: tuple(Way.from_json(entry, f"{where}: ways of {name!r}") for entry in told.sequence(name))
        for name in told
    }


def with_workers(made: JobModel, counts: Mapping[str, int]) -> JobModel:
    """The same job on other numbers of workers; types that are not named have left.

    The network's figures are per message, so that they hold for any number of workers over the same links.

    Raises:
        ProblemError: A type that was not measured.
    """
    devices = tuple(replace(made.cluster.device(name), count=count) for name, count in counts.items())
    return replace(
        made,
        profiles={name: made.profiles[name] for name in counts},
        sensitivities={name: made.sensitivities[name] for name in counts},
        ways={name: made.ways[name] for name in counts} if made.ways else {},
        # All-reduces of other workers take another time.
        steps=made.steps if dict(counts) == {d.name: d.count for d in made.cluster.devices} else (),
        cluster=replace(made.cluster, devices=devices),
    )


def with_speed(made: JobModel, factors: Mapping[str, float]) -> JobModel:
    """The same job with all times of some device types multiplied: 2.0 is half as fast as it was measured.

    Raises:
        ProblemError: A type that was not measured, or a factor that is not above 0.
    """
    for name, factor in factors.items():
        made.cluster.device(name)
        check_number(factor, f"speed factor of {name!r}")
        if not factor:
            raise ProblemError(f"speed factor of {name!r} is 0: times are multiplied by it, so it must be above 0")
    changed = {name: _slowed(made.profiles[name], factor) for name, factor in factors.items() if factor != 1.0}
    slower = {name: tuple(way.slowed(factors.get(name, 1.0)) for way in ways) for name, ways in made.ways.items()}
    # Batches that were sized for other speeds say nothing.
    steps = tuple(_step_slowed(step, made.ways, slower) for step in made.steps if not (changed and step.batches))
    return replace(made, profiles={**made.profiles, **changed}, ways=slower, steps=steps)


def _step_slowed(step: StepTime, before: Mapping[str, Sequence[Way]], after: Mapping[str, Sequence[Way]]) -> StepTime:
    """The step with its passes as they are now; what it takes beside them stays."""
    then, now = (
        max(way.pass_ns for name, mine in ways.items() for way in mine if way.label == step.taken.get(name))
        for ways in (before, after)
    )
    turns = tuple(turn and max(1, turn + now - then) for turn in step.rounds_ns)
    return replace(step, step_ns=max(1, step.step_ns + now - then), rounds_ns=turns)


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
    """Options by which ranks wait for each other: all must go the same way."""
    names = ("compare", "compiled", "capture", "local_batches", "trial")
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
    path, made = job.options.job_file, plan.model
    if path is None:
        return
    facts = {**job_facts(job), "memory_bytes": dict(types.memory_bytes)}
    together(lambda: None if made is None else save_job(made, path, facts))
